"""What a span costs: disabled against ``contextlib.nullcontext()``, enabled against an SDK span that is OTLP-encoded.

"Enabled" is the whole path: started, made current, encoded, and in the mapped file when it has ended, with the
heartbeat running. The SDK's span is recorded and encoded by OpenTelemetry's own encoder; it is not written anywhere.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from benchmarks.rounds import measure
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import init_telemetry_driver, managed_span, shutdown_telemetry, umbrella_span

if TYPE_CHECKING:
    from collections.abc import Callable

#: Spans handed to the SDK's encoder at once: the batch size of its BatchSpanProcessor.
BATCH = 512


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


def disabled() -> dict[str, list[float]]:
    """Measures a disabled span, in a process without telemetry."""
    return measure({"nullcontext": _nullcontext, "no attributes": _plain, "two attributes": _two}, turns=200_000)


def enabled() -> dict[str, list[float]]:
    """Measures an enabled span against the SDK's, each inside a job span."""
    with tempfile.TemporaryDirectory() as run_dir:
        init_telemetry_driver({"enabled": True, "span_groups": "per_step", "run_dir": run_dir, "spool_max_mib": 64})
        try:
            with umbrella_span(G.U_JOB, "rl.grpo.job"):
                ours = {"no attributes": _plain, "two attributes": _two, "five attributes": _five}
                return measure(ours | _sdk(), turns=5_000)
        finally:
            shutdown_telemetry()


def _sdk() -> dict[str, Callable[[int], object]]:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

    class Collect(SpanProcessor):
        def __init__(self) -> None:
            self.spans: list[ReadableSpan] = []

        def on_end(self, span: ReadableSpan) -> None:
            self.spans.append(span)
            if len(self.spans) >= BATCH:
                self.encode()

        def encode(self) -> None:
            if self.spans:
                encode_spans(self.spans).SerializeToString()
                self.spans = []

    collect = Collect()
    provider = TracerProvider(shutdown_on_exit=False)  # of its own: its spans do not reach our spool
    provider.add_span_processor(collect)
    tracer = provider.get_tracer("benchmarks")

    def spans(attributes: Callable[[int], dict[str, Any]]) -> Callable[[int], None]:
        def run(turns: int) -> None:
            for n in range(turns):
                with tracer.start_as_current_span("rl.grpo.generation", attributes=attributes(n)):
                    pass
            collect.encode()

        return run

    return {
        "SDK, no attributes": spans(lambda _: {}),
        "SDK, two attributes": spans(lambda n: {"prompts": n & 63, "mode": "train"}),
        "SDK, five attributes": spans(lambda n: {"prompts": n & 63, "mode": "train", "mean": 0.5, "ok": True, "w": 3}),
    }
