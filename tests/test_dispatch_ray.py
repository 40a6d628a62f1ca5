"""Dispatch on real Ray: what Ray checks and pickles is the point, and results are read back from the spool."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from raytrace_rl import (
    accepts_trace_context,
    current_trace_carrier,
    dispatch_with_trace_context,
    managed_span,
    setup,
    trace_context_kwargs,
    traced,
    umbrella_span,
)
from tests import dispatch_actors
from tests.readback import BUCKET, TracedTest, get, wait_until

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", params=["by_value", "by_reference"])
def actors(request: pytest.FixtureRequest, cluster: Any) -> SimpleNamespace:
    """A sync and an async actor and two remote functions, pickled by value or by reference."""
    import ray

    made: Any = dispatch_actors if request.param == "by_reference" else dispatch_actors.classes()
    sync = ray.remote(made.Sync)
    return SimpleNamespace(
        Sync=sync,
        name=request.param,
        sync=sync.options(num_cpus=0.1, name=request.param).remote(10),
        async_=ray.remote(made.Async).options(num_cpus=0.1).remote(),
        function=ray.remote(made.function),
        generator_function=ray.remote(made.generator_function),
    )


def steps(generator: Any) -> list[Any]:
    """What a stream yielded."""
    return [get(ref) for ref in generator]


def test_a_plain_method_hangs_under_its_caller(actors, traced_test):
    """Catches a carrier that does not arrive, scopes that stay behind, and a delay stamped on every span."""
    assert get(dispatch_with_trace_context(actors.sync.plain, 1, 2, k=3, other=4)) == [11, [2], 3, ["other"]]
    span = traced_test.assert_dispatched("plain")
    assert span.bucket == BUCKET
    inner = traced_test.one("plain.inner")
    assert inner.parent_span_id == span.span_id
    assert inner.iteration == span.iteration
    assert inner.queued_ns is None


def test_a_generator_method_keeps_its_context_over_its_steps(actors, traced_test):
    """Catches a generator whose second step runs in the consumer's context, and one that Ray no longer streams."""
    assert steps(dispatch_with_trace_context(actors.sync.generator, 3)) == [0, 1, 2]
    span = traced_test.assert_dispatched("generator")
    assert {s.parent_span_id for s in traced_test.named("generator.step", 3)} == {span.span_id}


def test_a_coroutine_method_hangs_under_its_caller(actors, traced_test):
    """Catches a wrapper that makes an async actor's method a sync one."""
    assert get(dispatch_with_trace_context(actors.async_.coroutine, 5)) == 5
    traced_test.assert_dispatched("coroutine")


def test_an_async_generator_method_keeps_its_context_over_its_steps(actors, traced_test):
    """Catches an async generator whose steps lose their context at an await or a yield."""
    assert steps(dispatch_with_trace_context(actors.async_.generator, 3)) == [0, 1, 2]
    span = traced_test.assert_dispatched("async.generator")
    assert {s.parent_span_id for s in traced_test.named("async.generator.step", 3)} == {span.span_id}


@pytest.mark.parametrize("method", ["static", "static_below", "of_class", "above", "below"])
def test_static_class_and_decorated_methods_in_either_order(method, actors, traced_test):
    """Catches a signature that another decorator, or the kind of method, hides from Ray's check."""
    assert get(dispatch_with_trace_context(getattr(actors.sync, method), 3)) == 3
    traced_test.assert_dispatched(method)


@pytest.mark.parametrize("method", ["generator_above", "generator_below"])
def test_a_decorated_generator_method_still_streams(method, actors, traced_test):
    """Catches a wrapper that hides from Ray, which unwraps methods to find out, that a generator is behind it."""
    assert steps(dispatch_with_trace_context(getattr(actors.sync, method), 3)) == [0, 1, 2]
    traced_test.assert_dispatched(method)


def test_an_async_actor_s_plain_method_hangs_under_its_caller(actors, traced_test):
    """Catches a context that Ray's own wrapping of sync methods in async actors would lose."""
    assert get(dispatch_with_trace_context(actors.async_.plain, 3)) == 3
    traced_test.assert_dispatched("async.plain")


def test_a_method_of_keywords_alone_does_not_see_the_carrier(actors, traced_test):
    """Catches the carrier among the user's own keywords, decorated or not."""
    assert get(dispatch_with_trace_context(actors.sync.keywords, a=1)) == ["a"]
    traced_test.assert_dispatched("keywords")
    assert get(dispatch_with_trace_context(actors.sync.undecorated, a=1)) == ["a"]


def test_a_remote_function_hangs_under_its_caller(actors, traced_test):
    """Catches a process without ``__init__`` whose telemetry nobody starts, and a generator that is no stream."""
    assert get(dispatch_with_trace_context(actors.function, 3)) == 3
    traced_test.assert_dispatched("function")
    assert steps(dispatch_with_trace_context(actors.generator_function, 2)) == [0, 1]
    traced_test.assert_dispatched("generator_function")


def test_options_of_methods_functions_and_classes(actors, traced_test):
    """Catches ``.options(...)``, behind which the signature is no longer found."""
    assert get(dispatch_with_trace_context(actors.sync.plain.options(name="x"), 1))[0] == 11
    traced_test.assert_dispatched("plain")
    assert get(dispatch_with_trace_context(actors.function.options(num_cpus=0.1), 3)) == 3
    traced_test.assert_dispatched("function")
    other = dispatch_with_trace_context(actors.Sync.options(num_cpus=0.1), 20)
    assert get(dispatch_with_trace_context(other.static, 1)) == 1
    traced_test.assert_dispatched("static")


def test_a_handle_that_was_looked_up(actors, traced_test):
    """Catches a signature that is lost where a handle is rebuilt from the class that Ray stored."""
    import ray

    assert get(dispatch_with_trace_context(ray.get_actor(actors.name).plain, 1))[0] == 11
    traced_test.assert_dispatched("plain")


def test_a_handle_that_was_passed_on(actors, traced_test):
    """Catches a break in the chain driver, remote function, actor: each under the one before, scopes included."""
    import ray

    @ray.remote(num_cpus=0.1)
    @accepts_trace_context
    def relay(actor: Any) -> Any:
        with umbrella_span("rollout", "relay"):
            return ray.get(dispatch_with_trace_context(actor.plain, 1), timeout=60)

    assert get(dispatch_with_trace_context(relay, actors.sync))[0] == 11
    middle = traced_test.assert_dispatched("relay")
    span = traced_test.one("plain")
    assert span.parent_span_id == middle.span_id
    assert span.iteration == middle.iteration
    assert span.bucket == BUCKET


def test_the_user_s_exception_is_the_user_s(actors, traced_test):
    """Catches a wrapper that swallows or replaces what the method raised."""
    with pytest.raises(LookupError, match="the user's own"):
        get(dispatch_with_trace_context(actors.sync.fails))
    assert traced_test.assert_dispatched("fails").status == "ERROR"


def test_wrong_arguments_are_still_refused_by_the_caller(actors, traced_test):
    """Catches a signature so wide that a mistake surfaces only on the worker."""
    with pytest.raises(TypeError, match="too many positional"):
        dispatch_with_trace_context(actors.sync.static, 1, 2)
    with pytest.raises(TypeError, match="missing a required argument"):
        actors.sync.static.remote()


def test_a_call_without_carrier_after_one_with_it(actors, traced_test):
    """Catches a context that stays current in a sync actor and swallows all its later calls."""
    get(dispatch_with_trace_context(actors.sync.plain, 1))
    steps(dispatch_with_trace_context(actors.sync.generator, 1))
    with pytest.raises(LookupError):
        get(dispatch_with_trace_context(actors.sync.fails))
    before = {s.span_id for s in traced_test.all()}
    get(actors.sync.plain.remote(1))

    def later() -> list[Any]:
        return [s for s in traced_test.all() if s.span_id not in before and s.name == "plain" and s.end_ns]

    (span,) = wait_until(later, "the span of the plain call")
    assert span.parent_span_id is None
    assert span.iteration is None
    assert span.queued_ns is None


def test_a_local_call_nests_where_it_stands(actors, traced_test):
    """Catches a decorated method that, called by another of the same actor, forgets where it is."""
    get(dispatch_with_trace_context(actors.sync.calls_itself))
    outer = traced_test.assert_dispatched("outer")
    assert traced_test.one("plain").parent_span_id == outer.span_id


def test_concurrent_calls_keep_to_their_own_parents(actors, traced_test):
    """Catches one call's context in another that the event loop runs in between."""
    refs = {}
    for i in range(8):
        with umbrella_span("rollout", f"parent-{i}") as parent:
            assert parent is not None
            refs[f"child-{i}"] = (
                parent.span_id.hex(),
                dispatch_with_trace_context(actors.async_.coroutine, i, 0.05, f"child-{i}"),
            )
    for name, (parent_id, ref) in refs.items():
        get(ref)
        assert traced_test.one(name).parent_span_id == parent_id


def test_threads_of_one_actor_keep_to_their_own_parents(cluster, traced_test):
    """Catches one call's context in another that runs at the same time in a threaded actor."""
    import ray

    class Threaded:
        def __init__(self) -> None:
            self.meet = threading.Barrier(4)

        @accepts_trace_context
        def work(self, name: str) -> None:
            self.meet.wait(timeout=30)
            with managed_span("generation", name):
                self.meet.wait(timeout=30)

    actor = ray.remote(Threaded).options(max_concurrency=4, num_cpus=0.1).remote()
    parents, refs = {}, []
    for i in range(4):
        with umbrella_span("rollout", f"thread-parent-{i}") as parent:
            assert parent is not None
            parents[f"thread-child-{i}"] = parent.span_id.hex()
            refs.append(dispatch_with_trace_context(actor.work, f"thread-child-{i}"))
    get(refs)
    assert {name: traced_test.one(name).parent_span_id for name in parents} == parents


def test_the_queueing_delay_is_the_time_in_the_queue(cluster, traced_test):
    """Catches a delay measured from somewhere else than dispatch, or to somewhere else than the call's entry."""
    import ray

    class Busy:
        @accepts_trace_context
        def work(self, name: str, busy_s: float) -> None:
            with managed_span("generation", name):
                time.sleep(busy_s)

    actor = ray.remote(Busy).options(num_cpus=0.1).remote()
    get(actor.work.remote("warm", 0.0))
    first = dispatch_with_trace_context(actor.work, "first", 0.5)
    second = dispatch_with_trace_context(actor.work, "second", 0.0)
    get([first, second])
    before, after = traced_test.one("first"), traced_test.one("second")
    assert before.queued_ns is not None
    assert after.queued_ns is not None
    assert after.queued_ns > 400_000_000
    # What it waited beyond the first is the first's own time, give or take the call itself.
    assert after.queued_ns - before.queued_ns == pytest.approx(before.duration_ns, abs=200_000_000)


def test_cancelling_a_stream_ends_its_span_and_detaches_nothing(cluster, traced_test):
    """Catches "Failed to detach context", and a span that is never ended, when a stream is cancelled half-way."""
    import ray

    class Streams:
        def __init__(self) -> None:
            import logging

            self.logged: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: self.logged.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger().addHandler(handler)

        @accepts_trace_context
        async def stream(self) -> Any:
            import asyncio

            with managed_span("generation", "stream"):
                yield 0
                await asyncio.sleep(60)

        @accepts_trace_context
        async def after(self) -> Any:
            return list(self.logged), current_trace_carrier()

    actor = ray.remote(Streams).options(num_cpus=0.1).remote()
    stream = dispatch_with_trace_context(actor.stream)
    assert get(next(stream)) == 0
    ray.cancel(stream)
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError, StopIteration)):
        get(next(stream))
    assert traced_test.one("stream").parent_span_id == traced_test.root_id
    logged, carrier = get(actor.after.remote())
    assert carrier == {}
    assert not [line for line in logged if "detach" in line]


def test_an_actor_s_class_takes_the_context_to_its_constructor(cluster, traced_test):
    """Catches a carrier sent to a constructor that does not name it, and one that is not sent to one that does."""
    import ray

    class Named:
        @accepts_trace_context
        def __init__(self, x: int) -> None:
            with managed_span("setup", "constructed"):
                self.x = x

        def value(self) -> int:
            return self.x

    class Unnamed:
        def __init__(self, **kwargs: Any) -> None:
            self.kwargs = sorted(kwargs)

        def value(self) -> Any:
            return self.kwargs

    named = dispatch_with_trace_context(ray.remote(num_cpus=0.1)(Named), 4)
    assert get(named.value.remote()) == 4
    traced_test.assert_dispatched("constructed")
    unnamed = dispatch_with_trace_context(ray.remote(num_cpus=0.1)(Unnamed).options(name="unnamed"), a=1)
    assert get(unnamed.value.remote()) == ["a"]


def test_a_decorator_without_wraps_around_a_generator_keeps_the_context(cluster, traced_test):
    """Catches a generator that is only returned, and iterated after the wrapper has gone."""
    import ray

    def bare(fn: Any) -> Any:
        def wrapper(self: Any, n: int) -> Any:
            return fn(self, n)

        return wrapper

    class Bare:
        @accepts_trace_context
        @bare
        def work(self, n: int) -> Any:
            with managed_span("generation", "bare"):
                for i in range(n):
                    yield i

        def all(self, n: int, _otel_carrier: Any = None) -> list[int]:
            return list(self.work(n, _otel_carrier=_otel_carrier))

    actor = ray.remote(Bare).options(num_cpus=0.1).remote()
    assert get(dispatch_with_trace_context(actor.all, 2)) == [0, 1]
    traced_test.assert_dispatched("bare")


def test_traced_is_a_view_of_the_handle(actors, traced_test):
    """Catches a proxy that Ray does not take for the handle, that pickles as itself, or that dispatches differently."""
    import ray

    view = traced(actors.sync)
    assert get(view.plain.remote(1))[0] == 11
    traced_test.assert_dispatched("plain")
    assert get(view.static.options(name="x").remote(2)) == 2
    traced_test.assert_dispatched("static")
    assert steps(view.generator.remote(1)) == [0]
    traced_test.assert_dispatched("generator")
    assert isinstance(view, ray.actor.ActorHandle)
    assert view == actors.sync
    assert actors.sync == view
    assert len({view, actors.sync}) == 1
    assert traced(view) is view

    @ray.remote(num_cpus=0.1)
    def kind_of(handle: Any) -> str:
        return type(handle).__name__

    assert get(kind_of.remote(view)) == "ActorHandle"


def test_traced_of_classes_and_functions(actors, traced_test):
    """Catches a view that works for handles alone."""
    import ray

    assert get(traced(actors.function).remote(3)) == 3
    traced_test.assert_dispatched("function")
    actor = traced(actors.Sync).options(num_cpus=0.1).remote(1)
    assert get(traced(actor).keywords.remote()) == []
    traced_test.assert_dispatched("keywords")
    ray.kill(traced(actor))

    def killed() -> bool:
        try:
            get(actor.keywords.remote())
        except ray.exceptions.RayActorError:
            return True
        return False  # the kill goes by way of the head node, the call does not: it may come first

    wait_until(killed, "the actor to be killed")


def test_off_in_the_driver_the_call_goes_out_as_it_is(actors, cluster):
    """Catches a carrier, or a view that costs more than the call, while tracing is off."""
    assert setup.get_telemetry_handle() is None
    assert trace_context_kwargs() == {}
    assert get(dispatch_with_trace_context(actors.sync.plain, 1, 2, k=3)) == [11, [2], 3, []]
    assert get(dispatch_with_trace_context(actors.function, 3)) == 3
    assert get(traced(actors.sync).static.remote(3)) == 3
    actor = dispatch_with_trace_context(actors.Sync.options(num_cpus=0.1), 1)
    assert get(actor.plain.remote(1))[0] == 2


def test_a_carrier_given_by_hand_and_one_out_of_the_object_store(actors, traced_test):
    """Catches a wrapper that only takes what dispatch sends: NeMo-RL passes the keyword itself."""
    import ray

    get(actors.sync.plain.remote(1, **trace_context_kwargs()))
    by_hand = traced_test.one("plain")
    assert by_hand.parent_span_id == traced_test.root_id
    assert by_hand.queued_ns is None
    get(actors.sync.static.remote(1, _otel_carrier=ray.put(current_trace_carrier())))
    assert traced_test.one("static").parent_span_id == traced_test.root_id


@pytest.mark.parametrize(
    "rubbish", ["text", {}, {"traceparent": 7}, {"traceparent": "00-0-0-0", "raytrace": "i=x|y"}, [1], b"\xff"]
)
def test_a_carrier_of_rubbish_does_not_fail_the_call(rubbish, actors, traced_test):
    """Catches a broken carrier that ends a user's call, or gives it a wrong parent."""
    before = {s.span_id for s in traced_test.all()}
    assert get(actors.sync.static.remote(3, _otel_carrier=rubbish)) == 3

    def later() -> list[Any]:
        return [s for s in traced_test.all() if s.span_id not in before and s.name == "static" and s.end_ns]

    assert wait_until(later, "the span")[0].parent_span_id is None


class Group:
    """A worker group in the shape of NeMo-RL's: what each call broadcasts, and what it slices per worker."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def run_all_workers_single_data(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(worker, method_name).remote(*args, **kwargs) for worker in self.workers]

    def run_all_workers_sharded_data(
        self, method_name: str, *args: Any, common_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        sliced = [{name: values[i] for name, values in kwargs.items()} for i in range(len(self.workers))]
        return [
            getattr(worker, method_name).remote(*args, **own, **(common_kwargs or {}))
            for worker, own in zip(self.workers, sliced, strict=True)
        ]


def test_a_worker_group_broadcasts_the_carrier(actors, traced_test):
    """Catches a carrier among the keywords that a group slices, and one for a method that does not name it."""
    group = Group([actors.sync, actors.sync])
    refs = dispatch_with_trace_context(
        group.run_all_workers_sharded_data, "plain", k=[1, 2], common_kwargs={"other": 3}, x=[5, 6]
    )
    assert get(refs) == [[15, [], 1, ["other"]], [16, [], 2, ["other"]]]
    assert {s.parent_span_id for s in traced_test.named("plain", 2)} == {traced_test.root_id}
    assert get(traced(group).run_all_workers_single_data("static", 4)) == [4, 4]
    assert {s.parent_span_id for s in traced_test.named("static", 2)} == {traced_test.root_id}
    assert get(dispatch_with_trace_context(group.run_all_workers_single_data, "undecorated", a=1)) == [["a"], ["a"]]


def test_a_view_of_a_group_is_the_group(actors, traced_test, caplog):
    """Catches a view of a group that loses the group's own attributes, or whose methods cannot be dispatched."""
    group = Group([actors.sync])
    view: Any = traced(group)
    assert view.workers == [actors.sync]
    assert isinstance(view, Group)
    assert get(dispatch_with_trace_context(view.run_all_workers_single_data, "static", 4)) == [4]
    assert traced_test.one("static").parent_span_id == traced_test.root_id
    assert not caplog.records


def test_a_root_span_for_every_test(traced_test):
    """Catches helpers that would find a span of another test."""
    assert isinstance(traced_test, TracedTest)
    assert current_trace_carrier()["traceparent"].split("-")[1] == traced_test.trace_id
