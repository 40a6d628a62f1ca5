"""PyTorch: spans that know the GPU's time, a profiler window for chosen iterations, collectives as spans.

Run against torch 2.13.0, on a CPU; what needs CUDA is tested where there is one. Nothing is imported from torch before
it is asked for, and nothing here ever initialises CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from opentelemetry.trace import Span

from raytrace_rl.instrumentation import managed_span
from raytrace_rl.integrations import _gpu_time, _versions
from raytrace_rl.integrations._collectives import (
    COLLECTIVE,
    RL_COLLECTIVE_ASYNC_ATTR,
    RL_COLLECTIVE_BYTES_ATTR,
    RL_COLLECTIVE_RANKS_ATTR,
    CollectiveSpans,
)
from raytrace_rl.integrations._gpu_time import RL_GPU_DURATION_ATTR, RL_HOST_DURATION_ATTR
from raytrace_rl.integrations._profiler import RL_PROFILE_PATH_ATTR, ProfilerWindow

__all__ = [
    "COLLECTIVE",
    "RL_COLLECTIVE_ASYNC_ATTR",
    "RL_COLLECTIVE_BYTES_ATTR",
    "RL_COLLECTIVE_RANKS_ATTR",
    "RL_GPU_DURATION_ATTR",
    "RL_HOST_DURATION_ATTR",
    "RL_PROFILE_PATH_ATTR",
    "TESTED_VERSIONS",
    "CollectiveSpans",
    "ProfilerWindow",
    "gpu_span",
    "settle_gpu_spans",
    "trace_collectives",
]

#: Releases that this was run against.
TESTED_VERSIONS: Final = _versions.TESTED["torch"]


def gpu_span(group: str, name: str, /, **attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens a `managed_span` that also measures the GPU: ``rl.gpu.duration_s`` beside the span's own duration.

    A CUDA event is recorded on the current stream at each end, and read once the GPU has passed it; nothing is
    synchronised. The span is therefore finished a little after its body: when another such span begins or ends and the
    GPU is done, at `settle_gpu_spans`, or at shutdown. Until then it is open, with ``rl.host.duration_s`` among its
    attributes from the next heartbeat on: of a process that is killed before, it is read as truncated.

    Where CUDA is not initialised (no GPU, no torch, a worker that has not chosen its device) and while a CUDA graph is
    captured, it is a `managed_span` and no more.

    Args:
        group: Span group; of an umbrella that begins a trace (job, step, rollout) the GPU is not measured.
        name: Span name.
        attributes: As for `managed_span`.
    """
    return _gpu_time.timed(managed_span(group, name, **attributes))


def settle_gpu_spans() -> None:
    """Finishes those GPU spans whose work is done by now: at the end of a step, say. Waits for nothing."""
    _gpu_time.settle()


def trace_collectives() -> CollectiveSpans:
    """Makes each collective of ``torch.distributed`` an ``rl.collective.<function>`` span, until it is stopped.

    The spans are of the group ``collective``, which no preset holds, since a step has thousands of them: it takes
    ``span_groups="per_step,collective"``, or ``all``. They carry bytes, ranks, whether the call waited, and on CUDA the
    GPU's time. A module that took a function out of ``torch.distributed`` before this call keeps the plain one.

    Returns:
        What ends it: ``stop()``, or a ``with`` statement around the work.
    """
    return CollectiveSpans()
