"""The library's public names, as code spells them: from ``raytrace_rl``, its modules, or ``nemo_rl.telemetry``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Packages whose names are ours: code for NeMo-RL's telemetry is checked by the same rules.
PACKAGES: Final = ("raytrace_rl", "nemo_rl.telemetry")


@dataclass(frozen=True)
class Opener:
    """A function that opens a span.

    Attributes:
        group: Position of the span group among the arguments, None if it has none to give.
        name: Position of the span's name, likewise.
        umbrella: Its span is an umbrella whatever the group; None if the group decides.
        optional: ``with`` yields the span or None.
        decorator: It decorates a function.
    """

    group: int | None = None
    name: int | None = None
    umbrella: bool | None = None
    optional: bool = True
    decorator: bool = False


OPENERS: Final[dict[str, Opener]] = {
    "managed_span": Opener(0, 1),
    "umbrella_span": Opener(0, 1, umbrella=True),
    "streaming_umbrella_span": Opener(0, 1, umbrella=True, optional=False),
    "span_cm": Opener(None, 0),
    "trace_fn": Opener(0, 1, optional=False, decorator=True),
    "umbrella_trace_fn": Opener(0, 1, umbrella=True, optional=False, decorator=True),
    "emit_span": Opener(0, 1, optional=False),
    "startup_span": Opener(umbrella=True),
    "setup_span": Opener(umbrella=True),
    "evaluate_span": Opener(umbrella=True),
    "efficiency_span": Opener(umbrella=False),
    "start_efficiency_span": Opener(umbrella=False),
    "checkpoint_finalize_span": Opener(umbrella=False),
    "torch.gpu_span": Opener(0, 1),
    "vllm.load_model_span": Opener(umbrella=True),
    "vllm.refit_span": Opener(umbrella=False),
    "megatron.log_prob_span": Opener(umbrella=False),
    "megatron.forward_backward_span": Opener(umbrella=False),
    "megatron.optimizer_span": Opener(umbrella=False),
    "megatron.weight_export_span": Opener(umbrella=False),
}

TIMER: Final = "Timer"
#: ``Timer.time(label, group=...)`` opens a managed_span, whose name is the timer's prefix and the label.
TIMED: Final = Opener(2, 0)

ACCEPTS: Final = "accepts_trace_context"
DISPATCH: Final = "dispatch_with_trace_context"
KWARGS: Final = "trace_context_kwargs"
TRACED: Final = "traced"
#: Views of a handle whose calls bring the carrier.
VIEWS: Final = frozenset({TRACED, "data_plane.traced_data_plane"})
TRACED_ACTOR: Final = "TracedActor"
#: A traced actor that keeps the context of its constructor for its threads.
TRACED_COLLECTOR: Final = "collector.TracedCollector"
#: Classes of ours whose subclasses are traced actors.
TRACED_ACTORS: Final = frozenset({TRACED_ACTOR, TRACED_COLLECTOR, "megatron.TracedMegatronWorker"})
INIT_WORKER: Final = "init_telemetry_worker"
#: The keyword that a carrier travels in.
KEYWORD: Final = "_otel_carrier"
FLUSHES: Final = frozenset({"flush_actors", "flush_and_kill", "flush_group", "flush_telemetry", "shutdown_telemetry"})
#: What keeps the context of a constructor for later.
CAPTURES: Final = frozenset({"TraceContext.capture", "current_trace_carrier"})

#: What ``from raytrace_rl.instrumentation import *`` may bring.
NAMES: Final = frozenset(
    {
        *OPENERS, *FLUSHES, ACCEPTS, DISPATCH, KWARGS, TRACED, TRACED_ACTOR, INIT_WORKER, "RLSpanGroup", "TeedMetric",
        "TraceContext", "current_trace_carrier", "is_span_group_enabled", "record_metrics", "register_metric_group",
        "register_span_groups", "register_teed_metrics", "safe_set_span_attributes", "span_attributes",
    }
)  # fmt: skip


def public_name(dotted: str) -> str | None:
    """Returns ``managed_span`` for ``raytrace_rl.instrumentation.managed_span``; None for what is not ours."""
    for package in PACKAGES:
        if dotted.startswith(f"{package}."):
            first, _, rest = dotted[len(package) + 1 :].partition(".")
            in_module = rest and first.islower() and first not in NAMES
            return rest if in_module else f"{first}.{rest}".rstrip(".")
    return None


def in_library(module_name: str) -> bool:
    """True for a module of the library itself, which may do what algorithm code may not."""
    return any(module_name == package or module_name.startswith(f"{package}.") for package in PACKAGES)


def is_mechanism(module_name: str) -> bool:
    """True for the modules of the library that make a dispatch what it is: what they call is not theirs."""
    name = module_name.rpartition(".")[2]
    return in_library(module_name) and (
        name.startswith("_") or name in {"actors", "context", "dispatch", "instrumentation", "worker_groups"}
    )
