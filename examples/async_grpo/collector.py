"""The collector: a Ray actor that keeps rollout batches coming while the driver trains.

A collection loop starts one thread a rollout batch. As a `TracedCollector` it takes its trace context once, at
construction, reattaches it in every thread, and can be brought to rest.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from examples.async_grpo.config import CALL_TIMEOUT_S, DemoConfig
from examples.async_grpo.task import FloatArray, IntArray, sample_prompts, score
from examples.async_grpo.trajectories import Generation, RolloutBatch
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import accepts_trace_context, managed_span, traced, umbrella_span
from raytrace_rl.instrumentation import efficiency_span, emit_span, per_prompt_scope, setup_span
from raytrace_rl.integrations.collector import TracedCollector, trajectory_carrier
from raytrace_rl.metrics import RL_EFFICIENCY_CATEGORY_ATTR
from raytrace_rl.timer import Timer

logger = logging.getLogger(__name__)

#: Before the slot of a failed rollout is used again: with every worker gone the loop must not spin. Seconds.
_FAILURE_PAUSE_S: Final = 0.5
#: The efficiency category of rollouts that nothing is trained on.
_WASTED: Final = "wasted/failed_trajectory"


@dataclass(frozen=True)
class CollectorReport:
    """What the collector did, at its end.

    Attributes:
        started: Rollout batches started.
        retried: Calls that a lost generation worker failed, made again on another.
        failed: Rollout batches given up.
        last_error: Why the last of them failed.
        unwanted: Rollout batches that the replay buffer did not take: too stale on arrival, or come after its end.
        seconds: Seconds by Timer key since the start. Those of rollout threads add up over threads.
    """

    started: int
    retried: int
    failed: int
    last_error: str | None
    unwanted: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@ray.remote
class AsyncTrajectoryCollector(TracedCollector):
    """Generates, scores and stores rollout batches in threads of its own.

    Args:
        config: The run's settings.
        generators: Handles of the generation workers.
        buffer: Handle of the replay buffer.
    """

    def __init__(self, config: DemoConfig, generators: Sequence[Any], buffer: Any) -> None:
        super().__init__(worker_group="collector")
        with setup_span("collector"):
            self._config = config
            self._generators = [traced(generator) for generator in generators]
            self._buffer = traced(buffer)
            self._rng = np.random.default_rng(config.seed)
            self._free_slots = threading.Semaphore(config.max_inflight)
            self.wake_on_stop(self._free_slots)
            self._stopping = self.collector_threads.stopping
            self._lock = threading.Lock()
            self._timer = Timer(span_prefix="rl.grpo")  # never reset: its seconds are those since the start
            self._started = self._retried = self._failed = self._unwanted = 0
            self._last_error: str | None = None

    @accepts_trace_context
    def start(self) -> None:
        """Starts the collection loop."""
        self.rollout_thread(self._collect, name="collection-loop").start()

    @accepts_trace_context
    def stop(self) -> CollectorReport:
        """Starts no more rollouts, waits for those under way, and reports.

        The replay buffer must have been closed, or a rollout may be waiting there for room.
        """
        self.quiesce(CALL_TIMEOUT_S / 4)
        return self.report()

    def report(self) -> CollectorReport:
        """Returns the counts so far."""
        with self._lock:
            counts = self._started, self._retried, self._failed, self._last_error, self._unwanted
        return CollectorReport(*counts, seconds=self._timer.totals())

    def _collect(self) -> None:
        """The collection loop: a new rollout thread whenever a slot is free."""
        for batch_id in itertools.count():
            pause = efficiency_span("idle/generation_limit_pause")
            with self._timer.time("idle/generation_limit_pause", span=pause):
                self._free_slots.acquire()
            if self._stopping.is_set():
                return
            processing = managed_span(G.DATA_PROCESSING, "rl.grpo.data_processing", **{"rl.batch_id": batch_id})
            with self._timer.time("data_processing", span=processing):
                prompts = sample_prompts(self._rng, self._config.num_prompts, self._config.prompt_length)
            self._started += 1
            self.rollout_thread(self._rollout, args=(batch_id, prompts), name=f"rollout-{batch_id}").start()

    def _rollout(self, batch_id: int, prompts: IntArray) -> None:
        """One rollout batch from prompts to replay buffer, in a thread of its own."""
        started = time.time()
        try:
            with umbrella_span(G.U_ROLLOUT, "rl.grpo.rollout", **{"rl.batch_id": batch_id}):
                generation = self._generate(batch_id, prompts)
                with self._timer.time("reward", group=G.REWARD):
                    rewards = _score(prompts, generation.responses)
                origin = trajectory_carrier(generation.weight_version)
                batch = RolloutBatch(batch_id, prompts, generation, rewards, origin)
                made = time.time()
                backoff = efficiency_span("idle/buffer_full_backoff")
                with self._timer.time("idle/buffer_full_backoff", span=backoff):
                    taken = ray.get(self._buffer.push.remote(batch), timeout=CALL_TIMEOUT_S)
                if not taken:
                    logger.info("rollout batch %d of version %d is not wanted", batch_id, batch.weight_version)
                    with self._lock:
                        self._unwanted += 1
                    self._record_waste(batch_id, started, made)
        except Exception as error:
            # One batch less: the loop goes on, and a run that starves for good ends at the driver's own deadline.
            if not self._stopping.is_set():
                logger.warning("rollout batch %d failed: %s", batch_id, error)
            with self._lock:
                self._failed += 1
                self._last_error = f"{type(error).__name__}: {error}"
            self._stopping.wait(_FAILURE_PAUSE_S)
            self._record_waste(batch_id, started, time.time())
        finally:
            self._free_slots.release()

    def _record_waste(self, batch_id: int, started: float, ended: float) -> None:
        """Notes that a rollout was in vain, which is known only at its end; times are seconds since the epoch."""
        self._timer.record(_WASTED, ended - started)
        attributes = {RL_EFFICIENCY_CATEGORY_ATTR: _WASTED, "rl.bucket": "wasted", "rl.batch_id": batch_id}
        emit_span(G.EFFICIENCY, "rl.wasted.failed_trajectory", started, ended, attributes=attributes)

    def _generate(self, batch_id: int, prompts: IntArray) -> Generation:
        """Generates on the workers in turn; where one is lost, its neighbour takes the batch."""
        workers = len(self._generators)
        seed = self._config.seed * 1_000_003 + batch_id
        for attempt in range(workers):
            worker = self._generators[(batch_id + attempt) % workers]
            call = worker.generate.remote(prompts, self._config.num_generations, seed)
            try:
                result: Generation = ray.get(call, timeout=CALL_TIMEOUT_S)
            except (RayActorError, GetTimeoutError) as error:
                logger.warning(
                    "generation worker %d lost batch %d: %s", (batch_id + attempt) % workers, batch_id, error
                )
                with self._lock:
                    self._retried += 1
                continue
            return result
        raise RuntimeError(f"none of the {workers} generation workers answered")


def _score(prompts: IntArray, responses: IntArray) -> FloatArray:
    """Scores prompt by prompt, as a reward that is asked for each would be; see `score`."""
    rewards = []
    for prompt, group in zip(prompts, responses, strict=True):
        # Recorded with span_groups=all only: the number of these spans grows with the prompts.
        with per_prompt_scope(), umbrella_span(G.U_PER_PROMPT, "rl.grpo.prompt_reward"):
            rewards.append(score(prompt[None], group[None]))
    return np.concatenate(rewards)
