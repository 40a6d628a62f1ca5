"""The threads of a trajectory collector: made under one kept trace context, and brought to rest within a deadline.

Nothing here needs Ray: `raytrace_rl.integrations.collector` makes an actor of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final, TypeVar

from opentelemetry import trace

from raytrace_rl import _live_threads, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._traced_thread import TracedThread, enlist
from raytrace_rl.context import TraceContext
from raytrace_rl.threads import TracedThreadPoolExecutor

T = TypeVar("T")

#: Waits are woken again and again until their threads have ended: one that looked at its flag just before it was set
#: (NeMo-RL's loop clears its event and then waits for it) parks after the first call. Seconds.
_WAKE_EVERY_S: Final = 0.05
#: Share of the time after which rollouts that wait inside their event loops, and queued pool tasks, are cancelled.
_GRACE: Final = 0.5


class CollectorThreads:
    """Makes the threads and pools of one collector, and stops them.

    Args:
        context: Attached in every thread; by default what is current where this is constructed.

    Attributes:
        context: What the threads attach.
        stopping: Set as soon as the collector is to stop; for loops to look at.
    """

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = TraceContext.capture() if context is None else context
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._waits: list[Any] = []
        self._loops: set[_Rollout] = set()
        self._pools: weakref.WeakSet[CollectorPool] = weakref.WeakSet()

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
            target: A function; a coroutine function runs in an event loop of the thread's own.
            name, args, kwargs, daemon: As `threading.Thread`'s, but for a daemon by default: a collector's thread must
                not keep its process alive.
        """
        run: Callable[..., object] = _Rollout(target, self._loops) if inspect.iscoroutinefunction(target) else target
        thread = self.context.thread(run, name=name, args=args, kwargs=kwargs, daemon=daemon)
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
                ended, so that what a thread finds when it wakes must be a reason to leave: see ``stopping``.
        """
        for wait in waits:
            if _waker(wait) is None:
                _state.warn_once(
                    f"collector-wait:{type(wait).__name__}",
                    "A %s cannot be woken when the collector stops: register an Event, a Condition, a Semaphore or a "
                    "function.",
                    type(wait).__name__,
                )
            else:
                with self._lock:
                    self._waits.append(wait)

    def quiesce(self, timeout_s: float, stop: Callable[[], object] | None = None) -> list[str]:
        """Stops the collector and waits for its threads, and all other traced ones of the process. Never raises.

        Sets ``stopping``, calls ``stop``, and wakes parked waits until every thread has ended. From half of the time
        on it cancels rollouts that wait inside their event loops, and pool tasks that have not begun.

        Args:
            timeout_s: Seconds for all of it.
            stop: What stops the collector's own loop. In a thread of its own: it may not cost more than the rest has.

        Returns:
            The names of the threads and pool tasks that would not end (those that were made and not started too).
        """
        started = monotonic()
        deadline = started + timeout_s
        self.stopping.set()
        stopped = _in_background(stop) if stop is not None else None
        while True:
            self._wake()
            now = monotonic()
            if now - started >= timeout_s * _GRACE:
                self._cancel()
            left = _live_threads.join(max(0.0, min(_WAKE_EVERY_S, deadline - now)))
            late = stopped is not None and stopped.is_alive()
            if monotonic() >= deadline or not (left or late):
                return [*left, *(["stop_collection"] if late else [])]
            if not left and stopped is not None:
                stopped.join(min(_WAKE_EVERY_S, max(0.0, deadline - monotonic())))

    def _wake(self) -> None:
        with self._lock:
            waits = list(self._waits)
        for wait in waits:
            wake = _waker(wait)
            try:
                if wake is not None:
                    wake()
            except Exception as error:
                if is_interrupt(error):
                    raise
                _state.warn_once(
                    f"collector-wake:{type(wait).__name__}", "A wait of a collector could not be woken: %r", error
                )

    def _cancel(self) -> None:
        with self._lock:
            loops, pools = list(self._loops), list(self._pools)
        for rollout in loops:
            rollout.cancel()
        for pool in pools:
            pool.cancel_queued()


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

    def cancel_queued(self) -> None:
        """Cancels the tasks that have not begun; the pool goes on."""
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


class _Rollout:
    """Runs a coroutine function in an event loop of the calling thread's own, so that it can be cancelled."""

    def __init__(self, target: Callable[..., Any], loops: set[_Rollout]) -> None:
        self._target = target
        self._loops = loops
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancelled = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        try:
            asyncio.run(self._main(args, kwargs))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            # else the collector stops: the spans have ended with the cancellation, and nobody waits for a result

    async def _main(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._running = asyncio.get_running_loop(), task
            self._loops.add(self)
        try:
            await self._target(*args, **kwargs)
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


def _waker(wait: Any) -> Callable[[], object] | None:
    """Returns what wakes the threads that are parked on ``wait``; None if there is nothing."""
    if isinstance(wait, threading.Condition):
        return lambda: _notify(wait)
    if isinstance(wait, threading.Semaphore):
        return lambda: _release(wait)
    found = wait if inspect.isroutine(wait) else getattr(wait, "set", wait)
    if type(wait).__module__.startswith("asyncio") or not callable(found):
        return None  # asyncio's own are for the thread of their loop alone
    return found


def _notify(condition: threading.Condition) -> None:
    if condition.acquire(blocking=False):  # else it is held just now: its holder is awake, and the next round comes
        try:
            condition.notify_all()
        finally:
            condition.release()


def _release(semaphore: threading.Semaphore) -> None:
    try:
        for _ in range(threading.active_count()):  # whoever waits is one of these
            semaphore.release()
    except ValueError:
        pass  # a bounded one, of which every permit is back


def _in_background(stop: Callable[[], object]) -> threading.Thread | None:
    def run() -> None:
        try:
            stop()
        except Exception as error:
            _state.warn_once("collector-stop", "A collector could not be stopped: %r", error)

    thread = threading.Thread(target=run, name="raytrace_rl-stop-collection", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        run()
        return None
    return thread
