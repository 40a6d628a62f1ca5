"""Where a process stands in Megatron's parallel groups, and how its telemetry learns of it.

Megatron is never imported for it, and knows only once ``initialize_model_parallel`` has run, long after telemetry has
started. So it is asked when the first span of a phase opens, for plain numbers that it keeps: no collective, no CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from raytrace_rl import _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.integrations import _versions
from raytrace_rl.setup import get_telemetry_handle, init_telemetry_worker

_PARALLEL_STATE: Final = "megatron.core.parallel_state"
#: Axis, as `parallel_state` names it; size as a resource attribute; size and rank as span attributes.
_AXES: Final = {
    "tp": (
        "tensor_model_parallel",
        semconv.NV_DL_TOPOLOGY_SIZE_TP,
        semconv.DL_TENSOR_PARALLEL_SIZE,
        semconv.DL_TENSOR_PARALLEL_RANK,
    ),
    "pp": (
        "pipeline_model_parallel",
        semconv.NV_DL_TOPOLOGY_SIZE_PP,
        semconv.DL_PIPELINE_PARALLEL_SIZE,
        semconv.DL_PIPELINE_PARALLEL_RANK,
    ),
    "dp": (
        "data_parallel",
        semconv.NV_DL_TOPOLOGY_SIZE_DP,
        semconv.DL_DATA_PARALLEL_SIZE,
        semconv.DL_DATA_PARALLEL_RANK,
    ),
    "cp": (
        "context_parallel",
        semconv.NV_DL_TOPOLOGY_SIZE_CP,
        semconv.DL_CONTEXT_PARALLEL_SIZE,
        semconv.DL_CONTEXT_PARALLEL_RANK,
    ),
    "ep": (
        "expert_model_parallel",
        semconv.NV_DL_TOPOLOGY_SIZE_EP,
        semconv.DL_EXPERT_PARALLEL_SIZE,
        semconv.DL_EXPERT_PARALLEL_RANK,
    ),
}


@dataclass(frozen=True)
class MegatronTopology:
    """One process's place.

    Attributes:
        rank: Its rank among all of ``torch.distributed``.
        world_size: Ranks there.
        sizes: Size of each axis (``tp``, ``pp``, ``dp``, ``cp``, ``ep``) that this Megatron has.
        ranks: Place along each.
    """

    rank: int
    world_size: int
    sizes: dict[str, int]
    ranks: dict[str, int]

    @property
    def resource(self) -> dict[str, int]:
        """The sizes as resource attributes, ``nv.dl.topology.size.*``."""
        return {_AXES[axis][1]: size for axis, size in self.sizes.items()}

    @property
    def span_attributes(self) -> dict[str, int]:
        """Sizes and places as span attributes, ``dl.*_parallel.size`` and ``.rank``."""
        sizes = {_AXES[axis][2]: size for axis, size in self.sizes.items()}
        return {**sizes, **{_AXES[axis][3]: place for axis, place in self.ranks.items()}}


#: (pid, epoch) of the telemetry that has been told, and what it was told as span attributes.
_told: tuple[int, int] | None = None
_attributes: dict[str, int] = {}


def megatron_topology() -> MegatronTopology | None:
    """Returns this process's place; None where Megatron is not imported or its groups are not initialised."""
    state = sys.modules.get(_PARALLEL_STATE)
    torch = sys.modules.get("torch")
    if state is None or torch is None:
        return None
    try:
        if not state.model_parallel_is_initialized():
            return None
        distributed = torch.distributed
        rank, world_size = int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception as error:
        if is_interrupt(error):
            raise
        _versions.unknown_api("megatron", f"usable parallel_state ({error!r})", "its ranks have no topology")
        return None
    sizes, ranks = {}, {}
    for axis, (name, *_) in _AXES.items():
        size, place = _asked(state, f"get_{name}_world_size"), _asked(state, f"get_{name}_rank")
        if size is not None and place is not None:
            sizes[axis], ranks[axis] = size, place
    return MegatronTopology(rank, world_size, sizes, ranks)


def described() -> dict[str, int]:
    """Returns the span attributes of this process's place, after its telemetry has been told of it, once.

    Empty until Megatron's groups are initialised. Never raises.
    """
    global _told, _attributes
    telling = os.getpid(), _state.epoch
    if _told == telling:
        return _attributes
    try:
        topology = megatron_topology()
        if topology is None or get_telemetry_handle() is None:
            return {}
        _attributes = topology.span_attributes
        _told = telling
        init_telemetry_worker(topology.rank, topology.world_size, resource_attributes=topology.resource)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("megatron-topology", "A Megatron rank's telemetry has no topology: %r", error)
        return {}
    return _attributes


def _asked(state: Any, name: str) -> int | None:
    question: Callable[[], Any] | None = getattr(state, name, None)
    if question is None:
        _versions.unknown_api("megatron", f"parallel_state.{name}", "spans and resource lack that axis")
        return None
    try:
        return int(question())
    except Exception as error:  # a group that this run did not make
        if is_interrupt(error):
            raise
        return None
