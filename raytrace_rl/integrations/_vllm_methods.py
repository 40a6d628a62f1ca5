"""How one engine's methods are replaced: by a class of its own, so that nothing of ours holds the engine.

A wrapper among the engine's attributes would hold the engine that holds it: ``del llm`` would then end its processes,
and give its GPU memory back, only when the garbage collector comes by.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from raytrace_rl._interrupts import is_interrupt

Method = Callable[..., Any]


def method_of(engine: Any, name: str) -> Method | None:
    """Returns a method as a function whose first parameter is the engine; None if the engine has no such method."""
    bound = getattr(engine, name, None)
    if not callable(bound):
        return None
    function = inspect.getattr_static(type(engine), name, None)
    if inspect.isfunction(function) and name not in getattr(engine, "__dict__", {}):
        return function
    # Another attribute, which somebody has put in a method's place, say.
    if inspect.iscoroutinefunction(bound):

        async def awaited(_engine: Any, *args: Any, **kwargs: Any) -> Any:
            return await bound(*args, **kwargs)

        return awaited
    return lambda _engine, *args, **kwargs: bound(*args, **kwargs)


def replace(engine: Any, methods: Mapping[str, Method]) -> None:
    """Gives one engine other methods; its class is from then on one derived for it, of the same name.

    Args:
        engine: The engine.
        methods: Functions whose first parameter is the engine, by name.

    Raises:
        AttributeError: The engine can be given none.
    """
    shadowed = [name for name in methods if name in getattr(engine, "__dict__", {})]
    kind = type(engine)
    try:
        body = {name: getattr(kind, name, None) for name in ("__module__", "__qualname__", "__doc__")}
        derive: Any = type(kind)
        engine.__class__ = derive(kind.__name__, (kind,), {**body, "__slots__": (), **methods})
    except Exception as error:  # a class that cannot be derived from, or whose objects cannot change theirs
        if is_interrupt(error):
            raise
        shadowed = list(methods)
    for name in shadowed:
        setattr(engine, name, functools.partial(methods[name], engine))
