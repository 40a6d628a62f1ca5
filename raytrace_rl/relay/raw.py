"""What little a relay looks up in encoded messages without decoding them: ids, and the fields of a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_TRACE_ID: Final = b"\x0a\x10"


def fields(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields each field of a protobuf message: its tag, and the offsets of the field, of its value and behind it.

    Raises:
        ValueError: The bytes are no message.
    """
    pos, end = 0, len(data)
    while pos < end:
        start = pos
        tag, pos = varint(data, pos)
        if tag >> 32 or pos - start > 5:
            raise ValueError("field number out of range")
        wire = tag & 7
        if wire == 0:
            value = pos
            _, pos = varint(data, pos)
        elif wire == 2:
            size, value = varint(data, pos)
            pos = value + size
        elif wire in (1, 5):
            value = pos
            pos += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if pos > end or tag < 8:
            raise ValueError("no protobuf message")
        yield tag, start, value, pos


def varint(data: bytes, pos: int) -> tuple[int, int]:
    """Reads the varint at ``pos``; returns it and the offset behind it.

    Raises:
        ValueError: There is none.
    """
    result = shift = 0
    for at in range(pos, min(pos + 10, len(data))):
        byte = data[at]
        result |= (byte & 0x7F) << shift
        if byte < 128:
            return result, at + 1
        shift += 7
    raise ValueError("no varint")


def trace_id(span: bytes) -> bytes | None:
    """Returns the trace id of an encoded ``Span``; None where it has none."""
    if span.startswith(_TRACE_ID):
        return span[2:18]
    ids = span_ids(span)
    return None if ids is None else ids[:16]


def span_ids(span: bytes) -> bytes | None:
    """Returns trace id (16 bytes) and span id (8) of an encoded ``Span``; None where it lacks either."""
    trace = own = b""
    try:
        for tag, _, value, stop in fields(span):
            if tag == 0x0A:
                trace = span[value:stop]
            elif tag == 0x12:
                own = span[value:stop]
            if len(trace) == 16 and len(own) == 8:
                return trace + own
    except ValueError:
        pass
    return None
