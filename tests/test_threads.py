"""Threads, pools and inherited functions: where their work belongs, and when the process knows that it is done."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace

from raytrace_rl import (
    TraceContext,
    TracedThread,
    TracedThreadPoolExecutor,
    _scopes,
    inherit_trace_context,
    iteration_scope,
    managed_span,
    setup,
)
from raytrace_rl.threads import join_live_threads, live_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def telemetry() -> Iterator[None]:
    """Telemetry on, its spans going nowhere."""
    setup.init_telemetry_driver({"enabled": True, "exporter": "none", "span_groups": "all"})
    yield
    setup.shutdown_telemetry()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A test that leaves an entry in the registry fails here, and not in the next one."""
    yield
    assert join_live_threads(5) == []


def here() -> tuple[int, int | None]:
    """The current span's id (0 without one) and iteration."""
    scopes = _scopes.var.get()
    return trace.get_current_span().get_span_context().span_id, None if scopes is None else scopes.iteration


def test_a_thread_runs_where_it_was_started_and_not_where_it_was_made(telemetry):
    """Catches a thread made in a constructor, and started in a call, whose spans hang under the constructor's."""
    seen: list[Any] = []
    with managed_span("generation", "made"):
        thread = TracedThread(target=lambda a, b: seen.append((a, b, *here())), args=(1,), kwargs={"b": 2})
    with managed_span("generation", "started"), iteration_scope(7):
        expected = here()
        thread.start()
    thread.join()
    assert seen == [(1, 2, *expected)]


def test_a_subclass_s_run_is_traced_too(telemetry):
    """Catches a hook in ``Thread.run`` that a subclass overrides, and a registry entry that nobody then drops."""
    seen: list[Any] = []

    class Collector(TracedThread):
        def run(self) -> None:
            seen.append(here())
            seen.append(live_threads())

    with managed_span("generation", "x"):
        expected = here()
        Collector(name="collector", daemon=True).start()
    assert join_live_threads(5) == []
    assert seen == [expected, []]  # a thread is no work that it could wait for itself


def test_a_thread_with_a_kept_context_brings_no_scopes(telemetry):
    """Catches a collector's thread that stamps the step in which it was started on all that it ever does."""
    seen: list[Any] = []
    with iteration_scope(7):
        thread = TraceContext({"traceparent": PARENT}).thread(lambda: seen.append(here()), name="kept", daemon=True)
        assert isinstance(thread, TracedThread)
        assert not thread.is_alive()
        assert (thread.name, thread.daemon) == ("kept", True)
        thread.start()
    thread.join()
    assert seen == [(int("b7ad6b7169203331", 16), None)]


def test_a_thread_leaves_the_registry_after_its_spans_have_closed(telemetry):
    """Catches a flush that thinks a thread done while the span around its work is still open."""
    opened, close = threading.Event(), threading.Event()
    ended_at: list[list[str]] = []

    class Noting:
        def __enter__(self) -> None: ...

        def __exit__(self, *exc: object) -> None:
            # From a thread that is not itself the one looked for.
            watcher = threading.Thread(target=lambda: ended_at.append(live_threads()))
            watcher.start()
            watcher.join()

    def work() -> None:
        with Noting(), managed_span("generation", "x"):
            opened.set()
            close.wait(10)

    thread = TracedThread(target=work, name="working")
    thread.start()
    assert opened.wait(10)
    assert live_threads() == ["working"]
    assert join_live_threads(0.01) == ["working"]
    close.set()
    assert join_live_threads(10) == []
    assert ended_at == [["working"]]


def test_a_thread_that_raises_leaves_the_registry(telemetry, monkeypatch):
    """Catches an entry that an exception keeps for ever, so that every flush waits in vain."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def fail() -> None:
        raise LookupError

    TracedThread(target=fail).start()
    assert join_live_threads(5) == []


def test_a_thread_that_cannot_start_leaves_the_registry(telemetry, monkeypatch):
    """Catches an entry for a thread that never ran."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread")

    thread = TracedThread(target=here)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.start()
    assert live_threads() == []
    thread.start()
    thread.join()


def test_a_thread_starts_once(telemetry):
    """Catches a second start, which `Thread` refuses, that leaves an entry behind."""
    go = threading.Event()
    thread = TracedThread(target=go.wait, args=(10,), name="once")
    thread.start()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()
    assert live_threads() == ["once"]
    go.set()
    thread.join()


def test_a_thread_that_has_ended_is_garbage(telemetry):
    """Catches a cycle through the traced ``run`` that keeps a thread, and all it holds, until the collector runs."""
    gc.disable()
    try:
        thread = TracedThread(target=here)
        gone = weakref.ref(thread)
        thread.start()
        thread.join()
        del thread
        assert gone() is None
    finally:
        gc.enable()


def test_a_pool_s_task_runs_where_it_was_submitted(telemetry):
    """Catches a pool whose thread keeps the context of the task for which it was made."""
    with TracedThreadPoolExecutor(max_workers=1) as pool:
        seen, expected = [], []
        for step in range(3):
            with managed_span("generation", "x"), iteration_scope(step):
                expected.append(here())
                seen.append(pool.submit(lambda a, *, b: (a, b, here()), 1, b=2))
        assert [future.result() for future in seen] == [(1, 2, at) for at in expected]
        with managed_span("generation", "x"), iteration_scope(9):
            assert list(pool.map(lambda _: here(), range(2))) == [here()] * 2
        assert pool.submit(here).result() == (0, None)


def test_a_pool_s_tasks_are_work_until_they_are_done_or_cancelled(telemetry):
    """Catches a flush that does not wait for queued tasks, and one that waits for those that will never run."""
    go = threading.Event()
    with TracedThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(go.wait, 10)
        queued = pool.submit(here)
        cancelled = pool.submit(here)
        assert cancelled.cancel()
        assert len(join_live_threads(0.01)) == 2
        go.set()
        queued.result(10)
        assert join_live_threads(5) == []
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(here)


def test_a_function_inherits_what_was_current_when_it_was_wrapped(telemetry):
    """Catches an executor's thread, or a task made elsewhere, that opens roots; and a wrapper of another kind."""

    async def coroutine() -> Any:
        await asyncio.sleep(0)
        return here()

    def generator() -> Iterator[Any]:
        yield here()

    with managed_span("generation", "x"), iteration_scope(7):
        expected = here()
        plain = inherit_trace_context(here)
        later = inherit_trace_context(coroutine)
        stream = inherit_trace_context(generator)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(plain).result() == expected
    assert asyncio.run(later()) == expected
    assert list(stream()) == [expected]
    assert here() == (0, None)


def test_off_it_is_all_as_if_we_were_not_there():
    """Catches wrappers, or registry entries of pools, that cost while telemetry is off."""
    assert inherit_trace_context(here) is here
    with TracedThreadPoolExecutor(1) as pool:
        assert pool.submit(here).result() == (0, None)
    thread = TracedThread(target=here)
    thread.start()
    thread.join()


def test_a_forked_child_waits_for_no_thread_of_its_parent(telemetry):
    """Catches a child whose flush waits for threads that were not forked, or on a lock that nobody will free."""
    go = threading.Event()
    thread = TracedThread(target=go.wait, args=(30,))
    thread.start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if join_live_threads(5) == [] else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    go.set()
    thread.join()
