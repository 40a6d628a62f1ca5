"""Collectors of test_collector_ray, in NeMo-RL's shape: a loop thread, a thread a rollout batch, events to park on.

In a module of their own, so that workers import them by reference.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

from raytrace_rl import accepts_trace_context, current_trace_carrier, managed_span, umbrella_span
from raytrace_rl.integrations.collector import TracedCollector


class Buffer:
    """Keeps what it is given; no traced actor."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def push(self, trajectory: dict[str, Any]) -> None:
        self.kept.append(trajectory)

    def all(self) -> list[dict[str, Any]]:
        return self.kept


class Collector(TracedCollector):
    """Does not call ``super().__init__()``, as NeMo-RL's does not."""

    def __init__(self, buffer: Any, batches: int = 3, wedged: float = 0.0) -> None:
        self.buffer = buffer
        self.batches = batches
        self.wedged = wedged
        self.running = False
        self.refit_cleared = threading.Event()
        self.limit_cleared = threading.Event()
        self.wake_on_stop(self.refit_cleared, self.limit_cleared)
        with managed_span("setup", "made"):
            pass

    def stop_collection(self) -> None:
        self.running = False

    @accepts_trace_context
    def start_collection(self) -> None:
        self.running = True
        self.rollout_thread(self._collection_loop, name="collection-loop").start()

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def _collection_loop(self) -> None:
        for batch in itertools.count():
            if batch == self.batches:
                with managed_span("efficiency", "limit_pause"):
                    self.limit_cleared.wait()
            if not self.running:
                return
            self.rollout_thread(self._rollout, args=(batch,), name=f"rollout-{batch}").start()

    async def _rollout(self, batch: int) -> None:
        with umbrella_span("rollout", "rollout", batch=batch), self.thread_pool(2, "teacher") as pool:
            await asyncio.sleep(0.01)
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                *(asyncio.wrap_future(pool.submit(self._teach, teacher), loop=loop) for teacher in range(2))
            )
            await self.buffer.push.remote({"batch": batch, "trace_carrier": current_trace_carrier()})
            if self.wedged and batch == 0:
                threading.Event().wait(self.wedged)

    def _teach(self, teacher: int) -> None:
        with managed_span("logprob", "teacher", teacher=teacher):
            pass


class AsyncCollector(Collector):
    """One coroutine among its methods makes it an async actor."""

    async def drain_metrics(self) -> int:
        return 1
