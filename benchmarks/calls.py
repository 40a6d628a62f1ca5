"""What tracing adds to a Ray call with one small argument: one after the other, and many in flight.

Wall-clock time, since most of a call is spent in other processes. The traced call is dispatched with the carrier to a
method that accepts it; the plain actor's class knows nothing of telemetry; the actor of an unedited program is traced
by what ``raytrace-rl run`` installs, with a span for each call. All three live on one cluster and take turns of a few
dozen calls. Beside them is a plain call with a keyword more: what Ray itself takes to send something along.

Other tracers are measured on clusters of their own, in turn with ours: what they patch, they patch for all of a
cluster. Datadog's is measured where ``ddtrace`` is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from benchmarks import datadog
from benchmarks.rounds import measure, ratio_of_groups
from benchmarks.table import installed
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import (
    TracedActor,
    accepts_trace_context,
    current_trace_carrier,
    dispatch_with_trace_context,
    init_telemetry_driver,
    shutdown_telemetry,
    umbrella_span,
)

if TYPE_CHECKING:
    from benchmarks.table import Row

#: Calls in flight at once.
WINDOW: Final = 100
#: Clusters of each kind, one after the other: two workers that do the same differ for as long as they live.
CLUSTERS: Final = 4
ROUNDS: Final = 40
#: Seconds a call by contender, round by round: one call at a time, then `WINDOW` in flight.
Found = list[dict[str, list[float]]]


class Plain:
    """An actor without telemetry."""

    def reply(self, x: int) -> int:
        """Returns its argument."""
        return x


class Keyword:
    """The same, with room for what a tracer sends along."""

    def reply(self, x: int, more: dict[str, str] | None = None) -> int:
        """Returns its argument, if more came with it."""
        return x if more else -1


class Unedited(Plain):
    """The same; wrappers are put around its methods."""


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


def _measured(calls: Mapping[str, Callable[[int], Any]]) -> Found:
    return [
        measure(
            {name: kind(call) for name, call in calls.items()},
            turns=turns,
            rounds=ROUNDS,
            clock=perf_counter,
            collect=False,
        )
        for kind, turns in ((_sync, 60), (_pipelined, 3 * WINDOW))
    ]


def ours() -> Found:
    """Measures the plain call, the traced one, and the one of an unedited program."""
    # raytrace: ignore[RT501] `install` registers the group too, but must come after the plain calls
    from raytrace_rl.integrations import _auto_entry, auto_ray

    _auto_entry.register()  # before the settings name its group
    with tempfile.TemporaryDirectory() as run_dir:
        init_telemetry_driver({"enabled": True, "span_groups": "per_step", "run_dir": run_dir, "spool_max_mib": 64})
        ray = _started()
        from ray.actor import ActorMethod

        unpatched: Any = ActorMethod._remote
        try:
            plain: Any = ray.remote(num_cpus=1)(Plain).remote()
            keyword: Any = ray.remote(num_cpus=1)(Keyword).remote()
            traced: Any = ray.remote(num_cpus=1)(Traced).remote()
            with umbrella_span(G.U_JOB, "rl.grpo.job"):
                carrier = current_trace_carrier()
                contenders = {
                    "plain": lambda n: plain.reply.remote(n),
                    "keyword": lambda n: keyword.reply.remote(n, more=carrier),
                    "traced": lambda n: dispatch_with_trace_context(traced.echo, n),
                }
                found = _measured(contenders)
                if not auto_ray.install():
                    raise RuntimeError("calls of unedited programs are not traced with this version of Ray")
                unedited: Any = ray.remote(num_cpus=1)(Unedited).remote()
                contenders = {
                    # What stands around calls from here on stands not around these.
                    "unpatched": lambda n: unpatched(plain.reply, (n,), {}),
                    "unedited": lambda n: unedited.reply.remote(n),
                }
                for kind, more in zip(found, _measured(contenders), strict=True):
                    kind.update(more)
        finally:
            ray.shutdown()
            shutdown_telemetry()
        recorded = sum(
            path.read_bytes().count(b"ray.call.Unedited.reply") for path in Path(run_dir, "spool").rglob("*.rts")
        )
        if recorded < ROUNDS * 60:
            raise RuntimeError(f"{recorded} spans of an unedited program's calls: they were not traced")
        return found


def rays_own() -> Found:
    """Measures calls under Ray's own tracing, within a span as ours are."""
    from opentelemetry import trace

    ray = _started(_tracing_startup_hook="benchmarks.sdk:ray_tracing_hook")
    try:
        actor: Any = ray.remote(num_cpus=1)(Plain).remote()
        # raytrace: ignore[RT208] Ray's tracing is measured, and its spans are OpenTelemetry's own
        with trace.get_tracer("benchmarks").start_as_current_span("rl.grpo.job"):
            return _measured({"traced": lambda n: actor.reply.remote(n)})
    finally:
        ray.shutdown()


def datadogs() -> Found:
    """Measures calls under Datadog's Ray integration, within a span as ours are."""
    ray = _started(_tracing_startup_hook=datadog.HOOK)
    from ddtrace.trace import tracer

    try:
        actor: Any = ray.remote(num_cpus=1)(Plain).remote()
        if not any(parameter.name == datadog.KEYWORD for parameter in actor._ray_method_signatures["reply"]):
            raise RuntimeError("ddtrace has not put its wrappers around the actor's methods")
        with tracer.trace("rl.grpo.job"):
            return _measured({"traced": lambda n: actor.reply.remote(n)})
    finally:
        ray.shutdown()


def _in_turn(contenders: Mapping[str, Mapping[str, str]]) -> dict[str, list[Found]]:
    """Runs functions of this module `CLUSTERS` times, in turn, each in a process of its own.

    Args:
        contenders: The function's name to variables of its environment.
    """
    found: dict[str, list[Found]] = {name: [] for name in contenders}
    for _ in range(CLUSTERS):
        for name, environment in contenders.items():
            program = f"import json; from benchmarks import calls; print(json.dumps(calls.{name}()))"
            done = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
                env={**os.environ, **environment},
            )
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-4000:]}")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def rows() -> list[Row]:
    """Measures ours against plain calls, and against other tracers, cluster by cluster."""
    contenders: dict[str, Mapping[str, str]] = {"ours": {}, "rays_own": {}}
    if installed("ddtrace"):
        with datadog.agent() as agent:
            found = _in_turn({**contenders, "datadogs": agent})
    else:
        found = _in_turn(contenders)

    def of(function: str, contender: str, kind: int) -> list[list[float]]:
        return [one[kind][contender] for one in found[function]]

    def rows_of(what: str, mine: tuple[str, str], theirs: tuple[str, str], *bars: tuple[float, float]) -> list[Row]:
        """Compares two contenders, each a function and a name in what it found, in both kinds; bars and aims."""
        return [
            ratio_of_groups(f"{what}, {how}", of(*mine, kind), of(*theirs, kind), bar=bar, aim=aim)
            for kind, (how, (bar, aim)) in enumerate(zip(("one at a time", "100 in flight"), bars, strict=True))
        ]

    traced = ("ours", "traced")
    rows = [
        *rows_of("traced Ray call / plain", traced, ("ours", "plain"), (1.10, 1.05), (1.25, 1.10)),
        *rows_of("the same / a call with a keyword more", traced, ("ours", "keyword"), (1.06, 1.02), (1.15, 1.05)),
        *rows_of(
            "call of an unedited program / plain", ("ours", "unedited"), ("ours", "unpatched"), (1.3, 1.2), (1.8, 1.4)
        ),
        *rows_of("traced Ray call / by Ray's own tracing", traced, ("rays_own", "traced"), (1.0, 0.8), (1.0, 0.8)),
    ]
    if "datadogs" in found:
        rows += rows_of("traced Ray call / by ddtrace", traced, ("datadogs", "traced"), (1.0, 0.8), (1.0, 0.8))
    return rows
