"""Signal handlers that raise, or open spans themselves, at any moment; and finalizers that do.

Alarm-based time-outs of rewards, Ctrl-C and ``ray.cancel`` raise out of a handler in the midst of the library's own
code. Nothing written may be damaged by it, nothing finished may be lost, and the user's exception must come through.
"""

from __future__ import annotations

import functools
import gc
import linecache
import random
import signal
import sys
import tokenize
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from opentelemetry import trace

from raytrace_rl import _encode, _interrupts, _span, _state
from raytrace_rl._span import ManagedSpan
from raytrace_rl.instrumentation import bucket_scope, iteration_scope, managed_span, umbrella_span
from raytrace_rl.spool import writer as writer_module
from raytrace_rl.spool.format import Kind
from raytrace_rl.spool.place import Place
from raytrace_rl.spool.writer import SpoolWriter
from tests.running import SETTINGS, Telemetry, attributes, read_records, running, spans_of

pytest_plugins = ["tests.telemetry_fixtures"]

SWALLOWING = {module.__file__ for module in (traceback, linecache, tokenize)}


class Alarm(Exception):
    """What a time-out library raises from its handler."""


class LateAlarm(TimeoutError):
    """The same, as an OSError: ``TimeoutError`` is one."""


class ValueAlarm(ValueError):
    """The same, as an error that the library has its own use for."""


class RuntimeAlarm(RuntimeError):
    """As `ValueAlarm`."""


class IndexAlarm(IndexError):
    """As `ValueAlarm`."""


class Storm:
    """SIGALRM after 50 µs to 2 ms, again and again; each time the handler raises, and how often is counted.

    Now and then it has to blow less: making a segment takes longer than the gusts, and would never be done.
    """

    def __init__(self, kind: type[BaseException], *, again: bool) -> None:
        self.kind = kind
        #: Raise also while an exception from here is on its way; otherwise not before the test has caught it.
        self.again = again
        self.masked = True
        self.raised = 0
        self.caught: set[int] = set()
        #: Raised in modules of the standard library that swallow all exceptions (`traceback` those of ``__str__``).
        self.lost_to_python: set[int] = set()
        self.places: dict[int, str] = {}
        self.rng = random.Random(5)

        self.over = False

    def arm(self) -> None:
        if not self.over:
            signal.setitimer(signal.ITIMER_REAL, 5e-5 * 40 ** self.rng.random())

    def handler(self, _signum: int, frame: FrameType | None) -> None:
        if self.masked:
            self.arm()
            return
        self.masked = True  # this handler is not to be interrupted by itself, or the count would be wrong
        self.arm()
        self.raised += 1
        self.places[self.raised] = str(frame)
        while frame is not None:
            if frame.f_code.co_filename in SWALLOWING:
                self.lost_to_python.add(self.raised)
            frame = frame.f_back
        error = self.kind(self.raised)
        if self.again:
            self.masked = False
        raise error  # no call since: nothing comes between

    def note(self, error: BaseException | None) -> None:
        """Notes a caught exception, and those in whose handling it came up."""
        while error is not None:
            if isinstance(error, self.kind) and error.args and isinstance(error.args[0], int):
                self.caught.add(error.args[0])
            error = error.__context__

    @property
    def swallowed(self) -> set[str]:
        """Where the exceptions struck that came through neither to the test nor to Python's hook."""
        return {self.places[n] for n in set(range(1, self.raised + 1)) - self.caught - self.lost_to_python}

    @contextmanager
    def blowing(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self.handler)
        hook = sys.unraisablehook
        ignored: list[Any] = []
        sys.unraisablehook = ignored.append  # no Python code, which an alarm could interrupt
        self.arm()
        try:
            yield
        finally:
            self.masked = self.over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            sys.unraisablehook = hook
            for unraisable in ignored:
                self.note(unraisable.exc_value)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 64 KiB, so that a test rolls over hundreds of them."""
    monkeypatch.setattr(writer_module, "LARGEST_SIZE", 64 << 10)


@pytest.mark.parametrize(
    ("kind", "again", "count"),
    [(Alarm, False, 100_000), (Alarm, True, 100_000), (LateAlarm, True, 100_000), (ValueAlarm, True, 100_000)],
)
@pytest.mark.usefixtures("small_segments")
def test_raising_alarm_over_appends(tmp_path: Path, kind: type[BaseException], again: bool, count: int):
    """An alarm leaves a hole in the file, at which a reader stops; loses a record; or is swallowed by us."""
    node = tmp_path / "spool" / "node"
    node.mkdir(parents=True)
    writer = SpoolWriter(Place(str(node), str(node)), b"", bound_bytes=1 << 40)
    writer.open()
    storm = Storm(kind, again=again)
    placed: list[int] = []
    refused = 0
    n = 0
    with storm.blowing():
        while len(placed) < count:
            try:
                storm.masked = False
                while len(placed) < count:
                    storm.masked = False  # once more: the interpreter may have dropped one, in a finalizer
                    n += 1
                    if writer.append(Kind.LOGS, b"%d|" % n + b"x" * (n % 200)):
                        placed.append(n)
                    else:
                        refused += 1
                storm.masked = True
            except kind as error:
                storm.masked = True
                storm.note(error)
    writer.close()
    records, damage = read_records(tmp_path)
    assert not damage
    found = [int(record.payload.partition(b"|")[0]) for record in records if record.kind == Kind.LOGS]
    assert refused == 0
    assert set(placed) <= set(found)
    assert len(found) == len(set(found))
    assert storm.swallowed == set()
    assert storm.raised > 20


class OrdinaryError(Exception):
    """What the body of a span raises of itself."""


def exercise(n: int) -> ManagedSpan:
    """One span, with something of everything in it."""
    with managed_span("generation", f"s{n % 50}", n=n, f=n / 7, kind="x", many=[n, n]) as span:
        assert isinstance(span, ManagedSpan)
        if n % 7 == 0:
            span.add_event("e", {"n": n})
            span.update_name(f"renamed{n % 50}")
        if n % 11 == 0:
            with iteration_scope(n), bucket_scope("wasted"), managed_span("reward", "inner", n=n):
                pass
        if n % 130 == 0:
            try:
                with managed_span("reward", "failing"):
                    raise OrdinaryError(n)
            except OrdinaryError:
                pass
    return span


@pytest.mark.parametrize(
    ("kind", "again", "count"),
    [
        (Alarm, False, 100_000),
        (Alarm, True, 10_000),
        (LateAlarm, True, 10_000),
        (ValueAlarm, True, 10_000),
        (RuntimeAlarm, True, 10_000),
        (IndexAlarm, True, 10_000),
        (KeyboardInterrupt, True, 10_000),
    ],
)
@pytest.mark.usefixtures("small_segments")
def test_raising_alarm_over_spans(tmp_path: Path, kind: type[BaseException], again: bool, count: int):
    """As over appends, for whole spans: those inside which the alarm struck included."""
    storm = Storm(kind, again=again)
    finished: list[tuple[bytes, int]] = []
    outside = _span.otel_var.get()
    n = 0
    with running(tmp_path / "run", heartbeat_s=0.05, spool_max_mib=1 << 20) as telemetry, storm.blowing():
        _encode.clear_caches()
        while len(finished) < count:
            token = _span.otel_var.set(outside)  # an alarm at the first line of an outermost __exit__ leaves it current
            try:
                storm.masked = False
                with umbrella_span("step", "step"):
                    while len(finished) < count:
                        storm.masked = False  # once more: the standard library may have swallowed one
                        n += 1
                        if n % 1000 == 0:
                            _encode.clear_caches()
                        finished.append((exercise(n).span_id, n))
                    storm.masked = True
            except kind as error:
                storm.masked = True
                storm.note(error)
            _span.otel_var.reset(token)
    records, damage = read_records(tmp_path / "run")
    assert not damage
    assert "spans" not in telemetry.drops
    spans = spans_of(records)
    times = Counter(span.span_id for span in spans)
    numbers = {span.span_id: attributes(span).get("n") for span in spans}
    assert [n for span_id, n in finished if numbers.get(span_id) != n] == []
    # A reader keeps one of each; more than one is possible only where an alarm cut the end of a span short.
    assert sum(times.values()) - len(times) <= storm.raised
    assert all(times[span_id] == 1 for span_id, _ in finished)
    assert storm.swallowed == set()
    assert storm.raised > 50
    assert not _state.open_spans


def package_events(inner: list[Any], strike: int, error: Exception) -> Any:
    """A trace function that raises ``error`` at the ``strike``-th line or call of the package's span path.

    Not between the lines that place a record, nor behind them before the next call: CPython raises out of signal
    handlers at calls, function entries and backward jumps alone.
    """
    seen = 0
    quiet = ("start = segment.position", "segment.position = ", "segment.buffer[", "self._placed = True")

    def local(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal seen
        if event not in ("line", "call"):
            return local
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and text.startswith((*quiet, "_state.open_spans.pop", "if self._token", "finally:")):
            return local
        seen += 1
        if seen == strike:
            inner.append((frame.f_code.co_name, event, text))
            sys.settrace(None)
            raise error
        return local

    def trace_(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename in {_span.__file__, _encode.__file__}:
            return local(frame, event, arg)
        return None

    return trace_


@pytest.mark.parametrize("failing", [False, True])
def test_exception_at_each_line_of_a_spans_way(telemetry: Telemetry, failing: bool):
    """There is a line at which an alarm is swallowed, loses the span, or leaves a wrong span current."""
    outside = _span.otel_var.get()
    places: dict[str, Any] = {}
    for strike in range(1, 2000):
        _encode.clear_caches()
        _state.static_cache.clear()
        where: list[Any] = []
        error = Alarm(strike)
        span: Any = None
        entered = False
        before = sys.gettrace()
        caught: BaseException | None = None
        try:
            with managed_span("generation", f"outer{strike}"):
                sys.settrace(package_events(where, strike, error))
                try:
                    with managed_span("reward", f"inner{strike}", n=strike, f=0.5) as span:
                        entered = True
                        span.add_event("e", {"k": 1})
                        if failing:
                            raise OrdinaryError("the body's own")
                finally:
                    sys.settrace(before)
        except (Alarm, OrdinaryError) as raised:
            caught = raised
        assert _span.otel_var.get() is outside, where
        if not where:  # past the last line
            break
        assert caught is error, where
        places[f"outer{strike}"] = where
        if entered:
            places[f"inner{strike}"] = where
    found = Counter(message.name for message in telemetry.spans())
    assert {name: where for name, where in places.items() if found[name] != 1} == {}
    assert len(places) > 100
    assert not _state.open_spans
    assert telemetry.drops.get("spans", 0) == 0


def test_alarm_at_the_first_line_of_exit_ends_the_span_with_its_parent(telemetry: Telemetry):
    """A span whose ``__exit__`` never ran stays open for the rest of the run, and current."""

    def strike(frame: FrameType, event: str, _arg: object) -> Any:
        if event == "call" and frame.f_code is ManagedSpan.__exit__.__code__:
            sys.settrace(None)
            raise Alarm
        return None

    before = sys.gettrace()
    try:
        with (
            managed_span("generation", "outer"),
            managed_span("reward", "middle"),
            managed_span("reward", "inner"),
        ):
            sys.settrace(strike)
    except Alarm:
        pass
    finally:
        sys.settrace(before)
    spans = {span.name: span for span in telemetry.spans()}
    assert set(spans) == {"outer", "middle", "inner"}
    assert spans["inner"].status.message == "interrupted"
    assert spans["inner"].status.code == 2
    assert not trace.get_current_span().get_span_context().is_valid
    assert not _state.open_spans


def test_handler_that_opens_spans_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A handler re-enters the append, and one of the two records is overwritten."""
    monkeypatch.setattr(writer_module, "LARGEST_SIZE", 64 << 10)
    counts: Counter[str] = Counter()

    over = False

    def arm() -> None:
        if not over:
            signal.setitimer(signal.ITIMER_REAL, 1e-4)

    def handler(_signum: int, _frame: object) -> None:
        number = counts["handler"] = counts["handler"] + 1
        if number % 10 == 0:
            arm()  # this one may be interrupted in its turn
        with managed_span("reward", "handler", n=number), managed_span("reward", "nested"):
            counts["nested"] += 1
        if number % 10:
            arm()

    before = signal.signal(signal.SIGALRM, handler)
    with running(tmp_path / "run", spool_max_mib=1 << 20) as telemetry:
        arm()
        try:
            while counts["main"] < 30_000:
                with managed_span("generation", "main", n=counts["main"]):
                    counts["main"] += 1
        finally:
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert Counter(span.name for span in telemetry.spans()) == counts
    assert counts["handler"] > 20
    assert not telemetry.drops
    assert Counter(span.name for span in spans_of(read_records(tmp_path / "run")[0])) == counts


def test_finalizers_that_open_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The collector runs in the midst of an append, and what it finalizes overwrites the record."""
    monkeypatch.setattr(writer_module, "LARGEST_SIZE", 64 << 10)
    counts: Counter[str] = Counter()

    class Finalized:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            with managed_span("reward", "finalizer"):
                counts["finalizer"] += 1

    threshold = gc.get_threshold()
    with running(tmp_path / "run", spool_max_mib=1 << 20) as telemetry:
        gc.set_threshold(3, 2, 2)
        try:
            for n in range(5_000):
                Finalized()
                with managed_span("generation", "main", n=[n]):
                    counts["main"] += 1
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        assert counts["finalizer"] == counts["main"] == 5_000
        assert Counter(span.name for span in telemetry.spans()) == counts
    assert not telemetry.drops


# -- which exceptions are the user's -----------------------------------------------------------------------------------


def raised_in(handler: Any) -> BaseException:
    """Raises SIGALRM with ``handler`` installed, in a frame of the package, and returns what came out."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        # `text` calls a method of its argument: the signal arrives inside a frame of the package
        class Raiser(str):
            __slots__ = ()

            def encode(self, *_args: Any) -> bytes:
                signal.raise_signal(signal.SIGALRM)
                return b""

            def __getitem__(self, _: Any) -> Any:
                return self

        _encode.text(Raiser("x"), 1)
    except BaseException as error:
        return error
    finally:
        signal.signal(signal.SIGALRM, before)
    pytest.fail("the handler did not raise")


def _plain_handler(_signum: int, _frame: object) -> None:
    raise ValueAlarm


def _handler_behind_arguments(*_args: object) -> None:
    raise ValueAlarm


def _handler_with_more(_limit: int, _signum: int, _frame: object) -> None:
    raise ValueAlarm


def _restoring_handler(_signum: int, _frame: object) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise ValueAlarm


def _delegating_handler(signum: int, frame: object) -> None:
    _restoring_handler(signum, None)


def _handler_of_rays(_signum: int, _frame: object) -> None:
    from ray.exceptions import GetTimeoutError

    raise GetTimeoutError("an alarm in the words of Ray")


class CallableHandler:
    def __call__(self, _signum: int, _frame: object) -> None:
        raise ValueAlarm


class MethodHandler:
    def handle(self, _signum: int, _frame: object) -> None:
        raise ValueAlarm


@pytest.mark.parametrize(
    "handler",
    [
        _plain_handler,
        _handler_behind_arguments,
        functools.partial(_handler_with_more, 5),
        _restoring_handler,
        _delegating_handler,
        CallableHandler(),
        MethodHandler().handle,
    ],
    ids=["function", "star", "partial", "restoring", "delegating", "callable", "method"],
)
def test_exception_out_of_any_handler_is_the_users(handler: Any):
    """A time-out decorator of another make is not known for one, and its time-out is swallowed as our failure."""
    error = raised_in(handler)
    assert type(error) is ValueAlarm
    assert _interrupts.is_interrupt(error)


def test_own_failures_and_those_of_users_objects_are_not_interrupts():
    """A bad attribute ends the training step, because its error passes for a time-out."""

    class Hostile:
        dtype = "x"

        @property
        def shape(self) -> Any:
            raise Alarm  # raised in the user's frame, outside any handler

    for value in (Hostile(), object(), 2**64):
        with pytest.raises(Exception) as caught:  # noqa: PT011  (whatever it is)
            _encode.any_value("k", value)
        assert not _interrupts.is_interrupt(caught.value)
    assert not _interrupts.is_interrupt(ValueError("never raised"))


def test_what_ray_says_of_a_call_is_no_interrupt_but_a_time_out_is():
    """A shutdown ends because an actor is busy: Ray's time-outs, and a method's own, are `TimeoutError` too."""
    from ray.exceptions import GetTimeoutError, RayTaskError

    of_the_method = RayTaskError("work", "Traceback", TimeoutError("its own")).as_instanceof_cause()
    assert isinstance(of_the_method, TimeoutError)
    for answer in (GetTimeoutError("late"), of_the_method):
        with pytest.raises(TimeoutError) as caught:
            raise answer
        assert not _interrupts.is_interrupt(caught.value)
    assert _interrupts.is_interrupt(TimeoutError("an alarm"))
    assert _interrupts.is_interrupt(raised_in(_handler_of_rays))


def test_exception_injected_from_another_thread_is_the_users():
    """``ray.cancel`` and time-out libraries inject exceptions into a thread: they surface inside our frames."""
    import ctypes
    import threading

    class Injected(Exception):
        pass

    result: list[BaseException] = []
    started = threading.Event()

    def work() -> None:
        try:
            started.set()
            while True:
                _encode.varint(1 << 60)
        except Injected as error:
            result.append(error)

    # Where it surfaces is chance: in our frame, or between two calls. Both, until one has been in ours.
    for _ in range(200):
        started.clear()
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Injected))
        thread.join()
        error = result.pop()
        innermost = error.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        assert innermost is not None
        if innermost.tb_frame.f_code.co_filename == _encode.__file__:
            assert _interrupts.is_interrupt(error)
            return
    pytest.fail("never inside the package in 200 tries")


def test_alarm_while_another_error_is_written_down_comes_through(telemetry: Telemetry):
    """Formatting the stack of a failed span takes long: an alarm that strikes there is swallowed."""

    class Slow(Exception):
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGALRM)
            return "slow"

    before = signal.signal(signal.SIGALRM, _plain_handler)
    try:
        with pytest.raises(ValueAlarm), managed_span("generation", "a"):
            raise Slow
    finally:
        signal.signal(signal.SIGALRM, before)
    assert telemetry.span("a").name == "a"


def test_alarm_inside_a_users_logging_handler_comes_through(telemetry: Telemetry):
    """A warning of ours is logged while the alarm strikes: the time-out is swallowed with the log line."""
    import logging

    class Raising(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            signal.raise_signal(signal.SIGALRM)

    handler = Raising()
    _state.logger.addHandler(handler)
    before = signal.signal(signal.SIGALRM, _plain_handler)
    try:
        with pytest.raises(ValueAlarm):
            _state.warn_once("some key of a test", "text")
    finally:
        signal.signal(signal.SIGALRM, before)
        _state.logger.removeHandler(handler)


def test_seeded_alarms_between_everything(tmp_path: Path):
    """Single alarms at moments that a fixed interval may never hit."""
    rng = random.Random(7)
    struck: list[str] = []
    swallowed: list[str] = []
    finished: list[bytes] = []

    def handler(_signum: int, frame: object) -> None:
        struck.append(str(frame))
        raise Alarm

    outside = _span.otel_var.get()
    before = signal.signal(signal.SIGALRM, handler)
    hook = sys.unraisablehook
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append  # what strikes inside a finalizer or a weak reference's callback, Python drops
    with running(tmp_path / "run", **{key: SETTINGS[key] for key in ("span_groups",)}) as telemetry:
        try:
            for n in range(1500):
                token = _span.otel_var.set(outside)
                try:
                    with umbrella_span("step", "step"):
                        signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-5, 5e-4))
                        while len(struck) == n:
                            finished.append(exercise(130 * rng.randrange(10**6) + 1).span_id)
                    swallowed.append(struck[-1])
                except Alarm:
                    pass
                _span.otel_var.reset(token)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            sys.unraisablehook = hook
        found = {span.span_id for span in telemetry.spans()}
    assert len(swallowed) == len(ignored), swallowed
    assert len(struck) == 1500
    assert set(finished) <= found
