"""OTLP traces as protobuf bytes, from rows that have been read: whatever a span holds, without limits or redaction.

``_encode`` is the encoder of what a user hands in, and cuts and redacts; what has been read went through that already.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raytrace_rl._encode import delimited, varint
from raytrace_rl.monitor.model import KINDS, STATUSES, Process, SpanRow
from raytrace_rl.monitor.otlp_json_out import number, related

if TYPE_CHECKING:
    from raytrace_rl._decode import Attributes, Event, Link, Scope, Value

_UINT64 = 1 << 64


def _text(tag: bytes, value: str) -> bytes:
    return delimited(tag, value.encode("utf-8", "backslashreplace")) if value else b""


def _uint(tag: bytes, value: int) -> bytes:
    return tag + varint(value % _UINT64) if value else b""


def any_value(value: Value) -> bytes:
    """Returns the ``AnyValue`` bytes of ``value``."""
    if isinstance(value, str):
        return delimited(b"\x0a", value.encode("utf-8", "backslashreplace"))
    if isinstance(value, bool):
        return b"\x10" + varint(value)
    if isinstance(value, int):
        return b"\x18" + varint(value % _UINT64)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    if isinstance(value, list):
        return delimited(b"\x2a", b"".join(delimited(b"\x0a", any_value(item)) for item in value))
    if isinstance(value, dict):
        return delimited(b"\x32", _attributes(b"\x0a", value))
    return b"" if value is None else delimited(b"\x3a", value)


def _attributes(tag: bytes, attributes: Attributes) -> bytes:
    return b"".join(
        delimited(tag, _text(b"\x0a", key) + delimited(b"\x12", any_value(value))) for key, value in attributes.items()
    )


def _event(event: Event) -> bytes:
    return delimited(
        b"\x5a",
        b"\x09"
        + event.time_ns.to_bytes(8, "little")
        + _text(b"\x12", event.name)
        + _attributes(b"\x1a", event.attributes)
        + _uint(b"\x20", event.dropped_attributes),
    )


def _link(link: Link) -> bytes:
    return delimited(
        b"\x6a",
        delimited(b"\x0a", link.trace_id)
        + delimited(b"\x12", link.span_id)
        + _text(b"\x1a", link.trace_state)
        + _attributes(b"\x22", link.attributes)
        + _uint(b"\x28", link.dropped_attributes)
        + (b"\x35" + link.flags.to_bytes(4, "little") if link.flags else b""),
    )


def span(row: SpanRow) -> bytes:
    """Returns the ``Span`` bytes of a row."""
    dropped_attributes, dropped_events, _ = row.dropped
    parent, links, dropped_links = related(row)
    status = _text(b"\x12", row.status_message) + _uint(b"\x18", number(STATUSES, row.status))
    return b"".join(
        (
            delimited(b"\x0a", bytes.fromhex(row.trace_id)),
            delimited(b"\x12", bytes.fromhex(row.span_id)),
            _text(b"\x1a", row.trace_state),
            delimited(b"\x22", bytes.fromhex(parent)) if parent else b"",
            _text(b"\x2a", row.name),
            _uint(b"\x30", number(KINDS, row.kind)),
            b"\x39" + row.start_ns.to_bytes(8, "little"),
            b"\x41" + (row.end_ns or 0).to_bytes(8, "little"),
            _attributes(b"\x4a", row.attributes),
            _uint(b"\x50", dropped_attributes),
            b"".join(_event(event) for event in row.events),
            _uint(b"\x60", dropped_events),
            b"".join(_link(link) for link in links),
            _uint(b"\x70", dropped_links),
            delimited(b"\x7a", status) if status else b"",
            b"\x85\x01" + row.flags.to_bytes(4, "little") if row.flags else b"",
        )
    )


def request(process: Process, scopes: Iterable[tuple[Scope, list[SpanRow]]]) -> bytes:
    """Returns an ``ExportTraceServiceRequest`` holding spans of one process."""
    body = delimited(b"\x0a", _attributes(b"\x0a", process.resource))
    for scope, rows in scopes:
        head = _text(b"\x0a", scope.name) + _text(b"\x12", scope.version) + _attributes(b"\x1a", scope.attributes)
        body += delimited(b"\x12", delimited(b"\x0a", head) + b"".join(delimited(b"\x12", span(row)) for row in rows))
    return delimited(b"\x0a", body)
