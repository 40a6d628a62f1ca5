"""Megatron-core: a worker's place in the parallel groups, the spans of its phases, and its own timers as spans.

Run against megatron-core 0.16.1, at tensor parallel 2 on a CPU. Nothing is imported from Megatron before
`trace_megatron_timers` is called, and nothing here touches CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from opentelemetry.trace import Span

from raytrace_rl import _state
from raytrace_rl._primitives import NO_SPAN
from raytrace_rl.actors import TracedActor
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.integrations import _gpu_time, _megatron_topology, _versions
from raytrace_rl.integrations._megatron_timers import MEGATRON_TIMER, SpanTimers, TimerSpans
from raytrace_rl.integrations._megatron_topology import MegatronTopology, megatron_topology
from raytrace_rl.span_groups import RLSpanGroup as G

__all__ = [
    "MEGATRON_TIMER",
    "TESTED_VERSIONS",
    "MegatronTopology",
    "SpanTimers",
    "TimerSpans",
    "TracedMegatronWorker",
    "describe_parallelism",
    "forward_backward_span",
    "log_prob_span",
    "megatron_topology",
    "optimizer_span",
    "trace_megatron_timers",
    "weight_export_span",
]

#: Releases that this was run against.
TESTED_VERSIONS: Final = _versions.TESTED["megatron"]


def describe_parallelism() -> bool:
    """Tells this process's telemetry its rank, world size and ``nv.dl.topology.size.*``. Never raises.

    The spans below do it by themselves, as soon as Megatron's groups are initialised: this is for a worker that has
    none of them, or wants its identity complete before the first.

    Returns:
        True if telemetry knows now.
    """
    return bool(_megatron_topology.described())


def log_prob_span(**attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens ``rl.megatron.log_probs`` (group ``LOGPROB``) over a forward pass without gradients.

    Args:
        attributes: As for `managed_span`.
    """
    return _phase(G.LOGPROB, "rl.megatron.log_probs", attributes)


def forward_backward_span(**attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens ``rl.megatron.forward_backward`` (group ``POLICY_UPDATE``) over the schedule's forward and backward passes.

    Args:
        attributes: As for `managed_span`.
    """
    return _phase(G.POLICY_UPDATE, "rl.megatron.forward_backward", attributes)


def optimizer_span(**attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens ``rl.megatron.optimizer`` (group ``POLICY_UPDATE``) over the optimizer's step.

    Args:
        attributes: As for `managed_span`.
    """
    return _phase(G.POLICY_UPDATE, "rl.megatron.optimizer", attributes)


def weight_export_span(**attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens ``rl.megatron.weight_export`` (group ``DATA_PLANE``) over the gathering of weights for a refit.

    Args:
        attributes: As for `managed_span`, such as ``rl.weight_version``.
    """
    return _phase(G.DATA_PLANE, "rl.megatron.weight_export", attributes)


def trace_megatron_timers() -> TimerSpans:
    """Makes each run of one of Megatron's timers an ``rl.megatron.timer.<name>`` span, until it is stopped.

    All of them, whatever their log level: those that Megatron does not time cost no synchronisation either. The spans
    are of the group ``megatron_timer``, which no preset holds, since their number grows with microbatches:
    ``span_groups="per_step,megatron_timer"``. Where Megatron is absent, one warning.

    Returns:
        What ends it: ``stop()``, or a ``with`` statement around the work.
    """
    return TimerSpans()


class TracedMegatronWorker(TracedActor):
    """A `TracedActor` that trains with Megatron: the spans of its phases, by the names of the functions above.

    Its telemetry starts before its constructor, which may choose the CUDA device in peace; its place in the parallel
    groups is added when Megatron knows it. On CUDA the spans carry the GPU's time (`integrations.torch.gpu_span`).
    """

    __slots__ = ()

    def describe_parallelism(self) -> bool:
        """See `describe_parallelism`."""
        return describe_parallelism()

    def log_prob_span(self, **attributes: Any) -> AbstractContextManager[Span | None]:
        """See `log_prob_span`."""
        return log_prob_span(**attributes)

    def forward_backward_span(self, **attributes: Any) -> AbstractContextManager[Span | None]:
        """See `forward_backward_span`."""
        return forward_backward_span(**attributes)

    def optimizer_span(self, **attributes: Any) -> AbstractContextManager[Span | None]:
        """See `optimizer_span`."""
        return optimizer_span(**attributes)

    def weight_export_span(self, **attributes: Any) -> AbstractContextManager[Span | None]:
        """See `weight_export_span`."""
        return weight_export_span(**attributes)


def _phase(group: str, name: str, attributes: dict[str, Any]) -> AbstractContextManager[Span | None]:
    if group not in _state.enabled:
        return NO_SPAN  # type: ignore[no-any-return]
    return _gpu_time.timed(managed_span(group, name, **{**_megatron_topology.described(), **attributes}))
