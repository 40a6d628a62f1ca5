"""What tracing adds to a Ray call with one small argument: one after the other, and many in flight.

Wall-clock time, since most of a call is spent in other processes. The traced call is dispatched with the carrier to a
method that accepts it; the plain actor's class knows nothing of telemetry. Ray's own tracing is measured on clusters
of its own, in turn with ours.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final

from benchmarks.rounds import ROUNDS, measure, ratio
from benchmarks.table import Row
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import (
    TracedActor,
    accepts_trace_context,
    dispatch_with_trace_context,
    init_telemetry_driver,
    shutdown_telemetry,
    umbrella_span,
)

#: Calls in flight at once.
WINDOW: Final = 100
#: Clusters of either kind that are compared with Ray's own tracing.
CLUSTERS: Final = 5


class Plain:
    """An actor without telemetry."""

    def reply(self, x: int) -> int:
        """Returns its argument."""
        return x


class Traced(TracedActor):
    """The same, traced."""

    @accepts_trace_context
    def echo(self, x: int) -> int:
        """Returns its argument."""
        return x


def _sync(call: Callable[[int], Any]) -> Callable[[int], None]:
    import ray

    def run(turns: int) -> None:
        for n in range(turns):
            ray.get(call(n))

    return run


def _pipelined(call: Callable[[int], Any]) -> Callable[[int], None]:
    import ray

    def run(turns: int) -> None:
        for start in range(0, turns, WINDOW):
            ray.get([call(n) for n in range(start, min(start + WINDOW, turns))])

    return run


def _started(**options: Any) -> Any:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False, **options)
    return ray


def _measured(calls: Mapping[str, Callable[[int], Any]], rounds: int = ROUNDS) -> list[dict[str, list[float]]]:
    """Returns seconds a call, one at a time and in flight, by contender."""
    return [
        measure({name: kind(call) for name, call in calls.items()}, turns=1_000, rounds=rounds, clock=perf_counter)
        for kind in (_sync, _pipelined)
    ]


def ours(rounds: int = ROUNDS) -> list[dict[str, list[float]]]:
    """Measures both kinds of call on two actors of one cluster."""
    with tempfile.TemporaryDirectory() as run_dir:
        init_telemetry_driver({"enabled": True, "span_groups": "per_step", "run_dir": run_dir, "spool_max_mib": 64})
        ray = _started()
        try:
            plain: Any = ray.remote(num_cpus=1)(Plain).remote()
            traced: Any = ray.remote(num_cpus=1)(Traced).remote()
            with umbrella_span(G.U_JOB, "rl.grpo.job"):
                return _measured(
                    {
                        "plain": lambda n: plain.reply.remote(n),
                        "traced": lambda n: dispatch_with_trace_context(traced.echo, n),
                    },
                    rounds,
                )
        finally:
            ray.shutdown()
            shutdown_telemetry()


def theirs(rounds: int = ROUNDS) -> list[dict[str, list[float]]]:
    """Measures calls under Ray's own tracing, within a span as ours are."""
    from opentelemetry import trace

    ray = _started(_tracing_startup_hook="benchmarks.sdk:ray_tracing_hook")
    try:
        actor: Any = ray.remote(num_cpus=1)(Plain).remote()
        # raytrace: ignore[RT208] Ray's tracing is measured, and its spans are OpenTelemetry's own
        with trace.get_tracer("benchmarks").start_as_current_span("rl.grpo.job"):
            return _measured({"traced": lambda n: actor.reply.remote(n)}, rounds)
    finally:
        ray.shutdown()


def rows() -> list[Row]:
    """Measures ours against plain calls on one cluster, then against Ray's own tracing on clusters in turn."""
    sync, pipelined = ours()
    mine: list[list[float]] = [[], []]
    other: list[list[float]] = [[], []]
    for _ in range(CLUSTERS):
        for found, which in ((mine, "ours"), (other, "theirs")):
            # A process each: Ray's tracing, once switched on, stays.
            program = f"import json; from benchmarks import calls; print(json.dumps(calls.{which}(rounds=3)))"
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
            )
            for kind, seconds in zip(found, json.loads(done.stdout.splitlines()[-1]), strict=True):
                kind.append(statistics.median(seconds["traced"]))
    return [
        ratio("traced Ray call / plain, one at a time", sync["traced"], sync["plain"], bar=1.10, aim=1.05),
        ratio("traced Ray call / plain, 100 in flight", pipelined["traced"], pipelined["plain"], bar=1.25, aim=1.10),
        ratio("traced Ray call / by Ray's own tracing, one at a time", mine[0], other[0], bar=1.0, aim=0.8),
        ratio("traced Ray call / by Ray's own tracing, 100 in flight", mine[1], other[1], bar=1.0, aim=0.8),
    ]
