"""Context variables that can be set while garbage is about: on CPython before 3.12, plain ones can crash the process.

``ContextVar.set`` and ``.reset`` allocate, an allocation may start a collection, a finalizer may set a context variable
(a generator in a reference cycle that is suspended inside a ``with`` span does), and the outer call goes on with memory
that the inner one has freed: a segmentation fault (seen on 3.11.7 with nothing but the standard library;
``tests/test_contextvar.py`` has the program). From 3.12 on, collections run between bytecodes only.
"""

from __future__ import annotations

import gc
import sys
from contextvars import ContextVar, Token
from functools import partial
from threading import local
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_isenabled: Final = gc.isenabled
_disable: Final = gc.disable
_enable: Final = gc.enable


class _Each:
    """What the collector last said at either phase."""

    __slots__ = ("start", "stop")

    start: object
    stop: object


class _Last:
    """What the collector last said: both of its phases are the same slot."""

    __slots__ = ("start",)

    start: object
    stop: object


_Last.stop = _Last.start  # type: ignore[misc]

#: Each phase of a collection comes with a dict of its own: while a collection runs, the last thing said is what was
#: said at a start. Kept by C functions alone: after a collection the interpreter runs signal handlers in the first
#: Python frame there is, and what they raise in a callback of the collector it swallows; a time-out would be lost.
#: The last is read before the start: a whole collection between the two, in a signal handler, makes them differ.
_each: Final = _Each()
_last: Final = _Last()
_each.start = None
_own: Final = local()
_last.start = _own  # none has run


def _here() -> bool:
    """True if the collection that runs, runs in this very thread: we are in a finalizer."""
    return getattr(_own, "start", None) is _each.start


class GcSafeVar(Generic[T]):
    """A `ContextVar` during whose ``set`` and ``reset`` no collection starts, and which is left alone by finalizers.

    Within a collection, it may be somebody else's ``set`` that is under way: there ``set`` returns None and ``reset``
    raises ValueError, as for a token of another context, and nothing changes.

    Attributes:
        get, set, reset: As those of a `ContextVar`; functions and not methods, since every span calls them.
        var: The variable itself.
    """

    __slots__ = ("get", "reset", "set", "var")

    def __init__(self, var: ContextVar[T]) -> None:
        self.var = var
        self.get = var.get
        plain_set, plain_reset = var.set, var.reset

        def set_(value: T) -> Token[T] | None:
            if _last.start is _each.start and _here():
                return None
            if not _isenabled():
                return plain_set(value)
            try:
                _disable()  # inside: a signal handler that raises here must not leave collections off
                return plain_set(value)
            finally:
                _enable()

        def reset(token: Token[T]) -> None:
            if _last.start is _each.start and _here():
                raise ValueError("in a finalizer")
            if not _isenabled():
                plain_reset(token)
                return
            try:
                _disable()
                plain_reset(token)
            finally:
                _enable()

        self.set = set_
        self.reset = reset


def safe(var: ContextVar[T]) -> Any:
    """Returns ``var`` where that is safe, else a `GcSafeVar` with the same three methods."""
    return var if sys.version_info >= (3, 12) else GcSafeVar(var)


if sys.version_info < (3, 12):
    # Called with the phase and its dict: kept as an attribute of that name.
    gc.callbacks += [partial(setattr, _each), partial(setattr, _own), partial(setattr, _last)]
