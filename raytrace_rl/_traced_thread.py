"""A thread that runs with the trace context of where it was started; public as `raytrace_rl.threads.TracedThread`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from raytrace_rl import _invocation, _live_threads, _state


class Attachable(Protocol):
    """What can be attached in a thread: a `raytrace_rl.context.TraceContext`."""

    def attach(self) -> AbstractContextManager[None]:
        """Returns a context manager inside which it is current."""


class TracedThread(threading.Thread):
    """A `threading.Thread` that runs with the span and the scopes that are current where it is **started**.

    Subclasses may override ``run``. A flush of its actor waits for it within the flush's budget.

    Args:
        group, target, name, args, kwargs, daemon: As `threading.Thread`'s.
        trace_context: Attach this instead, which brings no scopes: for a thread that outlives the call that starts it.
    """

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        trace_context: Attachable | None = None,
    ) -> None:
        super().__init__(group, target, name, args, kwargs, daemon=daemon)
        self._raytrace_context = trace_context
        #: Its entry in the registry, where that was made before its start.
        self._raytrace_work: _live_threads.Work | None = None

    def start(self) -> None:
        """Starts the thread; what is current now is current in it."""
        if self.ident is not None:
            super().start()  # a second start, which `Thread` refuses
            return
        work = self._raytrace_work or _live_threads.Work(self.name)
        kept = self._raytrace_context
        current = _invocation.here() if _state.tracing and kept is None else None
        run = self.run

        def traced_run() -> None:
            work.ident = threading.get_ident()
            try:
                if current is not None:
                    _invocation.call(run, (), {}, current)
                elif kept is not None:
                    with kept.attach():
                        run()
                else:
                    run()
            finally:
                del self.run  # the instance's, which would keep the thread alive by a cycle
                _live_threads.discharge(work)

        # On the instance, so that a subclass's own run() is traced as well.
        self.run = traced_run  # type: ignore[method-assign]
        _live_threads.enlist(work)
        work.started()
        try:
            super().start()
        except BaseException:
            if not self.is_alive():
                self.__dict__.pop("run", None)
                _live_threads.discharge(work)
            raise


def enlist(thread: TracedThread) -> None:
    """Has flushes wait for ``thread`` from now on, though it has not been started."""
    if thread._raytrace_work is None and thread.ident is None:
        thread._raytrace_work = _live_threads.Work(thread.name, unstarted=thread)
        _live_threads.enlist(thread._raytrace_work)
