"""Actors and remote functions of test_dispatch_ray.

In a module of their own, so that workers import them by reference; `classes` makes the same ones anew, to be pickled by
value.
"""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

from raytrace_rl import accepts_trace_context, managed_span


def timed(fn: Any) -> Any:
    """A decorator as users write them: it passes everything on, and shows what is behind it."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def classes() -> SimpleNamespace:
    """Makes the classes; called in a test, they are local to it and go to workers by value."""

    class Sync:
        def __init__(self, base: int = 0) -> None:
            self.base = base

        @accepts_trace_context
        def plain(self, x: int, *rest: int, k: int = 1, **extra: Any) -> Any:
            with managed_span("generation", "plain"), managed_span("generation", "plain.inner"):
                return [self.base + x, list(rest), k, sorted(extra)]

        @accepts_trace_context
        def generator(self, n: int) -> Any:
            with managed_span("generation", "generator"):
                for i in range(n):
                    with managed_span("generation", "generator.step"):
                        pass
                    yield i

        @staticmethod
        @accepts_trace_context
        def static(x: int) -> int:
            with managed_span("generation", "static"):
                return x

        @accepts_trace_context
        @staticmethod
        def static_below(x: int) -> int:
            with managed_span("generation", "static_below"):
                return x

        @classmethod
        @accepts_trace_context
        def of_class(cls, x: int) -> int:
            with managed_span("generation", "of_class"):
                return x

        @accepts_trace_context
        def keywords(self, **kwargs: Any) -> Any:
            with managed_span("generation", "keywords"):
                return sorted(kwargs)

        def undecorated(self, **kwargs: Any) -> Any:
            with managed_span("generation", "undecorated"):
                return sorted(kwargs)

        @accepts_trace_context
        @timed
        def above(self, x: int) -> int:
            with managed_span("generation", "above"):
                return x

        @timed
        @accepts_trace_context
        def below(self, x: int) -> int:
            with managed_span("generation", "below"):
                return x

        @accepts_trace_context
        @timed
        def generator_above(self, n: int) -> Any:
            with managed_span("generation", "generator_above"):
                for i in range(n):
                    yield i

        @timed
        @accepts_trace_context
        def generator_below(self, n: int) -> Any:
            with managed_span("generation", "generator_below"):
                for i in range(n):
                    yield i

        @accepts_trace_context
        def fails(self) -> None:
            with managed_span("generation", "fails"):
                raise LookupError("the user's own")

        @accepts_trace_context
        def calls_itself(self) -> int:
            with managed_span("generation", "outer"):
                self.plain(1)
            return 0

    class Async:
        @accepts_trace_context
        async def coroutine(self, x: int, delay_s: float = 0.0, name: str = "coroutine") -> int:
            await asyncio.sleep(delay_s)
            with managed_span("generation", name):
                await asyncio.sleep(delay_s)
                return x

        @accepts_trace_context
        async def generator(self, n: int) -> Any:
            with managed_span("generation", "async.generator"):
                for i in range(n):
                    await asyncio.sleep(0)
                    with managed_span("generation", "async.generator.step"):
                        await asyncio.sleep(0)
                    yield i

        @accepts_trace_context
        def plain(self, x: int) -> int:
            with managed_span("generation", "async.plain"):
                return x

    @accepts_trace_context
    def function(x: int) -> int:
        with managed_span("reward", "function"):
            return x

    @accepts_trace_context
    def generator_function(n: int) -> Any:
        with managed_span("reward", "generator_function"):
            for i in range(n):
                yield i

    return SimpleNamespace(Sync=Sync, Async=Async, function=function, generator_function=generator_function)


_by_reference = classes()
Sync = _by_reference.Sync
Async = _by_reference.Async
function = _by_reference.function
generator_function = _by_reference.generator_function
for _name in ("Sync", "Async", "function", "generator_function"):
    # As if they stood at the module's level: pickle finds them by this name.
    globals()[_name].__qualname__ = _name
