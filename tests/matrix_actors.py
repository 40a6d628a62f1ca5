"""Actors of test_matrix_ray: one method of each kind, on classes with each sort of constructor.

In a module of their own, so that workers import them by reference. A method does what the cell's ending asks of it
under one span of the cell's name; `conclude` is the other side of it, for whoever made the call.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs
import pydantic
from opentelemetry import trace

from raytrace_rl import TracedActor, accepts_trace_context, dispatch_with_trace_context, managed_span

#: What a stream yields before it is looked at; one that is to be cancelled goes on until it is.
STEPS = 3
ENDLESS = 10_000


def mark(marks: str, what: str) -> None:
    """Says ``what`` to whoever waits for it."""
    Path(marks, what).touch()


def wait_for(marks: str, what: str, timeout_s: float = 60.0) -> None:
    """Returns once ``what`` was said."""
    deadline = time.monotonic() + timeout_s
    while not Path(marks, what).exists():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.002)


class CellError(LookupError):
    """The user's own exception."""


def _steps(ending: str) -> int:
    return ENDLESS if ending == "cancelled" else STEPS


def _end(name: str, ending: str) -> None:
    if ending == "raising":
        raise CellError(name)


class Probe:
    """What a test asks an actor between two cells."""

    def current(self) -> bool:
        """Says whether a call without a carrier finds a span current: one that a call before it left behind."""
        return trace.get_current_span().get_span_context().is_valid

    def hold(self, name: str, marks: str) -> None:
        """Says that it has started, and keeps a sync actor busy until the gate is open."""
        mark(marks, f"{name}.held")
        wait_for(marks, f"{name}.gate")


class SyncMethods(Probe):
    """The kinds of method that a sync actor has."""

    @accepts_trace_context
    def sync(self, name: str, ending: str, marks: str) -> str:
        with managed_span("generation", name):
            _end(name, ending)
            return name

    @staticmethod
    @accepts_trace_context
    def static(name: str, ending: str, marks: str) -> str:
        with managed_span("generation", name):
            _end(name, ending)
            return name

    @accepts_trace_context
    def generator(self, name: str, ending: str, marks: str) -> Any:
        with managed_span("generation", name):
            for step in range(_steps(ending)):
                yield step
                if ending == "cancelled":
                    time.sleep(0.002)
            _end(name, ending)


class AsyncMethods(Probe):
    """The kinds of method that make an actor an async one."""

    @accepts_trace_context
    async def coroutine(self, name: str, ending: str, marks: str) -> str:
        with managed_span("generation", name):
            if ending == "cancelled":
                mark(marks, f"{name}.started")
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            _end(name, ending)
            return name

    @accepts_trace_context
    async def async_generator(self, name: str, ending: str, marks: str) -> Any:
        with managed_span("generation", name):
            for step in range(_steps(ending)):
                yield step
                await asyncio.sleep(0.002 if ending == "cancelled" else 0)
            _end(name, ending)


class PlainSync(SyncMethods, TracedActor):
    """Has a constructor as people write them, and forgets ``super().__init__()``."""

    def __init__(self, x: int) -> None:
        self.x = x


class PlainAsync(AsyncMethods, TracedActor):
    """The same, async."""

    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x


@dataclass
class DataSync(SyncMethods, TracedActor):
    """A dataclass."""

    x: int


@dataclass
class DataAsync(AsyncMethods, TracedActor):
    """A dataclass, async."""

    x: int


@attrs.define
class AttrsSync(SyncMethods, TracedActor):
    """An attrs class, made anew by its decorator."""

    x: int


@attrs.define
class AttrsAsync(AsyncMethods, TracedActor):
    """An attrs class, async."""

    x: int


class ModelSync(SyncMethods, TracedActor, pydantic.BaseModel):
    """A pydantic model."""

    x: int


class ModelAsync(AsyncMethods, TracedActor, pydantic.BaseModel):
    """A pydantic model, async."""

    x: int


CLASSES: dict[str, tuple[type, type]] = {
    "plain": (PlainSync, PlainAsync),
    "dataclass": (DataSync, DataAsync),
    "attrs": (AttrsSync, AttrsAsync),
    "pydantic": (ModelSync, ModelAsync),
}


def conclude(kind: str, names: list[str], ending: str, marks: str, results: list[Any]) -> str:
    """Ends the calls of a cell, one a worker, as ``ending`` says. The caller gives ``results`` away.

    Returns:
        What the caller saw of it.
    """
    import ray

    streams = kind.endswith("generator")
    if ending == "abandoned":
        if streams:
            for stream in results:
                ray.get(next(stream), timeout=60)
            del stream
        results.clear()
        return "abandoned"
    if ending == "cancelled":
        if streams:
            for stream in results:
                ray.get(next(stream), timeout=60)
        elif kind == "coroutine":
            for name in names:
                wait_for(marks, f"{name}.started")
        for each in results:
            ray.cancel(each)
        for name in names:
            mark(marks, f"{name}.gate")
    errors: list[str] = []
    for each in results:
        try:
            if streams:
                for ref in each:
                    ray.get(ref, timeout=60)
            else:
                ray.get(each, timeout=60)
        except CellError:
            errors.append("raised")
        except (ray.exceptions.TaskCancelledError, asyncio.CancelledError):
            errors.append("cancelled")
        except ray.exceptions.RayTaskError as error:
            errors.append(f"{type(error.cause).__name__}: {error.cause}"[:200])
    return ", ".join(sorted(set(errors))) or "finished"


class Caller(TracedActor):
    """An actor that was given the handle of another, and calls it from under a span of its own."""

    @accepts_trace_context
    def forward(self, actor: Any, kind: str, name: str, ending: str, marks: str) -> str:
        with managed_span("reward", f"{name}.caller"):
            results = [dispatch_with_trace_context(getattr(actor, kind), name, ending, marks)]
            return conclude(kind, [name], ending, marks, results)
