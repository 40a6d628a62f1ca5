"""The wrapper of `accepts_trace_context` and the plan of a dispatch, without a cluster."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import inspect
import logging
import signal
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context, trace

from raytrace_rl import (
    _scopes,
    _span,
    accepts_trace_context,
    dispatch_with_trace_context,
    iteration_scope,
    managed_span,
    setup,
    trace_context_kwargs,
    traced,
)
from tests.shaped_workers import Worker, score, train

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterator

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
INSIDE = f"{TRACE_ID}-{SPAN_ID}"
CARRIER = {"traceparent": f"00-{INSIDE}-01", "raytrace": "i=7;b=overhead"}


@pytest.fixture(autouse=True)
def _telemetry() -> Iterator[None]:
    """Telemetry on, its spans going nowhere."""
    setup.init_telemetry_driver({"enabled": True, "exporter": "none", "span_groups": "all"})
    yield
    setup.shutdown_telemetry()


def parent() -> str | None:
    """The current span as ``trace-span``, None if there is none."""
    found = trace.get_current_span().get_span_context()
    return f"{found.trace_id:032x}-{found.span_id:016x}" if found.is_valid else None


def iteration() -> int | None:
    """The current iteration."""
    scopes = _scopes.var.get()
    return None if scopes is None else scopes.iteration


def carried(fn: Any, *args: Any, carrier: Any = CARRIER) -> Any:
    """Calls ``fn`` as Ray does at the other end of a dispatch."""
    return fn(*args, _otel_carrier=carrier)


def assert_clean() -> None:
    """Nothing of a call is current any more."""
    assert parent() is None
    assert _scopes.var.get() is None


# ------------------------------------------------------------------------------------------------- the wrapper itself


def plain(self: Any, x: int, *rest: int, k: int = 1, **extra: Any) -> int:
    """Documented."""
    return x


async def coroutine(x: int) -> int:
    """Documented."""
    return x


def generator(n: int) -> Generator[int, None, None]:
    """Documented."""
    yield n


async def asyncgen(n: int) -> AsyncGenerator[int, None]:
    """Documented."""
    yield n


@pytest.mark.parametrize("fn", [plain, coroutine, generator, asyncgen])
def test_the_wrapper_is_the_same_kind_of_function(fn):
    """Catches a wrapper that inspect, and Ray, take for another kind."""
    wrapper: Any = accepts_trace_context(fn)
    for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        assert kind(wrapper) == kind(fn)
    assert wrapper.__name__ == fn.__name__
    assert wrapper.__doc__ == "Documented."
    assert wrapper.__module__ == __name__


@pytest.mark.parametrize("fn", [plain, coroutine, generator, asyncgen])
def test_ray_s_check_finds_the_carrier_and_the_function_is_left_alone(fn):
    """Catches a wrapper that Ray looks past, and a decorator that writes into the user's function."""
    before = (dict(fn.__dict__), inspect.signature(fn), fn.__defaults__, fn.__kwdefaults__)
    wrapper = accepts_trace_context(fn)
    seen = inspect.signature(inspect.unwrap(wrapper)).parameters
    assert seen["_otel_carrier"].kind is inspect.Parameter.KEYWORD_ONLY
    assert seen["_otel_carrier"].default is None
    assert [p for p in seen.values() if p.name != "_otel_carrier"] == list(before[1].parameters.values())
    assert (dict(fn.__dict__), inspect.signature(fn), fn.__defaults__, fn.__kwdefaults__) == before


def test_marks_on_the_function_are_kept():
    """Catches ``@ray.method`` options, or an abstract method's mark, that the wrapper loses."""

    def fn() -> None: ...

    fn.__ray_num_returns__ = 2
    assert accepts_trace_context(fn).__ray_num_returns__ == 2


def test_a_plain_decorator_around_a_generator_stays_what_it_was():
    """Catches a wrapper that is a generator function to remote functions, which look at it as it is, or none to actors,
    which unwrap it.
    """

    @functools.wraps(generator)
    def collected(*args: Any, **kwargs: Any) -> list[int]:
        return list(generator(*args, **kwargs))

    wrapper = accepts_trace_context(collected)
    assert not inspect.isgeneratorfunction(wrapper)
    assert inspect.isgeneratorfunction(inspect.unwrap(wrapper))
    assert carried(wrapper, 3) == [3]
    assert "_otel_carrier" in inspect.signature(inspect.unwrap(wrapper)).parameters


@pytest.mark.parametrize("what", [property(lambda self: 1), 7, type("C", (), {}), functools.partialmethod(plain)])
def test_what_cannot_take_a_carrier_is_returned_as_it_is(what, caplog):
    """Catches a decorator that breaks a class, or silently does nothing."""
    assert accepts_trace_context(what) is what
    assert len([r for r in caplog.records if "cannot accept a trace context" in r.getMessage()]) == 1


# -------------------------------------------------------------------------------------------------------- one call


def test_a_call_with_a_carrier_runs_under_it_and_leaves_nothing():
    """Catches a context or scope that stays current for the next call, after an exception too."""

    @accepts_trace_context
    def call(fail: bool = False) -> Any:
        context.attach(baggage.set_baggage("left", "behind"))
        _scopes.var.set(_scopes.make(None, iteration=99))
        if fail:
            raise LookupError
        return parent()

    otel = _span.otel_var.get()
    assert carried(call) == INSIDE
    assert_clean()
    with pytest.raises(LookupError):
        carried(call, True)
    assert_clean()
    assert _span.otel_var.get() is otel


def test_scopes_and_delay_of_the_call():
    """Catches a delay on every span of a call, and scopes of the place where the actor was left."""

    @accepts_trace_context
    def call() -> tuple[Any, int | None]:
        scopes = _scopes.var.get()
        assert scopes is not None
        return (scopes.iteration, scopes.bucket), scopes.take_queued()

    with iteration_scope(1):
        assert carried(call) == ((7, "overhead"), None)
        assert iteration() == 1


def test_without_a_carrier_the_context_is_left_alone():
    """Catches a local call that becomes a root, or whose own changes to the context are undone."""
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark")

    @accepts_trace_context
    def call() -> str | None:
        mark.set(1)
        return parent()

    with managed_span("generation", "local"):
        assert call() == parent()
    assert mark.get() == 1


def test_a_user_s_context_variable_survives_a_call_with_a_carrier():
    """Catches a call run in a copied context: an actor that counts in a ContextVar would start anew each time."""
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark")

    @accepts_trace_context
    def call() -> None:
        mark.set(2)

    carried(call)
    assert mark.get() == 2


def test_a_function_that_names_the_carrier_itself_gets_it():
    """Catches a method in NeMo-RL's style, which reads the carrier, that finds it gone."""

    @accepts_trace_context
    def call(x: int, _otel_carrier: Any = None) -> Any:
        return _otel_carrier, parent()

    assert carried(call, 1) == (CARRIER, INSIDE)
    assert call(1) == (None, None)


def test_decorated_twice():
    """Catches a method that a base class's decorator and a subclass's both wrap."""

    @accepts_trace_context
    @accepts_trace_context
    def call(x: int, **extra: Any) -> Any:
        return parent(), extra

    assert carried(call, 1) == (INSIDE, {})


@pytest.mark.parametrize("fail_at", [None, "start", "during"])
def test_a_raising_signal_handler_leaves_nothing_current(fail_at):
    """Catches an alarm-based time-out whose exception falls between attaching and the call, and leaves a parent."""

    class TimesUpError(Exception):
        pass

    def handler(*args: Any) -> None:
        raise TimesUpError

    @accepts_trace_context
    def call() -> None:
        if fail_at == "during":
            signal.raise_signal(signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        if fail_at == "start":
            with pytest.raises(TimesUpError):
                carried(call, carrier=_Alarm(CARRIER))
        elif fail_at == "during":
            with pytest.raises(TimesUpError):
                carried(call)
        else:
            carried(call)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert_clean()


class _Alarm(dict):
    """A carrier in the midst of whose reading the signal comes."""

    def __iter__(self) -> Iterator[Any]:
        signal.raise_signal(signal.SIGUSR1)
        return super().__iter__()

    def keys(self) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return super().keys()


# ------------------------------------------------------------------------------------------------------- generators


@accepts_trace_context
def echo(n: int) -> Generator[Any, Any, str]:
    """Yields where it is and what it was sent."""
    got: Any = None
    try:
        for _ in range(n):
            try:
                got = yield parent(), got
            except LookupError:
                got = "caught"
    finally:
        echoed.append(parent())
    return "done"


echoed: list[str | None] = []


def test_a_generator_is_all_a_generator_was():
    """Catches a driver that loses what is sent, thrown, or returned, or that is current in the consumer."""
    echoed.clear()
    run = carried(echo, 3)
    assert next(run) == (INSIDE, None)
    assert_clean()
    assert run.send("sent") == (INSIDE, "sent")
    assert run.throw(LookupError()) == (INSIDE, "caught")
    with pytest.raises(StopIteration) as stopped:
        next(run)
    assert stopped.value.value == "done"
    assert echoed == [INSIDE]
    assert_clean()


@pytest.mark.parametrize("how", ["close", "throw", "drop"])
def test_a_generator_that_is_given_up_ends_inside_its_context(how):
    """Catches a clean-up that runs outside the context, or not at all."""
    echoed.clear()
    run: Any = carried(echo, 3)
    next(run)
    with managed_span("generation", "consumer"):
        here = parent()
        if how == "close":
            run.close()
        elif how == "throw":
            with pytest.raises(KeyboardInterrupt):
                run.throw(KeyboardInterrupt())
        del run
        gc.collect()
        assert parent() == here
    assert echoed == [INSIDE]
    assert_clean()


def test_a_span_in_a_generator_stays_current_over_its_yields_and_not_in_the_consumer():
    """Catches an attachment across yields: the user's own ``with`` span would be lost, or be everyone's parent."""

    @accepts_trace_context
    def call() -> Iterator[bool]:
        with managed_span("generation", "mine") as mine:
            assert mine is not None
            yield trace.get_current_span() is mine
            yield trace.get_current_span() is mine

    for stayed in carried(call):
        assert stayed
        assert_clean()


def test_generators_interleaved_keep_their_contexts():
    """Catches one generator's context in another that is stepped in between."""
    other = {"traceparent": f"00-{TRACE_ID}-{'1' * 16}-01"}
    first, second = carried(echo, 2), carried(echo, 2, carrier=other)
    seen = [next(run)[0] for run in (first, second, first, second)]
    assert seen == [INSIDE, f"{TRACE_ID}-{'1' * 16}"] * 2
    assert_clean()


def test_the_delay_of_a_generator_ends_at_its_first_step(monkeypatch):
    """Catches a delay taken when the generator is made: the time until somebody iterates is waiting too."""
    clock = [10**18]
    monkeypatch.setattr("raytrace_rl._carrier.time_ns", lambda: clock[0])

    @accepts_trace_context
    def call() -> Iterator[int | None]:
        scopes = _scopes.var.get()
        assert scopes is not None
        yield scopes.take_queued()

    run = carried(call, carrier={**CARRIER, "raytrace": f"i=7|{10**18 - 5},here"})
    clock[0] += 100
    assert next(run) == 105


def test_without_a_carrier_a_generator_runs_in_the_consumer_s_context():
    """Catches a local generator, undispatched, that no longer sees where it is iterated."""
    run = echo(1)
    with managed_span("generation", "consumer"):
        assert next(run) == (parent(), None)
        run.close()


# --------------------------------------------------------------------------------------- coroutines, async generators


def test_a_coroutine_runs_under_its_carrier_and_leaves_the_task_clean():
    """Catches a context that stays in the task that awaited."""

    @accepts_trace_context
    async def call() -> str | None:
        await asyncio.sleep(0)
        return parent()

    async def main() -> None:
        assert await carried(call) == INSIDE
        assert_clean()

    asyncio.run(main())


def test_a_coroutine_that_is_dropped_detaches_nothing_elsewhere(caplog):
    """Catches "Failed to detach context", or a foreign context reset, when a coroutine is collected unfinished."""

    @accepts_trace_context
    async def call() -> None:
        await asyncio.get_running_loop().create_future()

    caplog.set_level(logging.DEBUG)
    elsewhere = contextvars.copy_context()

    async def main() -> None:
        coroutine = carried(call)
        elsewhere.run(coroutine.send, None)
        with managed_span("generation", "here"):
            here = parent()
            coroutine.close()
            assert parent() == here

    asyncio.run(main())
    assert not [r for r in caplog.records if "detach" in r.getMessage()]


@accepts_trace_context
async def aecho(n: int) -> AsyncGenerator[Any, Any]:
    """Yields where it is and what it was sent, with awaits between."""
    got: Any = None
    try:
        for _ in range(n):
            await asyncio.sleep(0)
            try:
                got = yield parent(), got
            except LookupError:
                got = "caught"
    finally:
        await asyncio.sleep(0)
        aechoed.append(parent())


aechoed: list[str | None] = []


def test_an_async_generator_is_all_an_async_generator_was():
    """Catches a driver that loses what is sent or thrown, or is current in the consumer or the next await."""
    aechoed.clear()

    async def main() -> None:
        run = carried(aecho, 3)
        assert await run.asend(None) == (INSIDE, None)
        assert_clean()
        assert await run.asend("sent") == (INSIDE, "sent")
        assert await run.athrow(LookupError()) == (INSIDE, "caught")
        with pytest.raises(StopAsyncIteration):
            await anext(run)
        assert_clean()

    asyncio.run(main())
    assert aechoed == [INSIDE]


@pytest.mark.parametrize("how", ["aclose", "athrow", "drop", "cancel"])
def test_an_async_generator_that_is_given_up_ends_inside_its_context(how, caplog):
    """Catches a clean-up outside the context, twice or never, and "Failed to detach context"."""
    aechoed.clear()
    caplog.set_level(logging.DEBUG)

    async def consume(run: Any, begun: asyncio.Event) -> None:
        async for _ in run:
            begun.set()
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        run: Any = carried(aecho, 3)
        if how == "cancel":
            begun = asyncio.Event()
            task = asyncio.create_task(consume(run, begun))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await run.aclose()
        else:
            await anext(run)
            if how == "aclose":
                await run.aclose()
            elif how == "athrow":
                with pytest.raises(OSError, match="thrown in"):
                    await run.athrow(OSError("thrown in"))
        del run
        gc.collect()
        for _ in range(100):  # a dropped one is closed by the loop, in a task of its own
            if not aechoed:
                await asyncio.sleep(0)
        assert_clean()

    asyncio.run(main())
    assert aechoed == [INSIDE]
    assert not [r for r in caplog.records if "detach" in r.getMessage()]


def test_a_task_made_inside_an_async_generator_inherits_its_context():
    """Catches awaits that run outside the call's context, where tasks and spans would be lost."""

    @accepts_trace_context
    async def call() -> AsyncGenerator[str | None, None]:
        async def inner() -> str | None:
            await asyncio.sleep(0)
            return parent()

        yield await asyncio.create_task(inner())
        async with asyncio.Lock():
            yield await asyncio.wait_for(inner(), 5)

    async def main() -> list[str | None]:
        return [seen async for seen in carried(call)]

    assert asyncio.run(main()) == [INSIDE, INSIDE]


@pytest.mark.parametrize("hidden", [generator, coroutine, asyncgen])
def test_what_a_plain_function_returns_keeps_the_context_while_it_runs(hidden):
    """Catches a decorator without ``functools.wraps``, behind which the kind of function is not to be seen."""
    seen: list[str | None] = []

    def noting(value: Any) -> Any:
        seen.append(parent())
        return value

    def make() -> Any:
        if hidden is generator:
            return (noting(i) for i in range(2))
        if hidden is coroutine:

            async def work() -> int:
                await asyncio.sleep(0)
                return int(noting(2))

            return work()

        async def agen() -> AsyncGenerator[int, None]:
            for i in range(2):
                await asyncio.sleep(0)
                yield noting(i)

        return agen()

    async def collect(steps: Any) -> list[Any]:
        return [value async for value in steps]

    async def main() -> Any:
        result = carried(accepts_trace_context(make))
        assert_clean()
        if hidden is generator:
            return list(result)
        return await (collect(result) if hidden is asyncgen else result)

    assert asyncio.run(main()) == (2 if hidden is coroutine else [0, 1])
    assert set(seen) == {INSIDE}


# --------------------------------------------------------------------------------------------------------- dispatch


def test_anything_else_is_called_as_it_is_with_one_warning(caplog):
    """Catches a dispatch that refuses, or swallows, a call that it does not understand."""

    def target(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    for _ in range(2):
        with managed_span("generation", "x"):
            assert dispatch_with_trace_context(target, 1, a=2) == ((1,), {"a": 2})
    (warning,) = [r.getMessage() for r in caplog.records if "takes no trace context" in r.getMessage()]
    assert "target" in warning


def test_an_object_with_remote_is_called_by_it():
    """Catches a handle of another library, as Ray Serve's, that is called instead of dispatched to."""

    class Handle:
        def remote(self, x: int) -> int:
            return x + 1

    assert dispatch_with_trace_context(Handle(), 1) == 2


def test_the_target_s_exception_passes():
    """Catches a user's exception taken for a failure of telemetry, and the call repeated."""
    calls = []

    def target() -> None:
        calls.append(1)
        raise TypeError("the user's own")

    with pytest.raises(TypeError, match="the user's own"):
        dispatch_with_trace_context(target)
    assert calls == [1]


class _Group:
    """NeMo-RL's shape."""

    def __init__(self, *workers: Any) -> None:
        self.workers = list(workers)

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return kwargs

    def run_all_workers_multiple_data(
        self, method: str, *args: Any, common_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        return kwargs, common_kwargs

    def run_nothing(self, method: str) -> str:
        return method


def test_a_group_call_takes_the_carrier_where_it_is_broadcast():
    """Catches a carrier among keywords that the group slices, and the caller's own common keywords changed."""
    group = _Group(Worker(train, score), Worker(train, score))
    common = {"seed": 1}
    with managed_span("generation", "x"):
        kwargs, broadcast = dispatch_with_trace_context(
            group.run_all_workers_multiple_data, "train", batch=[1, 2], common_kwargs=common
        )
        assert kwargs == {"batch": [1, 2]}
        assert set(broadcast) == {"seed", "_otel_carrier"}
        assert common == {"seed": 1}
        assert set(dispatch_with_trace_context(group.run_all_workers_single_data, "train")) == {"_otel_carrier"}


def test_a_group_call_without_room_or_name_for_a_carrier_goes_as_it_is():
    """Catches a carrier in a worker's ``**kwargs``, or in a method that has no keyword for it."""
    group = _Group(Worker(train, score), Worker(score))
    with managed_span("generation", "x"):
        assert dispatch_with_trace_context(group.run_all_workers_single_data, "score", a=1) == {"a": 1}
        assert dispatch_with_trace_context(group.run_all_workers_single_data, "train", a=1) == {"a": 1}
        assert dispatch_with_trace_context(group.run_all_workers_single_data, "unknown") == {}
        group = _Group(Worker(train))
        assert dispatch_with_trace_context(group.run_nothing, "train") == "train"


def test_traced_leaves_what_is_no_actor_alone(caplog):
    """Catches a view of something that has no remote calls, and one of None where an optional actor is missing."""
    thing = object()
    assert traced(thing) is thing
    assert traced(None) is None
    assert len([r for r in caplog.records if "takes no trace context" in r.getMessage()]) == 2


def test_keywords_for_a_call_written_by_hand():
    """Catches an empty carrier sent along, and a carrier under another keyword than NeMo-RL's."""
    assert trace_context_kwargs() == {}
    with managed_span("generation", "x") as span:
        assert span is not None
        found = span.get_span_context()
        assert trace_context_kwargs() == {
            "_otel_carrier": {"traceparent": f"00-{found.trace_id:032x}-{found.span_id:016x}-01"}
        }
