"""The environment of one worker of a group: its rank, its group's rendezvous, telemetry's settings, and a carrier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from raytrace_rl import _env_carrier, semconv, setup
from raytrace_rl._workers.layout import Seat
from raytrace_rl._workers.sharding import (
    CONTEXT_PARALLEL,
    DATA_PARALLEL,
    EXPERT_PARALLEL,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
    NamedSharding,
)

_RESOURCE_ATTRIBUTES: Final = "OTEL_RESOURCE_ATTRIBUTES"
_TOPOLOGY: Final = {
    DATA_PARALLEL: semconv.NV_DL_TOPOLOGY_SIZE_DP,
    CONTEXT_PARALLEL: semconv.NV_DL_TOPOLOGY_SIZE_CP,
    TENSOR_PARALLEL: semconv.NV_DL_TOPOLOGY_SIZE_TP,
    PIPELINE_PARALLEL: semconv.NV_DL_TOPOLOGY_SIZE_PP,
    EXPERT_PARALLEL: semconv.NV_DL_TOPOLOGY_SIZE_EP,
}


def group_environment(
    worker_group: str, base: Mapping[str, str] | None = None, sharding: NamedSharding | None = None
) -> dict[str, str]:
    """Returns what all workers of a group have in common: its name, telemetry's settings, axes, the current carrier.

    Args:
        worker_group: The group's name; empty for none.
        base: The user's own variables; what they set holds.
        sharding: The group's axes; their sizes become resource attributes of its workers.
    """
    own = dict(setup.telemetry_runtime_env().get("env_vars", {}))
    own |= _env_carrier.written()
    if worker_group:
        own["RAYTRACE_RL_WORKER_GROUP"] = worker_group
    merged = {**own, **(base or {})}
    sizes = {_TOPOLOGY[name]: size for name, size in sharding.shape.items() if name in _TOPOLOGY} if sharding else {}
    known = merged.get(_RESOURCE_ATTRIBUTES) or os.environ.get(_RESOURCE_ATTRIBUTES, "")
    missing = [f"{quote(key)}={size}" for key, size in sizes.items() if f"{key}=" not in known]
    if missing:
        merged[_RESOURCE_ATTRIBUTES] = ",".join([*filter(None, [known]), *missing])
    return merged


def rank_environment(seat: Seat, world_size: int, master: tuple[str, int]) -> dict[str, str]:
    """Returns what is one worker's own, by the names that torch and its launchers use.

    Args:
        seat: The worker's place.
        world_size: Workers in the group.
        master: Address and port of the group's rendezvous.
    """
    return {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "NODE_RANK": str(seat.node_rank),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }
