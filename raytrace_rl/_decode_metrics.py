"""Decodes OTLP ``ScopeMetrics`` in plain Python, as `_decode` does spans.

Field numbers and types: opentelemetry-proto ``metrics/v1/metrics.proto``. Whatever is no message raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from raytrace_rl._decode import Attributes, Scope, _Fields, _int32, _scope, key_value

#: Kind of a metric by the tag of its data, which is also its field in ``Metric``.
_KINDS: Final = {0x2A: "gauge", 0x3A: "sum", 0x4A: "histogram", 0x52: "exponential_histogram", 0x5A: "summary"}
_TEMPORALITIES: Final = {1: "delta", 2: "cumulative"}


class Buckets(NamedTuple):
    """Buckets of an exponential histogram: bucket ``i`` counts values in ``(base**(offset+i), base**(offset+i+1)]``."""

    offset: int
    counts: tuple[int, ...]


class Point:
    """A data point of any kind; what its kind does not have is None or empty. Times are ns since the epoch."""

    __slots__ = (
        "attributes",
        "bounds",
        "bucket_counts",
        "count",
        "max",
        "min",
        "negative",
        "positive",
        "scale",
        "start_ns",
        "sum",
        "time_ns",
        "value",
        "zero_count",
    )

    def __init__(self) -> None:
        self.attributes: Attributes = {}
        self.start_ns = 0
        self.time_ns = 0
        self.value: int | float | None = None
        self.count: int | None = None
        self.sum: float | None = None
        self.min: float | None = None
        self.max: float | None = None
        self.bucket_counts: tuple[int, ...] = ()
        self.bounds: tuple[float, ...] = ()
        self.scale: int | None = None
        self.zero_count = 0
        self.positive: Buckets | None = None
        self.negative: Buckets | None = None


class Metric(NamedTuple):
    """An OTLP ``Metric``: ``kind`` is gauge, sum, histogram, exponential_histogram or summary."""

    name: str
    description: str
    unit: str
    kind: str
    temporality: str | None
    monotonic: bool
    points: list[Point]


class ScopeMetrics(NamedTuple):
    """An OTLP ``ScopeMetrics``."""

    scope: Scope
    metrics: list[Metric]


def scope_metrics(data: bytes) -> ScopeMetrics:
    """Decodes an OTLP ``ScopeMetrics``.

    Raises:
        ValueError: The bytes are no such message.
    """
    scope: list[bytes] = []
    metrics: list[Metric] = []
    for tag, raw in _messages(data):
        if tag == 0x0A:
            scope.append(raw)
        elif tag == 0x12:
            metrics.append(metric(raw))
    return ScopeMetrics(_scope(b"".join(scope)), metrics)


def metric(data: bytes) -> Metric:
    """Decodes an OTLP ``Metric``.

    Raises:
        ValueError: The bytes are no such message.
    """
    name = description = unit = kind = ""
    temporality: str | None = None
    monotonic = False
    points: list[Point] = []
    pieces: list[bytes] = []
    for tag, raw in _messages(data):
        if tag == 0x0A:
            name = raw.decode()
        elif tag == 0x12:
            description = raw.decode()
        elif tag == 0x1A:
            unit = raw.decode()
        elif tag in _KINDS:
            if kind != _KINDS[tag]:
                kind = _KINDS[tag]
                pieces.clear()  # the last one of a oneof holds
            pieces.append(raw)
    for tag, value in _Fields(b"".join(pieces)):
        if isinstance(value, bytes):
            if tag == 0x0A:
                points.append(_point(kind, value))
        elif tag == 0x10:
            temporality = _TEMPORALITIES.get(_int32(value))
        elif tag == 0x18:
            monotonic = bool(value)
    return Metric(name, description, unit, kind, temporality, monotonic, points)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    for tag, raw in _Fields(data):
        if isinstance(raw, bytes):
            yield tag, raw


def _double(raw: int) -> float:
    value: float = struct.unpack("<d", raw.to_bytes(8, "little"))[0]
    return value


def _signed(raw: int) -> int:
    return raw - (1 << 64) if raw >> 63 else raw


def _zigzag32(raw: int) -> int:
    raw &= 0xFFFFFFFF
    return (raw >> 1) ^ -(raw & 1)


def _packed(raw: bytes, code: str) -> tuple[int | float, ...]:
    if len(raw) % 8:
        raise ValueError("packed field of a broken length")
    return struct.unpack(f"<{len(raw) // 8}{code}", raw)


#: Field number of the attributes in each kind's data point.
_ATTRIBUTES: Final = {"gauge": 7, "sum": 7, "histogram": 9, "exponential_histogram": 1, "summary": 7}


class _Lists:
    """What a histogram's point holds in any number of pieces: tuples that grow would cost the square of that number."""

    __slots__ = ("bounds", "counts", "negative", "positive")

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.bounds: list[float] = []
        self.positive: list[bytes] = []
        self.negative: list[bytes] = []


def _point(kind: str, data: bytes) -> Point:
    point = Point()
    lists = _Lists()
    attributes_tag = _ATTRIBUTES[kind] << 3 | 2
    histogram = kind in ("histogram", "exponential_histogram", "summary")
    for tag, raw in _Fields(data):
        if tag == attributes_tag and isinstance(raw, bytes):
            key, value = key_value(raw)
            point.attributes[key] = value
        elif isinstance(raw, bytes):
            _distribution(kind, lists, tag, raw)
        elif tag == 0x11:
            point.start_ns = raw
        elif tag == 0x19:
            point.time_ns = raw
        elif histogram:
            _summary(kind, point, lists, tag, raw)
        elif tag == 0x21:
            point.value = _double(raw)
        elif tag == 0x31:
            point.value = _signed(raw)
    if histogram and point.count is None:
        point.count = 0
    point.bucket_counts, point.bounds = tuple(lists.counts), tuple(lists.bounds)
    if lists.positive:
        point.positive = _buckets(b"".join(lists.positive))
    if lists.negative:
        point.negative = _buckets(b"".join(lists.negative))
    return point


def _summary(kind: str, point: Point, lists: _Lists, tag: int, raw: int) -> None:
    """Takes a number of a histogram's point."""
    least, most = (0x59, 0x61) if kind == "histogram" else (0x61, 0x69)
    if tag == 0x21:
        point.count = raw
    elif tag == 0x29:
        point.sum = _double(raw)
    elif kind == "summary":
        return
    elif tag == least:
        point.min = _double(raw)
    elif tag == most:
        point.max = _double(raw)
    elif kind == "exponential_histogram":
        if tag == 0x30:
            point.scale = _zigzag32(raw)
        elif tag == 0x39:
            point.zero_count = raw
    elif tag == 0x31:  # a list that is not packed
        lists.counts.append(raw)
    elif tag == 0x39:
        lists.bounds.append(_double(raw))


def _distribution(kind: str, lists: _Lists, tag: int, raw: bytes) -> None:
    """Takes the buckets of a histogram's point."""
    if kind == "histogram":
        if tag == 0x32:
            lists.counts.extend(int(count) for count in _packed(raw, "Q"))
        elif tag == 0x3A:
            lists.bounds.extend(_packed(raw, "d"))
    elif kind == "exponential_histogram":
        if tag == 0x42:
            lists.positive.append(raw)
        elif tag == 0x4A:
            lists.negative.append(raw)


def _buckets(data: bytes) -> Buckets:
    offset = 0
    counts: list[int] = []
    for tag, raw in _Fields(data):
        if isinstance(raw, bytes):
            if tag == 0x12:
                counts.extend(_varints(raw))
        elif tag == 0x08:
            offset = _zigzag32(raw)
        elif tag == 0x10:
            counts.append(raw)
    return Buckets(offset, tuple(counts))


def _varints(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        if byte < 128:
            yield value & (1 << 64) - 1
            value = shift = 0
        elif shift > 56:
            raise ValueError("varint of more than ten bytes")
        else:
            shift += 7
    if shift:
        raise ValueError("varint reaches beyond its message")
