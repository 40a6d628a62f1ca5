"""Actors of the tests with real engines: an offline vLLM, and a collector whose threads drive two engines at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from examples.vllm_megatron_grpo.engine import ENVIRONMENT, on_cores
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import TracedActor, accepts_trace_context, traced, umbrella_span
from raytrace_rl.context import current_trace_carrier
from raytrace_rl.integrations.collector import TracedCollector
from raytrace_rl.integrations.vllm import (
    GenerationStats,
    engine_args,
    load_model_span,
    request_parents,
    take_stats,
    trace_engine,
)


@ray.remote
class OfflineEngine(TracedActor):
    """vLLM's ``LLM``, whose ``generate`` takes no trace headers, on two workers."""

    def __init__(self, folder: str) -> None:
        super().__init__(rank=0, world_size=1, worker_group="offline")
        os.environ.update({**ENVIRONMENT, **on_cores(2)})
        with load_model_span():
            from vllm import LLM

            llm = LLM(
                model=folder,
                skip_tokenizer_init=True,
                max_model_len=64,
                max_num_seqs=16,
                dtype="float32",
                enforce_eager=True,
                use_tqdm_on_load=False,
                tensor_parallel_size=2,
                **engine_args(),
            )
            self._llm = trace_engine(llm, weight_version=7)

    @accepts_trace_context
    def generate(self, prompts: Sequence[list[int]], carriers: Sequence[dict[str, str]], tokens: int) -> list[int]:
        """Generates for several rollouts at once; returns how many tokens each got."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        with request_parents(carriers):
            outputs = self._llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def stats(self) -> GenerationStats:
        return take_stats(self._llm)

    def pids(self) -> list[int]:
        import psutil

        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


@ray.remote
class Rollouts(TracedCollector):
    """Drives both engines from threads, one rollout each, so that all requests are under way at once."""

    def __init__(self, streaming: Any, offline: Any) -> None:
        super().__init__(worker_group="collector")
        self._streaming, self._offline = traced(streaming), traced(offline)

    @accepts_trace_context
    def run(self, count: int) -> tuple[int, list[int]]:
        """Runs ``count`` rollouts; each has a request in each engine. Returns responses and tokens got."""
        together = threading.Barrier(count)
        carriers: dict[int, dict[str, str]] = {}
        responses: list[Any] = []
        answered: list[Any] = []
        done = threading.Event()

        def rollout(place: int) -> None:
            with umbrella_span(G.U_ROLLOUT, "rl.test.rollout", place=place):
                carriers[place] = current_trace_carrier()
                together.wait(120)
                prompts = np.full((1, 4), place % 10)
                responses.append(ray.get(self._streaming.generate.remote(prompts, 1, place), timeout=240))
                if together.wait(240) == 0:  # one of them asks for all: rollouts share an offline batch
                    asked = [[place % 10, 10] for place in range(count)]
                    call = self._offline.generate.remote(asked, [carriers[i] for i in range(count)], 8)
                    answered.append(ray.get(call, timeout=240))
                    done.set()
                done.wait(240)

        threads = [self.rollout_thread(rollout, args=(place,), name=f"rollout-{place}") for place in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        return len(responses), answered[0]

    def pids(self) -> list[int]:
        return [os.getpid()]
