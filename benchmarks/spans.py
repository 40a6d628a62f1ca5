"""What a span costs: disabled against ``contextlib.nullcontext()``, enabled against an SDK span that is OTLP-encoded.

Also the disabled decorator against a plain call, and eight threads against one.

"Enabled" is the whole path: started, made current, encoded, and in the mapped file when it has ended, with the
heartbeat running. The SDK's span is recorded, goes through its BatchSpanProcessor and is encoded by OpenTelemetry's own
encoder; it is not written anywhere. Both in CPU time, of all threads.
"""

from __future__ import annotations

import tempfile
import threading
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.rounds import difference_us, measure, ratio
from benchmarks.table import Row
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import init_telemetry_driver, managed_span, shutdown_telemetry, trace_fn, umbrella_span

if TYPE_CHECKING:
    from collections.abc import Callable

#: Spans in a round.
TURNS = 5_000


def _nullcontext(turns: int) -> None:
    for _ in range(turns):
        with nullcontext():
            pass


def _plain(turns: int) -> None:
    for _ in range(turns):
        with managed_span(G.GENERATION, "rl.grpo.generation"):
            pass


def _two(turns: int) -> None:
    for n in range(turns):
        with managed_span(G.GENERATION, "rl.grpo.generation", prompts=n & 63, mode="train"):
            pass


def _five(turns: int) -> None:
    for n in range(turns):
        with managed_span(G.GENERATION, "rl.grpo.generation", prompts=n & 63, mode="train", mean=0.5, ok=True, w=3):
            pass


def _function() -> None:
    pass


_decorated = trace_fn(G.GENERATION, "rl.grpo.generation")(_function)


def _calls(function: Callable[[], None]) -> Callable[[int], None]:
    def run(turns: int) -> None:
        for _ in range(turns):
            function()

    return run


def _threads(count: int) -> Callable[[int], None]:
    """Returns what records the turns in ``count`` threads at once, each of which is the child of one span."""

    def run(turns: int) -> None:
        threads = [threading.Thread(target=_two, args=(turns // count,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def rows() -> list[Row]:
    """Measures everything; the disabled costs first, in a process that has not seen telemetry yet."""
    return [*_disabled(), *_enabled()]


def _disabled() -> list[Row]:
    spans = measure({"null": _nullcontext, "plain": _plain, "two": _two}, turns=200_000)
    calls = measure({"plain": _calls(_function), "decorated": _calls(_decorated)}, turns=200_000)
    return [
        ratio("disabled span / nullcontext()", spans["plain"], spans["null"], bar=0.9, aim=0.75),
        ratio("disabled span, 2 attributes / nullcontext()", spans["two"], spans["null"], bar=1.2, aim=1.05),
        difference_us("disabled decorator - plain call", calls["decorated"], calls["plain"], bar=0.15, aim=0.08),
    ]


def _enabled() -> list[Row]:
    with tempfile.TemporaryDirectory() as run_dir:
        init_telemetry_driver({"enabled": True, "span_groups": "per_step", "run_dir": run_dir, "spool_max_mib": 1024})
        try:
            with umbrella_span(G.U_JOB, "rl.grpo.job"):
                ours = {"none": _plain, "two": _two, "five": _five}
                found = measure(ours | _sdk(), turns=TURNS)
            threads = measure({"one": _threads(1), "eight": _threads(8)}, turns=16_000, clock=perf_counter)
        finally:
            shutdown_telemetry()
    shown = {"none": "enabled span in the spool / SDK span encoded", "two": "the same, 2 attributes"}
    shown["five"] = "the same, 5 attributes"
    rows = [ratio(shown[name], found[name], found[f"SDK, {name}"], bar=0.15, aim=0.1) for name in ours]
    eight = ratio("8 threads at once, spans a second / one thread", threads["one"], threads["eight"], bar=0, aim=0)
    return [*rows, replace(eight, bar=0.9, aim=1.0, at_least=True)]


def _sdk() -> dict[str, Callable[[int], object]]:
    from benchmarks.sdk import Sdk

    sdk = Sdk(queue=2 * TURNS)  # a whole round: to drop spans is cheap
    tracer = sdk.provider.get_tracer("benchmarks")

    def spans(attributes: Callable[[int], dict[str, Any]]) -> Callable[[int], None]:
        def run(turns: int) -> None:
            before = sdk.encode.spans
            for n in range(turns):
                with tracer.start_as_current_span("rl.grpo.generation", attributes=attributes(n)):
                    pass
            sdk.processor.force_flush()
            if sdk.encode.spans - before != turns:
                raise RuntimeError(f"the SDK encoded {sdk.encode.spans - before} of {turns} spans")

        return run

    return {
        "SDK, none": spans(lambda _: {}),
        "SDK, two": spans(lambda n: {"prompts": n & 63, "mode": "train"}),
        "SDK, five": spans(lambda n: {"prompts": n & 63, "mode": "train", "mean": 0.5, "ok": True, "w": 3}),
    }
