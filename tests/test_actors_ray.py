"""`TracedActor` and the flush on real Ray: every sort of constructor, and every sort of end."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrace_rl import (
    TracedActor,
    _state,
    accepts_trace_context,
    dispatch_with_trace_context,
    flush_actors,
    flush_and_kill,
    managed_span,
    setup,
    traced,
)
from raytrace_rl.actors import FlushReport, flush_group, registered_actors
from tests import traced_actors
from tests.readback import get, gone, wait_until

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = [
    pytest.mark.ray,
    # Ray derives its actor class from a generic class and the user's; pydantic warns of that, with us or without.
    pytest.mark.filterwarnings("ignore:Classes should inherit from `BaseModel` before generic classes"),
]

CONSTRUCTORS = ("Ordinary", "Forgetful", "Data", "MoreData", "Attrs", "Model", "Concrete", "Mixed", "Async")


def remote(cls: type, **options: Any) -> Any:
    """The class as an actor class that takes next to no CPU."""
    import ray

    return ray.remote(num_cpus=0.01, **options)(cls)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_telemetry_starts_before_the_constructor_whatever_it_is(name, traced_test):
    """Catches a constructor that telemetry misses, breaks, or that the caller's context does not reach."""
    cls = getattr(traced_actors, name)
    actor = dispatch_with_trace_context(remote(cls), x=4)
    assert get(actor.value.remote()) == 4
    span = traced_test.assert_dispatched(f"init.{name}")
    assert span.actor_class == name
    assert span.incarnation == 0
    assert get(remote(cls).remote(x=5).value.remote()) == 5  # and without a carrier


def by_value() -> type:
    """A class that is pickled by value, with a constructor that forgets the mixin's."""

    class Local(TracedActor):
        def __init__(self, x: int, *, y: int = 0) -> None:
            self.x = x + y
            with managed_span("setup", "init.Local"):
                pass

        @accepts_trace_context
        def value(self) -> int:
            with managed_span("setup", "value.Local"):
                return self.x

    return Local


def test_a_class_by_value_and_a_looked_up_handle(traced_test):
    """Catches a constructor's wrapper that does not survive pickling with its class, or with the handle."""
    import ray

    actor = dispatch_with_trace_context(remote(by_value()).options(name="by-value"), 4, y=1)
    assert get(traced(ray.get_actor("by-value")).value.remote()) == 5
    assert actor is not None
    traced_test.assert_dispatched("init.Local")
    traced_test.assert_dispatched("value.Local")


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_user_s_constructor_looks_as_it_did(name, cluster):
    """Catches a signature that telemetry changes for everyone who reads it."""
    cls = getattr(traced_actors, name)
    before = (inspect.signature(cls), cls.__init__)
    remote(cls)
    assert (inspect.signature(cls), cls.__init__) == before
    assert "_otel_carrier" not in inspect.signature(cls).parameters


def test_wrong_arguments_of_a_constructor_are_refused_by_the_caller(cluster):
    """Catches a constructor's wrapper that takes anything, so that the actor dies instead."""
    with pytest.raises(TypeError, match="missing a required argument"):
        remote(traced_actors.Ordinary).remote()
    with pytest.raises(TypeError, match="unexpected keyword"):
        remote(traced_actors.Ordinary).remote(x=1, z=2)


def test_an_actor_class_starts_nothing_on_the_driver(cluster, monkeypatch):
    """Catches telemetry started in a driver that has it off: Ray calls ``__new__`` there as well."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    remote(traced_actors.Ordinary)
    assert setup.get_telemetry_handle() is None


def test_a_class_is_an_ordinary_class_without_ray(monkeypatch):
    """Catches a mixin that can only be used in an actor: unit tests of users construct the class."""
    assert traced_actors.Ordinary(3).value() == 3
    assert traced_actors.Data(3) == traced_actors.Data(3)
    assert traced_actors.Model(x=1, rank=2).rank == 2
    assert traced_actors.Mixed(1, rank=5).own_rank == 5
    with pytest.raises(TypeError):
        traced_actors.Ordinary(1, 2, 3)  # type: ignore[call-arg]


def test_who_the_actor_is(traced_test):
    """Catches an identity given to the mixin that reaches neither the resource nor a base that wants it too."""
    actor = dispatch_with_trace_context(remote(traced_actors.Passing), 1, rank=3)
    assert get(actor.ranks.remote()) == 3
    span = traced_test.assert_dispatched("init.Passing")
    assert (span.rank, span.worker_group) == (3, "policy")
    assert span.resource["nv.dl.world_size"] == 4
    assert span.resource["rl.model"] == "tiny"


def test_an_umbrella_around_the_constructor_on_request(traced_test):
    """Catches two umbrellas, one per constructor in line, or none."""
    actor = dispatch_with_trace_context(remote(traced_actors.ModelInit), 1)
    assert get(actor.value.remote()) == 1
    umbrella = traced_test.assert_dispatched("rl.setup.model_init")
    assert umbrella.span_group == "model_init"
    assert umbrella.bucket is None
    assert traced_test.one("init.ModelInit").parent_span_id == umbrella.span_id


def test_a_decorator_that_cannot_take_the_carrier_does_not_get_it(traced_test):
    """Catches a call that fails on the worker, because ``functools.wraps`` copied a promise that nobody keeps."""
    actor = remote(traced_actors.Worker).remote()
    assert get(dispatch_with_trace_context(actor.narrow, "narrow")) == "narrow"
    traced_test.assert_dispatched("narrow")


def test_a_restarted_actor_says_so(traced_test):
    """Catches spans of an actor's second life that cannot be told from those of its first."""
    import ray

    actor = traced(remote(traced_actors.Worker, max_restarts=1, max_task_retries=-1).remote())
    first = get(actor.work.remote("first life"))
    ray.kill(actor, no_restart=False)
    wait_until(lambda: not Path(f"/proc/{first}").exists(), "the first life to end")
    second = get(actor.work.remote("second life"))
    assert first != second
    assert traced_test.one("first life").incarnation == 0
    assert traced_test.one("second life").incarnation == 1


def test_a_sync_actor_stays_sync_and_an_async_one_flushes_by_coroutine(cluster):
    """Catches one coroutine of ours that makes every actor an async one to Ray, or a flush that stops the loop."""
    assert not inspect.iscoroutinefunction(traced_actors.Worker.flush_telemetry)
    assert inspect.iscoroutinefunction(traced_actors.Async.flush_telemetry)

    class Mixin:
        async def late(self) -> None: ...

    class Late(TracedActor, Mixin):
        pass

    class Own(TracedActor):
        async def work(self) -> None: ...

        async def flush_telemetry(self, *args: Any, **kwargs: Any) -> bool:  # type: ignore[override]
            return False

    assert inspect.iscoroutinefunction(Late.flush_telemetry)
    assert Own.flush_telemetry.__qualname__.endswith("Own.flush_telemetry")


def closed(pid: int, traced_test: Any) -> bool:
    """Whether the spool of the process was closed cleanly: its liveness file is gone."""
    return not list((traced_test.run_dir / "spool").glob(f"*/{pid}-*.live"))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_final_flush_ends_telemetry_and_the_actor_goes_on(kind, traced_test):
    """Catches a flush that leaves the spool open, kills the actor, or is undone by the next carrier."""
    actor = remote(traced_actors.Worker if kind == "sync" else traced_actors.Async).remote(
        **({} if kind == "sync" else {"x": 1})
    )
    view = traced(actor)

    def call(name: str) -> Any:
        return get(view.work.remote(name) if kind == "sync" else view.slow.remote(name, 0.0))

    call("before")
    pid = traced_test.one("before").pid
    assert not closed(pid, traced_test)
    assert flush_actors([actor]) == FlushReport(flushed=(actor,))
    assert closed(pid, traced_test)
    call("after")
    assert flush_actors([view]) == FlushReport(flushed=(actor,))
    assert [span.name for span in traced_test.all() if span.pid == pid and span.name in {"before", "after"}] == [
        "before"
    ]


def test_a_flush_that_is_not_final_changes_nothing(traced_test):
    """Catches a checkpoint's flush after which nothing is traced any more."""
    actor = traced(remote(traced_actors.Worker).remote())
    get(actor.work.remote("one"))
    assert flush_actors([actor], final=False).flushed == (actor,)
    get(actor.work.remote("two"))
    traced_test.one("two")


def test_a_flush_waits_for_threads(traced_test):
    """Catches an actor killed while a thread's span is still open, though the thread needed only a moment."""
    actor = traced(remote(traced_actors.Worker).remote())
    get(actor.in_thread.remote("brief thread", 0.7))
    assert get(actor.flush_telemetry.remote(10)) is True
    span = traced_test.one("brief thread")
    assert not span.truncated
    assert span.parent_span_id == traced_test.root_id
    assert span.thread == "brief thread"


def test_a_flush_does_not_wait_for_ever(traced_test):
    """Catches a flush that hangs on a collector's endless thread, or that loses its span."""
    actor = traced(remote(traced_actors.Worker).remote())
    get(actor.in_thread.remote("endless thread", None))
    begun = time.monotonic()
    assert get(actor.flush_telemetry.remote(2, quiesce_timeout_s=0.2)) is False
    assert time.monotonic() - begun < 5
    assert traced_test.one("endless thread").truncated


@pytest.mark.parametrize("whole", ["actors", "group"])
def test_who_left_threads_behind_is_not_flushed_but_incomplete(whole, traced_test):
    """Catches a report that calls telemetry complete though a thread's spans were cut short."""
    actor = traced(remote(traced_actors.Worker).remote())
    get(actor.in_thread.remote("endless thread", None))
    group = SimpleNamespace(workers=[actor])
    report = flush_actors([actor], 2) if whole == "actors" else flush_group(group, 2)
    assert report == FlushReport(incomplete=(actor,))
    assert str(report) == "0 flushed, 0 timed out, 0 dead, 1 incomplete"
    assert traced_test.one("endless thread").truncated


@pytest.mark.parametrize("name", ["OwnFlush", "NamedFlush", "DemandingFlush"])
def test_a_flush_of_its_own_is_called_with_what_it_takes(name, traced_test, caplog):
    """Catches an actor that counts as timed out though it was never asked."""
    actor = traced(remote(getattr(traced_actors, name)).remote())
    get(actor.work.remote("x"))
    pid = traced_test.one("x").pid
    assert flush_actors([actor], 20) == FlushReport(flushed=(actor,))
    assert closed(pid, traced_test)
    assert not [record for record in caplog.records if record.name == "raytrace_rl"]


def test_a_process_in_which_nothing_of_ours_knows_the_actor_may_be_incomplete_too(traced_test):
    """Catches threads that are left behind, in an actor whose process is flushed from outside."""
    actor = traced(remote(traced_actors.DemandingFlush).remote())
    get(actor.in_thread.remote("endless thread", None))
    assert flush_actors([actor], 2) == FlushReport(incomplete=(actor,))
    assert flush_actors([actor], float("nan")).timed_out in {(), (actor,)}, "nobody waits for a time that is none"


def test_an_async_actor_s_loop_goes_on_during_a_flush(traced_test):
    """Catches a flush that blocks the event loop on which the work that it waits for depends."""
    actor = traced(remote(traced_actors.Async).remote(1))
    slow = actor.slow.remote("slow", 0.5)
    get(actor.value.remote())
    flush = actor.flush_telemetry.remote(3, final=False)
    get(flush)
    get(slow)
    traced_test.one("slow")


def test_the_report_tells_dead_and_wedged_from_flushed(traced_test):
    """Catches a fan-out that fails, or waits for each in turn, because of one that is dead or busy."""
    import ray

    cls = remote(traced_actors.Worker)
    well, dead, wedged = cls.remote(), cls.remote(), cls.remote()
    get([well.work.remote("x"), dead.work.remote("x"), wedged.work.remote("x")])
    ray.kill(dead)
    wait_until(lambda: gone(dead), "the actor to be gone")
    wedged.work.remote("wedged", 60)
    begun = time.monotonic()
    report = flush_actors([well, dead, wedged, traced(well)], timeout_s=2)
    assert time.monotonic() - begun < 6
    assert report == FlushReport(flushed=(well,), timed_out=(wedged,), dead=(dead,))
    assert str(report) == "1 flushed, 1 timed out, 1 dead"
    ray.kill(wedged)


def test_flush_and_kill_kills_them_all(traced_test, caplog):
    """Catches an actor spared because it could not be flushed, was dead already, or is none of ours."""

    class Untraced:
        pass

    cls = remote(traced_actors.Worker)
    actors = [cls.remote(), traced(cls.remote()), remote(Untraced).remote()]
    get([actors[0].work.remote("x"), actors[1].work.remote("killed")])
    report = flush_and_kill(actors, timeout_s=10)
    assert report == FlushReport(flushed=(actors[0], actors[1]))
    for actor in actors:
        wait_until(lambda: gone(actor), "the actor to be gone")  # noqa: B023
    assert not traced_test.one("killed").truncated
    assert [r for r in caplog.records if "no TracedActor" in r.getMessage()]
    assert flush_and_kill(actors, timeout_s=10).dead == (actors[0], actors[1])


def test_a_flush_that_fails_with_a_time_out_of_its_own_is_no_alarm(traced_test, caplog):
    """Catches the driver's shutdown ended by a worker's TimeoutError, which passes for one raised on the driver."""
    late, well = remote(traced_actors.LateFlush).remote(), remote(traced_actors.Worker).remote()
    get([late.work.remote("x"), well.work.remote("x")])
    report = flush_and_kill([late, well], timeout_s=10)
    assert report == FlushReport(flushed=(well,), timed_out=(late,))
    assert "the checkpoint is not written yet" in caplog.text


def test_a_group_is_flushed_by_its_workers(traced_test, caplog):
    """Catches a group whose workers are not found, and an object that is none and fails the end of a run."""
    group = SimpleNamespace(workers=[remote(traced_actors.Worker).remote() for _ in range(2)])
    assert flush_group(group).flushed == tuple(group.workers)
    assert flush_group(object()) == FlushReport()
    assert [r for r in caplog.records if "no workers to flush" in r.getMessage()]


def test_off_nobody_is_asked(cluster):
    """Catches a flush that costs a run without telemetry its time-out for every busy actor."""
    actor = remote(traced_actors.Worker).remote()
    actor.work.remote("busy", 3)
    begun = time.monotonic()
    assert flush_actors([actor], timeout_s=30) == FlushReport()
    assert time.monotonic() - begun < 1


def test_actors_that_were_dispatched_to_are_known_while_they_are_held(traced_test):
    """Catches a session's end that misses an actor, or a registry that keeps one alive."""
    cls = remote(traced_actors.Worker)
    created, called = dispatch_with_trace_context(cls), cls.remote()
    get(dispatch_with_trace_context(called.work, "x"))
    viewed: Any = cls.remote()
    view = traced(viewed)
    known = registered_actors()
    assert {created, called, viewed} <= set(known)
    del known
    pid = get(created.work.remote("x"))
    del created
    wait_until(lambda: ended(pid), "the actor without handles to end")
    assert view == viewed


def ended(pid: int) -> bool:
    """Whether the process has ended; as a zombie it may stay until Ray collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_detached_named_actor_and_one_made_by_an_actor(traced_test):
    """Catches the class that Ray derives, in an actor that creates others, being taken for that actor itself."""
    import ray

    class Maker(TracedActor):
        @accepts_trace_context
        def make(self) -> int:
            with managed_span("setup", "making"):
                made = dispatch_with_trace_context(remote(traced_actors.Ordinary), 4)
            return int(ray.get(made.value.remote(), timeout=60))

    actor = dispatch_with_trace_context(remote(Maker).options(name="maker", lifetime="detached"))
    assert get(traced(ray.get_actor("maker")).make.remote()) == 4
    making, made = traced_test.assert_dispatched("making"), traced_test.one("init.Ordinary")
    assert made.parent_span_id == making.span_id
    assert str(making.actor_class).endswith("Maker")
    assert made.actor_class == "Ordinary"
    assert making.resource["ray.actor.name"] == "maker"
    ray.kill(actor)


def test_a_broken_class_is_still_a_class(monkeypatch, caplog):
    """Catches a failure of ours that would keep a user from defining a class."""

    def broken(cls: type) -> None:
        raise LookupError("ours")

    monkeypatch.setattr("raytrace_rl.actors._adapt", broken)
    _state.forget_warnings()

    class Fine(TracedActor):
        def __init__(self, x: int) -> None:
            self.x = x

    assert Fine(3).x == 3
    assert [r for r in caplog.records if "traced only in part" in r.getMessage()]
