"""Which exceptions are the user's and only passing through: telemetry swallows its own failures, never these.

A signal handler may raise (alarm-based time-outs), and another thread may inject an exception (``ray.cancel``, timeout
libraries), at any call inside this library. Swallowed as "our failure", the user's time-out would never fire.
"""

from __future__ import annotations

import signal
from types import CodeType, TracebackType
from typing import Final

_PACKAGE: Final = __name__.partition(".")[0]
_SIGNALS: Final = tuple(signal.valid_signals())


def is_interrupt(error: BaseException) -> bool:
    """True if ``error`` came out of a signal handler or was injected from outside: it must be re-raised."""
    if not isinstance(error, Exception) or isinstance(error, TimeoutError):
        return True
    entries = _entries(error.__traceback__)
    if not entries:
        return False
    handlers = {code for code in map(_handler_code, _SIGNALS) if code is not None}
    if any(entry.tb_frame.f_code in handlers for entry in entries):
        return True
    # Injected exceptions surface in whatever frame runs. In one of ours, a type of neither Python's nor ours is one.
    innermost = entries[-1].tb_frame.f_globals.get("__name__", "")
    origin = type(error).__module__.partition(".")[0]
    return str(innermost).partition(".")[0] == _PACKAGE and origin not in ("builtins", _PACKAGE, "struct", "zlib")


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _handler_code(number: int) -> CodeType | None:
    try:
        handler = signal.getsignal(number)
    except ValueError:
        return None
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(vars(type(handler)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None
