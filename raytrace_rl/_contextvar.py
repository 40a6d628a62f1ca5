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
from operator import setitem
from threading import local
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_isenabled: Final = gc.isenabled
_disable: Final = gc.disable
_enable: Final = gc.enable

#: The phases that collections have gone through, the latest one last, and in each thread those of its own. Filled by C
#: functions alone: after a collection the interpreter runs signal handlers in the first Python frame there is, and what
#: they raise in a callback of the collector it swallows. The user's time-out would be lost.
_phases: Final[dict[str, Any]] = {"stop": None}
_own: Final = local()


def _here() -> bool:
    """True if the collection that runs, runs in this very thread: we are in a finalizer."""
    return getattr(_own, "start", None) is _phases.get("start", _own)


# `next(reversed(_phases), "stop")`, below: a signal handler between the two calls may see a whole collection pass,
# which puts both phases where the iterator no longer looks.


class GcSafeVar(Generic[T]):
    """A `ContextVar` during whose ``set`` and ``reset`` no collection starts, and which is left alone by finalizers.

    Within a collection, it may be somebody else's ``set`` that is under way: there ``set`` returns None and ``reset``
    raises ValueError, as for a token of another context, and nothing changes.
    """

    __slots__ = ("_reset", "_set", "get", "var")

    def __init__(self, var: ContextVar[T]) -> None:
        self.var = var
        self.get = var.get
        self._set = var.set
        self._reset = var.reset

    def set(self, value: T) -> Token[T] | None:
        """Sets the variable; the token is for `reset`."""
        if next(reversed(_phases), "stop") == "start" and _here():
            return None
        if not _isenabled():
            return self._set(value)
        try:
            _disable()  # inside: a signal handler that raises here must not leave collections off
            return self._set(value)
        finally:
            _enable()

    def reset(self, token: Token[T]) -> None:
        """Restores the value before `set`.

        Raises:
            ValueError: The token is of another context, or the call comes from a finalizer.
        """
        if next(reversed(_phases), "stop") == "start" and _here():
            raise ValueError("in a finalizer")
        if not _isenabled():
            self._reset(token)
            return
        try:
            _disable()
            self._reset(token)
        finally:
            _enable()


def safe(var: ContextVar[T]) -> Any:
    """Returns ``var`` where that is safe, else a `GcSafeVar` with the same three methods."""
    return var if sys.version_info >= (3, 12) else GcSafeVar(var)


if sys.version_info < (3, 12):
    # Called with the phase and a dict of its own each: taken out, put in again behind the others, noted for the thread.
    gc.callbacks += [_phases.pop, partial(setitem, _phases), partial(setattr, _own)]
