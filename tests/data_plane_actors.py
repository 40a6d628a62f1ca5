"""The buffer of test_data_plane_ray. In a module of its own, so that workers import it by reference."""

from __future__ import annotations

from typing import Any

from raytrace_rl import TracedActor, accepts_trace_context
from raytrace_rl.integrations.data_plane import traced_data_plane


class Store:
    """What a buffer keeps its batches in."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def put(self, batch: Any) -> int:
        self.kept.append(batch)
        return len(self.kept)


class Buffer(TracedActor):
    """In the shape of NeMo-RL's ``ReplayBuffer``; its own store is traced too."""

    def __init__(self) -> None:
        self.store = traced_data_plane(Store())

    @accepts_trace_context
    def push_with_wait_signal(self, trajectory: Any, weight_version: int) -> str:
        self.store.put(trajectory)
        return "success"

    def size(self) -> int:
        return len(self.store.kept)
