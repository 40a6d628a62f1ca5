"""Metrics and logs of a run, as rows: what ``load_run(path).metrics`` and ``.logs`` hold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from raytrace_rl import _decode_logs, _decode_metrics
from raytrace_rl.monitor import otlp_parts

if TYPE_CHECKING:
    from raytrace_rl._decode import Attributes, Value
    from raytrace_rl.monitor.model import Process
    from raytrace_rl.monitor.otlp_parts import Wrong


class MetricRow:
    """One data point, with the columns of the ``metrics`` table.

    Attributes:
        name, description, unit: Of its series.
        kind: ``gauge``, ``sum``, ``histogram``, ``exponential_histogram`` or ``summary``.
        temporality: ``cumulative`` or ``delta``; None for a gauge.
        monotonic: A sum that only grows: a counter.
        start_ns: Since when it counts, ns since the epoch; 0 for a gauge.
        time_ns: When it was collected, ns since the epoch.
        value: Of a gauge or a sum; None of a histogram.
        count, sum, min, max: Of a histogram; None otherwise.
        bounds, bucket_counts: Of a histogram: ``bucket_counts[i]`` values up to ``bounds[i]``, and one count beyond.
        scale, zero_count, positive, negative: Of an exponential histogram.
        attributes: Its labels.
        scope: Instrumentation scope that it was recorded under.
        process: The process it was recorded in.
    """

    __slots__ = (
        "attributes",
        "bounds",
        "bucket_counts",
        "count",
        "description",
        "kind",
        "max",
        "min",
        "monotonic",
        "name",
        "negative",
        "positive",
        "process",
        "scale",
        "scope",
        "start_ns",
        "sum",
        "temporality",
        "time_ns",
        "unit",
        "value",
        "zero_count",
    )

    def __init__(
        self, metric: _decode_metrics.Metric, point: _decode_metrics.Point, scope: str, process: Process
    ) -> None:
        self.name = metric.name
        self.description = metric.description
        self.unit = metric.unit
        self.kind = metric.kind
        self.temporality = metric.temporality
        self.monotonic = metric.monotonic
        self.start_ns = point.start_ns
        self.time_ns = point.time_ns
        self.value = point.value
        self.count = point.count
        self.sum = point.sum
        self.min = point.min
        self.max = point.max
        self.bounds = point.bounds
        self.bucket_counts = point.bucket_counts
        self.scale = point.scale
        self.zero_count = point.zero_count
        self.positive = point.positive
        self.negative = point.negative
        self.attributes: Attributes = point.attributes
        self.scope = scope
        self.process = process

    def __repr__(self) -> str:
        shown = self.value if self.count is None else f"count {self.count}, sum {self.sum}"
        return f"<MetricRow {self.name} {self.attributes} {shown}>"


class LogRow:
    """One log record, with the columns of the ``logs`` table.

    Attributes:
        time_ns: When it was logged, ns since the epoch.
        severity: OTLP severity number, 1 to 24; 0 where unknown.
        severity_text: Name of its level.
        body: The message.
        attributes: ``code.*``, ``exception.*``, ``thread.*``, and what came as ``extra=``.
        logger: Name of its logger.
        trace_id, span_id: Of the span that was current, hexadecimal; None without one.
        dropped_attributes: What could not be kept.
        process: The process it was logged in.
    """

    __slots__ = (
        "attributes",
        "body",
        "dropped_attributes",
        "logger",
        "process",
        "severity",
        "severity_text",
        "span_id",
        "time_ns",
        "trace_id",
    )

    def __init__(self, record: _decode_logs.LogRecord, logger: str, process: Process) -> None:
        self.time_ns = record.time_ns or record.observed_ns
        self.severity = record.severity
        self.severity_text = record.severity_text
        self.body: Value = record.body
        self.attributes: Attributes = record.attributes
        self.logger = logger
        self.trace_id = record.trace_id.hex() or None
        self.span_id = record.span_id.hex() or None
        self.dropped_attributes = record.dropped_attributes
        self.process = process

    def __repr__(self) -> str:
        return f"<LogRow {self.severity_text} {self.logger}: {self.body!r:.60}>"


def metric_rows(payload: bytes, process: Process, wrong: Wrong | None = None) -> list[MetricRow]:
    """Returns the data points in a METRICS record's payload.

    Args:
        payload: An OTLP ``ScopeMetrics``.
        process: Who recorded them.
        wrong: Told of each point that cannot be read; None refuses the whole.

    Raises:
        ValueError: The bytes are no such message.
    """
    decode = _decode_metrics.scope_metrics if wrong is None else partial(otlp_parts.scope_metrics, wrong=wrong)
    scope, metrics = decode(payload)
    return [MetricRow(metric, point, scope.name, process) for metric in metrics for point in metric.points]


def log_rows(payload: bytes, process: Process, wrong: Wrong | None = None) -> list[LogRow]:
    """Returns the records in a LOGS record's payload.

    Args:
        payload: An OTLP ``ScopeLogs``.
        process: Who logged them.
        wrong: Told of each record that cannot be read; None refuses the whole.

    Raises:
        ValueError: The bytes are no such message.
    """
    decode = _decode_logs.scope_logs if wrong is None else partial(otlp_parts.scope_logs, wrong=wrong)
    scope, records = decode(payload)
    return [LogRow(record, scope.name, process) for record in records]
