from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
from opentelemetry import trace

from raytrace_rl import _process
from raytrace_rl.instrumentation import efficiency_span, managed_span, trace_fn
from raytrace_rl.timer import Timer
from tests.running import running, wait_for


async def stands_here() -> None:
    """Never returns; tests find its name in stacks."""
    await asyncio.Event().wait()


async def _in_with() -> None:
    with managed_span("generation", "span"):
        await stands_here()


async def _in_timer() -> None:
    with Timer().time("x", span=managed_span("generation", "span")):
        await stands_here()


async def _in_exit_stack() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(efficiency_span("idle/refit_event_wait"))
        await stands_here()


async def _in_foreign_span() -> None:
    with trace.get_tracer("library").start_as_current_span("span"):
        await stands_here()


@trace_fn("generation", "span")
async def _decorated() -> None:
    await stands_here()


@trace_fn("generation", "span")
async def _generates():
    await asyncio.sleep(0)
    yield 1
    await stands_here()


async def _reads_generator() -> None:
    async for _ in _generates():
        pass


@contextlib.contextmanager
def parked(body: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """``body`` in an event loop in another thread, until the ``with`` block is left."""
    loop = asyncio.new_event_loop()

    async def main() -> None:
        task = asyncio.ensure_future(body())
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    ready = threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait(30)
    try:
        yield
    finally:

        def cancel() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()

        loop.call_soon_threadsafe(cancel)
        thread.join(30)
        loop.close()


def stack_of(telemetry, innermost: str = "stands_here") -> str:
    """The text of the one open span's stack, as soon as its task stands in ``innermost``."""
    assert _process.current is not None

    def look():
        _process.current._heartbeat.beat()
        found = [stack.text for stack in telemetry.run().stacks]
        return found[0] if len(found) == 1 and innermost in found[0] else None

    text: str = wait_for(look, f"a stack with {innermost} in it")
    return text


@pytest.mark.parametrize(
    "body",
    [_in_with, _in_timer, _in_exit_stack, _in_foreign_span, _decorated, _reads_generator],
    ids=lambda f: f.__name__,
)
def test_parked_coroutine_is_followed_to_where_it_stands(body, tmp_path):
    """Catches a stack that ends in the event loop: it says nothing of the coroutine that waits."""
    with running(tmp_path / "run", stack_after_s=0) as telemetry, parked(body):
        text = stack_of(telemetry)
        assert text.startswith("Task Task-")
        assert text.index(f"in {body.__name__}") < text.index("in stands_here") < text.index("in wait")
        assert "select" not in text


async def _gathers() -> None:
    with managed_span("generation", "span"):
        await asyncio.gather(stands_here(), asyncio.sleep(0))


async def _waits_for() -> None:
    with managed_span("generation", "span"):
        await asyncio.wait_for(stands_here(), 1000)


async def _waits() -> None:
    with managed_span("generation", "span"):
        await asyncio.wait([asyncio.ensure_future(stands_here())])


async def _awaits_a_task() -> None:
    with managed_span("generation", "span"):
        await asyncio.ensure_future(stands_here())


@pytest.mark.parametrize("body", [_gathers, _waits_for, _waits, _awaits_a_task], ids=lambda f: f.__name__)
def test_tasks_that_a_task_waits_for_are_followed(body, tmp_path):
    """Catches a stack that ends at ``gather``: the coroutine that really hangs is in another task."""
    with running(tmp_path / "run", stack_after_s=0) as telemetry, parked(body):
        text = stack_of(telemetry)
        assert text.index(f"in {body.__name__}") < text.index("in stands_here")
        assert text.count("in stands_here") == 1


def test_a_task_that_runs_shows_the_stack_of_its_thread(tmp_path):
    """Catches a coroutine that is busy, or blocks the loop, shown as if it were parked."""
    go_on = threading.Event()

    async def blocks() -> None:
        with managed_span("generation", "span"):
            blocks_the_loop()

    def blocks_the_loop() -> None:
        go_on.wait(30)

    with running(tmp_path / "run", stack_after_s=0) as telemetry, parked(blocks):
        text = stack_of(telemetry, "blocks_the_loop")
        go_on.set()
    assert not text.startswith("Task")
    assert "run_until_complete" in text


def test_threads_without_a_span_are_noted_too(tmp_path):
    """Catches a deadlock whose other half has no span: the thread that holds the lock is nowhere to be seen."""
    ready, go_on = threading.Event(), threading.Event()

    def holds_the_lock() -> None:
        ready.set()
        go_on.wait(30)

    with running(tmp_path / "run", stack_after_s=0) as telemetry, managed_span("generation", "span"):
        thread = threading.Thread(target=holds_the_lock, name="holder")
        thread.start()
        ready.wait(30)
        _process.current._heartbeat.beat()
        (process,) = telemetry.run().processes
        go_on.set()
        thread.join()
    assert process.threads is not None
    assert "holder\n" in process.threads.text
    assert "in holds_the_lock" in process.threads.text
    assert "raytrace_rl-heartbeat" not in process.threads.text, "ours are of no interest"
    assert "in test_threads_without" not in process.threads.text, "that one has a span"


def test_foreign_objects_are_not_asked_for_anything(tmp_path):
    """Catches a look at a user's object that runs the user's code (a proxy's ``__getattr__``) in our thread."""
    asked = []

    class Proxy:
        def __getattr__(self, name: str):
            asked.append(name)
            raise RuntimeError(name)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None: ...

        def __await__(self):
            yield from asyncio.Event().wait().__await__()

    async def body() -> None:
        proxy = Proxy()
        with managed_span("generation", "span"), proxy:
            await proxy

    with running(tmp_path / "run", stack_after_s=0) as telemetry, parked(body):
        assert "in body" in stack_of(telemetry, "__await__")
    assert asked == []
