"""Actors of test_actors_ray with every sort of constructor.

In a module of their own, so that workers import them by reference. What a constructor does, it does under a span of its
class's name.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import attrs
import pydantic

from raytrace_rl import TracedActor, TracedThread, accepts_trace_context, managed_span


def constructing(self: Any) -> None:
    """Opens the span that the tests look for."""
    name = next(c.__name__ for c in type(self).__mro__ if c.__module__ == __name__)
    with managed_span("setup", f"init.{name}"):
        pass


class Ordinary(TracedActor):
    """Does as it is told."""

    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x
        constructing(self)

    def value(self) -> int:
        return self.x


class Forgetful(TracedActor):
    """Forgets ``super().__init__()``."""

    def __init__(self, x: int) -> None:
        self.x = x
        constructing(self)

    def value(self) -> int:
        return self.x


@dataclass
class Data(TracedActor):
    """Has its constructor written by a decorator that comes after the class."""

    x: int

    def __post_init__(self) -> None:
        constructing(self)

    def value(self) -> int:
        return self.x


@dataclass
class MoreData(Data):
    """A dataclass of a dataclass."""

    y: int = 0


@attrs.define
class Attrs(TracedActor):
    """Is made anew, with slots, by its decorator."""

    x: int

    def __attrs_post_init__(self) -> None:
        constructing(self)

    def value(self) -> int:
        return self.x


class Model(TracedActor, pydantic.BaseModel):
    """Has a metaclass, a constructor of keywords, and a field that telemetry knows too."""

    x: int
    rank: int = 0

    def model_post_init(self, context: Any) -> None:
        constructing(self)

    def value(self) -> int:
        return self.x


class Abstract(abc.ABC):
    """Someone else's interface."""

    @abc.abstractmethod
    def value(self) -> int: ...


class Concrete(Abstract, TracedActor):
    """Mixed in last, behind an abstract class."""

    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x
        constructing(self)

    def value(self) -> int:
        return self.x


class Base:
    """A worker that knows nothing of telemetry, and takes a rank of its own."""

    def __init__(self, x: int, rank: int = -1) -> None:
        self.x = x
        self.own_rank = rank
        constructing(self)

    def value(self) -> int:
        return self.x


class Mixed(TracedActor, Base):
    """Has no constructor of its own."""


class Passing(TracedActor, Base):
    """Tells telemetry who it is."""

    def __init__(self, x: int, rank: int) -> None:
        super().__init__(x, rank=rank, world_size=4, worker_group="policy", resource_attributes={"rl.model": "tiny"})

    def ranks(self) -> int:
        return self.own_rank


class Async(TracedActor):
    """Async, by one coroutine."""

    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x
        constructing(self)

    async def value(self) -> int:
        return self.x

    @accepts_trace_context
    async def slow(self, name: str, seconds: float) -> None:
        with managed_span("generation", name):
            await asyncio.sleep(seconds)


def fixed(fn: Any) -> Any:
    """A decorator that copies a signature that it cannot serve."""

    @functools.wraps(fn)
    def wrapper(self: Any, name: str) -> Any:
        return fn(self, name)

    return wrapper


class Worker(TracedActor):
    """Does things that take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    @accepts_trace_context
    def work(self, name: str, seconds: float = 0.0) -> int:
        with managed_span("generation", name):
            time.sleep(seconds)
        return os.getpid()

    @fixed
    @accepts_trace_context
    def narrow(self, name: str) -> str:
        with managed_span("generation", name):
            return name

    @accepts_trace_context
    def in_thread(self, name: str, seconds: float | None) -> None:
        """Starts a thread that works for a while, or for ever."""
        started = threading.Event()

        def work() -> None:
            with managed_span("generation", name):
                started.set()
                self.go.wait(seconds)

        TracedThread(target=work, name=name, daemon=True).start()
        started.wait(10)


class OwnFlush(Worker):
    """Flushes in its own way, without a word on time."""

    def flush_telemetry(self) -> str:  # type: ignore[override]
        TracedActor.flush_telemetry(self)
        return "mine"


class NamedFlush(Worker):
    """Takes the time alone."""

    def flush_telemetry(self, *, timeout_s: float) -> bool:  # type: ignore[override]
        return TracedActor.flush_telemetry(self, timeout_s)


class DemandingFlush(Worker):
    """Cannot be called without what only its own callers know."""

    def flush_telemetry(self, path: str) -> None:  # type: ignore[override]
        raise AssertionError(path)


class LateFlush(Worker):
    """Waits in its flush for something of its own, which takes too long."""

    def flush_telemetry(self, timeout_s: float) -> bool:  # type: ignore[override]
        raise TimeoutError("the checkpoint is not written yet")


class ModelInit(TracedActor, model_init=True):
    """Loads weights in its constructor, and its base in its own."""

    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x
        constructing(self)

    def value(self) -> int:
        return self.x
