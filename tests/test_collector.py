"""A collector's threads: whose children their spans are, and how they are brought to rest. Without Ray."""

from __future__ import annotations

import asyncio
import functools
import gc
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl import iteration_scope, managed_span, span_cm
from raytrace_rl._live_threads import join, names
from raytrace_rl.integrations.collector import CollectorThreads, TracedCollector
from tests.running import attributes, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.telemetry_fixtures"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A test that leaves a thread behind fails here, and not in the next one."""
    yield
    assert join(10) == []


@pytest.fixture
def threads(telemetry) -> CollectorThreads:
    """A collector's threads, made under the span ``job`` that has ended since."""
    with span_cm("job"), iteration_scope(7):
        return CollectorThreads()


def recorded(name: str) -> None:
    """Records a span of that name."""
    with managed_span("generation", name):
        pass


def test_every_thread_runs_under_what_was_current_at_construction(telemetry, threads):
    """Catches a thread whose spans are roots, hang under the call that started it, or bear that call's step."""

    async def rollout(n: int) -> None:
        await asyncio.sleep(0)
        recorded(f"rollout-{n}")

    with span_cm("elsewhere"), iteration_scope(8):
        for n in range(2):
            threads.thread(rollout, args=(n,), name=f"rollout-{n}").start()
        threads.thread(recorded, args=("plain",)).start()
    assert threads.quiesce(10) == []
    job = telemetry.span("job")
    for name in ("rollout-0", "rollout-1", "plain"):
        span = telemetry.span(name)
        assert span.parent_span_id == job.span_id
        assert "rl.iteration" not in attributes(span)
    assert attributes(telemetry.span("rollout-0"))["thread.name"] == "rollout-0"


def test_each_coroutine_has_a_loop_of_its_own(threads):
    """Catches rollouts that share a loop, where one that blocks would hold up all others."""
    loops: queue.SimpleQueue[Any] = queue.SimpleQueue()
    both = threading.Barrier(2)

    async def rollout() -> None:
        both.wait(10)  # blocks its loop: both can be here at once only in two
        loops.put(asyncio.get_running_loop())

    for _ in range(2):
        threads.thread(rollout).start()
    assert threads.quiesce(10) == []
    assert loops.get() is not loops.get()


def test_a_pools_tasks_hang_under_their_rollout_or_else_under_the_collector(telemetry, threads):
    """Catches teacher log-probabilities that belong to no rollout."""

    def rollout() -> None:
        with managed_span("rollout", "rollout"), threads.pool(2, "teacher") as pool:
            assert len(list(pool.map(recorded, ["a", "b"]))) == 2

    threads.thread(rollout).start()
    assert threads.quiesce(10) == []
    with threads.pool(1) as pool:
        pool.submit(recorded, "alone").result(10)
    rollout_id = telemetry.span("rollout").span_id
    assert telemetry.span("a").parent_span_id == telemetry.span("b").parent_span_id == rollout_id
    assert telemetry.span("alone").parent_span_id == telemetry.span("job").span_id


def _parked(threads: CollectorThreads, kind: str) -> Any:
    """Parks two threads on a wait of that kind, registered; returns once both are there."""
    there = threading.Barrier(3)
    wait: Any
    if kind == "event":
        wait = threading.Event()
        park = wait.wait
    elif kind == "condition":
        wait = threading.Condition()

        def park() -> None:
            with wait:
                wait.wait_for(threads.stopping.is_set)

    elif kind == "queue":
        items: queue.Queue[None] = queue.Queue()
        park = items.get

        def wait() -> None:
            items.put(None)

    else:
        wait = threading.BoundedSemaphore(2) if kind == "bounded" else threading.Semaphore(0)
        if kind == "bounded":
            wait.acquire()
            wait.acquire()
        park = wait.acquire

    def run() -> None:
        there.wait(10)
        with managed_span("efficiency", "parked"):
            park()

    threads.wake_on_stop(wait)
    for n in range(2):
        threads.thread(run, name=f"parked-{n}").start()
    there.wait(10)
    return wait


@pytest.mark.parametrize("kind", ["event", "condition", "semaphore", "bounded", "queue"])
def test_parked_threads_are_woken_and_their_spans_end(telemetry, threads, kind):
    """Catches a collector that is killed with its threads parked: their spans are cut short."""
    _parked(threads, kind)
    started = time.monotonic()
    assert threads.quiesce(20) == []
    assert time.monotonic() - started < 10
    parked = [span for span in telemetry.spans() if span.name == "parked"]
    assert len(parked) == 2
    assert all("rl.truncated" not in attributes(span) for span in parked)


def test_a_condition_that_is_held_does_not_block_the_flush(threads):
    """Catches a flush that waits for a lock which a wedged thread holds."""
    condition = threading.Condition()
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with condition:
            held.set()
            let_go.wait(30)

    threads.wake_on_stop(condition)
    threads.thread(hold, name="holder").start()
    assert held.wait(10)
    assert threads.quiesce(0.2) == ["holder"]
    let_go.set()


def test_a_thread_that_parks_after_the_first_wake_is_woken_too(threads):
    """Catches a wake that comes once: NeMo-RL's loop clears its event, after looking at its flag, and then waits."""
    resumed, running = threading.Event(), threading.Event()

    def loop() -> None:
        running.set()
        assert threads.stopping.wait(10)
        wait_for(resumed.is_set, "the first wake")
        resumed.clear()
        resumed.wait()

    threads.wake_on_stop(resumed)
    threads.thread(loop, name="loop").start()
    assert running.wait(10)
    assert threads.quiesce(10) == []


def test_a_thread_that_was_not_started_yet_is_waited_for(telemetry, threads):
    """Catches a flush between the making of a rollout's thread and its start: the rollout is lost."""
    made, go = threading.Event(), threading.Event()

    def loop() -> None:
        thread = threads.thread(recorded, args=("late",), name="late")
        made.set()
        go.wait(10)
        thread.start()

    looping = threading.Thread(target=loop)  # a thread that nobody knows of
    looping.start()
    assert made.wait(10)
    assert threads.quiesce(0.1) == ["late (not started)"]
    threading.Timer(0.1, go.set).start()
    assert threads.quiesce(10) == []
    looping.join()
    assert telemetry.span("late").parent_span_id == telemetry.span("job").span_id


def test_a_thread_that_was_dropped_unstarted_is_not_waited_for(threads):
    """Catches a flush that waits its whole time for what will never run."""
    threads.thread(recorded, args=("never",))
    gc.collect()
    assert names() == []
    started = time.monotonic()
    assert threads.quiesce(20) == []
    assert time.monotonic() - started < 10


def test_who_would_not_come_is_named_inside_the_budget(threads):
    """Catches a wedged rollout that keeps a flush past its deadline, or is not named."""
    let_go = threading.Event()
    threads.thread(let_go.wait, args=(60,), name="rollout-7").start()
    threads.thread(recorded, args=("fine",), name="fine").start()
    started = time.monotonic()
    assert threads.quiesce(0.4) == ["rollout-7"]
    assert 0.4 <= time.monotonic() - started < 5
    let_go.set()


def test_a_rollout_that_waits_in_its_event_loop_is_cancelled_once_and_may_clean_up(telemetry, threads):
    """Catches a coroutine that nobody can wake, and one cancelled again and again while it cleans up."""
    there = threading.Event()

    async def rollout() -> None:
        with managed_span("rollout", "rollout"):
            try:
                there.set()
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.3)  # several rounds of waking long
                recorded("cleaned up")

    threads.thread(rollout, name="rollout").start()
    assert there.wait(10)
    assert threads.quiesce(6) == []
    assert telemetry.span("cleaned up").parent_span_id == telemetry.span("rollout").span_id
    assert "rl.truncated" not in attributes(telemetry.span("rollout"))


def test_a_rollout_that_ends_by_itself_is_not_cancelled(telemetry, threads):
    """Catches a flush that throws away what was nearly done."""
    there = threading.Event()

    async def rollout() -> None:
        there.set()
        await asyncio.sleep(0.3)
        recorded("done")

    threads.thread(rollout).start()
    assert there.wait(10)
    assert threads.quiesce(20) == []
    assert telemetry.span("done")


def test_tasks_that_have_not_begun_are_cancelled(threads):
    """Catches a flush that waits for a queue of work; and a pool that loses the sign of its own shutdown."""
    busy, let_go = threading.Event(), threading.Event()
    ran: list[int] = []
    pool = threads.pool(1)

    def work() -> None:
        busy.set()
        let_go.wait(30)

    first = pool.submit(work)
    queued = [pool.submit(ran.append, n) for n in range(5)]
    assert busy.wait(10)
    assert len(threads.quiesce(0.2)) == 1
    assert all(future.cancelled() for future in queued)
    pool.shutdown(wait=False)
    pool.cancel_queued()
    let_go.set()
    first.result(10)
    pool.shutdown(wait=True)
    assert ran == []


def test_a_stop_that_hangs_or_fails_costs_no_more_than_the_rest(threads, caplog):
    """Catches a user's stop that keeps the flush past its deadline, or ends it."""
    let_go = threading.Event()
    started = time.monotonic()
    assert threads.quiesce(0.3, lambda: let_go.wait(30)) == ["stop_collection"]
    assert time.monotonic() - started < 5
    let_go.set()

    def fail() -> None:
        raise LookupError("no such collector")

    assert threads.quiesce(5, fail) == []
    assert "no such collector" in caplog.text


def test_what_cannot_be_woken_is_refused_when_it_is_registered(threads, caplog):
    """Catches a wait that is found out at the end of a run; and asyncio's, which is not for other threads."""
    threads.wake_on_stop(threading.Lock(), asyncio.Event(), 7)
    assert [record.getMessage().split(" cannot")[0] for record in caplog.records] == ["A lock", "A Event", "A int"]


def test_a_wake_that_fails_is_one_warning(threads, caplog):
    """Catches a function of the user's that ends the flush, or fills the log twenty times a second."""
    let_go = threading.Event()

    def wake() -> None:
        raise LookupError("nothing there")

    threads.wake_on_stop(wake, let_go)
    threads.thread(let_go.wait, args=(30,)).start()
    assert threads.quiesce(10) == []
    assert caplog.text.count("nothing there") == 1


def test_a_wake_that_blocks_holds_up_neither_the_flush_nor_the_others(telemetry, threads, caplog):
    """Catches a sentinel for a full queue that keeps the flush, or the waits behind it, for ever."""
    full: queue.Queue[None] = queue.Queue(maxsize=1)
    full.put(None)
    let_go, behind = threading.Event(), threading.Event()

    def sentinel() -> None:
        full.put(None, timeout=30)

    threads.wake_on_stop(sentinel, behind)
    threads.thread(behind.wait, args=(30,), name="behind").start()
    started = time.monotonic()
    assert threads.quiesce(20) == []
    assert time.monotonic() - started < 10
    threads.thread(let_go.wait, args=(30,), name="rollout-3").start()
    started = time.monotonic()
    left = threads.quiesce(0.4)
    assert time.monotonic() - started < 5
    assert left == ["rollout-3", f"wake_on_stop({sentinel.__qualname__})"], "who hangs is named, and called once"
    assert f"{sentinel.__qualname__}) of a collector hangs" in caplog.text
    let_go.set()
    full.get()


def test_a_wake_that_ends_its_thread_does_not_end_the_waking(threads, caplog):
    """Catches waits that nobody wakes any more because the function before them called ``sys.exit``."""
    behind = threading.Event()
    threads.wake_on_stop(sys.exit, behind)
    threads.thread(behind.wait, args=(30,)).start()
    assert threads.quiesce(10) == []
    assert "wake_on_stop(exit) of a collector failed: SystemExit" in caplog.text


def test_a_callback_of_a_cancelled_task_that_blocks_does_not_hold_up_the_flush(threads):
    """Catches a flush that runs the user's callbacks, of tasks that it cancels, in its own thread."""
    busy, let_go = threading.Event(), threading.Event()
    pool = threads.pool(1)

    def work() -> None:
        busy.set()
        let_go.wait(30)

    pool.submit(work)
    assert busy.wait(10)
    pool.submit(int).add_done_callback(lambda _future: let_go.wait(30))
    started = time.monotonic()
    assert threads.quiesce(0.4)
    assert time.monotonic() - started < 5
    let_go.set()
    pool.shutdown(wait=True)


def test_a_time_that_is_no_number_is_none(threads):
    """Catches a flush that compares with nan, which is never over."""
    let_go = threading.Event()
    threads.thread(let_go.wait, args=(30,), name="rollout").start()
    assert threads.quiesce(float("nan")) == threads.quiesce(-1) == ["rollout"]
    let_go.set()


def test_code_of_the_users_is_not_run_in_the_flushing_thread_where_there_is_no_other(threads, monkeypatch):
    """Catches a flush without a deadline on a machine that is out of threads; what cannot block is still woken."""
    parked, called = threading.Event(), threading.Event()
    threads.wake_on_stop(called.set, parked)
    threads.thread(parked.wait, args=(30,), name="parked").start()
    real = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("raytrace_rl-"):
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert threads.quiesce(10, called.set) == ["stop_collection"]
    assert not called.is_set()


def test_whatever_gives_a_coroutine_is_run_in_a_loop(telemetry, threads):
    """Catches a rollout that never runs: a callable object or a lambda does not look like a coroutine function."""

    class Rollout:
        async def __call__(self, name: str) -> None:
            await asyncio.sleep(0)
            recorded(name)

        def start(self, name: str) -> Any:
            return self(name)

    rollout = Rollout()
    targets: list[Any] = [rollout, rollout.start, functools.partial(rollout), lambda name: rollout(name)]
    for n, target in enumerate(targets):
        threads.thread(target, args=(f"rollout-{n}",)).start()
    assert threads.quiesce(10) == []
    job = telemetry.span("job").span_id
    assert [telemetry.span(f"rollout-{n}").parent_span_id for n in range(len(targets))] == [job] * len(targets)


def test_a_coroutine_behind_a_function_is_cancelled_too(telemetry, threads):
    """Catches a rollout that nobody can stop because it came out of a lambda."""
    there = threading.Event()

    async def rollout() -> None:
        with managed_span("rollout", "rollout"):
            there.set()
            await asyncio.sleep(600)

    threads.thread(lambda: rollout()).start()
    assert there.wait(10)
    assert threads.quiesce(2) == []
    assert "rl.truncated" not in attributes(telemetry.span("rollout"))


def test_a_generator_for_a_target_is_said_to_have_run_nothing(threads, caplog):
    """Catches a rollout with a stray ``yield``, of which a thread runs nothing, without a word."""

    async def rollout() -> Any:
        yield 1

    threads.thread(rollout).start()
    assert threads.quiesce(10) == []
    assert "nothing of it has run" in caplog.text


def test_a_coroutine_cannot_wake_and_is_not_lost_without_a_word(threads, caplog):
    """Catches a wake that is never awaited."""

    async def wake() -> None: ...

    threads.wake_on_stop(wake, lambda: wake())
    let_go = threading.Event()
    threads.wake_on_stop(let_go)
    threads.thread(let_go.wait, args=(30,)).start()
    assert threads.quiesce(10) == []
    assert "A function cannot be woken" in caplog.text
    assert "returned a coroutine" in caplog.text


def test_a_stop_may_be_a_coroutine_function(threads):
    """Catches a stop that is made, and never awaited, so that the loop goes on."""
    stopped = threading.Event()

    async def stop() -> None:
        await asyncio.sleep(0)
        stopped.set()

    threads.thread(stopped.wait, args=(30,)).start()
    assert threads.quiesce(10, stop) == []


# ------------------------------------------------------------------------------------------------------- as an object


class Collector(TracedCollector):
    """In NeMo-RL's shape: a flag, an event to park on, no ``super().__init__()``."""

    def __init__(self) -> None:
        self.running = True
        self.resumed = threading.Event()
        self.wake_on_stop(self.resumed)

    def loop(self) -> None:
        with managed_span("efficiency", "loop"):
            while self.running:
                self.resumed.wait()

    def stop_collection(self) -> None:
        self.running = False


def test_a_flush_stops_the_loop_and_ends_telemetry(telemetry):
    """Catches a loop that the flush leaves running, or telemetry that goes on after the last flush."""
    with span_cm("job"):
        collector = Collector()
    collector.rollout_thread(collector.loop, name="loop").start()
    assert collector.flush_telemetry(10)
    assert not telemetry.handle.is_exporting
    spans = {span.name: span for span in telemetry.spans()}
    assert spans["loop"].parent_span_id == spans["rl.collector.quiesce"].parent_span_id == spans["job"].span_id
    assert "rl.truncated" not in attributes(spans["loop"])


def test_a_flush_names_who_would_not_come(telemetry, caplog):
    """Catches a thread that is cut short and of which neither the log nor the trace says so."""
    collector = Collector()
    let_go = threading.Event()
    collector.rollout_thread(let_go.wait, args=(60,), name="rollout-9").start()
    started = time.monotonic()
    assert not collector.flush_telemetry(3, quiesce_timeout_s=0.2)
    assert time.monotonic() - started < 3
    assert attributes(telemetry.span("rl.collector.quiesce"))["rl.collector.left"] == ["rollout-9"]
    assert "rollout-9" in caplog.text
    let_go.set()


def test_a_flush_that_is_not_the_last_leaves_the_collector_running(telemetry):
    """Catches a periodic flush that stops the collection, or waits for a loop that goes on for ever."""
    collector = Collector()
    thread = collector.rollout_thread(collector.loop, name="loop")
    thread.start()
    started = time.monotonic()
    collector.flush_telemetry(20, final=False)
    assert time.monotonic() - started < 5
    assert thread.is_alive()
    assert collector.running
    assert telemetry.handle.is_exporting
    assert collector.quiesce(10) == []


def test_an_async_flush_needs_no_thread_of_the_loops(telemetry):
    """Catches a flush that queues behind calls which are parked in ``asyncio.to_thread``, and never begins."""

    class AsyncCollector(Collector):
        async def metrics(self) -> None: ...

    async def main() -> bool:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        parked = loop.run_in_executor(None, collector.resumed.wait, 30)
        flushed: bool = await asyncio.wait_for(collector.flush_telemetry(5), 20)
        assert await parked, "the stop has woken it"
        return flushed

    collector = AsyncCollector()
    thread = collector.rollout_thread(collector.loop)
    thread.start()
    assert asyncio.run(main())
    assert not thread.is_alive()


def test_an_async_collectors_stop_runs_in_its_own_loop(telemetry):
    """Catches an ``async def stop_collection`` that is never awaited, or in a loop that knows nothing of its tasks."""

    class AsyncCollector(Collector):
        async def stop_collection(self) -> None:  # type: ignore[override]
            self.stopped_in = asyncio.get_running_loop()
            self.running = False

    async def main() -> bool:
        flushed: bool = await asyncio.wait_for(collector.flush_telemetry(10), 20)
        return flushed and collector.stopped_in is asyncio.get_running_loop()

    collector = AsyncCollector()
    collector.rollout_thread(collector.loop).start()
    assert asyncio.run(main())


def test_off_a_collector_works_all_the_same():
    """Catches a collector that cannot run, or stop, without telemetry."""
    collector = Collector()
    thread = collector.rollout_thread(collector.loop)
    thread.start()
    with collector.thread_pool(1) as pool:
        assert pool.submit(int, "7").result(10) == 7
    assert collector.flush_telemetry(10)
    assert not thread.is_alive()
