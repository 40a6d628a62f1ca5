"""verl's worker groups: the carrier joins where each call leaves for its worker, and verl's data never meets it.

verl binds a worker's ``@register``-ed methods to the group as callables without ``__self__``, and its dispatch modes
slice, chunk or length-check every keyword of a call. Only ``group._execute_remote_single_worker(worker, method, ...)``
comes after all that. So a call runs on a stand-in for the group: an object of a subclass that overrides this one method
and shares the group's own ``__dict__``. Nothing of the group is changed, two threads may dispatch on it at once, and
the stand-in is gone with the call. Nothing here imports verl: a group is what has that method.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

from raytrace_rl import _carrier, _state, _wrapping
from raytrace_rl._interrupts import is_interrupt

_SINGLE: Final = "_execute_remote_single_worker"

#: The stand-in's class by the group's.
_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def is_group(value: Any) -> bool:
    """True for a worker group of verl's kind."""
    return callable(getattr(type(value), _SINGLE, None))


def group_of(target: Any) -> Any:
    """Returns the group that ``target`` is a method of, its own or one bound from its workers; None if of none."""
    near = [target.__self__] if inspect.ismethod(target) else cells(_function(target)).values()
    return next((value for value in near if is_group(value)), None)


def is_call(name: str, target: Any) -> bool:
    """True if ``target``, a group's attribute of that name, calls its workers."""
    if group_of(target) is None:
        return False
    return name.startswith("execute_") if inspect.ismethod(target) else True


def method_name(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the workers' method that a call of ``target`` leads to."""
    if inspect.ismethod(target):
        return args[0] if args else kwargs.get("method_name")
    return cells(_function(target)).get("method_name")


def carrying(target: Any, names_carrier: Callable[[Any, str], bool]) -> Callable[..., Any]:
    """Returns a callable that does what ``target`` does, with the carrier added to each worker's call.

    Args:
        target: A method for which `group_of` has an answer.
        names_carrier: Says of a worker's handle and a method whether the method's own signature names the carrier.
    """
    group = group_of(target)
    stand_in = _stand_in(group, names_carrier)
    if inspect.ismethod(target):
        return types.MethodType(target.__func__, stand_in)
    function = _function(target)
    assert function is not None
    bound = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(_rebound(cell, group, stand_in) for cell in function.__closure__ or ()),
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound if target is function else types.MethodType(bound, target)


def colocated_names_carrier(group: Any, method: str) -> bool:
    """True if ``method`` names the carrier on the user's class behind workers that share one actor.

    Such an actor's own methods take anything and pass it on, so their signatures say nothing. verl has two kinds: a
    fused worker knows its classes by name, the older one has them in the closure of its constructor.
    """
    worker_class = getattr(getattr(group, "ray_cls_with_init", None), "cls", None)
    fused = getattr(worker_class, "raw_cls_dict", None)
    if fused is not None and method not in (group.method_names or ()):
        return _names(fused.get(group.sub_cls_name), method)
    init = getattr(getattr(worker_class, "__ray_actor_class__", None), "__init__", None)
    classes = cells(init).get("cls_dict") or {}
    return any(_names(cls, method[len(key) + 1 :]) for key, cls in classes.items() if method.startswith(f"{key}_"))


def cells(function: Any) -> dict[str, Any]:
    """Returns what a function's closure holds by name; empty for what is no function, cells not filled left out."""
    if not inspect.isfunction(function) or function.__closure__ is None:
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _function(target: Any) -> types.FunctionType | None:
    """Returns the function that calling ``target`` runs."""
    if inspect.isfunction(target):
        return target
    member = next((vars(cls)["__call__"] for cls in type(target).__mro__ if "__call__" in vars(cls)), None)
    return member if inspect.isfunction(member) else None


def _names(cls: Any, method: str) -> bool:
    member = getattr(getattr(cls, "__ray_actor_class__", cls), method, None)
    return member is not None and _wrapping.names_carrier(member)


def _rebound(cell: types.CellType, group: Any, stand_in: Any) -> types.CellType:
    """Returns the cell itself, unless it holds the group or a method bound to it."""
    try:
        content = cell.cell_contents
    except ValueError:
        return cell
    if content is group:
        return types.CellType(stand_in)
    if inspect.ismethod(content) and content.__self__ is group:
        return types.CellType(types.MethodType(content.__func__, stand_in))
    return cell


def _stand_in(group: Any, names_carrier: Callable[[Any, str], bool]) -> Any:
    cls = type(group)
    known = _classes.get(cls)
    if known is None:
        known = _classes[cls] = _stand_in_class(cls)
    stand_in: Any = object.__new__(known)
    object.__setattr__(stand_in, "__dict__", group.__dict__)
    object.__setattr__(stand_in, "_raytrace_carrier", _carrier.current())
    object.__setattr__(stand_in, "_raytrace_names", names_carrier)
    return stand_in


def _stand_in_class(cls: type) -> type:
    def execute(self: Any, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        if _carrier.KEYWORD not in kwargs and _accepts(self, worker, method_name):
            # A group that fans out in threads of its own has lost the context by now.
            carrier = _carrier.sent() or dict(self._raytrace_carrier)
            if carrier:
                kwargs[_carrier.KEYWORD] = carrier
        return getattr(super(made, self), _SINGLE)(worker, method_name, *args, **kwargs)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # Beside the dictionary, which is the group's own.
        "__slots__": ("_raytrace_carrier", "_raytrace_names"),
        # A group may take its workers down with it when it is collected; the end of a call must not.
        "__del__": lambda self: None,  # noqa: ARG005
        _SINGLE: execute,
    }
    made: type = types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(namespace))
    return made


def _accepts(stand_in: Any, worker: Any, method: str) -> bool:
    try:
        return bool(stand_in._raytrace_names(worker, method))
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once(f"verl:{method}", "Whether %s takes a trace context cannot be told: %r", method, error)
        return False
