"""Which exceptions are the user's and only passing through: telemetry swallows its own failures, never these.

A signal handler may raise (alarm-based time-outs), and another thread may inject an exception (``ray.cancel``, timeout
libraries), at any call inside this library. Swallowed as "our failure", the user's time-out would never fire.
"""

from __future__ import annotations

import importlib
import inspect
import signal
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, Final

_PACKAGE: Final = __name__.partition(".")[0]
_SIGNALS: Final = tuple(map(int, signal.valid_signals()))
# The C function: the one around it makes enums, and swallows a ValueError out of a handler that interrupts it.
_getsignal: Final[Callable[[int], Any]] = importlib.import_module("_signal").getsignal


def is_interrupt(error: BaseException) -> bool:
    """True if ``error`` came out of a signal handler or was injected from outside: it must be re-raised."""
    if not isinstance(error, Exception) or (isinstance(error, TimeoutError) and not _is_an_answer(error)):
        return True
    entries = _entries(error.__traceback__)
    if not entries:
        return False
    if any(_is_handler(entry.tb_frame) for entry in entries):
        return True
    handlers = {code for code in map(_handler_code, _SIGNALS) if code is not None}
    if any(entry.tb_frame.f_code in handlers for entry in entries):
        return True
    # Injected exceptions surface in whatever frame runs. In one of ours, a type of neither Python's nor ours is one.
    innermost = entries[-1].tb_frame.f_globals.get("__name__", "")
    origin = type(error).__module__.partition(".")[0]
    return str(innermost).partition(".")[0] == _PACKAGE and origin not in ("builtins", _PACKAGE, "struct", "zlib")


def _is_an_answer(error: TimeoutError) -> bool:
    """True if Ray says so what became of a call: its time is over, or the method itself raised a `TimeoutError`."""
    return any(kind.__module__ == "ray.exceptions" for kind in type(error).__mro__)


def _is_handler(frame: FrameType) -> bool:
    """True if ``frame`` was called as signal handlers are: with the frame that it interrupts.

    By its code alone it is not found where it is behind a ``functools.partial``, or has put another handler in its
    place before it raises, as time-out decorators do.
    """
    interrupted = frame.f_back
    if interrupted is None:
        return False
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    found = frame.f_locals
    for value in map(found.get, code.co_varnames[:count]):
        if value is interrupted or (type(value) is tuple and any(item is interrupted for item in value)):
            return True
    return False


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _handler_code(number: int) -> CodeType | None:
    handler = _getsignal(number)
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(vars(type(handler)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None
