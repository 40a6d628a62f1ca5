"""The generation worker: a Ray actor around a vLLM engine, which gets its weights from the trainer at each refit."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from examples.async_grpo.task import NUM_DIGITS, SEPARATOR, IntArray
from examples.async_grpo.trajectories import Generation
from examples.vllm_megatron_grpo.config import EnginesConfig
from examples.vllm_megatron_grpo.model import write_weights
from examples.vllm_megatron_grpo.weights import Shard, llama_weights
from raytrace_rl import TracedActor, accepts_trace_context
from raytrace_rl.instrumentation import per_prompt_scope
from raytrace_rl.integrations.vllm import (
    GenerationStats,
    engine_args,
    load_model_span,
    refit_span,
    take_stats,
    trace_engine,
)

#: Variables of vLLM's, for its own process and those that it starts.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def on_cores(tensor_parallel: int) -> dict[str, str]:
    """Returns what lets vLLM's workers on a CPU share one NUMA node: a core for each."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tensor_parallel)))} if tensor_parallel > 1 else {}


@ray.remote
class EngineWorker(TracedActor):
    """A vLLM engine. Its weights are random until the first refit.

    Args:
        rank: This worker's place in its group.
        config: The run's settings.
        folder: The model's folder, with vLLM's configuration file.
    """

    def __init__(self, rank: int, config: EnginesConfig, folder: str) -> None:
        super().__init__(rank=rank, world_size=config.num_generators, worker_group="generation")
        os.environ.update({**ENVIRONMENT, **on_cores(config.engine_tensor_parallel)})
        with load_model_span():
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = AsyncEngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                max_model_len=config.model.context,
                max_num_seqs=64,
                dtype="float32",
                enforce_eager=True,
                use_tqdm_on_load=False,
                enable_prefix_caching=False,
                tensor_parallel_size=config.engine_tensor_parallel,
                logprobs_mode="processed_logprobs",
                **engine_args(),
            )
            self._engine = trace_engine(AsyncLLM.from_engine_args(arguments), weight_version=0)
        self._config = config
        self._weight_version = 0
        self._requests = itertools.count()
        self._turn = asyncio.Lock()

    @accepts_trace_context
    async def generate(self, prompts: IntArray, num_generations: int, seed: int | None) -> Generation:
        """Samples ``num_generations`` responses of as many digits as the prompt has.

        Args:
            prompts: ``[prompts, length]``.
            num_generations: Responses a prompt.
            seed: Seeds the sampling; None decodes greedily.
        """
        async with self._turn:
            found = await asyncio.gather(
                *(self._answer(place, prompt, num_generations, seed) for place, prompt in enumerate(prompts))
            )
            responses, log_probs = zip(*found, strict=True)
            return Generation(np.array(responses), np.array(log_probs, dtype=np.float32), self._weight_version)

    async def _answer(
        self, place: int, prompt: IntArray, num_generations: int, seed: int | None
    ) -> tuple[list[list[int]], list[list[float]]]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=num_generations,
            temperature=0.0 if seed is None else 1.0,
            seed=None if seed is None else seed * 1009 + place,
            min_tokens=len(prompt),
            max_tokens=len(prompt),
            allowed_token_ids=list(range(NUM_DIGITS)),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = TokensPrompt(prompt_token_ids=[*prompt.tolist(), SEPARATOR])
        with per_prompt_scope():
            async for output in self._engine.generate(tokens, params, f"request-{next(self._requests)}"):
                answer = output
        samples = [
            (list(sample.token_ids), [next(iter(place.values())).logprob for place in sample.logprobs])
            for sample in answer.outputs
        ]
        return [tokens for tokens, _ in samples], [log_probs for _, log_probs in samples]

    @accepts_trace_context
    async def update_weights(self, shards: Sequence[Any], version: int) -> None:
        """Takes the weights of ``version``, once what is being generated is done.

        Args:
            shards: The shards of Megatron's tensor parallel ranks, as references to the object store.
            version: Their version.
        """
        async with self._turn:
            with refit_span(self._engine, version):
                given: list[Shard] = [await shard for shard in shards]
                with tempfile.TemporaryDirectory() as folder:
                    weights = llama_weights(given, self._config.model)
                    await asyncio.to_thread(write_weights, weights, Path(folder))
                    await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
                await self._engine.update_weight_version(str(version))
            self._weight_version = version

    def stats(self) -> GenerationStats:
        """Returns what has been generated since this was asked last."""
        return take_stats(self._engine)

    def pids(self) -> list[int]:
        """Returns the processes of this worker: its own, then those of its engine."""
        import psutil

        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
