"""What a collector's thread runs: a function, or a coroutine in an event loop of the thread's own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt


class Rollout:
    """Runs a target in the calling thread; a coroutine so that it can be cancelled.

    Whether there is a coroutine shows in what the call returns: a callable object, a ``functools.partial``, a lambda
    do not look like coroutine functions, and threads throw away what they are given.

    Args:
        target: What to call.
        loops: Those that are in an event loop now; this one joins them for as long as it is.
    """

    def __init__(self, target: Callable[..., Any], loops: set[Rollout]) -> None:
        self._target = target
        self._loops = loops
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancelled = False
        if isinstance(name := getattr(target, "__name__", None), str):
            self.__name__ = name  # for the thread's own name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        try:
            if inspect.iscoroutinefunction(self._target):
                asyncio.run(self._main(lambda: self._target(*args, **kwargs)))
                return
            result = self._target(*args, **kwargs)
            if isinstance(result, Coroutine):
                asyncio.run(self._main(lambda: result))
            elif isinstance(result, (Generator, AsyncGenerator)):
                _state.warn_once(
                    "collector-generator",
                    "A collector's thread was given %r, a generator function: nothing of it has run.",
                    self._target,
                )
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            # else the collector stops: the spans have ended with the cancellation, and nobody waits for a result

    async def _main(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._running = asyncio.get_running_loop(), task
            self._loops.add(self)
        try:
            await call()
        finally:
            self._running = None
            self._loops.discard(self)

    def cancel(self) -> None:
        """Cancels the coroutine, from any thread; once, for it may need time to clean up."""
        running = self._running
        if running is not None and not self._cancelled:
            self._cancelled = True
            loop, task = running
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError as error:  # it has closed meanwhile
                if is_interrupt(error):
                    raise
