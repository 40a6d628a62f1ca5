"""The generation worker: a Ray actor that samples responses with whatever weights it last received."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import ray
import torch

from examples.async_grpo.config import DemoConfig
from examples.async_grpo.model import Policy
from examples.async_grpo.task import FloatArray, IntArray
from examples.async_grpo.trajectories import Generation
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import TracedActor, accepts_trace_context, managed_span, umbrella_span

logger = logging.getLogger(__name__)


@ray.remote(max_restarts=3)
class GenerationWorker(TracedActor):
    """Samples responses; a restarted one is back at version 0 until the next refit.

    Until then its batches carry that old version, and the replay buffer's staleness limit refuses them: losing a
    worker costs throughput, never correctness.

    Args:
        rank: This worker's place in its group.
        config: The run's settings.
    """

    def __init__(self, rank: int, config: DemoConfig) -> None:
        super().__init__(rank=rank, world_size=config.num_generators, worker_group="generation")
        with umbrella_span(G.U_MODEL_INIT, "rl.setup.generation_model"):
            torch.set_num_threads(1)
            torch.manual_seed(config.seed)
            self._policy = Policy(config.prompt_length).eval()
            self._weight_version = 0

    @accepts_trace_context
    def generate(self, prompts: IntArray, num_generations: int, seed: int | None) -> Generation:
        """Samples ``num_generations`` responses to each prompt.

        Args:
            prompts: ``[prompts, length]``.
            num_generations: Responses a prompt.
            seed: Seeds the sampling; None decodes greedily.
        """
        attributes = {
            "rl.num_prompt_groups": len(prompts),
            "rl.num_generations_per_prompt": num_generations,
            "rl.weight_version": self._weight_version,
        }
        with managed_span(G.GENERATION, "rl.grpo.generation", **attributes):
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            rows = torch.from_numpy(np.repeat(prompts, num_generations, axis=0))
            responses, log_probs = self._policy.sample(rows, generator)
            shape = (len(prompts), num_generations, -1)
            return Generation(responses.numpy().reshape(shape), log_probs.numpy().reshape(shape), self._weight_version)

    def drain(self) -> None:
        """Returns once whatever was being generated is done: calls are executed one by one, as they arrive."""

    @accepts_trace_context
    def update_weights(self, weights: Mapping[str, FloatArray], version: int) -> None:
        """Takes the weights of ``version`` (parameter name to array), after whatever is being generated now."""
        with managed_span(G.DATA_PLANE, "rl.grpo.weight_sync", **{"rl.weight_version": version}):
            # Copies: arrays out of Ray's object store are read-only and shared, which torch does not know.
            self._policy.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
            self._weight_version = version
            logger.info("generating with version %d from here on", version)
