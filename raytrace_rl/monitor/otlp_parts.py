"""Reads OTLP protobuf messages of many records part by part, so that what is damaged costs itself and nothing else.

`_decode` says what one span, log record or point is. Where a length is wrong, all that follows it in the message would
be read from the wrong place on: the next span is then found by how every encoder begins one (its number in the
message, its length, 16 bytes of trace id, 8 of span id).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from raytrace_rl import _decode, _decode_logs, _decode_metrics
from raytrace_rl._decode import Attributes, ResourceSpans, Scope, ScopeSpans, Span
from raytrace_rl._encode import delimited, varint
from raytrace_rl.monitor.builder import check_ids

_LENGTH: Final = rb"(?:[\x00-\x7f]|[\x80-\xff]{1,4}[\x00-\x7f])"
_SPAN: Final = re.compile(rb"\x12" + _LENGTH + rb"(?=\x0a\x10.{16}\x12\x08)", re.DOTALL)
_FIRST: Final = 0x0A
_SECOND: Final = 0x12
#: What `_parts` gives as the tag of spans that it finds behind something that is no field.
_LOST: Final = 0
_NO_SCOPE: Final = Scope("", "", {})
#: In so many bytes a request and its first batch say how long they are.
_HEADS: Final = 12
#: Bytes of spans that turn out to be none may be this many times those of their message: each of a million lengths
#: could else claim the whole of it.
_FAILURES: Final = 16


class Wrong:
    """Told of each part that cannot be read.

    Args:
        note: Called with where the part starts, how long it is (bytes), and why.

    Attributes:
        count: How many there were.
    """

    def __init__(self, note: Callable[[int, int, object], None]) -> None:
        self._note = note
        self.count = 0

    def __call__(self, offset: int, size: int, why: object) -> None:
        """Notes one."""
        self.count += 1
        self._note(offset, size, why)


def checked(span: Span) -> Span:
    """Returns the span.

    Raises:
        ValueError: One of its ids has a wrong length, or it has none.
    """
    check_ids(span)
    if len(span.parent_span_id) not in (0, 8):
        raise ValueError("id of the parent is not 8 bytes long")
    if any(len(link.trace_id) not in (0, 16) or len(link.span_id) not in (0, 8) for link in span.links):
        raise ValueError("ids of a link are not 16 and 8 bytes long")
    return span


def request(data: bytes, start: int, stop: int, wrong: Wrong) -> list[ResourceSpans]:
    """Returns the batches of an ``ExportTraceServiceRequest``, which may be torn off.

    Args:
        data: A file.
        start: Where the request begins in it.
        stop: Where it ends.
        wrong: Told of what is left out.
    """
    found = _parts(data, start, stop, wrong)
    return [_resource_spans(data, at, end, wrong) for tag, at, end in found if tag == _FIRST]


def among(data: bytes, start: int, stop: int, wrong: Wrong) -> list[ResourceSpans]:
    """Returns the spans in what may once have been a request; their scopes are not known."""
    first = _SPAN.search(data, start, stop)
    if first is None:
        return []
    resource: Attributes = {}
    for at in range(start, min(start + _HEADS, first.start())):
        resource = _resource_at(data, at, first.start())
        if resource:
            break
    return [ResourceSpans(resource, [_scope_spans(data, first.start(), stop, wrong, checked)])]


def _resource_at(data: bytes, at: int, stop: int) -> Attributes:
    """The resource that a field at this place is; nothing if it is none."""
    fields = _decode._Fields(data, at, stop)
    try:
        tag, raw = next(fields)
        return _decode.resource(raw) if tag == _FIRST and isinstance(raw, bytes) else {}
    except (ValueError, StopIteration):
        return {}


def _resource_spans(data: bytes, start: int, stop: int, wrong: Wrong) -> ResourceSpans:
    resource: Attributes = {}
    scopes: list[ScopeSpans] = []
    for tag, at, end in _parts(data, start, stop, wrong):
        if tag in (_SECOND, _LOST):
            scopes.append(_scope_spans(data, at, end, wrong, checked))
            continue
        swallowed = _SPAN.search(data, at, end)
        if tag == _FIRST:
            about = swallowed.start() if swallowed else end
            resource.update(_attributes(data, at, about, wrong if swallowed is None else Wrong(_nowhere)))
        if swallowed is not None:
            wrong(at, swallowed.start() - at, "spans in what says it holds none: its length, or that, is wrong")
            scopes.append(_scope_spans(data, swallowed.start(), stop, wrong, checked))
            break
    return ResourceSpans(resource, scopes)


def scope_spans(payload: bytes, wrong: Wrong, check: Callable[[Span], Any]) -> ScopeSpans:
    """Returns what can be read of a ``ScopeSpans``; spans that ``check`` refuses (ValueError) are left out as well."""
    return _scope_spans(payload, 0, len(payload), wrong, check)


def scope_logs(payload: bytes, wrong: Wrong) -> _decode_logs.ScopeLogs:
    """Returns what can be read of a ``ScopeLogs``."""
    scope, found = _scoped(payload, wrong, lambda raw, *_: _decode_logs.log_record(raw))
    return _decode_logs.ScopeLogs(scope, found)


def scope_metrics(payload: bytes, wrong: Wrong) -> _decode_metrics.ScopeMetrics:
    """Returns what can be read of a ``ScopeMetrics``: a damaged point costs the point, of a metric that is one."""
    scope, found = _scoped(payload, wrong, _metric)
    return _decode_metrics.ScopeMetrics(scope, found)


def _scoped(payload: bytes, wrong: Wrong, read: Callable[[bytes, int, Wrong], Any]) -> tuple[Scope, list[Any]]:
    scope = _NO_SCOPE
    found: list[Any] = []
    for tag, at, end in _parts(payload, 0, len(payload), wrong):
        if tag == _FIRST:
            scope = _scope(payload, at, end, wrong)
        elif tag == _SECOND:
            try:
                found.append(read(payload[at:end], at, wrong))
            except ValueError as error:
                wrong(at, end - at, error)
    return scope, found


def _metric(raw: bytes, offset: int, wrong: Wrong) -> _decode_metrics.Metric:
    try:
        return _decode_metrics.metric(raw)
    except ValueError:
        # What it says of itself must hold; then each of its points is read alone.
        about: list[bytes] = []
        points: list[tuple[int, bytes]] = []
        last = b""
        for tag, at, end in _parts(raw, 0, len(raw), Wrong(_refuse)):
            if tag not in _decode_metrics._KINDS:
                about.append(delimited(varint(tag), raw[at:end]))
                continue
            if last != varint(tag):
                last = varint(tag)
                points.clear()  # the last one of a oneof holds
            fields = _decode._Fields(raw, at, end)
            rest = b""
            before = at
            for inner, value in fields:
                if inner == _FIRST and isinstance(value, bytes):
                    points.append((fields.pos - len(value), value))
                else:
                    rest += raw[before : fields.pos]
                before = fields.pos
            about.append(delimited(last, rest))
        metric = _decode_metrics.metric(b"".join(about))
    for at, value in points:
        try:
            metric.points.append(_decode_metrics._point(metric.kind, value))
        except ValueError as error:
            wrong(offset + at, len(value), error)
    return metric


def _nowhere(*part: object) -> None:
    del part


def _refuse(offset: int, size: int, why: object) -> None:
    del offset, size
    raise ValueError(why)


def _parts(data: bytes, start: int, stop: int, wrong: Wrong) -> Iterator[tuple[int, int, int]]:
    """Yields tag, begin and end of the length-delimited fields of a message; one that is torn off ends with it.

    Behind what is no field it goes on at the next span, if there is one: the rest is then spans.
    """
    fields = _decode._Fields(data, start, stop)
    while True:
        before = fields.pos
        try:
            tag, raw = next(fields)
        except StopIteration:
            return
        except ValueError as error:
            noted = wrong.count
            begin = _begin_of_torn(data, before, stop)
            if begin is not None:
                yield data[before], begin, stop
            elif (span := _SPAN.search(data, before + 1, stop)) is not None:
                wrong(before, span.start() - before, error)
                yield _LOST, span.start(), stop
            if wrong.count == noted:  # else what is in it has said so
                wrong(before, stop - before, error)
            return
        if isinstance(raw, bytes):
            yield tag, fields.pos - len(raw), fields.pos


def _begin_of_torn(data: bytes, at: int, stop: int) -> int | None:
    """Where the content begins of a part that reaches beyond its message; None if that is not what is wrong."""
    if data[at] not in (_FIRST, _SECOND):
        return None
    try:
        return _decode._varint(data, at + 1, stop)[1]
    except ValueError:
        return None


def _scope_spans(data: bytes, start: int, stop: int, wrong: Wrong, check: Callable[[Span], Any]) -> ScopeSpans:
    scope = _NO_SCOPE
    spans: list[Span] = []
    fields = _decode._Fields(data, start, stop)
    failed = 0
    while True:
        before = fields.pos
        try:
            tag, raw = next(fields)
            if tag == _SECOND and isinstance(raw, bytes):
                span = _decode.span(raw)
                check(span)
                spans.append(span)
            elif tag == _FIRST and isinstance(raw, bytes):
                scope = _scope(data, fields.pos - len(raw), fields.pos, wrong)
            elif isinstance(raw, bytes) and raw[:2] == b"\x0a\x10" and raw[18:20] == b"\x12\x08":
                raise ValueError("a span that says it is something else")
        except StopIteration:
            return ScopeSpans(scope, spans)
        except ValueError as error:
            # Its own length may be what is wrong: then the next one begins before its end.
            beyond = fields.pos if fields.pos > before else stop
            failed += beyond - before
            found = _SPAN.search(data, before + 1, stop) if failed <= _FAILURES * (stop - start) else None
            fields.pos = min(found.start(), beyond) if found else beyond
            wrong(before, fields.pos - before, error)


def _scope(data: bytes, start: int, stop: int, wrong: Wrong) -> Scope:
    try:
        return _decode._scope(data[start:stop])
    except ValueError as error:
        wrong(start, stop - start, error)
        return _NO_SCOPE


def _attributes(data: bytes, start: int, stop: int, wrong: Wrong) -> Attributes:
    found: Attributes = {}
    for tag, at, end in _parts(data, start, stop, wrong):
        if tag == _FIRST:
            try:
                key, value = _decode.key_value(data[at:end])
            except ValueError as error:
                wrong(at, end - at, error)
            else:
                found[key] = value
    return found
