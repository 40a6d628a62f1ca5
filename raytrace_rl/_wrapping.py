"""The wrapper of `accepts_trace_context`: takes a carrier out of a call, and passes Ray's check of signatures.

Ray checks a call on the caller against ``inspect.signature(inspect.unwrap(method))``. So the wrapper carries a
signature of its own that names the carrier, and shows no ``__wrapped__`` that would lead past it; the user's function
stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, Final

from raytrace_rl import _carrier, _invocation

_CARRIER: Final = Parameter(_carrier.KEYWORD, Parameter.KEYWORD_ONLY, default=None)


def accepting(fn: Any, read: Callable[[object], _invocation.Attachment | None]) -> Any:
    """Returns a function (static method, class method) of the same kind that takes a carrier besides.

    Args:
        fn: The user's function.
        read: Says what a carrier makes current. A function of a module, for it is pickled with the wrapper.

    Raises:
        TypeError: ``fn`` is no function that could take one.
        ValueError: It has no signature that can be read.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(accepting(fn.__func__, read))
    if not callable(fn) or not (inspect.isroutine(fn) or isinstance(fn, functools.partial)):
        raise TypeError(f"{type(fn).__name__} is no function")
    named = signature_with_carrier(fn)
    if _sees_carrier(fn):

        def enter(kwargs: dict[str, Any]) -> _invocation.Attachment | None:
            carrier = kwargs.get(_carrier.KEYWORD)
            return None if carrier is None else read(carrier)

    else:

        def enter(kwargs: dict[str, Any]) -> _invocation.Attachment | None:
            carrier = kwargs.pop(_carrier.KEYWORD, None)
            return None if carrier is None else read(carrier)

    wrapper = _dressed(_invocation.attached(fn, enter), fn, named)
    hidden = inspect.unwrap(fn)
    if _is_generator(hidden) != _is_generator(fn):
        # A plain decorator around a generator: Ray unwraps actor methods to find out, but not remote functions. Behind
        # the wrapper stands one of the hidden kind, so that both get the answer that they would get without us.
        wrapper.__wrapped__ = _dressed(_invocation.attached(hidden, enter), fn, named)
    return wrapper


def signature_with_carrier(fn: Callable[..., Any]) -> Signature:
    """Returns the signature of ``fn``, the keyword-only carrier added unless it is there."""
    signature = inspect.signature(fn)
    if _carrier.KEYWORD in signature.parameters:
        return signature
    parameters = list(signature.parameters.values())
    at = len(parameters)
    if parameters and parameters[-1].kind is Parameter.VAR_KEYWORD:
        at -= 1
    parameters.insert(at, _CARRIER)
    return signature.replace(parameters=parameters)


def names_carrier(fn: Callable[..., Any]) -> bool:
    """True if the signature of ``fn``, as Ray reads it, names the carrier."""
    try:
        return _carrier.KEYWORD in inspect.signature(inspect.unwrap(fn)).parameters
    except (TypeError, ValueError):
        return False


def promises_too_much(fn: Any) -> bool:
    """True if ``fn`` names the carrier in its signature and yet cannot take it.

    So does a decorator with fixed parameters and ``functools.wraps`` around a method that accepts carriers: ``wraps``
    copies the signature, and the call would fail on the worker.
    """
    return inspect.isfunction(fn) and names_carrier(fn) and not _takes_keyword(fn)


def _sees_carrier(fn: Any) -> bool:
    return names_carrier(fn) and (not inspect.isfunction(fn) or _takes_keyword(fn))


def _takes_keyword(fn: Any) -> bool:
    code = fn.__code__
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return bool(code.co_flags & inspect.CO_VARKEYWORDS) or _carrier.KEYWORD in names


def _is_generator(fn: Any) -> bool:
    return inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)


def _dressed(wrapper: Any, fn: Any, signature: Signature) -> Any:
    """Gives ``wrapper`` what ``functools.wraps`` would, ``ray.method``'s options included, but for ``__wrapped__``."""
    functools.update_wrapper(wrapper, fn, updated=())
    del wrapper.__wrapped__
    marks = dict(getattr(fn, "__dict__", ()))
    for name in ("__wrapped__", "__signature__"):
        marks.pop(name, None)
    wrapper.__dict__.update(marks)
    wrapper.__signature__ = signature
    return wrapper
