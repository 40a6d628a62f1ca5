"""What a span costs beside nemo-lens, the telemetry library of NVIDIA's NeMo: disabled, and recorded and encoded.

Its spans go through OpenTelemetry's SDK, set up as for the other suites. The suite runs where nemo-lens is installed;
constraints-bench.txt has it for the Pythons that it allows.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Final

from nemo.lens.helpers import managed_span as lens_span
from nemo.lens.state import set_enabled_span_groups

from benchmarks.rounds import measure, ratio
from benchmarks.sdk import Sdk
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import init_telemetry_driver, managed_span, shutdown_telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from benchmarks.table import Row

_DISABLED_TURNS: Final = 100_000
_TURNS: Final = 5_000


def _ours(turns: int) -> None:
    for n in range(turns):
        with managed_span(G.GENERATION, "rl.grpo.generation", prompts=n & 63, mode="train"):
            pass


def _theirs(turns: int, tracer: Tracer | None = None) -> None:
    for n in range(turns):
        with lens_span(G.GENERATION, "rl.grpo.generation", tracer, prompts=n & 63, mode="train"):
            pass


def rows() -> list[Row]:
    """Measures the disabled spans first, in a process that has not seen telemetry yet."""
    disabled = measure({"ours": _ours, "theirs": _theirs}, turns=_DISABLED_TURNS)
    sdk = Sdk(queue=2 * _TURNS)
    tracer = sdk.provider.get_tracer("benchmarks")  # given to them: they would look for it at each span
    set_enabled_span_groups(frozenset({G.GENERATION}))

    def theirs(turns: int) -> None:
        before = sdk.encode.spans
        _theirs(turns, tracer)
        sdk.processor.force_flush()
        if sdk.encode.spans - before != turns:
            raise RuntimeError(f"nemo-lens recorded {sdk.encode.spans - before} of {turns} spans")

    with tempfile.TemporaryDirectory() as run_dir:
        init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": run_dir, "spool_max_mib": 64})
        try:
            enabled = measure({"ours": _ours, "theirs": theirs}, turns=_TURNS)
        finally:
            shutdown_telemetry()
    return [
        ratio("disabled span, 2 attributes / by nemo-lens", disabled["ours"], disabled["theirs"], bar=1.0, aim=0.2),
        ratio("enabled span, 2 attributes / by nemo-lens", enabled["ours"], enabled["theirs"], bar=0.5, aim=0.2),
    ]
