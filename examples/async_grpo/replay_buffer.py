"""The replay buffer: a bounded queue of rollout batches that refuses what lies too many weight versions behind."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np
import ray

from examples.async_grpo.config import CALL_TIMEOUT_S
from examples.async_grpo.task import FloatArray
from examples.async_grpo.trajectories import RolloutBatch
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import TracedActor, accepts_trace_context, managed_span, safe_set_span_attributes
from raytrace_rl.instrumentation import setup_span


@dataclass(frozen=True)
class Sample:
    """One training step's batches.

    Attributes:
        batches: Oldest first.
        staleness: Weight versions that each lies behind the policy, in the same order.
        refused: Batches refused since the run began, for being staler than the limit.
    """

    batches: tuple[RolloutBatch, ...]
    staleness: tuple[int, ...]
    refused: int

    @property
    def rewards(self) -> FloatArray:
        """Rewards of all batches, ``[prompts, generations]``."""
        return np.concatenate([batch.rewards for batch in self.batches])

    @property
    def mean_response_length(self) -> float:
        """Tokens of a response, on average over all batches."""
        responses = [batch.generation.responses for batch in self.batches]
        return sum(tokens.size for tokens in responses) / sum(tokens[..., 0].size for tokens in responses)


class StalenessQueue:
    """The buffer's rule, without Ray: first in, first out, and nothing older than the limit comes out.

    Args:
        capacity: Batches it holds.
        max_staleness: Weight versions that a batch may lie behind the current one.

    Attributes:
        refused: Batches refused so far.
    """

    def __init__(self, capacity: int, max_staleness: int) -> None:
        self.refused = 0
        self._capacity = capacity
        self._max_staleness = max_staleness
        self._version = 0
        self._batches: deque[RolloutBatch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def full(self) -> bool:
        """True while another batch would exceed the capacity."""
        return len(self._batches) >= self._capacity

    def advance(self, version: int) -> int:
        """Notes that the policy is at ``version`` now, and refuses the held batches that this makes too stale.

        Returns:
            How many those were.
        """
        self._version = version
        held, self._batches = self._batches, deque()
        return sum(not self.put(batch) for batch in held)

    def put(self, batch: RolloutBatch) -> bool:
        """Appends ``batch``; returns False where it is too stale and was refused instead."""
        if self.staleness(batch) > self._max_staleness:
            self.refused += 1
            return False
        self._batches.append(batch)
        return True

    def take(self, count: int) -> tuple[RolloutBatch, ...]:
        """Removes and returns the oldest ``count`` batches."""
        return tuple(self._batches.popleft() for _ in range(count))

    def staleness(self, batch: RolloutBatch) -> int:
        """Weight versions that ``batch`` lies behind the policy."""
        return self._version - batch.weight_version


@ray.remote
class ReplayBuffer(TracedActor):
    """The queue as an async actor: producers wait for room, the driver waits for a step's worth of batches.

    Args:
        capacity: Batches it holds.
        max_staleness: Weight versions that a batch may lie behind the current one.
    """

    def __init__(self, capacity: int, max_staleness: int) -> None:
        super().__init__(worker_group="replay_buffer")
        with setup_span("staleness_queue"):
            self._queue = StalenessQueue(capacity, max_staleness)
            self._changed = asyncio.Condition()
            self._closed = False

    @accepts_trace_context
    async def push(self, batch: RolloutBatch) -> bool:
        """Waits for room, then stores ``batch``; returns False where it was refused or the buffer has closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or not self._queue.full)
            if self._closed:
                return False
            attributes = {"rl.batch_id": batch.batch_id, "rl.staleness": self._queue.staleness(batch)}
            with managed_span(G.DATA_PLANE, "rl.grpo.buffer_push", **attributes) as span:
                accepted = self._queue.put(batch)
                safe_set_span_attributes(span, {"rl.refused": not accepted})
            self._changed.notify_all()
            return accepted

    async def wait_for(self, count: int) -> None:
        """Returns once ``count`` batches are there.

        Raises:
            RuntimeError: They did not come within half the call timeout.
        """
        async with self._changed:
            await self._wait_for(count)

    @accepts_trace_context
    async def sample(self, count: int, version: int) -> Sample:
        """Waits for ``count`` batches fresh enough to train the policy of ``version``, and hands them out.

        Raises:
            RuntimeError: They did not come within half the call timeout.
        """
        async with self._changed:
            aged_out = self._queue.advance(version)
            self._changed.notify_all()
            await self._wait_for(count)
            with managed_span(G.DATA_PLANE, "rl.grpo.buffer_sample", **{"rl.weight_version": version}) as span:
                batches = self._queue.take(count)
                staleness = tuple(self._queue.staleness(batch) for batch in batches)
                attributes = {"rl.staleness.max": max(staleness), "rl.num_refused": aged_out}
                safe_set_span_attributes(span, attributes)
            self._changed.notify_all()
            return Sample(batches, staleness, self._queue.refused)

    async def _wait_for(self, count: int) -> None:
        try:
            enough = self._changed.wait_for(lambda: len(self._queue) >= count)
            await asyncio.wait_for(enough, timeout=CALL_TIMEOUT_S / 2)
        except asyncio.TimeoutError:
            raise RuntimeError(
                f"starved: {len(self._queue)} of {count} batches after {CALL_TIMEOUT_S / 2:.0f} s, "
                f"{self._queue.refused} refused so far"
            ) from None

    async def close(self) -> None:
        """Sends waiting producers home; nothing is stored from here on."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
