"""Helpers of the tests of metrics and logs: both switched on for a test, and read back with the official classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import ScopeMetrics

from raytrace_rl import _metrics_pipeline, _state, logs
from raytrace_rl.spool.format import Kind
from tests.running import Telemetry, attributes, read_records, running


@contextmanager
def signals(run_dir: Path, **settings: Any) -> Iterator[Telemetry]:
    """Telemetry with metrics, and with logs if ``logs_enabled``, for the length of a ``with`` statement."""
    with running(run_dir, **settings) as started:
        assert _state.config is not None
        _metrics_pipeline.start(_state.config)
        if _state.config.logs_enabled:
            logs.start()
        try:
            yield started
        finally:
            logs.stop()
            _metrics_pipeline.stop(time.monotonic() + 5)


def scope_metrics(run_dir: Path) -> list[ScopeMetrics]:
    """Every METRICS record of a run."""
    records, damage = read_records(run_dir)
    assert not damage
    return [ScopeMetrics.FromString(record.payload) for record in records if record.kind == Kind.METRICS]


def points(run_dir: Path, name: str) -> list[tuple[dict[str, Any], Any]]:
    """Labels and value of every point of a gauge or sum, in the order of the records."""
    found = []
    for scope in scope_metrics(run_dir):
        for metric in scope.metrics:
            if metric.name == name:
                body = getattr(metric, metric.WhichOneof("data"))
                found += [(attributes(p), getattr(p, p.WhichOneof("value"))) for p in body.data_points]
    return found


def values(run_dir: Path, name: str) -> list[Any]:
    """The values alone."""
    return [value for _, value in points(run_dir, name)]


def names(run_dir: Path) -> set[str]:
    """Names of all series of a run."""
    return {metric.name for scope in scope_metrics(run_dir) for metric in scope.metrics}


def log_records(run_dir: Path) -> list[tuple[str, LogRecord]]:
    """Logger and record of everything that the bridge kept."""
    records, damage = read_records(run_dir)
    assert not damage
    found = []
    for record in records:
        if record.kind == Kind.LOGS:
            scope = ScopeLogs.FromString(record.payload)
            found += [(scope.scope.name, log) for log in scope.log_records]
    return found
