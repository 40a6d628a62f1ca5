"""The threads of a trajectory collector: made under one kept trace context, and brought to rest within a deadline.

Nothing here needs Ray: `raytrace_rl.integrations.collector` makes an actor of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final, NamedTuple, TypeVar

from opentelemetry import trace

from raytrace_rl import _live_threads, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._traced_thread import TracedThread, enlist
from raytrace_rl.context import TraceContext
from raytrace_rl.integrations._collector_wakes import WAKE_EVERY_S, Wakes, Waking
from raytrace_rl.integrations._rollouts import Rollout
from raytrace_rl.threads import TracedThreadPoolExecutor

T = TypeVar("T")

#: Share of the time after which rollouts that wait inside their event loops, and queued pool tasks, are cancelled.
_GRACE: Final = 0.5


class CollectorThreads:
    """Makes the threads and pools of one collector, and stops them.

    Args:
        context: Attached in every thread; by default what is current where this is constructed.

    Attributes:
        context: What the threads attach.
        stopping: Set as soon as the collector is to stop; for loops to look at.
        loop: The event loop of an async actor, in which a coroutine that stops it runs; None for one of its own.
    """

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = TraceContext.capture() if context is None else context
        self.stopping = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._wakes = Wakes()
        self._loops: set[Rollout] = set()
        self._pools: weakref.WeakSet[CollectorPool] = weakref.WeakSet()
        #: Who cancels the tasks of a pool: their callbacks are the user's.
        self._cancelling: weakref.WeakKeyDictionary[CollectorPool, Background] = weakref.WeakKeyDictionary()

    def thread(
        self,
        target: Callable[..., object],
        *,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = True,
    ) -> TracedThread:
        """Returns an unstarted thread that runs ``target`` attached; flushes wait for it from now on.

        Args:
            target: A function; what is a coroutine function, or returns a coroutine, runs in an event loop of the
                thread's own.
            name, args, kwargs, daemon: As `threading.Thread`'s, but for a daemon by default: a collector's thread must
                not keep its process alive.
        """
        thread = self.context.thread(Rollout(target, self._loops), name=name, args=args, kwargs=kwargs, daemon=daemon)
        enlist(thread)
        return thread

    def pool(self, max_workers: int | None = None, thread_name_prefix: str = "", **kwargs: Any) -> CollectorPool:
        """Returns a pool whose tasks run under what is current where they are submitted, else under the collector.

        Args:
            max_workers, thread_name_prefix, kwargs: As `concurrent.futures.ThreadPoolExecutor`'s.
        """
        pool = CollectorPool(max_workers, thread_name_prefix, **kwargs)
        pool.context = self.context
        with self._lock:
            self._pools.add(pool)
        return pool

    def wake_on_stop(self, *waits: Any) -> None:
        """Registers what the collector's threads may be parked on, to be woken when it stops.

        Args:
            waits: `threading.Event` (is set), `Condition` (all its waiters are notified), `Semaphore` (is released),
                or a function without arguments, for anything else. Called again and again until the threads have
                ended, so that what a thread finds when it wakes must be a reason to leave: see ``stopping``. In
                threads of their own: one that blocks holds up nothing.
        """
        for wait in waits:
            self._wakes.register(wait)

    def quiesce(self, timeout_s: float, stop: Callable[[], object] | None = None) -> list[str]:
        """Stops the collector and waits for its threads, and all other traced ones of the process. Never raises.

        Sets ``stopping``, calls ``stop``, and wakes parked waits until every thread has ended. From half of the time
        on it cancels rollouts that wait inside their event loops, and pool tasks that have not begun.

        Args:
            timeout_s: Seconds for all of it.
            stop: What stops the collector's own loop; may be a coroutine function. Like all code of the user's it runs
                in another thread: it may not cost more than the rest has.

        Returns:
            The names of the threads and pool tasks that would not end (those that were made and not started too), and
            of what else hangs: ``stop_collection``, and, beside threads that would not end, functions that were to
            wake them.
        """
        timeout_s = timeout_s if timeout_s > 0 else 0.0  # nan would never be over
        started = monotonic()
        deadline = started + timeout_s
        self.stopping.set()
        stopping = None if stop is None else _in_background(stop, "stop_collection", self.loop)
        waking = Waking(self._wakes)
        try:
            while True:
                waking.tend()
                now = monotonic()
                if now - started >= timeout_s * _GRACE:
                    self._cancel()
                left = _live_threads.join(max(0.0, min(WAKE_EVERY_S, deadline - now)))
                late = stopping is not None and stopping.pending()
                if monotonic() >= deadline or not (left or late):
                    break
                if not left and stopping is not None:
                    if stopping.thread is None:
                        break
                    stopping.pending(min(WAKE_EVERY_S, max(0.0, deadline - monotonic())))
        finally:
            hanging = waking.end()
        return [*left, *(["stop_collection"] if late else []), *(hanging if left else [])]

    def _cancel(self) -> None:
        with self._lock:
            pools = list(self._pools)
        for rollout in list(self._loops):
            rollout.cancel()
        for pool in pools:
            known = self._cancelling.get(pool)
            if pool.has_queued() and (known is None or known.thread is None or not known.pending()):
                self._cancelling[pool] = _in_background(pool.cancel_queued, "cancel_queued")


class CollectorPool(TracedThreadPoolExecutor):
    """A `TracedThreadPoolExecutor` whose tasks hang under their collector where nothing else is current.

    Attributes:
        context: The collector's.
    """

    context: TraceContext

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submits ``fn(*args, **kwargs)``; see `concurrent.futures.Executor.submit`."""
        if trace.get_current_span().get_span_context().is_valid:
            return super().submit(fn, *args, **kwargs)
        with self.context.attach():
            return super().submit(fn, *args, **kwargs)

    def has_queued(self) -> bool:
        """True if there is something that no thread of the pool has taken yet."""
        return self._work_queue.qsize() > 0

    def cancel_queued(self) -> None:
        """Cancels the tasks that have not begun; the pool goes on. Runs the callbacks of their futures."""
        tasks: Any = self._work_queue
        waiting: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(tasks.get_nowait())
        for item in waiting:
            if item is None:  # the pool's own sign to its threads that it has been shut down
                tasks.put(item)
            else:
                item.future.cancel()


def _in_background(call: Callable[[], object], name: str, loop: asyncio.AbstractEventLoop | None = None) -> Background:
    """Runs code of the user's in a thread of its own: it may block, a flush may not."""

    def run() -> None:
        try:
            result = call()
            if isinstance(result, Coroutine):
                if loop is not None and loop.is_running():
                    asyncio.run_coroutine_threadsafe(result, loop).result()
                else:
                    asyncio.run(_awaited(result))
        except Exception as error:
            _state.warn_once(f"collector-{name}", "%s of a collector failed: %r", name, error)

    thread = threading.Thread(target=run, name=f"raytrace_rl-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads
        if is_interrupt(error):
            raise
        _state.warn_once(f"collector-{name}", "%s of a collector was not called: %r", name, error)
        return Background(name, None)
    return Background(name, thread)


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> None:
    await coroutine


class Background(NamedTuple):
    """A call in a thread of its own; without a thread it was never made."""

    name: str
    thread: threading.Thread | None

    def pending(self, timeout_s: float = 0.0) -> bool:
        """Waits for it; True if it has not ended."""
        if self.thread is None:
            return True
        if timeout_s > 0:
            self.thread.join(timeout_s)
        return self.thread.is_alive()
