"""The hand-written encoder of metrics, field by field, against OpenTelemetry's own.

Differences that are meant, each tested as such: labels are redacted by key; series are split over several records; a
point that cannot be encoded loses itself alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as ProtoMetric
from opentelemetry.proto.metrics.v1.metrics_pb2 import ScopeMetrics as ProtoScopeMetrics
from opentelemetry.sdk.metrics import AlwaysOnExemplarFilter, Exemplar, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from raytrace_rl import _decode_metrics, _encode_metrics, _state
from raytrace_rl._redact import REDACTED
from raytrace_rl.spool.format import MAX_PAYLOAD
from tests.running import attributes

texts = st.text(st.characters(codec="utf-8"), max_size=20)
keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
times = st.integers(1, 2**64 - 1)
counts = st.integers(0, 2**64 - 1)
doubles = st.floats()
numbers: st.SearchStrategy[Any] = st.one_of(st.integers(-(2**63), 2**63 - 1), doubles)
scalars: st.SearchStrategy[Any] = st.one_of(texts, st.booleans(), numbers)
labels = st.dictionaries(keys, st.one_of(scalars, st.lists(texts, min_size=1, max_size=3)), max_size=4)
temporalities = st.sampled_from([AggregationTemporality.DELTA, AggregationTemporality.CUMULATIVE])

exemplars = st.lists(
    st.builds(
        lambda filtered, value, time, ids: Exemplar(filtered, value, time, *ids),
        labels,
        numbers,
        times,
        st.one_of(
            st.just((None, None)),
            st.tuples(st.integers(1, 2**64 - 1), st.integers(1, 2**128 - 1)),
        ),
    ),
    max_size=2,
)
number_points = st.lists(st.builds(NumberDataPoint, labels, times, times, numbers, exemplars), max_size=3)


@st.composite
def histogram_points(draw: st.DrawFn) -> HistogramDataPoint:
    """A point of an explicit histogram."""
    bounds = sorted(draw(st.lists(st.floats(allow_nan=False), max_size=5)))
    buckets = draw(st.lists(counts, min_size=len(bounds) + 1, max_size=len(bounds) + 1)) if bounds else []
    return HistogramDataPoint(
        draw(labels), draw(times), draw(times), draw(counts), draw(doubles), buckets, bounds, draw(doubles),
        draw(doubles), draw(exemplars),
    )  # fmt: skip


int32 = st.integers(-(2**31), 2**31 - 1)
buckets = st.builds(Buckets, int32, st.lists(counts, max_size=5))
exponential_points = st.builds(
    ExponentialHistogramDataPoint, labels, times, times, counts, doubles, int32, counts, buckets, buckets,
    st.integers(0, 1), doubles, doubles, exemplars,
)  # fmt: skip

data: st.SearchStrategy[Any] = st.one_of(
    st.builds(Gauge, number_points),
    st.builds(Sum, number_points, temporalities, st.booleans()),
    st.builds(HistogramData, st.lists(histogram_points(), max_size=3), temporalities),
    st.builds(ExponentialHistogram, st.lists(exponential_points, max_size=3), temporalities),
)
metrics = st.builds(Metric, texts, texts, texts, data)
scopes = st.builds(InstrumentationScope, texts, st.one_of(st.none(), texts), st.just("https://schema"), labels)


@pytest.fixture(autouse=True)
def _capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is redacted but where a test says so."""
    monkeypatch.setattr(_state, "capture_content", True)


def official(scope: Any, series: list[Any]) -> ProtoScopeMetrics:
    """What OpenTelemetry's own encoder makes of it."""
    wrapped = ScopeMetrics(scope, series, "")
    request = encode_metrics(MetricsData([ResourceMetrics(Resource.get_empty(), [wrapped], "")]))
    return request.resource_metrics[0].scope_metrics[0]


def ours(scope: Any, series: list[Any]) -> tuple[ProtoScopeMetrics, int]:
    """What the official class reads in what our encoder makes of it, all records together, and the points counted."""
    found, points = ProtoScopeMetrics(), 0
    for payload, count in _encode_metrics.scope_metrics(scope, series, scope.schema_url):
        read = ProtoScopeMetrics.FromString(payload)
        assert count == sum(len(points_of(metric)) for metric in read.metrics)
        metrics_before = list(found.metrics)
        found.CopyFrom(read)
        del found.metrics[:]
        found.metrics.extend([*metrics_before, *read.metrics])
        points += count
    return found, points


def points_of(metric: ProtoMetric) -> Any:
    """The data points of any kind of metric."""
    return getattr(metric, metric.WhichOneof("data")).data_points


def with_points(message: ProtoScopeMetrics) -> ProtoScopeMetrics:
    """The message without series that have no points, which we do not write."""
    kept = ProtoScopeMetrics()
    kept.CopyFrom(message)
    del kept.metrics[:]
    kept.metrics.extend(m for m in message.metrics if m.WhichOneof("data") and points_of(m))
    return kept


@given(scopes, st.lists(metrics, max_size=3))
def test_every_field_is_that_of_the_official_encoder(scope, series):
    """Catches a wrong field number, wire type or presence in any of the four kinds of point, scopes and exemplars."""
    expected = with_points(official(scope, series))
    found, points = ours(scope, series)
    assert points == sum(len(points_of(metric)) for metric in expected.metrics)
    if points:  # by bytes, since NaN is not equal to itself
        assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    else:
        assert found == ProtoScopeMetrics()


@given(st.lists(metrics, max_size=3))
def test_our_decoder_reads_back_what_was_encoded(series):
    """Catches encoder and decoder that agree with the official classes on different halves of the message."""
    scope = InstrumentationScope("a", "1")
    for payload, _ in _encode_metrics.scope_metrics(scope, series):
        expected = ProtoScopeMetrics.FromString(payload)
        found = _decode_metrics.scope_metrics(payload)
        assert found.scope.name == "a"
        for metric, wanted in zip(found.metrics, expected.metrics, strict=True):
            kind = wanted.WhichOneof("data")
            assert (metric.name, metric.description, metric.unit, metric.kind) == (
                wanted.name, wanted.description, wanted.unit, kind,
            )  # fmt: skip
            body = getattr(wanted, kind)
            if kind == "gauge":
                assert metric.temporality is None
            else:
                assert metric.temporality == {1: "delta", 2: "cumulative"}[body.aggregation_temporality]
            assert metric.monotonic == getattr(body, "is_monotonic", False)
            for point, message in zip(metric.points, body.data_points, strict=True):
                same_point(kind, point, message)


def same_point(kind: str, point: _decode_metrics.Point, message: Any) -> None:
    """A decoded point says what the official message says; floats by their text, which NaN has too."""
    assert repr(point.attributes) == repr(attributes(message))
    assert (point.start_ns, point.time_ns) == (message.start_time_unix_nano, message.time_unix_nano)
    if kind in ("gauge", "sum"):
        assert repr(point.value) == repr(getattr(message, message.WhichOneof("value")))
        return
    assert repr((point.count, point.sum, point.min, point.max)) == repr(
        (message.count, message.sum, message.min, message.max)
    )
    if kind == "histogram":
        assert point.bucket_counts == tuple(message.bucket_counts)
        assert point.bounds == tuple(message.explicit_bounds)
        return
    assert (point.scale, point.zero_count) == (message.scale, message.zero_count)
    for side in ("positive", "negative"):
        found, wanted = getattr(point, side), getattr(message, side)
        assert (found.counts if found else ()) == tuple(wanted.bucket_counts)
        assert (found.offset if found else 0) == wanted.offset


def test_what_a_real_sdk_collects():
    """Catches an SDK whose own objects differ from the ones built by hand above."""
    reader = InMemoryMetricReader(preferred_aggregation={Histogram: ExponentialBucketHistogramAggregation()})
    provider = MeterProvider([reader], exemplar_filter=AlwaysOnExemplarFilter(), shutdown_on_exit=False)
    meter = provider.get_meter("scope", "1.2", "https://schema", {"k": 1})
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1)))
    with use_span(span):
        meter.create_counter("c", "1", "counted").add(3, {"a": "x"})
        meter.create_up_down_counter("u").add(-2.5)
        meter.create_gauge("g").set(7)
        for value in (0.0, 0.001, 3.5, 1e9):
            meter.create_histogram("h", "s").record(value)
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    found, points = ours(scope.scope, list(scope.metrics))
    expected = official(scope.scope, list(scope.metrics))
    assert points == 4
    assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    exemplar = found.metrics[0].sum.data_points[0].exemplars[0]
    assert (exemplar.trace_id.hex()[-3:], exemplar.span_id.hex()[-3:]) == ("abc", "def")


def gauge(name: str, *values: Any, **labels: Any) -> Metric:
    """A gauge with these values."""
    return Metric(name, "", "", Gauge([NumberDataPoint(labels, 0, 5, value) for value in values]))


def test_what_is_large_is_split_into_records_that_fit():
    """Catches a collection of many series, or one series of many points, that is lost whole for being too long."""
    long = [gauge(f"m{i}", i, text="x" * 1000) for i in range(500)]
    one = gauge("one", *range(2000), text="y" * 400)
    payloads = list(_encode_metrics.scope_metrics(InstrumentationScope("s"), [*long, one]))
    assert len(payloads) > 3
    assert all(len(payload) < MAX_PAYLOAD // 2 for payload, _ in payloads)
    read = [metric for payload, _ in payloads for metric in ProtoScopeMetrics.FromString(payload).metrics]
    values = [point.as_int for metric in read for point in metric.gauge.data_points]
    assert values == [*range(500), *range(2000)]
    assert sum(count for _, count in payloads) == 2500


def test_a_point_that_cannot_be_encoded_loses_itself_alone():
    """Catches one odd value that costs every other series of its collection."""
    series = [gauge("a", 1, "text", 2), gauge("b", np.int64(3), np.float32(0.5), 2**70)]
    found, points = ours(InstrumentationScope("s"), series)
    read = [[p.as_int or p.as_double for p in metric.gauge.data_points] for metric in found.metrics]
    assert read == [[1, 2], [3, 0.5, float(2**70)]]
    assert points == 5
    assert _state.drops["metrics"] == 1


class Unknown:
    """A kind of data that a later SDK may have."""

    data_points = (1, 2)


def test_a_kind_that_is_not_known_is_counted():
    """Catches points that vanish without a word."""
    found, points = ours(InstrumentationScope("s"), [Metric("x", "", "", Unknown()), gauge("a", 1)])
    assert (len(found.metrics), points) == (1, 1)
    assert _state.drops["metrics"] == 2


def test_labels_are_redacted_as_attributes_of_spans_are(monkeypatch):
    """Catches a prompt that leaves the process as a metric label."""
    monkeypatch.setattr(_state, "capture_content", False)
    found, _ = ours(InstrumentationScope("s"), [gauge("a", 1, prompt="tell me", model="m")])
    assert attributes(found.metrics[0].gauge.data_points[0]) == {"prompt": REDACTED, "model": "m"}


def test_a_scope_without_a_name_and_none_at_all():
    """Catches a scope that breaks the collection of its series."""
    for scope in (InstrumentationScope(""), None):
        ((payload, count),) = _encode_metrics.scope_metrics(scope, [gauge("a", 1)])
        assert count == 1
        assert ProtoScopeMetrics.FromString(payload).metrics[0].name == "a"
