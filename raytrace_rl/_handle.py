"""What ``get_telemetry_handle`` returns: what telemetry is in this process, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from opentelemetry import metrics, trace

from raytrace_rl import _metrics_pipeline, _process, _state, semconv
from raytrace_rl._version import VERSION


class TelemetryHandle:
    """What telemetry is in this process; from `get_telemetry_handle`."""

    def __init__(self, process: _process.Process, role: str) -> None:
        self._process = process
        self.role = role

    def moved_to(self, process: _process.Process) -> None:
        """In a forked child: stands for the telemetry that has started in it."""
        self._process = process
        self.role = semconv.ROLE_WORKER

    @property
    def tracer(self) -> trace.Tracer:
        """An OTel tracer whose spans reach the spool."""
        return trace.get_tracer("raytrace_rl", VERSION)

    @property
    def meter(self) -> metrics.Meter:
        """An OTel meter whose instruments reach the spool, whichever MeterProvider is installed."""
        return _metrics_pipeline.meter("raytrace_rl", VERSION)

    @property
    def is_exporting(self) -> bool:
        """True only while spans really go somewhere."""
        return self._process is _process.current and self._process.exporting and _state.tracing

    @property
    def run_dir(self) -> str | None:
        """The run directory, absolute."""
        return self._process.config.run_dir

    @property
    def run_id(self) -> str | None:
        """The run's id."""
        return self._process.config.run_id

    @property
    def dropped(self) -> Mapping[str, int]:
        """What was lost in this process since telemetry started: spans, attributes, metrics, logs, bytes."""
        return MappingProxyType(dict(_state.drops))
