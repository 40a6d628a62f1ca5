"""Workers of the groups in test_worker_groups_ray and test_worker_groups_nodes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrace_rl import TracedActor, accepts_trace_context, managed_span, setup

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RAYTRACE_RL_WORKER_GROUP",
    "TRACEPARENT",
    "USERS_OWN",
)


class Rank(TracedActor):
    """A rank as NeMo-RL's are written: what it is stands in its environment."""

    def __init__(self, base: int = 0, *, said: Any = None) -> None:
        super().__init__()
        self.rank = int(os.environ["RANK"])
        self.base = base
        self.said = said
        with managed_span("setup", "worker.init"):
            pass

    def environment(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in NAMES}

    def where(self) -> tuple[str, list[int]]:
        """The node, and the GPUs that Ray assigned."""
        import ray

        context = ray.get_runtime_context()
        return str(context.get_node_id()), [int(gpu) for gpu in context.get_accelerator_ids().get("GPU", ())]

    def told(self) -> Any:
        """What ``configure_worker`` asked to be told."""
        return self.said

    @accepts_trace_context
    def train(self, data: Any = None, scale: int = 1) -> Any:
        with managed_span("policy_update", "worker.train", rows=0 if data is None else len(data)):
            return self.rank, None if data is None else [x * scale for x in data]

    @accepts_trace_context
    def add(self, x: int, y: int = 0) -> int:
        with managed_span("policy_update", "worker.add"):
            return self.base + 10 * x + y + 100 * self.rank

    @accepts_trace_context
    def stream(self, n: int) -> Iterator[tuple[int, int]]:
        with managed_span("generation", "worker.stream"):
            for i in range(n):
                yield self.rank, i

    def wedge(self, mark: str) -> None:
        """Never comes back."""
        Path(mark).touch()
        time.sleep(600)

    def clean_up(self, directory: str | None = None) -> None:
        """Leaves a mark that it was here."""
        Path(directory or os.environ["USERS_OWN"], str(self.rank)).touch()

    def pid(self) -> int:
        return os.getpid()


class Configured(Rank):
    """Asks for things of its own, as NeMo-RL's vLLM workers do."""

    @staticmethod
    def configure_worker(num_gpus: float, bundle_indices: Any = None) -> Any:
        return {"num_gpus": 0}, {"USERS_OWN": "configured"}, {"said": bundle_indices}


class Plain:
    """No `TracedActor`: it starts its telemetry itself, on the first line of its constructor."""

    def __init__(self) -> None:
        setup.init_telemetry_worker()
        with managed_span("setup", "plain.init"):
            pass

    @accepts_trace_context
    def train(self, data: Any = None) -> Any:
        with managed_span("policy_update", "plain.train"):
            return data

    def pid(self) -> int:
        return os.getpid()


class Accepting(Plain):
    """Takes the carrier in its constructor."""

    @accepts_trace_context
    def __init__(self) -> None:
        super().__init__()


class Untraced:
    """Knows nothing of telemetry."""

    def pid(self) -> int:
        return os.getpid()
