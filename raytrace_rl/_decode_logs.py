"""Decodes OTLP ``ScopeLogs`` in plain Python, as `_decode` does spans.

Field numbers and types: opentelemetry-proto ``logs/v1/logs.proto``. Whatever is no message raises ValueError.
"""

from __future__ import annotations

from typing import NamedTuple

from raytrace_rl._decode import Attributes, Scope, Value, _Fields, _int32, _scope, any_value, key_value


class LogRecord:
    """An OTLP ``LogRecord``. Times are ns since the epoch; ids are bytes, empty where there is none."""

    __slots__ = (
        "attributes",
        "body",
        "dropped_attributes",
        "event_name",
        "flags",
        "observed_ns",
        "severity",
        "severity_text",
        "span_id",
        "time_ns",
        "trace_id",
    )

    def __init__(self) -> None:
        self.time_ns = 0
        self.observed_ns = 0
        self.severity = 0
        self.severity_text = ""
        self.body: Value = None
        self.attributes: Attributes = {}
        self.dropped_attributes = 0
        self.flags = 0
        self.trace_id = b""
        self.span_id = b""
        self.event_name = ""


class ScopeLogs(NamedTuple):
    """An OTLP ``ScopeLogs``."""

    scope: Scope
    records: list[LogRecord]


def scope_logs(data: bytes) -> ScopeLogs:
    """Decodes an OTLP ``ScopeLogs``.

    Raises:
        ValueError: The bytes are no such message.
    """
    scope: list[bytes] = []
    records: list[LogRecord] = []
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            continue
        if tag == 0x0A:
            scope.append(raw)
        elif tag == 0x12:
            records.append(log_record(raw))
    return ScopeLogs(_scope(b"".join(scope)), records)


def log_record(data: bytes) -> LogRecord:
    """Decodes an OTLP ``LogRecord``.

    Raises:
        ValueError: The bytes are no such message.
    """
    record = LogRecord()
    body: list[bytes] = []
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            if tag == 0x09:
                record.time_ns = raw
            elif tag == 0x59:
                record.observed_ns = raw
            elif tag == 0x10:
                record.severity = _int32(raw)
            elif tag == 0x38:
                record.dropped_attributes = raw & 0xFFFFFFFF
            elif tag == 0x45:
                record.flags = raw
        elif tag == 0x1A:
            record.severity_text = raw.decode()
        elif tag == 0x2A:
            body.append(raw)
        elif tag == 0x32:
            key, value = key_value(raw)
            record.attributes[key] = value
        elif tag == 0x4A:
            record.trace_id = raw
        elif tag == 0x52:
            record.span_id = raw
        elif tag == 0x62:
            record.event_name = raw.decode()
    if body:
        record.body = any_value(b"".join(body))
    return record
