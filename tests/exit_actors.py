"""Actors of test_exits_ray: each notes, outside telemetry, every span that it has finished.

In a module of their own, so that workers import them by reference.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import TracedActor, managed_span

SPANS = 50


class _Noting(TracedActor):
    """Finishes spans and notes each in a file with one ``write`` (which a kill does not undo)."""

    def __init__(self, channel: str) -> None:
        super().__init__()
        self._fd = os.open(channel, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._open: list[Any] = []

    def _span(self, name: str) -> None:
        with managed_span(G.GENERATION, name, step=1):
            pass
        os.write(self._fd, f"{name}\n".encode())

    def _spans(self, first: int, n: int) -> None:
        for i in range(first, first + n):
            self._span(f"done-{i}")

    def _leave_open(self) -> int:
        span = managed_span(G.GENERATION, "left-open", step=2)
        span.__enter__()
        self._open.append(span)
        return os.getpid()

    def _forever(self, label: str) -> None:
        i = 0
        while True:
            self._span(f"{label}-{i}")
            i += 1


class SyncActor(_Noting):
    def work(self) -> int:
        self._spans(0, SPANS)
        return self._leave_open()

    def run(self) -> None:
        self._forever("loop")

    def leave(self, how: str) -> None:
        leave(how)


class ThreadedActor(_Noting):
    """To be made with ``max_concurrency``: its calls run in Ray's thread pool, and it has threads of its own."""

    def work(self) -> int:
        threads = [threading.Thread(target=self._spans, args=(i * 10, 10)) for i in range(SPANS // 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._leave_open()

    def run(self) -> None:
        for label in ("a", "b", "c"):
            threading.Thread(target=self._forever, args=(label,), daemon=True).start()
        self._forever("d")

    def leave(self, how: str) -> None:
        leave(how)


class AsyncActor(_Noting):
    async def work(self) -> int:
        async def some(first: int) -> None:
            for i in range(first, first + 10):
                with managed_span(G.GENERATION, f"done-{i}", step=1):
                    await asyncio.sleep(0)
                os.write(self._fd, f"done-{i}\n".encode())

        await asyncio.gather(*(some(first) for first in range(0, SPANS, 10)))
        return self._leave_open()

    async def run(self) -> None:
        async def forever(label: str) -> None:
            i = 0
            while True:
                with managed_span(G.GENERATION, f"{label}-{i}", step=1):
                    await asyncio.sleep(0)
                os.write(self._fd, f"{label}-{i}\n".encode())
                i += 1

        await asyncio.gather(forever("a"), forever("b"))

    async def leave(self, how: str) -> None:
        leave(how)


def leave(how: str) -> None:
    """Ends this process in the way named."""
    import ray

    if how == "exit_actor":
        ray.actor.exit_actor()
    elif how == "sys.exit":
        sys.exit(0)
    elif how == "os._exit":
        os._exit(1)
