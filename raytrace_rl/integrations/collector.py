"""An asynchronous trajectory collector as a Ray actor: its threads in the trace, and a flush that brings them to rest.

A collector outlives the call that made it, starts a thread a rollout batch, parks threads on events, and is killed
while they are. `TracedCollector` takes its trace context once, at construction, and reattaches it in every thread; its
``flush_telemetry`` stops the loop, wakes what is parked, waits for what still runs, and only then flushes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, Final

from raytrace_rl import _state, actors
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._traced_thread import TracedThread
from raytrace_rl.actors import TracedActor
from raytrace_rl.instrumentation import span_cm
from raytrace_rl.integrations._collector_threads import CollectorPool, CollectorThreads
from raytrace_rl.integrations._trajectories import rollout_links, trajectory_carrier

__all__ = ["CollectorPool", "CollectorThreads", "TracedCollector", "rollout_links", "trajectory_carrier"]

#: The span of a flush's wait for the collector's threads.
QUIESCE_SPAN: Final = "rl.collector.quiesce"
#: Its attribute: the threads and pool tasks that would not end.
RL_COLLECTOR_LEFT_ATTR: Final = "rl.collector.left"


class TracedCollector(TracedActor):
    """Mixin for the class of a trajectory collector; all that `TracedActor` is, besides.

    The carrier that it was created with (``traced(Collector).remote(...)``) is kept before the subclass's ``__init__``
    runs, so that one without ``super().__init__()`` is covered::

        @ray.remote
        class Collector(TracedCollector):
            def __init__(self, buffer):
                self.running = True
                self.resumed = threading.Event()
                self.wake_on_stop(self.resumed)

            def start(self):
                self.rollout_thread(self._collect, name="collection-loop").start()

            def stop_collection(self):
                self.running = False
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _ = self.collector_threads

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "__ray_actor_class__" in vars(cls) and not actors._is_rays_own(cls):
            # Ray's copy of the class. Inside what takes the carrier, which is put around it next.
            cls.__init__ = _capturing(cls.__init__)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)
        if cls.flush_telemetry is TracedCollector.flush_telemetry and actors._has_async_methods(cls):
            cls.flush_telemetry = _flush_async  # type: ignore[assignment,method-assign]

    @property
    def collector_threads(self) -> CollectorThreads:
        """Its threads; the first use, at construction, takes the trace context."""
        known = self.__dict__.get("_raytrace_threads")
        if known is None:
            known = self.__dict__.setdefault("_raytrace_threads", CollectorThreads())
        threads: CollectorThreads = known
        return threads

    def rollout_thread(
        self,
        target: Callable[..., object],
        *,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = True,
    ) -> TracedThread:
        """Returns an unstarted thread that runs ``target`` under the collector's context.

        See `CollectorThreads.thread`. A coroutine function, or what returns a coroutine, gets an event loop of the
        thread's own.
        """
        return self.collector_threads.thread(target, name=name, args=args, kwargs=kwargs, daemon=daemon)

    def thread_pool(self, max_workers: int | None = None, thread_name_prefix: str = "", **kwargs: Any) -> CollectorPool:
        """Returns a pool, for teacher log-probabilities say; see `CollectorThreads.pool`."""
        return self.collector_threads.pool(max_workers, thread_name_prefix, **kwargs)

    def wake_on_stop(self, *waits: Any) -> None:
        """Registers events, conditions, semaphores or functions; see `CollectorThreads.wake_on_stop`."""
        self.collector_threads.wake_on_stop(*waits)

    def stop_collection(self) -> None:
        """Called when the collector is to stop; to be overridden where its loop looks at a flag of its own.

        ``self.collector_threads.stopping`` is set already. Called in a thread of its own; ``async def`` runs in the
        event loop of the async actor.
        """

    def quiesce(self, timeout_s: float) -> list[str]:
        """Stops the collector and waits for its threads; see `CollectorThreads.quiesce`.

        Returns:
            The names of those that would not end within ``timeout_s`` seconds.
        """
        stop: Callable[[], object] | None = self.stop_collection
        if getattr(stop, "__func__", None) is TracedCollector.stop_collection:
            stop = None  # ours, which does nothing
        return self.collector_threads.quiesce(timeout_s, stop)

    def flush_telemetry(
        self, timeout_s: float = 5.0, *, quiesce_timeout_s: float | None = None, final: bool = True
    ) -> bool:
        """Stops the collector, waits for its threads, and brings telemetry to a clean end. Never raises.

        A coroutine on an async actor, so that its event loop goes on meanwhile.

        Args:
            timeout_s: Seconds for all of it.
            quiesce_timeout_s: Seconds of these for the threads; by default half.
            final: False flushes what there is, and leaves the collector running.

        Returns:
            True if no traced thread was left running. Those that were are named in the log, in the span
            ``rl.collector.quiesce``, and, with where they stood, among the truncated spans of the report.
        """
        return _flush(self, timeout_s, quiesce_timeout_s, final=final)


async def _flush_async(
    self: TracedCollector,
    timeout_s: float = 5.0,
    *,
    quiesce_timeout_s: float | None = None,
    final: bool = True,
) -> bool:
    """Stops the collector, waits for its threads, and brings telemetry to a clean end; see `TracedCollector`."""
    flush = functools.partial(_flush, self, timeout_s, quiesce_timeout_s, final=final)
    self.collector_threads.loop = asyncio.get_running_loop()
    # In a pool of its own: every thread of the loop's may be parked in an ``asyncio.to_thread`` of the collector's.
    pool = ThreadPoolExecutor(1, "raytrace_rl-flush")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, flush)
    finally:
        pool.shutdown(wait=False)


def _flush(collector: TracedCollector, timeout_s: float, quiesce_timeout_s: float | None, *, final: bool) -> bool:
    deadline = monotonic() + timeout_s
    if not final:
        return TracedActor.flush_telemetry(collector, timeout_s, quiesce_timeout_s=0, final=False)
    quiesce_s = timeout_s / 2 if quiesce_timeout_s is None else min(quiesce_timeout_s, timeout_s)
    left: list[str] = []
    try:
        with collector.collector_threads.context.attach(), span_cm(QUIESCE_SPAN) as span:
            left = collector.quiesce(max(0.0, quiesce_s))
            if span is not None:
                span.set_attribute(RL_COLLECTOR_LEFT_ATTR, left[:64])  # as long as an attribute's array may be
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("collector-quiesce", "A collector could not be brought to rest: %r", error)
    # Warns of the threads that are left, by name.
    rest = max(0.0, deadline - monotonic())
    return TracedActor.flush_telemetry(collector, rest, quiesce_timeout_s=0) and not left


def _capturing(init: Callable[..., None]) -> Callable[..., None]:
    """Returns ``init``, before which the trace context is taken."""

    @functools.wraps(init)
    def construct(self: TracedCollector, /, *args: Any, **kwargs: Any) -> None:
        _ = self.collector_threads
        init(self, *args, **kwargs)

    return construct
