"""Metrics and logs of a run, as rows: `metrics_of` and `logs_of`, and what `load_run` needs to have them too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from raytrace_rl import _decode, _decode_logs, _decode_metrics
from raytrace_rl.monitor.builder import identify
from raytrace_rl.monitor.model import Process, UnreadableRunError
from raytrace_rl.spool import listing
from raytrace_rl.spool.format import Kind
from raytrace_rl.spool.reader import Cursor, Damage

if TYPE_CHECKING:
    from raytrace_rl._decode import Attributes, Value

Row = TypeVar("Row")


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


def metric_rows(payload: bytes, process: Process) -> list[MetricRow]:
    """Returns the data points in a METRICS record's payload.

    Raises:
        ValueError: The bytes are no OTLP ``ScopeMetrics``.
    """
    scope, metrics = _decode_metrics.scope_metrics(payload)
    return [MetricRow(metric, point, scope.name, process) for metric in metrics for point in metric.points]


def log_rows(payload: bytes, process: Process) -> list[LogRow]:
    """Returns the records in a LOGS record's payload.

    Raises:
        ValueError: The bytes are no OTLP ``ScopeLogs``.
    """
    scope, records = _decode_logs.scope_logs(payload)
    return [LogRow(record, scope.name, process) for record in records]


def metrics_of(run_dir: str | os.PathLike[str], damage: list[Damage] | None = None) -> list[MetricRow]:
    """Returns every data point in the spools of a run, in the order of time.

    Args:
        run_dir: The run directory, or its ``spool`` directory.
        damage: What cannot be read is appended to it.

    Raises:
        UnreadableRunError: It cannot be listed.
    """
    return sorted(_read(run_dir, Kind.METRICS, metric_rows, damage), key=lambda row: row.time_ns)


def logs_of(run_dir: str | os.PathLike[str], damage: list[Damage] | None = None) -> list[LogRow]:
    """Returns every log record in the spools of a run, in the order of time.

    Args:
        run_dir: As for `metrics_of`.
        damage: As for `metrics_of`.

    Raises:
        UnreadableRunError: It cannot be listed.
    """
    return sorted(_read(run_dir, Kind.LOGS, log_rows, damage), key=lambda row: row.time_ns)


def _read(
    run_dir: str | os.PathLike[str],
    kind: Kind,
    rows_of: Callable[[bytes, Process], list[Row]],
    damage: list[Damage] | None,
) -> list[Row]:
    root = Path(run_dir)
    root = root / "spool" if (root / "spool").is_dir() else root
    try:
        found = list(listing.processes(root))
    except OSError as error:
        raise UnreadableRunError(f"{run_dir}: cannot be listed: {error.strerror}") from None
    rows: list[Row] = []
    for files in found:
        process = Process(f"{files.node}/{files.stem}", files.node, files.pid, files.start_ns)
        resource: Attributes | None = None
        for _, path in sorted(files.segments.items()):
            with Cursor(path) as cursor:
                for record in cursor.poll():
                    try:
                        if record.kind == kind:
                            rows += rows_of(record.payload, process)
                        elif record.kind == Kind.RESOURCE:
                            resource = _decode.resource(record.payload)
                    except (ValueError, RecursionError) as error:
                        if damage is not None:
                            reason = f"content of a record of kind {record.kind}: {error}"
                            damage.append(Damage(path, record.offset, len(record.payload), reason, "payload"))
                if resource is None and cursor.header is not None:
                    resource = _resource(cursor.header.resource)
                if damage is not None:
                    damage += cursor.damage
        identify(process, resource or {})
    return rows


def _resource(data: bytes) -> Attributes | None:
    try:
        return _decode.resource(data)
    except ValueError:
        return None
