"""The primitives of algorithm code: gates, buckets, scopes, decorators of each kind of function, foreign tracers."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import threading
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from raytrace_rl import _span, _state, span_groups
from raytrace_rl.instrumentation import (
    Bucket,
    bucket_scope,
    emit_span,
    is_span_group_enabled,
    iteration_scope,
    managed_span,
    safe_set_span_attributes,
    span_attributes,
    span_cm,
    streaming_umbrella_span,
    trace_fn,
    umbrella_span,
    umbrella_trace_fn,
)
from raytrace_rl.span_groups import ALL_GROUPS, UMBRELLA_GROUPS, register_span_groups
from tests.disks import warnings_of
from tests.running import Telemetry, attributes, running

pytest_plugins = ["tests.telemetry_fixtures"]

LEAVES = sorted(ALL_GROUPS - UMBRELLA_GROUPS)


# -- gates -------------------------------------------------------------------------------------------------------------


def test_off_yields_none_and_runs_the_body():
    """Without telemetry the body does not run, or an exception out of it is lost."""
    ran = []
    for span in (
        managed_span("generation", "a", n=1),
        umbrella_span("step", "a"),
        span_cm("a"),
        managed_span("generation", "a", tracer=trace.get_tracer("x")),
        managed_span("generation", "a", tracer="rubbish"),
    ):
        with span as inside:
            assert inside is None
            ran.append(1)
        with pytest.raises(ZeroDivisionError), span:
            _ = 1 // 0
    assert len(ran) == 5


def test_disabled_group_is_none_and_its_children_hang_from_its_parent(tmp_path: Path):
    """A group that is off breaks the tree of those that are on."""
    with running(tmp_path / "run", span_groups="job,reward") as telemetry:
        with umbrella_span("job", "job"), managed_span("generation", "off") as off:
            assert off is None
            with managed_span("reward", "on") as on:
                assert on is not None
            with span_cm("no group"):
                pass
        spans = {span.name: span for span in telemetry.spans()}
    assert set(spans) == {"job.started", "on", "no group", "job"}
    assert spans["on"].parent_span_id == spans["job"].span_id


def test_traces_off(tmp_path: Path):
    """``traces_enabled=False`` still records spans outside all groups."""
    with running(tmp_path / "run", traces_enabled=False) as telemetry:
        with span_cm("a") as a, managed_span("generation", "b") as b, umbrella_span("job", "c") as c:
            assert (a, b, c) == (None, None, None)
        assert telemetry.spans() == []
        assert not telemetry.handle.is_exporting


def test_name_and_group_may_be_attributes(telemetry: Telemetry):
    """``managed_span(g, n, name="x")`` is a TypeError: positional-only parameters are not."""
    with managed_span("generation", "a", name="x", group="y"), span_cm("b", name="x"):
        pass
    found = attributes(telemetry.span("a"))
    assert (found["name"], found["group"]) == ("x", "y")
    assert attributes(telemetry.span("b"))["name"] == "x"


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_default_buckets(telemetry: Telemetry):
    """A group's time counts as something else than DESIGN says; an umbrella's counts twice."""
    for group in ALL_GROUPS:
        with managed_span(group, group):
            pass
    found = {span.name: attributes(span).get("rl.bucket") for span in telemetry.spans()}
    productive = {"generation", "reward", "policy_update"}
    assert {name for name, bucket in found.items() if bucket == "productive"} == productive
    assert {name for name, bucket in found.items() if bucket == "overhead"} == set(LEAVES) - productive
    assert {name for name, bucket in found.items() if bucket is None} == UMBRELLA_GROUPS | {"job.started"}


@pytest.mark.parametrize("group", ["generation", "checkpoint", "step", None])
@pytest.mark.parametrize("scope", [None, Bucket.IDLE, "wasted"])
@pytest.mark.parametrize("explicit", [None, Bucket.PRODUCTIVE, "OVERHEAD"])
def test_precedence_of_buckets(telemetry: Telemetry, group: str | None, scope: Any, explicit: Any):
    """Explicit, then the nearest scope, then the group's default; an umbrella takes only an explicit one."""
    given = {} if explicit is None else {"rl.bucket": explicit}

    def open_span() -> Any:
        return span_cm("a", **given) if group is None else managed_span(group, "a", **given)

    if scope is None:
        with open_span():
            pass
    else:
        with bucket_scope("productive"), bucket_scope(scope), open_span():
            pass
    found = attributes(telemetry.span("a")).get("rl.bucket")
    default = {"generation": "productive", "checkpoint": "overhead"}.get(str(group))
    wanted: str | None
    if explicit is not None:
        wanted = str(explicit).lower()
    elif default is not None and scope is not None:
        wanted = str(scope)
    else:
        wanted = default
    assert found == wanted


def test_what_is_no_bucket_is_ignored_with_one_warning(telemetry: Telemetry, caplog: pytest.LogCaptureFixture):
    """A slip in a bucket's name makes a fifth bucket, ends the step, or passes unnoticed."""
    for _ in range(3):
        with bucket_scope("prodctive"), managed_span("generation", "a", **{"rl.bucket": 5}):
            pass
    assert [attributes(span)["rl.bucket"] for span in telemetry.spans()] == ["productive"] * 3
    assert sum("no goodput bucket" in record.getMessage() for record in caplog.records) == 2


def test_unknown_leaf_group_is_overhead(telemetry: Telemetry, registrations: None):
    """The time of a library's own group is in no bucket."""
    register_span_groups("lib", {"lib_leaf", "lib_top"}, umbrellas={"lib_top"})
    with managed_span("lib_top", "top"), managed_span("lib_leaf", "leaf"):
        pass
    assert attributes(telemetry.span("leaf"))["rl.bucket"] == "overhead"
    assert "rl.bucket" not in attributes(telemetry.span("top"))


def test_umbrella_span_on_a_leaf_group(telemetry: Telemetry, caplog: pytest.LogCaptureFixture):
    """The time of a misused primitive is lost to goodput, or the log is flooded."""
    for _ in range(3):
        with umbrella_span("generation", "a"):
            pass
    assert [attributes(span)["rl.bucket"] for span in telemetry.spans()] == ["productive"] * 3
    assert sum("leaf group" in record.getMessage() for record in caplog.records) == 1


# -- scopes ------------------------------------------------------------------------------------------------------------


def test_iteration_scope(telemetry: Telemetry):
    """A span belongs to no step, to the step before, or to the outer one."""
    with managed_span("generation", "before"):
        pass
    with iteration_scope(3):
        with managed_span("generation", "in 3"), iteration_scope(4), managed_span("reward", "in 4"):
            pass
        with managed_span("generation", "again in 3"):
            pass
    with managed_span("generation", "after"):
        pass
    found = {span.name: attributes(span).get("rl.iteration") for span in telemetry.spans()}
    assert found == {"before": None, "in 3": 3, "in 4": 4, "again in 3": 3, "after": None}


def test_scopes_combine(telemetry: Telemetry):
    """The inner scope forgets what the outer one said."""
    with iteration_scope(3), bucket_scope(Bucket.WASTED), managed_span("generation", "a"):
        pass
    found = attributes(telemetry.span("a"))
    assert (found["rl.iteration"], found["rl.bucket"]) == (3, "wasted")


@pytest.mark.parametrize("rubbish", ["x", None, object(), float("nan"), float("inf")])
def test_iteration_that_is_no_number_is_ignored(telemetry: Telemetry, rubbish: Any):
    """A slip in telemetry ends the training step."""
    with iteration_scope(3), iteration_scope(rubbish), managed_span("generation", "a"):
        pass
    assert attributes(telemetry.span("a"))["rl.iteration"] == 3


def test_iteration_beyond_64_bits_is_lost_alone(telemetry: Telemetry):
    """A hash in the place of a step costs the span."""
    with iteration_scope(2**70), managed_span("generation", "a"):
        pass
    assert "rl.iteration" not in attributes(telemetry.span("a"))
    assert telemetry.drops == {"attributes": 1}


def test_exception_leaves_no_scope_behind(telemetry: Telemetry):
    """After a failed step all spans count as wasted, in the failed step."""
    with pytest.raises(ZeroDivisionError), iteration_scope(3), bucket_scope("wasted"):
        _ = 1 // 0
    with managed_span("generation", "a"):
        pass
    found = attributes(telemetry.span("a"))
    assert "rl.iteration" not in found
    assert found["rl.bucket"] == "productive"


# -- the job's start, and a trace a step -------------------------------------------------------------------------------


def test_job_announces_itself(telemetry: Telemetry):
    """A backend that shows a trace when its root has ended shows nothing of a run that lives for days."""
    with umbrella_span("job", "rl.grpo.job"):
        (started,) = telemetry.spans()
        assert started.name == "rl.grpo.job.started"
        assert started.start_time_unix_nano == started.end_time_unix_nano
    job = telemetry.span("rl.grpo.job")
    assert started.parent_span_id == job.span_id
    assert started.start_time_unix_nano == job.start_time_unix_nano


@pytest.mark.parametrize("trace_per", ["run", "step"])
def test_trace_per(tmp_path: Path, trace_per: str):
    """One trace of a million spans where a backend refuses it; or steps that do not lead back to their job."""
    with running(tmp_path / "run", trace_per=trace_per) as telemetry:
        with umbrella_span("job", "job") as job:
            for n in range(2):
                with (
                    iteration_scope(n),
                    umbrella_span("step", "step"),
                    umbrella_span("rollout", "in step"),
                    managed_span("generation", "leaf"),
                ):
                    pass
            with umbrella_span("rollout", "collector's"):
                pass
            assert trace.get_current_span() is job
        spans = telemetry.spans()
    (job_span,) = [span for span in spans if span.name == "job"]
    roots = [span for span in spans if span.name in {"step", "collector's"}]
    if trace_per == "run":
        assert {span.trace_id for span in spans} == {job_span.trace_id}
        assert not any(span.links for span in spans)
    else:
        assert len({span.trace_id for span in [*roots, job_span]}) == 4
        for span in roots:
            assert span.parent_span_id == b""
            assert [(link.trace_id, link.span_id) for link in span.links] == [(job_span.trace_id, job_span.span_id)]
    steps = [span for span in spans if span.name == "step"]
    inner = [span for span in spans if span.name == "in step"]
    assert [span.parent_span_id for span in inner] == [span.span_id for span in steps]
    assert [span.trace_id for span in inner] == [span.trace_id for span in steps]


# -- decorators --------------------------------------------------------------------------------------------------------


@trace_fn("generation", "plain")
def plain(a: int, *, b: int = 2) -> int:
    """Adds."""
    with managed_span("reward", "inside"):
        return a + b


@trace_fn("generation", "coroutine")
async def coroutine(a: int) -> int:
    """Waits."""
    await asyncio.sleep(0)
    with managed_span("reward", "inside"):
        await asyncio.sleep(0)
        return a + 1


@trace_fn("generation", "generator")
def generator(n: int) -> Generator[int, Any, str]:
    """Counts."""
    with managed_span("reward", "inside"):
        for k in range(n):
            got = yield k
            if got is not None:
                yield got * 10
    return "done"


@trace_fn("generation", "asyncgen")
async def asyncgen(n: int) -> AsyncGenerator[int, Any]:
    """Counts and waits."""
    with managed_span("reward", "inside"):
        for k in range(n):
            await asyncio.sleep(0)
            got = yield k
            if got is not None:
                yield got * 10


def test_decorators_keep_the_kind_and_the_name():
    """``inspect`` takes a decorated coroutine for a plain function, and a framework calls it without awaiting."""
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(generator)
    assert inspect.isasyncgenfunction(asyncgen)
    assert not inspect.iscoroutinefunction(plain)
    for function in (plain, coroutine, generator, asyncgen):
        assert function.__doc__ in {"Adds.", "Waits.", "Counts.", "Counts and waits."}
        assert function.__module__ == __name__
    assert list(inspect.signature(plain).parameters) == ["a", "b"]


async def collect(items: Any) -> list[Any]:
    """All items of an async generator."""
    return [item async for item in items]


def test_decorated_functions_work_with_telemetry_off():
    """Off, a decorated function returns something else than it did."""
    assert plain(1) == 3
    assert asyncio.run(coroutine(1)) == 2
    assert list(generator(3)) == [0, 1, 2]
    assert asyncio.run(collect(asyncgen(3))) == [0, 1, 2]


def test_decorated_functions_are_spans(telemetry: Telemetry):
    """A decorated function opens no span, or what it opens inside does not hang from it."""
    assert plain(1, b=4) == 5
    assert asyncio.run(coroutine(1)) == 2
    assert list(generator(3)) == [0, 1, 2]
    assert asyncio.run(collect(asyncgen(3))) == [0, 1, 2]
    spans = telemetry.spans()
    assert [span.name for span in spans] == [
        *("inside", "plain"),
        *("inside", "coroutine"),
        *("inside", "generator"),
        *("inside", "asyncgen"),
    ]
    for inside, outer in zip(spans[::2], spans[1::2], strict=True):
        assert inside.parent_span_id == outer.span_id
        assert attributes(outer)["rl.bucket"] == "productive"
        assert outer.status.code == 0


def test_default_name_is_the_qualified_name(telemetry: Telemetry):
    """Spans of two classes' ``run`` cannot be told apart."""

    class Worker:
        @trace_fn("generation")
        def run(self) -> str:
            return "ran"

        @staticmethod
        @trace_fn("generation", "static")
        def still() -> str:
            return "ran"

        @classmethod
        @trace_fn("generation", "class")
        def whole(cls) -> str:
            return cls.__name__

    assert (Worker().run(), Worker.still(), Worker.whole()) == ("ran", "ran", "Worker")
    names = [span.name for span in telemetry.spans()]
    assert names[0].endswith("Worker.run")
    assert names[1:] == ["static", "class"]


def test_decorated_callable_of_another_kind(telemetry: Telemetry):
    """A ``functools.partial`` or a callable object cannot be decorated."""

    class Callable:
        def __call__(self, n: int) -> int:
            return n + 1

    assert trace_fn("generation", "object")(Callable())(1) == 2
    assert trace_fn("generation", "partial")(functools.partial(max, 3))(1) == 3
    assert [span.name for span in telemetry.spans()] == ["object", "partial"]


@pytest.mark.parametrize("kind", ["plain", "coroutine", "generator", "asyncgen"])
def test_exception_out_of_each_kind(telemetry: Telemetry, kind: str):
    """A failed call reads as a success; or its exception is changed on the way."""
    error = LookupError("mine")

    @trace_fn("generation", "plain")
    def fails() -> None:
        raise error

    @trace_fn("generation", "coroutine")
    async def afails() -> None:
        await asyncio.sleep(0)
        raise error

    @trace_fn("generation", "generator")
    def gfails() -> Generator[int]:
        yield 1
        raise error

    @trace_fn("generation", "asyncgen")
    async def agfails() -> AsyncGenerator[int]:
        yield 1
        raise error

    calls: dict[str, Any] = {
        "plain": fails,
        "coroutine": lambda: asyncio.run(afails()),
        "generator": lambda: list(gfails()),
        "asyncgen": lambda: asyncio.run(collect(agfails())),
    }
    with pytest.raises(LookupError) as caught:
        calls[kind]()
    assert caught.value is error
    (span,) = telemetry.spans()
    assert (span.name, span.status.code, len(span.events)) == (kind, 2, 1)


def test_generator_sends_throws_and_returns(telemetry: Telemetry):
    """``send``, ``throw`` or the return value of a generator get lost in the decorator (PEP 380)."""

    @trace_fn("generation", "echo")
    def echo() -> Generator[Any, Any, str]:
        got = yield "first"
        while got != "stop":
            try:
                got = yield got
            except KeyError as error:
                got = yield f"caught {error}"
        return "result"

    steps = echo()
    assert next(steps) == "first"
    assert steps.send("a") == "a"
    assert steps.throw(KeyError("k")) == "caught 'k'"
    assert steps.send("b") == "b"
    with pytest.raises(StopIteration) as stop:
        steps.send("stop")
    assert stop.value.value == "result"
    assert telemetry.span("echo").status.code == 0

    def delegating() -> Generator[Any, Any, str]:
        return (yield from echo())

    steps = delegating()
    assert [next(steps), steps.send("x")] == ["first", "x"]
    with pytest.raises(StopIteration) as stop:
        steps.send("stop")
    assert stop.value.value == "result"


def test_async_generator_sends_and_throws(telemetry: Telemetry):
    """``asend`` or ``athrow`` get lost in the decorator."""

    @trace_fn("generation", "echo")
    async def echo() -> AsyncGenerator[Any, Any]:
        got = yield "first"
        while got != "stop":
            try:
                await asyncio.sleep(0)
                got = yield got
            except KeyError as error:
                got = yield f"caught {error}"

    async def main() -> None:
        steps = echo()
        assert await anext(steps) == "first"
        assert await steps.asend("a") == "a"
        assert await steps.athrow(KeyError("k")) == "caught 'k'"
        assert await steps.asend("b") == "b"
        with pytest.raises(StopAsyncIteration):
            await steps.asend("stop")
        with pytest.raises(StopAsyncIteration):
            await anext(steps)

    asyncio.run(main())
    (span,) = telemetry.spans()
    assert (span.name, span.status.code) == ("echo", 0)


def test_generators_span_is_not_its_consumers(telemetry: Telemetry):
    """Between two steps the generator's span is current in the consumer, and adopts what the consumer opens."""
    with managed_span("data_processing", "consumer") as consumer:
        for _ in generator(2):
            assert trace.get_current_span() is consumer
            with managed_span("logprob", "between"):
                pass
        assert trace.get_current_span() is consumer
    spans = telemetry.spans()
    (outer,) = [span for span in spans if span.name == "consumer"]
    (made,) = [span for span in spans if span.name == "generator"]
    assert {span.parent_span_id for span in spans if span.name in {"between", "generator"}} == {outer.span_id}
    assert [span.parent_span_id for span in spans if span.name == "inside"] == [made.span_id]


def test_async_generators_span_is_not_its_consumers(telemetry: Telemetry):
    """As for generators; and a ``with`` span of the user's stays current across its own yields."""
    seen: list[Any] = []

    @trace_fn("generation", "producer")
    async def producer() -> AsyncGenerator[int]:
        with managed_span("reward", "held") as held:
            for n in range(3):
                seen.append(trace.get_current_span() is held)
                yield n
                await asyncio.sleep(0)
                seen.append(trace.get_current_span() is held)

    async def main() -> None:
        with managed_span("data_processing", "consumer") as consumer:
            async for _ in producer():
                assert trace.get_current_span() is consumer
                with managed_span("logprob", "between"):
                    await asyncio.sleep(0)
            assert trace.get_current_span() is consumer

    asyncio.run(main())
    assert seen == [True] * 6
    spans = {span.name: span for span in telemetry.spans()}
    assert spans["between"].parent_span_id == spans["consumer"].span_id
    assert spans["held"].parent_span_id == spans["producer"].span_id


@pytest.mark.parametrize("way", ["close", "throw", "garbage", "exhaust", "never started", "other thread"])
def test_generators_span_ends_once(telemetry: Telemetry, way: str):
    """A half-read generator leaves its span open for the rest of the run, or ends it twice."""
    steps = generator(3)
    if way == "never started":
        del steps
        gc.collect()
        assert telemetry.spans() == []
        return
    next(steps)
    assert telemetry.spans() == []
    if way == "close":
        steps.close()
        steps.close()
    elif way == "throw":
        with pytest.raises(KeyError):
            steps.throw(KeyError("k"))
    elif way == "garbage":
        del steps
        gc.collect()
    elif way == "exhaust":
        list(steps)
    else:
        thread = threading.Thread(target=steps.close)
        thread.start()
        thread.join()
    spans = telemetry.spans()
    assert [span.name for span in spans] == ["inside", "generator"]
    assert [span.status.code for span in spans] == [2, 2] if way == "throw" else [0, 0]
    assert not _state.open_spans
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("way", ["aclose", "athrow", "break", "cancel", "exhaust", "other task"])
def test_async_generators_span_ends_once(telemetry: Telemetry, way: str, caplog: pytest.LogCaptureFixture):
    """As for generators; and cancelling says "Failed to detach context" in the user's log."""

    @trace_fn("generation", "asyncgen")
    async def slow() -> AsyncGenerator[int]:
        with managed_span("reward", "inside"):
            yield 1
            await asyncio.sleep(0 if way == "exhaust" else 60)
            yield 2

    async def consume(steps: Any) -> None:
        async for _ in steps:
            pass

    async def main() -> None:
        steps = slow()
        if way in {"cancel", "exhaust"}:
            task = asyncio.create_task(consume(steps))
            for _ in range(5):
                await asyncio.sleep(0)
            if way == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task
            return
        if way == "break":
            async for _ in steps:
                break
            del steps
            gc.collect()
            await asyncio.sleep(0.01)
            return
        await anext(steps)
        if way == "aclose":
            await steps.aclose()
        elif way == "athrow":
            with pytest.raises(KeyError):
                await steps.athrow(KeyError("k"))
        else:
            await asyncio.create_task(steps.aclose())

    asyncio.run(main())
    spans = telemetry.spans()
    assert [span.name for span in spans] == ["inside", "asyncgen"]
    assert [span.status.code for span in spans] == ([2, 2] if way in {"athrow", "cancel"} else [0, 0])
    if way == "cancel":
        assert attributes(spans[1].events[0])["exception.type"] == "asyncio.exceptions.CancelledError"
    assert not _state.open_spans
    assert not [record for record in caplog.records if "detach" in record.getMessage()]


def test_generator_read_while_its_consumer_handles_an_error(telemetry: Telemetry):
    """Read to its end inside an ``except`` block, a generator takes the consumer's error for its own."""

    async def main() -> list[Any]:
        try:
            raise LookupError("the consumer's")
        except LookupError:
            return [list(generator(2)), await collect(asyncgen(2)), await coroutine(1), plain(1)]

    assert asyncio.run(main()) == [[0, 1], [0, 1], 2, 3]
    assert {span.status.code for span in telemetry.spans()} == {0}


def test_coroutine_cancelled_and_dropped(telemetry: Telemetry):
    """A cancelled rollout reads as a success; one that is dropped half-way stays open."""

    async def main() -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    @trace_fn("generation", "forever")
    async def forever() -> None:
        await asyncio.sleep(60)

    asyncio.run(main())
    dropped = forever()
    with managed_span("data_processing", "driver"):
        # driven by hand to its first wait, and forgotten there
        loop = asyncio.new_event_loop()
        try:
            asyncio.events._set_running_loop(loop)
            dropped.send(None)
        finally:
            asyncio.events._set_running_loop(None)
            loop.close()
    dropped.close()
    spans = telemetry.spans()
    assert sorted((span.name, span.status.code) for span in spans) == [("driver", 0), ("forever", 0), ("forever", 2)]
    assert not _state.open_spans
    assert not trace.get_current_span().get_span_context().is_valid


def test_recursive_generators(telemetry: Telemetry):
    """A decorated generator that calls itself cannot enter its context, which is entered already."""

    @trace_fn("generation", "walk")
    def walk(depth: int) -> Generator[int]:
        yield depth
        if depth:
            yield from walk(depth - 1)

    assert list(walk(3)) == [3, 2, 1, 0]
    spans = telemetry.spans()
    parents = {span.span_id: span.parent_span_id for span in spans}
    assert len(spans) == 4
    (root,) = [span for span, parent in parents.items() if not parent]
    chain = [root]
    while children := [span for span, parent in parents.items() if parent == chain[-1]]:
        (child,) = children
        chain.append(child)
    assert len(chain) == 4


def test_umbrella_trace_fn(telemetry: Telemetry):
    """A decorated umbrella carries a bucket, or is no job."""

    @umbrella_trace_fn("job", "job")
    def job() -> None:
        step()

    @umbrella_trace_fn("step", "step")
    def step() -> None:
        pass

    job()
    spans = {span.name: span for span in telemetry.spans()}
    assert set(spans) == {"job.started", "job", "step"}
    assert spans["step"].parent_span_id == spans["job"].span_id
    assert not any("rl.bucket" in attributes(span) for span in spans.values())


def test_decorator_asks_the_gate_at_each_call(tmp_path: Path):
    """A function decorated at import time, before telemetry starts, is never traced."""
    assert plain(1) == 3
    with running(tmp_path / "one", span_groups="generation") as telemetry:
        assert plain(1) == 3
        assert [span.name for span in telemetry.spans()] == ["plain"]
        _state.enabled = frozenset()
        assert plain(1) == 3
        assert len(telemetry.spans()) == 1


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("junk", [[], {}, {"generation"}, [["job"]]], ids=str)
def test_what_cannot_be_a_group_is_one_warning_and_the_body_runs(
    junk: Any, on: bool, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
):
    """A group out of a configuration that is a list ends the run, as it is only looked up in a set."""
    telemetry = request.getfixturevalue("telemetry") if on else None
    ran = []
    for opener in (managed_span, umbrella_span):
        with opener(junk, "s") as span:
            ran.append(span)
    with streaming_umbrella_span(junk, "s") as step, step() as span:
        ran.append(span)
    assert ran == [None] * 3
    for decorator in (trace_fn, umbrella_trace_fn):
        assert decorator(junk, "s")(len)([1]) == 1
        assert list(decorator(junk, "s")(lambda: iter((1, 2)))()) == [1, 2]
    emit_span(junk, "s", 1.0, 2.0)
    assert is_span_group_enabled(junk) is False
    assert len(warnings_of(caplog)) == 1
    if telemetry is not None:
        assert (telemetry.spans(), telemetry.drops) == ([], {})


def test_shared_attributes_that_are_none_are_one_warning(telemetry: Telemetry, caplog: pytest.LogCaptureFixture):
    """``span_attributes(config.tags)`` with a list in it ends the run."""
    for junk in (None, [1], 5, "x"):
        with span_attributes(junk), managed_span("generation", "s"):
            pass
    assert len(telemetry.spans()) == 4
    assert len(warnings_of(caplog)) == 1


# -- foreign tracers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "coroutine", "generator", "asyncgen"])
@pytest.mark.parametrize("decorate", [trace_fn, umbrella_trace_fn])
def test_decorators_take_a_tracer(telemetry: Telemetry, decorate: Any, kind: str):
    """``@trace_fn(group, name, tracer=telemetry.tracer)``, as NeMo-RL writes it, fails at import or loses the span."""
    group = "generation" if decorate is trace_fn else "job"

    @decorate(group, "decorated", tracer=trace.get_tracer("theirs"))
    def plain() -> int:
        return len(list(inner(2)))

    @decorate(group, "decorated", tracer=trace.get_tracer("theirs"))
    async def coroutine() -> int:
        await asyncio.sleep(0)
        return plain_inner(2)

    @decorate(group, "decorated", tracer=trace.get_tracer("theirs"))
    def generator() -> Generator[int]:
        yield from inner(2)

    @decorate(group, "decorated", tracer=trace.get_tracer("theirs"))
    async def asyncgen() -> AsyncGenerator[int]:
        for n in inner(2):
            yield n

    def inner(count: int) -> Any:
        with managed_span("reward", "inside"):
            yield from range(count)

    def plain_inner(count: int) -> int:
        return len(list(inner(count)))

    async def collect() -> int:
        return len([n async for n in asyncgen()])

    calls: dict[str, Any] = {
        "plain": plain,
        "coroutine": lambda: asyncio.run(coroutine()),
        "generator": lambda: len(list(generator())),
        "asyncgen": lambda: asyncio.run(collect()),
    }
    assert calls[kind]() == 2
    decorated, inside = telemetry.span("decorated"), telemetry.span("inside")
    assert inside.parent_span_id == decorated.span_id
    assert attributes(decorated)["rl.span_group"] == group
    assert attributes(decorated).get("rl.bucket") == ("productive" if group == "generation" else None)
    scopes = [row.scope.name for row in telemetry.run().spans if row.name == "decorated" and row.scope is not None]
    assert scopes == ["theirs"]


def test_what_is_no_tracer_is_ignored(telemetry: Telemetry):
    """``tracer=config.tracer`` with a string in it ends the run, or loses the span."""
    for rubbish in ("x", 5, object(), {}):
        with managed_span("generation", "a", tracer=rubbish), span_cm("b", tracer=rubbish):
            pass
    assert len(telemetry.spans()) == 8


class FailingTracer:
    """A tracer that fails where a test says."""

    def __init__(self, *, at: str) -> None:
        self.at = at

    def start_as_current_span(self, name: str, attributes: Any = None) -> Any:
        if self.at == "call":
            raise RuntimeError("no span today")
        return self

    def __enter__(self) -> Any:
        if self.at == "enter":
            raise RuntimeError("no span today")
        return trace.INVALID_SPAN

    def __exit__(self, *_: object) -> None:
        if self.at == "exit":
            raise RuntimeError("no end today")


@pytest.mark.parametrize("at", ["call", "enter", "exit"])
def test_tracer_that_fails_does_not_end_the_run(telemetry: Telemetry, at: str):
    """An error of somebody else's tracer comes out of our ``with`` statement."""
    ran = []
    with managed_span("generation", "a", tracer=FailingTracer(at=at)):
        ran.append(1)
    assert ran == [1]
    with pytest.raises(KeyError), managed_span("generation", "a", tracer=FailingTracer(at=at)):
        raise KeyError


# -- attributes --------------------------------------------------------------------------------------------------------


def test_safe_set_span_attributes(telemetry: Telemetry):
    """Setting attributes on a disabled span, or of rubbish, raises."""
    safe_set_span_attributes(None, {"a": 1})
    with managed_span("generation", "a") as span:
        safe_set_span_attributes(span, {"a": 1, "none": None, "bad": object()})
        safe_set_span_attributes(span, 5)
    found = attributes(telemetry.span("a"))
    assert found["a"] == 1
    assert not {"none", "bad"} & set(found)


def test_attributes_of_a_call_are_its_own(telemetry: Telemetry):
    """The span keeps the caller's dictionary, and both change it."""
    given = {"a": 1, "rl.bucket": "idle"}
    with managed_span("generation", "x", **given) as span:
        assert span is not None
        span.set_attribute("b", 2)
    assert given == {"a": 1, "rl.bucket": "idle"}


def test_context_variable_of_otel_is_the_real_one():
    """OpenTelemetry moves its context elsewhere, and nobody sees our spans as parents any more."""
    from opentelemetry import context

    token = context.attach(context.set_value("k", 1))
    assert _span.otel_var.get() is context.get_current()
    context.detach(token)
    assert span_groups.is_span_group_enabled("generation") is False
