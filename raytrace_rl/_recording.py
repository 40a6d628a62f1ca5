"""Telemetry in memory for the length of a test, and the clock and ids of one that wants the same at each run.

The fixtures of `raytrace_rl.testing` are these context managers; nothing here needs pytest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry.context import Context

from raytrace_rl import (
    _clock,
    _ids,
    _otel_context,
    _process,
    _registry,
    _scopes,
    _span,
    _span_api,
    _state,
    setup,
    span_groups,
)
from raytrace_rl._recorder import LogRecorder, MetricRecorder, SpanRecorder
from raytrace_rl._sinks import MemorySink

#: Every variable with one of these is telemetry's.
_PREFIXES: Final = ("RAYTRACE_RL_", "NEMO_RL_OTEL_", "OTEL_")
_EVERYTHING: Final[dict[str, Any]] = {"enabled": True, "span_groups": "all", "logs_enabled": True}

#: 2023-11-14T22:13:20Z, ns since the epoch.
_EPOCH_NS: Final = 1_700_000_000_000_000_000
_SEED: Final = 0


class Recording:
    """Telemetry of a test.

    Attributes:
        handle: As `get_telemetry_handle` returns it.
        spans: Finished spans.
        metrics: Data points.
        logs: Log records.
        run_dir: Where other processes of the test put their spools, for `raytrace_rl.monitor.load_run`.
    """

    def __init__(self, handle: setup.TelemetryHandle, sink: MemorySink) -> None:
        self.handle = handle
        self.spans = SpanRecorder(sink)
        self.metrics = MetricRecorder(sink)
        self.logs = LogRecorder(sink)
        self.run_dir = handle.run_dir

    @property
    def dropped(self) -> dict[str, int]:
        """What was lost, by kind; empty if nothing was."""
        return {kind: n for kind, n in _state.drops.items() if n}


@contextmanager
def recording(settings: Mapping[str, Any]) -> Iterator[Recording]:
    """Runs telemetry in memory; afterwards the process is as before. Telemetry that runs already is ended first.

    Args:
        settings: Fields of `TelemetryConfig`, over all groups and all three signals.

    Raises:
        ConfigError: A setting cannot be used.
        ValueError: Telemetry is switched off by the settings.
    """
    setup.shutdown_telemetry()
    variables = _take_variables()
    sink = MemorySink()
    context, scopes = _otel_context.otel_var.get(), _scopes.var.get()
    _otel_context.otel_var.set(Context())
    _scopes.var.set(None)
    _forget()
    _process.sink_override = sink
    try:
        handle = setup.init_telemetry_driver({**_EVERYTHING, **settings})
        if handle is None:
            raise ValueError(f"telemetry in memory did not start with {dict(settings)}")
        yield Recording(handle, sink)
    finally:
        setup.shutdown_telemetry()
        _process.sink_override = None
        _otel_context.otel_var.set(context)
        _scopes.var.set(scopes)
        _take_variables()
        os.environ.update(variables)
        _forget()


def _take_variables() -> dict[str, str]:
    """Takes telemetry's variables out of the environment; returns them."""
    return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_PREFIXES)}


def _forget() -> None:
    _state.forget_warnings()
    for kind in _state.DROP_KINDS:
        _state.drops[kind] = 0


class DeterministicClock:
    """A clock that goes on when it is read, or told to.

    Attributes:
        now_ns: What it shows, ns since the epoch.
        step_ns: How far each reading takes it.
    """

    def __init__(self, now_ns: int = _EPOCH_NS, step_ns: int = 1_000_000) -> None:
        self.now_ns = now_ns
        self.step_ns = step_ns

    def advance(self, seconds: float) -> None:
        """Lets time pass: what is open becomes that much longer."""
        self.now_ns += round(seconds * 1e9)

    def monotonic_ns(self) -> int:
        """Stands in for ``time.monotonic_ns``: this clock's time after the anchor is added to it."""
        self.now_ns += self.step_ns
        return self.now_ns - _clock.OFFSET_NS


@contextmanager
def deterministic(seed: int = _SEED) -> Iterator[DeterministicClock]:
    """Gives spans the same ids and times at each run.

    Args:
        seed: Of the ids.
    """
    clock = DeterministicClock()
    modules: list[Any] = [_clock, _span, _span_api]
    real = [module.monotonic_ns for module in modules]
    _ids.reseed(seed)
    for module in modules:
        module.monotonic_ns = clock.monotonic_ns
    try:
        yield clock
    finally:
        for module, original in zip(modules, real, strict=True):
            module.monotonic_ns = original
        _ids.reseed()


@contextmanager
def registrations() -> Iterator[None]:
    """Puts the registry of span groups back as it was."""
    tables: list[Any] = [
        _registry.owners,
        _registry.umbrellas,
        _registry.buckets,
        _registry.presets,
        _registry.preset_owners,
    ]
    before = [table.copy() for table in tables]
    try:
        yield
    finally:
        for table, contents in zip(tables, before, strict=True):
            table.clear()
            table.update(contents)
        _state.static_cache.clear()
        span_groups.apply_spec(span_groups.span_group_status().spec)
