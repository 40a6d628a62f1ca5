"""What tracing adds to a Ray call with one small argument: one after the other, and many in flight.

Wall-clock time, since most of a call is spent in other processes. The traced call is dispatched with the carrier to a
method that accepts it; the plain actor's class knows nothing of telemetry.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from benchmarks.rounds import measure, ratio
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


class Plain:
    """An actor without telemetry."""

    def echo(self, x: int) -> int:
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


def rows() -> list[Row]:
    """Measures both kinds of call on two actors of one cluster."""
    import ray

    with tempfile.TemporaryDirectory() as run_dir:
        init_telemetry_driver({"enabled": True, "span_groups": "per_step", "run_dir": run_dir, "spool_max_mib": 64})
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            plain: Any = ray.remote(num_cpus=1)(Plain).remote()
            traced: Any = ray.remote(num_cpus=1)(Traced).remote()
            calls: dict[str, Callable[[int], Any]] = {
                "plain": plain.echo.remote,
                "traced": lambda n: dispatch_with_trace_context(traced.echo, n),
            }
            with umbrella_span(G.U_JOB, "rl.grpo.job"):
                sync = measure({name: _sync(call) for name, call in calls.items()}, turns=1_000, clock=perf_counter)
                pipelined = measure(
                    {name: _pipelined(call) for name, call in calls.items()}, turns=2_000, clock=perf_counter
                )
        finally:
            ray.shutdown()
            shutdown_telemetry()
    return [
        ratio("traced Ray call / plain, one at a time", sync["traced"], sync["plain"], bar=1.10, aim=1.05),
        ratio("traced Ray call / plain, 100 in flight", pipelined["traced"], pipelined["plain"], bar=1.25, aim=1.10),
    ]
