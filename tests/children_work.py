"""What child processes of test_children do. In a module of its own, so that a spawned child imports no test."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import Any

from raytrace_rl import TraceContext, TracedActor, accepts_trace_context, managed_span
from raytrace_rl.context import trace_context_env


def under(given: TraceContext, name: str, count: int) -> None:
    """Records spans under a context that was handed over; seeded as every rank is."""
    random.seed(42)
    with given.attach():
        for n in range(count):
            with managed_span("reward", name, n=n):
                pass


def until_killed(given: TraceContext, ready: Any) -> None:
    """Records spans, leaves one open, says so, and waits."""
    under(given, "finished", 5)
    with given.attach(), managed_span("reward", "unfinished"):
        ready.set()
        time.sleep(600)


class Numbers:
    """A data set that records each item it gives."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        with managed_span("data_processing", "item", index=index):
            return index


class Sandbox(TracedActor):
    """Opens spans of its own, and runs programs: with the environment that it has, and with one made for them."""

    def around(self) -> None:
        with managed_span("reward", "actor.plain"):
            pass

    @accepts_trace_context
    def run(self, program: str) -> None:
        with managed_span("reward", "actor.run"):
            for name, environ in (("plain", None), ("given", trace_context_env())):
                command = [sys.executable, "-c", program, f"program.{name}"]
                subprocess.run(command, env=environ, check=True, timeout=60)
