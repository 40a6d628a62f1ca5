"""Decodes OTLP protobuf bytes (spans and resources) in plain Python, so that reading a run needs no protobuf package.

Field numbers and types: opentelemetry-proto ``trace/v1/trace.proto``, ``common/v1/common.proto`` and
``resource/v1/resource.proto``; wire format: https://protobuf.dev/programming-guides/encoding/. A field that is not
known, or that has another wire type than it should, is passed over, and a message in several pieces is their
concatenation, as for protobuf itself. Everything that is not a message raises ValueError; nesting is bounded.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, Union

#: What an OTLP AnyValue holds. An unset value is None.
Value = Union[str, bool, int, float, bytes, "list[Value]", "dict[str, Value]", None]
Attributes = dict[str, Value]

#: Levels of array or key-value list inside one attribute; protobuf's own limit of 100 messages allows about as many.
MAX_DEPTH: Final = 32

_DOUBLE: Final = struct.Struct("<d").unpack

#: Most attributes of a run repeat (span group, bucket, thread): the bytes of a KeyValue lead to what they mean. Only
#: scalars are kept, so that no two spans share a list, and only so many that memory stays bounded.
_KEY_VALUES: Final[dict[bytes, tuple[str, Value]]] = {}
_KEPT_KEY_VALUES: Final = 16384
_KEPT_SIZE: Final = 128


class Event(NamedTuple):
    """An OTLP ``Span.Event``; the time in ns since the epoch."""

    time_ns: int
    name: str
    attributes: Attributes
    dropped_attributes: int


class Link(NamedTuple):
    """An OTLP ``Span.Link``."""

    trace_id: bytes
    span_id: bytes
    trace_state: str
    attributes: Attributes
    dropped_attributes: int
    flags: int


class Span:
    """An OTLP ``Span``. Times are ns since the epoch, 0 where unset; ids are bytes as they were sent."""

    __slots__ = (
        "attributes",
        "dropped_attributes",
        "dropped_events",
        "dropped_links",
        "end_ns",
        "events",
        "flags",
        "kind",
        "links",
        "name",
        "parent_span_id",
        "span_id",
        "start_ns",
        "status_code",
        "status_message",
        "trace_id",
        "trace_state",
    )

    def __init__(self) -> None:
        self.trace_id = b""
        self.span_id = b""
        self.parent_span_id = b""
        self.name = ""
        self.kind = 0
        self.start_ns = 0
        self.end_ns = 0
        self.attributes: Attributes = {}
        self.events: tuple[Event, ...] = ()
        self.links: tuple[Link, ...] = ()
        self.status_code = 0
        self.status_message = ""
        self.trace_state = ""
        self.flags = 0
        self.dropped_attributes = 0
        self.dropped_events = 0
        self.dropped_links = 0


class Scope(NamedTuple):
    """An OTLP ``InstrumentationScope``."""

    name: str
    version: str
    attributes: Attributes


class ScopeSpans(NamedTuple):
    """An OTLP ``ScopeSpans``."""

    scope: Scope
    spans: list[Span]


class ResourceSpans(NamedTuple):
    """An OTLP ``ResourceSpans``."""

    resource: Attributes
    scopes: list[ScopeSpans]


class _Fields:
    """Iterates over a message's fields as ``(tag, value)``: bytes for a length-delimited field, else an int."""

    __slots__ = ("buf", "end", "pos")

    def __init__(self, buf: bytes, pos: int = 0, end: int | None = None) -> None:
        self.buf = buf
        self.pos = pos
        self.end = len(buf) if end is None else end

    def __iter__(self) -> _Fields:
        return self

    def __next__(self) -> tuple[int, int | bytes]:
        buf, pos, end = self.buf, self.pos, self.end
        if pos >= end:
            raise StopIteration
        tag = buf[pos]
        pos += 1
        if tag > 127:
            start = pos - 1
            tag, pos = _varint(buf, start, end)
            if tag >> 32 or tag < 128 or pos - start > 5:
                raise ValueError("field number out of range, or longer than it needs to be")
        wire = tag & 7
        if tag < 8:
            raise ValueError("field number 0")
        if wire == 2:
            size, pos = _varint(buf, pos, end)
            stop = pos + size
        elif wire == 0:
            value, self.pos = _varint(buf, pos, end)
            return tag, value
        elif wire == 1:
            stop = pos + 8
        elif wire == 5:
            stop = pos + 4
        else:
            raise ValueError(f"wire type {wire}")
        if stop > end:
            raise ValueError("field reaches beyond its message")
        self.pos = stop
        raw = buf[pos:stop]
        return tag, raw if wire == 2 else int.from_bytes(raw, "little")


def _varint(buf: bytes, pos: int, end: int) -> tuple[int, int]:
    result = shift = 0
    while pos < end:
        byte = buf[pos]
        pos += 1
        result |= (byte & 0x7F) << shift
        if byte < 128:
            return result & 0xFFFFFFFFFFFFFFFF, pos
        shift += 7
        if shift > 63:
            raise ValueError("varint of more than ten bytes")
    raise ValueError("varint reaches beyond its message")


def _int32(value: int) -> int:
    """The value of an enum, which is a signed 32-bit number on a 64-bit varint."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def any_value(data: bytes, depth: int = 0) -> Value:
    """Decodes an OTLP ``AnyValue``.

    Raises:
        ValueError: It is none, or is nested deeper than MAX_DEPTH.
    """
    size = len(data)
    if size > 1 and data[0] == 0x0A and data[1] == size - 2 < 128:
        return data[2:].decode()  # by far the most common: one short string
    value: Value = None
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            if tag == 0x18:
                value = raw - (1 << 64) if raw >> 63 else raw
            elif tag == 0x10:
                value = raw != 0
            elif tag == 0x40:
                value = None  # the index of a string in a table that only profiles have
            elif tag == 0x21:
                value = _DOUBLE(raw.to_bytes(8, "little"))[0]
        elif tag == 0x0A:
            value = raw.decode()
        elif tag == 0x2A:
            items = _array(raw, depth + 1)
            if isinstance(value, list):
                value.extend(items)  # a message that comes in pieces is one
            else:
                value = items
        elif tag == 0x32:
            entries = _key_value_list(raw, depth + 1)
            if isinstance(value, dict):
                value.update(entries)
            else:
                value = entries
        elif tag == 0x3A:
            value = raw
    return value


def _array(data: bytes, depth: int) -> list[Value]:
    if depth > MAX_DEPTH:
        raise ValueError(f"attribute nested deeper than {MAX_DEPTH}")
    return [any_value(raw, depth) for tag, raw in _Fields(data) if tag == 0x0A and isinstance(raw, bytes)]


def _key_value_list(data: bytes, depth: int) -> Attributes:
    if depth > MAX_DEPTH:
        raise ValueError(f"attribute nested deeper than {MAX_DEPTH}")
    return dict(key_value(raw, depth) for tag, raw in _Fields(data) if tag == 0x0A and isinstance(raw, bytes))


def key_value(data: bytes, depth: int = 0) -> tuple[str, Value]:
    """Decodes an OTLP ``KeyValue`` to ``(key, value)``.

    Raises:
        ValueError: It is none.
    """
    kept = _KEY_VALUES.get(data)
    if kept is not None:
        return kept
    key = ""
    first = b""
    value: Value = None
    fields = _Fields(data)
    size = len(data)
    if size > 3 and data[0] == 0x0A and (at := 2 + data[1]) < size - 1 and data[1] < 128 and data[at] == 0x12:
        # A short key, then a short value, as every encoder writes them; what follows is left to the loop.
        stop = at + 2 + data[at + 1]
        if stop <= size and data[at + 1] < 128:
            key = data[2:at].decode()
            first = data[at + 2 : stop]
            value = any_value(first, depth)
            fields.pos = stop
    rest: list[bytes] = []
    for tag, raw in fields:
        if isinstance(raw, int):
            continue
        if tag == 0x0A:
            key = raw.decode()
        elif tag == 0x12:
            rest.append(raw)
    if rest:
        value = any_value(b"".join([first, *rest]), depth)
    if len(data) <= _KEPT_SIZE and not isinstance(value, (list, dict)):
        if len(_KEY_VALUES) >= _KEPT_KEY_VALUES:
            _KEY_VALUES.clear()
        _KEY_VALUES[data] = key, value
    return key, value


def _event(data: bytes) -> Event:
    time_ns = dropped = 0
    name = ""
    attributes: Attributes = {}
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            if tag == 0x09:
                time_ns = raw
            elif tag == 0x20:
                dropped = raw & 0xFFFFFFFF
        elif tag == 0x12:
            name = raw.decode()
        elif tag == 0x1A:
            key, value = key_value(raw)
            attributes[key] = value
    return Event(time_ns, name, attributes, dropped)


def _link(data: bytes) -> Link:
    trace_id = span_id = b""
    trace_state = ""
    attributes: Attributes = {}
    dropped = flags = 0
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            if tag == 0x28:
                dropped = raw & 0xFFFFFFFF
            elif tag == 0x35:
                flags = raw
        elif tag == 0x0A:
            trace_id = raw
        elif tag == 0x12:
            span_id = raw
        elif tag == 0x1A:
            trace_state = raw.decode()
        elif tag == 0x22:
            key, value = key_value(raw)
            attributes[key] = value
    return Link(trace_id, span_id, trace_state, attributes, dropped, flags)


def span(data: bytes) -> Span:
    """Decodes an OTLP ``Span``. The loop is written out, since a run has millions of them.

    Raises:
        ValueError: The bytes are no such message.
    """
    result = Span()
    attributes = result.attributes
    # Lists: a tuple that grows by one would make work of the square of their number.
    events: list[Event] = []
    links: list[Link] = []
    kept = _KEY_VALUES
    from_bytes = int.from_bytes
    pos = 0
    end = len(data)
    try:
        while pos < end:
            tag = data[pos]
            if tag & 7 == 2 and tag < 128:
                size = data[pos + 1]
                pos += 2
                if size > 127:
                    size, pos = _varint(data, pos - 1, end)
                stop = pos + size
                if stop > end:
                    raise ValueError("field reaches beyond its message")
                raw = data[pos:stop]
                pos = stop
                if tag == 0x4A:
                    item = kept.get(raw) or key_value(raw)
                    attributes[item[0]] = item[1]
                elif tag == 0x0A:
                    result.trace_id = raw
                elif tag == 0x12:
                    result.span_id = raw
                elif tag == 0x22:
                    result.parent_span_id = raw
                elif tag == 0x2A:
                    result.name = raw.decode()
                elif tag == 0x7A:
                    _status(result, raw)
                elif tag == 0x5A:
                    events.append(_event(raw))
                elif tag == 0x6A:
                    links.append(_link(raw))
                elif tag == 0x1A:
                    result.trace_state = raw.decode()
                elif tag < 8:
                    raise ValueError("field number 0")
            elif tag == 0x39 and pos + 9 <= end:
                result.start_ns = from_bytes(data[pos + 1 : pos + 9], "little")
                pos += 9
            elif tag == 0x41 and pos + 9 <= end:
                result.end_ns = from_bytes(data[pos + 1 : pos + 9], "little")
                pos += 9
            elif tag == 0x30 and data[pos + 1] < 128:
                result.kind = data[pos + 1]
                pos += 2
            else:
                pos = _rare_span_field(result, data, pos)
    except IndexError:
        raise ValueError("field reaches beyond its message") from None
    if events:
        result.events = tuple(events)
    if links:
        result.links = tuple(links)
    return result


def _rare_span_field(result: Span, data: bytes, pos: int) -> int:
    fields = _Fields(data, pos)
    tag, raw = next(fields)
    if isinstance(raw, int):
        if tag == 0x30:
            result.kind = _int32(raw)
        elif tag == 0x85:
            result.flags = raw
        elif tag == 0x50:
            result.dropped_attributes = raw & 0xFFFFFFFF
        elif tag == 0x60:
            result.dropped_events = raw & 0xFFFFFFFF
        elif tag == 0x70:
            result.dropped_links = raw & 0xFFFFFFFF
    return fields.pos


def _status(result: Span, data: bytes) -> None:
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            if tag == 0x18:
                result.status_code = _int32(raw)
        elif tag == 0x12:
            result.status_message = raw.decode()


def resource(data: bytes) -> Attributes:
    """Decodes an OTLP ``Resource`` to its attributes.

    Raises:
        ValueError: The bytes are no such message.
    """
    return dict(key_value(raw) for tag, raw in _Fields(data) if tag == 0x0A and isinstance(raw, bytes))


def _scope(data: bytes) -> Scope:
    name = version = ""
    attributes: Attributes = {}
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            continue
        if tag == 0x0A:
            name = raw.decode()
        elif tag == 0x12:
            version = raw.decode()
        elif tag == 0x1A:
            key, value = key_value(raw)
            attributes[key] = value
    return Scope(name, version, attributes)


def scope_spans(data: bytes) -> ScopeSpans:
    """Decodes an OTLP ``ScopeSpans``.

    Raises:
        ValueError: The bytes are no such message.
    """
    scope: list[bytes] = []
    spans: list[Span] = []
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            continue
        if tag == 0x0A:
            scope.append(raw)
        elif tag == 0x12:
            spans.append(span(raw))
    return ScopeSpans(_scope(b"".join(scope)), spans)


def resource_spans(data: bytes) -> ResourceSpans:
    """Decodes an OTLP ``ResourceSpans``.

    Raises:
        ValueError: The bytes are no such message.
    """
    attributes: Attributes = {}
    scopes: list[ScopeSpans] = []
    for tag, raw in _Fields(data):
        if isinstance(raw, int):
            continue
        if tag == 0x0A:
            attributes.update(resource(raw))
        elif tag == 0x12:
            scopes.append(scope_spans(raw))
    return ResourceSpans(attributes, scopes)


def request(data: bytes) -> list[ResourceSpans]:
    """Decodes an OTLP ``ExportTraceServiceRequest`` (the same bytes as a ``TracesData``).

    Raises:
        ValueError: The bytes are no such message.
    """
    return [resource_spans(raw) for tag, raw in _Fields(data) if tag == 0x0A and isinstance(raw, bytes)]
