"""OTLP ``ScopeMetrics`` bytes from what the OpenTelemetry SDK collects: gauges, sums, both histograms, exemplars.

Field numbers are those of ``opentelemetry/proto/metrics/v1/metrics.proto`` (OTLP 1.x). The SDK's objects are known by
the names of their classes, so that this module does not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from struct import pack as _pack
from typing import Any, Final

from raytrace_rl import _encode, _state
from raytrace_rl._encode import UnencodableError, delimited, text, varint
from raytrace_rl._interrupts import is_interrupt

#: One record's payload is at most this (bytes): well under the spool's bound, and cheap to place.
MAX_RECORD: Final = 256 << 10
#: Name, unit and description of a series are cut at this many characters.
_MAX_TEXT: Final = 1024

_double: Final = Struct("<d").pack
_fixed: Final = Struct("<Q").pack
_signed: Final = Struct("<q").pack
_U64: Final = (1 << 64) - 1

# Tag bytes: field number << 3 | wire type.
_GAUGE: Final = b"\x2a"
_SUM: Final = b"\x3a"
_HISTOGRAM: Final = b"\x4a"
_EXPONENTIAL: Final = b"\x52"
_POINT: Final = b"\x0a"
_TEMPORALITY: Final = b"\x10"
_MONOTONIC: Final = b"\x18\x01"


def scope_metrics(scope: Any, series: Iterable[Any], schema_url: str = "") -> Iterator[tuple[bytes, int]]:
    """Yields OTLP ``ScopeMetrics`` payloads of at most about `MAX_RECORD` bytes, each with its number of data points.

    A series or point that cannot be encoded loses itself alone: it is counted, and named in one warning. A payload
    holds at least one point.

    Args:
        scope: The SDK's ``InstrumentationScope``; None for none.
        series: The SDK's ``Metric`` objects of that scope.
        schema_url: Schema of the scope.
    """
    head = delimited(b"\x0a", _scope(scope)) if scope is not None else b""
    tail = delimited(b"\x1a", text(schema_url, _MAX_TEXT)) if schema_url else b""
    metrics: list[bytes] = []
    size = points = 0
    for one in series:
        for encoded, count in _metric(one):
            if metrics and size + len(encoded) > MAX_RECORD:
                yield head + b"".join(metrics) + tail, points
                metrics, size, points = [], 0, 0
            metrics.append(delimited(b"\x12", encoded))
            size += len(metrics[-1])
            points += count
    if metrics:
        yield head + b"".join(metrics) + tail, points


def _scope(scope: Any) -> bytes:
    encoded = delimited(b"\x0a", text(scope.name or "", _MAX_TEXT))
    if scope.version:
        encoded += delimited(b"\x12", text(scope.version, _MAX_TEXT))
    attributes, lost = _encode.attributes_of(b"\x1a", getattr(scope, "attributes", None))
    return encoded + attributes + (b"\x20" + varint(lost) if lost else b"")


def _metric(metric: Any) -> Iterator[tuple[bytes, int]]:
    """Yields OTLP ``Metric`` messages, more than one where the points of a series fill a record, with their counts."""
    data = metric.data
    kind = _KINDS.get(type(data).__name__)
    if kind is None:
        _lost(metric, len(getattr(data, "data_points", ())) or 1, UnencodableError(type(data).__name__))
        return
    tag, encode = kind
    head = delimited(b"\x0a", text(metric.name, _MAX_TEXT))
    for field, value in ((b"\x12", metric.description), (b"\x1a", metric.unit)):
        if value:
            head += delimited(field, text(value, _MAX_TEXT))
    tail = b""
    if tag is not _GAUGE:
        tail = _TEMPORALITY + varint(int(data.aggregation_temporality))
        if getattr(data, "is_monotonic", False):
            tail += _MONOTONIC
    points: list[bytes] = []
    size = 0
    for point in data.data_points:
        try:
            encoded = delimited(_POINT, encode(point))
        except Exception as error:
            if is_interrupt(error):
                raise
            _lost(metric, 1, error)
            continue
        if points and size + len(encoded) > MAX_RECORD:
            yield head + delimited(tag, b"".join(points) + tail), len(points)
            points, size = [], 0
        points.append(encoded)
        size += len(encoded)
    if points:
        yield head + delimited(tag, b"".join(points) + tail), len(points)


def _lost(metric: Any, points: int, error: BaseException) -> None:
    _state.count_drop("metrics", points)
    name = getattr(metric, "name", "?")
    _state.warn_once(f"metric:{name}", "Points of metric %s cannot be encoded and are dropped: %r", name, error)


def _number_point(point: Any, start_ns: int | None = None) -> bytes:
    """Returns a ``NumberDataPoint``; a gauge's has no start: it is the value of an instant."""
    value = point.value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        encoded = b"\x31" + _signed(value)
    else:
        encoded = b"\x21" + _double(value)
    return _times(point, start_ns) + encoded + _attributes(b"\x3a", point) + _exemplars(b"\x2a", point)


def _sum_point(point: Any) -> bytes:
    return _number_point(point, point.start_time_unix_nano)


def _histogram_point(point: Any) -> bytes:
    counts, bounds = point.bucket_counts, point.explicit_bounds
    return b"".join(
        (
            _attributes(b"\x4a", point),
            _times(point, point.start_time_unix_nano),
            b"\x21" + _fixed(point.count),
            _optional_double(b"\x29", point.sum),
            delimited(b"\x32", _pack(f"<{len(counts)}Q", *counts)) if counts else b"",
            delimited(b"\x3a", _pack(f"<{len(bounds)}d", *bounds)) if bounds else b"",
            _exemplars(b"\x42", point),
            _optional_double(b"\x59", point.min),
            _optional_double(b"\x61", point.max),
        )
    )


def _exponential_point(point: Any) -> bytes:
    return b"".join(
        (
            _attributes(b"\x0a", point),
            _times(point, point.start_time_unix_nano),
            b"\x21" + _fixed(point.count),
            _optional_double(b"\x29", point.sum),
            b"\x30" + _zigzag(point.scale),
            b"\x39" + _fixed(point.zero_count),
            _buckets(b"\x42", point.positive),
            _buckets(b"\x4a", point.negative),
            b"\x50" + varint(point.flags) if point.flags else b"",
            _exemplars(b"\x5a", point),
            _optional_double(b"\x61", point.min),
            _optional_double(b"\x69", point.max),
        )
    )


_KINDS: Final[dict[str, tuple[bytes, Callable[[Any], bytes]]]] = {
    "Gauge": (_GAUGE, _number_point),
    "Sum": (_SUM, _sum_point),
    "Histogram": (_HISTOGRAM, _histogram_point),
    "ExponentialHistogram": (_EXPONENTIAL, _exponential_point),
}


def _times(point: Any, start_ns: int | None) -> bytes:
    """Returns start and time of a point; all three messages have them as fields 2 and 3, ns since the epoch."""
    start = b"\x11" + _fixed(start_ns) if start_ns else b""
    return start + b"\x19" + _fixed(point.time_unix_nano)


def _attributes(tag: bytes, point: Any) -> bytes:
    """Returns a point's attributes; what of them is lost is counted (OTLP has no field for it here)."""
    return _encode.attributes_of(tag, point.attributes)[0]


def _optional_double(tag: bytes, value: Any) -> bytes:
    return b"" if value is None else tag + _double(value)


def _zigzag(value: int) -> bytes:
    """Returns a ``sint32``."""
    return varint((value << 1 ^ value >> 31) & 0xFFFFFFFF)


def _buckets(tag: bytes, buckets: Any) -> bytes:
    counts: Sequence[int] = buckets.bucket_counts
    if not counts:
        return b""
    return delimited(tag, b"\x08" + _zigzag(buckets.offset) + delimited(b"\x12", b"".join(map(varint, counts))))


def _exemplars(tag: bytes, point: Any) -> bytes:
    """Returns the exemplars: single measurements, each with the span that made it. Older SDKs have none."""
    parts = []
    for exemplar in getattr(point, "exemplars", None) or ():
        value = exemplar.value
        encoded = b"\x31" + _signed(value) if isinstance(value, int) else b"\x19" + _double(value)
        encoded += b"\x11" + _fixed(exemplar.time_unix_nano)
        if exemplar.span_id is not None and exemplar.trace_id is not None:
            encoded += delimited(b"\x22", (exemplar.span_id & _U64).to_bytes(8, "big"))
            encoded += delimited(b"\x2a", exemplar.trace_id.to_bytes(16, "big"))
        encoded += _encode.attributes_of(b"\x3a", exemplar.filtered_attributes)[0]
        parts.append(delimited(tag, encoded))
    return b"".join(parts)
