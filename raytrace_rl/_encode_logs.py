"""OTLP ``ScopeLogs`` bytes from a record of the standard library's logging.

Field numbers are those of ``opentelemetry/proto/logs/v1/logs.proto`` (OTLP 1.x).
"""

from __future__ import annotations

import logging
import traceback
from typing import Any, Final

from raytrace_rl import _encode, _state
from raytrace_rl._encode import delimited, text, varint
from raytrace_rl._interrupts import is_interrupt

# Attribute names: OpenTelemetry semantic conventions, "Code", "Exception" and "Thread" attributes.
CODE_FILE_PATH: Final = "code.file.path"
CODE_FUNCTION_NAME: Final = "code.function.name"
CODE_LINE_NUMBER: Final = "code.line.number"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"
THREAD_ID: Final = "thread.id"
THREAD_NAME: Final = "thread.name"

_ATTRIBUTE: Final = b"\x32"
_MAX_NAME: Final = 1024
_MAX_FRAMES: Final = 64

#: What every ``logging.LogRecord`` has; anything else came as ``extra=`` and is an attribute.
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def severity(level: int) -> int:
    """Returns the OTLP severity number of a logging level.

    DEBUG, INFO, WARNING and ERROR begin at 5, 9, 13 and 17, CRITICAL at 21; levels between go up within the four
    numbers of each. Below DEBUG is TRACE (1), NOTSET has none (0). Source: OpenTelemetry specification, "Logs data
    model", field ``SeverityNumber``.
    """
    if level < 10:
        return 1 if level > 0 else 0
    step = min(level // 10, 5)
    return 1 + 4 * step + min(level - 10 * step, 3)


def scope_logs(
    record: logging.LogRecord, observed_ns: int, span: tuple[int, int, int] | None, *, extras: bool = True
) -> bytes:
    """Returns an OTLP ``ScopeLogs`` with the one record, its logger's name as the instrumentation scope.

    Args:
        record: The record. Its message is the body, the user's text, and passes unredacted; attributes out of
            ``extra=`` are redacted by key as a span's are.
        observed_ns: Ns since the epoch.
        span: Trace id, span id and flags of the current span; None without one.
        extras: With the attributes out of ``extra=``.
    """
    encoded = b"".join(
        (
            b"\x09" + (int(record.created * 1e9) & (1 << 64) - 1).to_bytes(8, "little"),
            b"\x10" + varint(severity(record.levelno)),
            delimited(b"\x1a", text(str(record.levelname), _MAX_NAME)),
            delimited(b"\x2a", _body(record)),
            _attributes(record, extras),
            _span(span) if span is not None else b"",
            b"\x59" + observed_ns.to_bytes(8, "little"),
        )
    )
    scope = delimited(b"\x0a", text(str(record.name), _MAX_NAME))
    return delimited(b"\x0a", scope) + delimited(b"\x12", encoded)


def _body(record: logging.LogRecord) -> bytes:
    """Returns the message as an ``AnyValue``; where its arguments do not fit it, as it stands in the code."""
    try:
        message = record.getMessage()
    except Exception as error:
        if is_interrupt(error):
            raise
        message = f"{record.msg!s} {record.args!r:.1000}"  # the program's other handlers complain of it
    return delimited(b"\x0a", text(message, _encode.value_length_limit))


def _attributes(record: logging.LogRecord, extras: bool) -> bytes:
    found: dict[str, Any] = {
        CODE_FILE_PATH: record.pathname,
        CODE_FUNCTION_NAME: record.funcName,
        CODE_LINE_NUMBER: record.lineno,
        THREAD_ID: record.thread,
        THREAD_NAME: record.threadName,
    }
    exception = _exception(record)
    if extras:
        # OTLP: attribute keys are unique.
        taken = _STANDARD.union(key for key, _ in exception)
        found.update((key, value) for key, value in record.__dict__.items() if key not in taken)
    encoded, lost = _encode.attributes_of(_ATTRIBUTE, {key: value for key, value in found.items() if value is not None})
    # Not by way of redaction: an exception's text is the user's own, like the message.
    for key, value in exception:
        body = delimited(b"\x0a", key.encode()) + delimited(
            b"\x12", delimited(b"\x0a", text(value, _encode.value_length_limit))
        )
        encoded += delimited(_ATTRIBUTE, body)
    return encoded + (b"\x38" + varint(lost) if lost else b"")


def _exception(record: logging.LogRecord) -> list[tuple[str, str]]:
    info: Any = record.exc_info  # makeLogRecord() lets anything in
    error = info[1] if isinstance(info, tuple) and len(info) > 1 else None
    if not isinstance(error, BaseException):
        return []
    kind = type(error)
    plain = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    found = [(EXCEPTION_TYPE, name)]
    try:
        found.append((EXCEPTION_MESSAGE, str(error)[: _encode.MAX_EXCEPTION_MESSAGE]))
        lines = traceback.format_exception(kind, error, error.__traceback__, limit=_MAX_FRAMES)
        found.append((EXCEPTION_STACKTRACE, "".join(lines)))
    except Exception as again:  # a __str__ that fails
        if is_interrupt(again):
            raise
        _state.count_drop("attributes")
    return found


def _span(span: tuple[int, int, int]) -> bytes:
    trace_id, span_id, flags = span
    return (
        b"\x45"
        + (flags & 0xFF).to_bytes(4, "little")
        + delimited(b"\x4a", trace_id.to_bytes(16, "big"))
        + delimited(b"\x52", span_id.to_bytes(8, "big"))
    )
