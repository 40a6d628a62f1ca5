"""Megatron-core without a GPU: what it asks of CUDA, answered for a CPU. For demonstrations and tests alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class _NoRngTracker:
    """In the place of the CUDA generators' tracker: there is no CUDA generator to fork."""

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:  # noqa: ARG002 - Megatron's signature
        yield

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}


class _CpuTorch:
    """``torch``, but for tensors that Megatron's schedules ask for on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def zeros(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        return torch.zeros(*args, **{**kwargs, "device": "cpu"})


def pretend_megatron_has_a_gpu() -> None:
    """Makes Megatron-core run on a CPU, in this process, for as long as it lives.

    Megatron allocates on "the current CUDA device", waits for it in its timers, and forks CUDA's random generators.
    """
    import torch

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None

    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.pipeline_parallel import schedules

    schedules.torch = _CpuTorch()
    megatron_random._CUDA_RNG_STATE_TRACKER = _NoRngTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
