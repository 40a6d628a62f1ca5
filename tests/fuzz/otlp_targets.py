"""Fuzz targets that take OTLP: our decoders beside protobuf's own, and OTLP files read, written and read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _decode, _decode_logs, _decode_metrics
from raytrace_rl.monitor import UnreadableRunError, export, load_run
from tests.fuzz.checking import check, scratch
from tests.fuzz.official import attributes_of, parses, value_of

if TYPE_CHECKING:
    from pathlib import Path

    from raytrace_rl.monitor.model import Run

#: What our decoders refuse by design, though protobuf takes it: groups, attributes in attributes without end, and
#: field numbers in more bytes than any encoder writes.
_REFUSED: Final = ("wire type 3", "wire type 4", "nested deeper", "longer than it needs")


#: How long an input is made by repeating it, bytes.
_LONG: Final = 256 << 10


def _span(message: Any) -> tuple[Any, ...]:
    return (
        *(message.trace_id, message.span_id, message.parent_span_id, message.trace_state, message.flags),
        *(message.name, message.kind, message.start_time_unix_nano, message.end_time_unix_nano),
        *(attributes_of(message.attributes), message.dropped_attributes_count),
        [(e.time_unix_nano, e.name, attributes_of(e.attributes), e.dropped_attributes_count) for e in message.events],
        message.dropped_events_count,
        [
            (n.trace_id, n.span_id, n.trace_state, attributes_of(n.attributes), n.dropped_attributes_count, n.flags)
            for n in message.links
        ],
        *(message.dropped_links_count, message.status.code, message.status.message),
    )


def _our_span(span: _decode.Span) -> tuple[Any, ...]:
    return (
        *(span.trace_id, span.span_id, span.parent_span_id, span.trace_state, span.flags),
        *(span.name, span.kind, span.start_ns, span.end_ns),
        *(span.attributes, span.dropped_attributes),
        [tuple(event) for event in span.events],
        span.dropped_events,
        [tuple(link) for link in span.links],
        *(span.dropped_links, span.status_code, span.status_message),
    )


def _scope(message: Any) -> tuple[Any, ...]:
    return message.name, message.version, attributes_of(message.attributes)


def _scope_spans(message: Any) -> Any:
    return _scope(message.scope), [_span(one) for one in message.spans]


def _our_scope_spans(found: _decode.ScopeSpans) -> Any:
    return tuple(found.scope), [_our_span(one) for one in found.spans]


def _request(message: Any) -> Any:
    return [
        (attributes_of(one.resource.attributes), [_scope_spans(scope) for scope in one.scope_spans])
        for one in message.resource_spans
    ]


def _our_request(found: list[_decode.ResourceSpans]) -> Any:
    return [(one.resource, [_our_scope_spans(scope) for scope in one.scopes]) for one in found]


def _points(message: Any) -> list[Any]:
    kind = message.WhichOneof("data")
    if kind is None:
        return []
    found = []
    for point in getattr(message, kind).data_points:
        if kind in ("gauge", "sum"):
            which = point.WhichOneof("value")
            values = [None if which is None else getattr(point, which)]
        else:
            total = point.sum if kind == "summary" and point.sum else None
            if kind != "summary" and point.HasField("sum"):
                total = point.sum
            values = [point.count, total]
        if kind == "histogram":
            values += [tuple(point.bucket_counts), tuple(point.explicit_bounds)]
        if kind == "exponential_histogram":
            values += [point.zero_count, tuple(point.positive.bucket_counts), point.positive.offset]
        found.append((point.start_time_unix_nano, point.time_unix_nano, attributes_of(point.attributes), values))
    return found


def _our_points(metric: _decode_metrics.Metric) -> list[Any]:
    found = []
    for point in metric.points:
        if metric.kind in ("gauge", "sum"):
            values: list[Any] = [point.value]
        else:
            values = [point.count, point.sum if metric.kind != "summary" else point.sum or None]
        if metric.kind == "histogram":
            values += [point.bucket_counts, point.bounds]
        if metric.kind == "exponential_histogram":
            positive = point.positive or _decode_metrics.Buckets(0, ())
            values += [point.zero_count, positive.counts, positive.offset]
        found.append((point.start_ns, point.time_ns, point.attributes, values))
    return found


def _scope_metrics(message: Any) -> Any:
    metrics = [(m.name, m.description, m.unit, m.WhichOneof("data") or "", _points(m)) for m in message.metrics]
    return _scope(message.scope), metrics


def _our_scope_metrics(found: _decode_metrics.ScopeMetrics) -> Any:
    metrics = [(m.name, m.description, m.unit, m.kind, _our_points(m)) for m in found.metrics]
    return tuple(found.scope), metrics


def _scope_logs(message: Any) -> Any:
    return _scope(message.scope), [
        (
            *(r.time_unix_nano, r.observed_time_unix_nano, r.severity_number, r.severity_text, value_of(r.body)),
            *(attributes_of(r.attributes), r.dropped_attributes_count, r.flags, r.trace_id, r.span_id, r.event_name),
        )
        for r in message.log_records
    ]


def _our_scope_logs(found: _decode_logs.ScopeLogs) -> Any:
    return tuple(found.scope), [
        (
            *(r.time_ns, r.observed_ns, r.severity, r.severity_text, r.body),
            *(r.attributes, r.dropped_attributes, r.flags, r.trace_id, r.span_id, r.event_name),
        )
        for r in found.records
    ]


#: Class, our decoder, and both results in one shape.
_MESSAGES: Final[tuple[tuple[str, Callable[[bytes], Any], Callable[[Any], Any], Callable[[Any], Any]], ...]] = (
    ("Span", _decode.span, _our_span, _span),
    ("ScopeSpans", _decode.scope_spans, _our_scope_spans, _scope_spans),
    ("ExportTraceServiceRequest", _decode.request, _our_request, _request),
    ("Resource", _decode.resource, lambda found: found, lambda message: attributes_of(message.attributes)),
    ("AnyValue", _decode.any_value, lambda found: found, value_of),
    ("ScopeMetrics", _decode_metrics.scope_metrics, _our_scope_metrics, _scope_metrics),
    ("ScopeLogs", _decode_logs.scope_logs, _our_scope_logs, _scope_logs),
)


def decode(data: bytes) -> None:
    """Any bytes as a message: what protobuf takes we take, and find the same in it; else ValueError, nothing else."""
    name, ours, our_shape, shape = _MESSAGES[(data[0] if data else 0) % len(_MESSAGES)]
    body = data[1:]
    message = parses(name, body)
    try:
        found = ours(body)
    except ValueError as error:
        refused = any(reason in str(error) for reason in _REFUSED)
        check(message is None or refused, f"{name} is refused, and protobuf takes it", error, message)
        return
    if message is not None:
        # By repr, since NaN equals nothing.
        got, wanted = repr(our_shape(found)), repr(shape(message))
        check(got == wanted, f"{name} as protobuf decodes it", got, wanted)


def decode_long(data: bytes) -> None:
    """As `decode`, of a message many times behind itself, which is a message too: work must not grow by the square."""
    if len(data) > 1:
        decode(data[:1] + data[1:] * (_LONG // len(data)))


def written_and_read_again(run: Run, directory: Path) -> None:
    """Writes a run in every form there is, and reads the OTLP ones: the same spans must come back."""
    ids = {(row.trace_id, row.span_id) for row in run.spans}
    for form in export.FORMATS:
        path = directory / f"again.{form}"
        with path.open("wb") as out:
            export.export(run, form, out)
        if form in export.OTLP_FORMATS and ids:
            again = load_run(path)
            got = {(row.trace_id, row.span_id) for row in again.spans}
            check(got == ids, f"the spans, from {form}", got, ids)
            check(not again.damage, f"no damage in {form}", again.damage)


def otlp_file(data: bytes) -> None:
    """Any bytes as a collector's file, JSON lines or protobuf: a run or one reason, and what is read can be written."""
    path = scratch() / "traces.json"
    path.write_bytes(data)
    try:
        run = load_run(path)
    except UnreadableRunError:
        return
    written_and_read_again(run, scratch())


TARGETS: Final[dict[str, Callable[[bytes], Any]]] = {
    "decode": decode,
    "decode_long": decode_long,
    "otlp_file": otlp_file,
}
