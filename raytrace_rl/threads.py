"""Work in threads that belongs where it was started: threads, pools, and any function that is run elsewhere.

Threads and pool tasks are known to the process while they run (`_live_threads`), so that a flush can wait for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from raytrace_rl import _invocation, _live_threads, _state
from raytrace_rl._live_threads import Work
from raytrace_rl._traced_thread import TracedThread

__all__ = ["TracedThread", "TracedThreadPoolExecutor", "inherit_trace_context", "join_live_threads", "live_threads"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


live_threads = _live_threads.names
join_live_threads = _live_threads.join


def inherit_trace_context(fn: F) -> F:
    """Returns ``fn``, of the same kind, to run elsewhere as if here: with the span and the scopes that are current now.

    For ``loop.run_in_executor``, a plain ``Thread`` or ``ThreadPoolExecutor``, which lose them. With telemetry off it
    returns ``fn`` itself.
    """
    if not _state.tracing:
        return fn
    current = _invocation.here()
    inheriting: F = _invocation.named_after(fn, _invocation.attached(fn, lambda _kwargs: current))
    return inheriting


class TracedThreadPoolExecutor(ThreadPoolExecutor):
    """A `concurrent.futures.ThreadPoolExecutor` whose tasks run with what was current where they were **submitted**.

    ``map`` submits, and so inherits it too. A flush of its actor waits for tasks within the flush's budget.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submits ``fn(*args, **kwargs)``; see `concurrent.futures.Executor.submit`."""
        if not _state.tracing:
            return super().submit(fn, *args, **kwargs)
        work = Work(getattr(fn, "__qualname__", None) or type(fn).__name__)
        _live_threads.enlist(work)
        try:
            future: Future[T] = super().submit(_run_task, work, _invocation.here(), fn, args, kwargs)
        except BaseException:
            _live_threads.discharge(work)
            raise
        # Called after the task, and also if it is cancelled before it runs or its pool breaks.
        future.add_done_callback(lambda _future: _live_threads.discharge(work))
        return future


def _run_task(
    work: Work,
    attachment: _invocation.Attachment,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    work.ident = threading.get_ident()
    return _invocation.call(fn, args, kwargs, attachment)
