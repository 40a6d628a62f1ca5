"""What a carrier costs: built and restored by us, against OpenTelemetry's ``inject`` and ``extract`` with attach."""

from __future__ import annotations

import tempfile

from opentelemetry import context as otel_context
from opentelemetry.propagate import extract, inject

from benchmarks.rounds import measure, ratio
from benchmarks.table import Row
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import (
    current_trace_carrier,
    init_telemetry_driver,
    iteration_scope,
    remote_trace_context,
    shutdown_telemetry,
    umbrella_span,
)


def _ours(turns: int) -> None:
    for _ in range(turns):
        with remote_trace_context(current_trace_carrier()):
            pass


def _otel(turns: int) -> None:
    for _ in range(turns):
        carrier: dict[str, str] = {}
        inject(carrier)
        token = otel_context.attach(extract(carrier))
        otel_context.detach(token)


def rows() -> list[Row]:
    """Measures both under a span and a scope of ours."""
    with tempfile.TemporaryDirectory() as run_dir:
        init_telemetry_driver({"enabled": True, "span_groups": "per_step", "run_dir": run_dir, "spool_max_mib": 64})
        try:
            with umbrella_span(G.U_JOB, "rl.grpo.job"), iteration_scope(7):
                found = measure({"ours": _ours, "otel": _otel}, turns=10_000)
        finally:
            shutdown_telemetry()
    return [ratio("carrier build + restore / OTel inject + extract", found["ours"], found["otel"], bar=0.35, aim=0.2)]
