"""A span from its start to the mapped file: identity, context, attributes, errors, limits, misuse."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from raytrace_rl import _clock, _encode, _head, _scopes, _span, _state, setup
from raytrace_rl._span import ManagedSpan, RecordingSpan
from raytrace_rl.instrumentation import iteration_scope, managed_span, span_cm, umbrella_span
from raytrace_rl.spool.format import MAX_PAYLOAD
from tests.running import Telemetry, attributes, running

pytest_plugins = ["tests.telemetry_fixtures"]


def opened(name: str, group: str | None = None, **given_attributes: Any) -> RecordingSpan:
    """A span that has been started by hand and is not current."""
    span = RecordingSpan(group, name, given_attributes)
    span.begin(_span.otel_var.get())
    return span


# -- what is written, and when -----------------------------------------------------------------------------------------


def test_span_is_in_the_file_when_exit_returns(telemetry: Telemetry):
    """A finished span waits in a queue, where ``kill -9`` would take it."""
    for n in range(3):
        with managed_span("generation", f"s{n}"):
            assert len(telemetry.spans()) == n
        assert [span.name for span in telemetry.spans()] == [f"s{k}" for k in range(n + 1)]


def test_every_field_of_a_span(telemetry: Telemetry):
    """A field is missing, or in the wrong place, in what a collector gets."""
    before = time.time_ns()
    with managed_span("generation", "rl.vllm.generate", **{"rl.num_prompts": 4, "model": "tiny"}) as span:
        assert isinstance(span, ManagedSpan)
    after = time.time_ns()
    (message,) = telemetry.spans()
    assert message.name == "rl.vllm.generate"
    assert (message.trace_id, message.span_id) == (span.trace_id, span.span_id)
    assert message.parent_span_id == b""
    assert message.kind == message.SPAN_KIND_INTERNAL
    slack = 50_000_000  # the wall clock may have been stepped since the anchor was taken
    assert before - slack <= message.start_time_unix_nano <= message.end_time_unix_nano <= after + slack
    assert message.flags == 0x101  # sampled; the parent, of which there is none, is not remote
    assert message.status.code == 0
    assert attributes(message) == {
        "rl.span_group": "generation",
        "rl.bucket": "productive",
        "rl.num_prompts": 4,
        "model": "tiny",
        "thread.id": threading.get_ident(),
        "thread.name": threading.current_thread().name,
    }


def test_children_name_their_parents(telemetry: Telemetry):
    """The tree falls apart into roots, or a grandchild hangs from the wrong span."""
    with umbrella_span("job", "job"):
        with umbrella_span("step", "step"):
            with managed_span("generation", "a"):
                pass
            with managed_span("reward", "b"):
                pass
        with managed_span("checkpoint", "c"):
            pass
    spans = {span.name: span for span in telemetry.spans()}
    parents = {"a": "step", "b": "step", "step": "job", "c": "job", "job.started": "job"}
    assert {name: span.parent_span_id for name, span in spans.items()} == {
        "job": b"",
        **{child: spans[parent].span_id for child, parent in parents.items()},
    }
    assert len({span.trace_id for span in spans.values()}) == 1
    assert len({span.span_id for span in spans.values()}) == len(spans)


def test_two_roots_are_two_traces(telemetry: Telemetry):
    """A span without a parent continues the trace of the one before it."""
    for name in "ab":
        with managed_span("generation", name):
            pass
    a, b = telemetry.spans()
    assert a.trace_id != b.trace_id


@pytest.mark.parametrize("sampled", [0, 1])
@pytest.mark.parametrize("remote", [False, True])
def test_parent_of_another_library_or_process(telemetry: Telemetry, sampled: int, remote: bool):
    """The trace breaks at a process boundary, or loses its flags and state there."""
    state = TraceState([("vendor", "x"), ("other", "y")])
    context = SpanContext(0xABC, 0xDEF, remote, TraceFlags(sampled), state)
    with (
        trace.use_span(NonRecordingSpan(context)),
        managed_span("generation", "outer") as span,
        managed_span("reward", "inner"),
    ):
        assert span is not None
        assert span.get_span_context().trace_state == state
    inner, outer = telemetry.spans()
    assert outer.trace_id == inner.trace_id == (0xABC).to_bytes(16, "big")
    assert outer.parent_span_id == (0xDEF).to_bytes(8, "big")
    assert outer.flags == sampled | 0x100 | (0x200 if remote else 0)
    assert inner.flags == sampled | 0x100
    assert outer.trace_state == inner.trace_state == "vendor=x,other=y"


def test_span_is_current_in_its_body_and_nowhere_else(telemetry: Telemetry):
    """Auto-instrumentation inside the body parents to the wrong span, or everything after it does."""
    before = _span.otel_var.get()
    with managed_span("generation", "a") as a:
        assert trace.get_current_span() is a
        with managed_span("reward", "b") as b:
            assert trace.get_current_span() is b
        assert trace.get_current_span() is a
        with pytest.raises(ZeroDivisionError), managed_span("reward", "c"):
            _ = 1 // 0
        assert trace.get_current_span() is a
    assert _span.otel_var.get() is before


def test_span_context_is_what_propagators_read(telemetry: Telemetry):
    """``inject()`` of any OTel propagator sends other ids than those in the spool."""
    with managed_span("generation", "a") as span:
        assert span is not None
        context = span.get_span_context()
        assert context.is_valid
        assert not context.is_remote
        assert context is span.get_span_context()
    (message,) = telemetry.spans()
    assert context.trace_id == int.from_bytes(message.trace_id, "big")
    assert context.span_id == int.from_bytes(message.span_id, "big")


@given(st.text(st.characters(), max_size=200))
@settings(max_examples=60)
def test_names_are_any_text(name: str):
    """A name with a surrogate, a NUL or nothing in it breaks the span, or every span after it."""
    parts = _head.static(None, name, None)
    assert Span.FromString(parts).name == name.encode("utf-8", "backslashreplace").decode()


@pytest.mark.parametrize("name", ["", "\0", "ü\udc80", "x" * 100_000, "\udc80" * 70_000])
def test_odd_names_reach_the_file(telemetry: Telemetry, name: str):
    """A span with an odd name is lost."""
    with managed_span("generation", name):
        pass
    (message,) = telemetry.spans()
    assert message.name == name[:65536].encode("utf-8", "backslashreplace").decode()
    assert not telemetry.drops


def test_name_that_is_no_text_costs_the_span_and_not_the_run(telemetry: Telemetry):
    """``managed_span(group, 5)`` ends the training run; or it loses a span and does not say so."""
    ran = []
    for name in (5, None, ["x"]):
        with managed_span("generation", name) as span:
            ran.append(name)
            # the body uses what it was given
            assert span is not None
            span.set_attribute("k", 1)
            assert not span.get_span_context().is_valid
            assert trace.get_current_span() is not span
    assert ran == [5, None, ["x"]]
    assert telemetry.spans() == []
    assert telemetry.drops == {"spans": 3}


def test_times_come_from_the_monotonic_clock(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch):
    """NTP steps the wall clock in the middle of a span, and its duration is negative."""
    with managed_span("generation", "a"):
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        monkeypatch.setattr(_clock, "time_ns", lambda: 0)
    (message,) = telemetry.spans()
    assert 0 <= message.end_time_unix_nano - message.start_time_unix_nano < 10**9


# -- errors ------------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("bad"), "ValueError", "bad"),
        (KeyError("k"), "KeyError", "'k'"),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError", ""),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (SystemExit(3), "SystemExit", "3"),
        (SystemExit("fatal"), "SystemExit", "fatal"),
        (StopIteration(1), "StopIteration", "1"),
        (TimeoutError("late"), "TimeoutError", "late"),
        (OddError(), "test_span.OddError", "<OddError: str() failed>"),
        (ValueError("\udc80"), "ValueError", "\\udc80"),
        (ValueError("x" * 5000), "ValueError", "x" * 1024),
    ],
    ids=map(str, range(11)),
)
def test_exception_is_recorded_and_goes_on(telemetry: Telemetry, error: BaseException, kind: str, message: str):
    """A cancelled or interrupted span reads as a success, or telemetry swallows what the user raised."""
    with pytest.raises(type(error)) as caught, managed_span("generation", "a"):
        raise error
    assert caught.value is error
    (span,) = telemetry.spans()
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert span.status.message == f"{type(error).__name__}: {message}"[:1024]
    (event,) = span.events
    assert event.name == "exception"
    assert span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano
    found = attributes(event)
    assert (found["exception.type"], found["exception.message"]) == (kind, message)
    assert found["exception.escaped"] == "True"
    assert "test_exception_is_recorded_and_goes_on" in found["exception.stacktrace"]


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), SystemExit(None), GeneratorExit()], ids=repr)
def test_clean_exit_is_no_error(telemetry: Telemetry, error: BaseException):
    """A program that ends with ``sys.exit(0)``, or a generator that is closed, reads as failed."""
    with pytest.raises(type(error)), managed_span("generation", "a"):
        raise error
    (span,) = telemetry.spans()
    assert span.status.code == 0
    assert not span.events


def test_exception_text_passes_unredacted(telemetry: Telemetry):
    """``exception.message`` has a word of the redaction list: an error without its text helps nobody."""
    with pytest.raises(ValueError, match="why"), managed_span("generation", "a"):
        raise ValueError("why")
    (event,) = telemetry.span("a").events
    assert attributes(event)["exception.message"] == "why"


def test_exception_that_is_handled_inside_is_no_error(telemetry: Telemetry):
    """A span is ERROR because something was tried and failed inside it."""
    with managed_span("generation", "a") as span:
        try:
            raise ValueError("handled")
        except ValueError as error:
            assert span is not None
            span.record_exception(error, {"attempt": 1})
    (message,) = telemetry.spans()
    assert message.status.code == 0
    found = attributes(message.events[0])
    assert found["exception.escaped"] == "False"
    assert found["attempt"] == 1


# -- the OTel span interface -------------------------------------------------------------------------------------------


def test_attributes_set_during_the_span(telemetry: Telemetry):
    """A value set later is lost, or stands beside the earlier one."""
    with managed_span("generation", "a", n=1) as span:
        assert span is not None
        span.set_attribute("n", 2)
        span.set_attribute("none", None)
        span.set_attributes({"m": 3, "s": "x"})
    found = attributes(telemetry.span("a"))
    assert (found["n"], found["m"], found["s"]) == (2, 3, "x")
    assert "none" not in found


FIXED = {
    "rl.span_group": "mine",
    "rl.bucket": "wasted",
    "rl.iteration": 99,
    "rl.queued_ns": 5,
    "thread.id": 1,
    "thread.name": "t",
}


@pytest.mark.parametrize("late", [False, True])
def test_fixed_keys_given_by_hand_replace_ours(telemetry: Telemetry, late: bool):
    """A key stands in the span twice (OTLP forbids it), or the user's value is lost."""
    with iteration_scope(7), managed_span("generation", "a", **({} if late else FIXED)) as span:
        if late:
            assert span is not None
            span.set_attributes(FIXED)
    assert attributes(telemetry.span("a")) == FIXED


def test_fixed_key_of_none_is_left_to_us(telemetry: Telemetry):
    """``rl.iteration=None`` removes the iteration of the scope."""
    with iteration_scope(7), managed_span("generation", "a", **{"rl.iteration": None, "rl.bucket": None}):
        pass
    found = attributes(telemetry.span("a"))
    assert (found["rl.iteration"], found["rl.bucket"]) == (7, "productive")


def test_fixed_key_that_cannot_be_encoded_is_lost_alone(telemetry: Telemetry):
    """``rl.iteration=object()`` costs the span, or is counted at each rename."""
    with managed_span("generation", "a", **{"rl.iteration": object()}) as span:
        assert span is not None
        span.update_name("b")
    message = telemetry.span("b")
    assert "rl.iteration" not in attributes(message)
    assert message.dropped_attributes_count == 1
    assert telemetry.drops == {"attributes": 1}


@pytest.mark.parametrize("late", [False, True])
def test_shared_attributes_of_a_scope_yield_to_the_spans_own(telemetry: Telemetry, late: bool):
    """A key of the scope and of the span stands there twice."""
    token = _scopes.var.set(_scopes.make(None, attributes=(("k", "scope"), ("other", 1))))
    try:
        with managed_span("generation", "a", **({} if late else {"k": "own"})) as span:
            if late:
                assert span is not None
                span.set_attribute("k", "own")
        with managed_span("generation", "b"):
            pass
    finally:
        _scopes.leave(token)
    found = attributes(telemetry.span("a"))
    assert (found["k"], found["other"]) == ("own", 1)
    assert attributes(telemetry.span("b"))["k"] == "scope"


def test_update_name(telemetry: Telemetry):
    """A renamed span keeps its old name, or loses its parent, attributes or start."""
    with managed_span("generation", "outer") as outer, managed_span("reward", "a", n=1) as span:
        assert isinstance(span, ManagedSpan)
        assert isinstance(outer, ManagedSpan)
        start = span.start_ns
        span.update_name("b")
    message = telemetry.span("b")
    assert message.parent_span_id == outer.span_id
    assert message.start_time_unix_nano == start
    found = attributes(message)
    assert (found["n"], found["rl.span_group"], found["rl.bucket"]) == (1, "reward", "productive")


def test_events_and_links(telemetry: Telemetry):
    """An event's time, or what a link points to, is lost."""
    linked = SpanContext(1, 2, True, TraceFlags(1), TraceState([("a", "b")]))
    with managed_span("generation", "a") as span:
        assert span is not None
        span.add_event("e", {"k": 1}, 12345)
        span.add_event("now")
        span.add_link(linked, {"l": 1})
        span.add_link(trace.INVALID_SPAN_CONTEXT)
    message = telemetry.span("a")
    first, second = message.events
    assert (first.name, first.time_unix_nano, attributes(first)) == ("e", 12345, {"k": 1})
    assert message.start_time_unix_nano <= second.time_unix_nano <= message.end_time_unix_nano
    (link,) = message.links
    assert (link.trace_id, link.span_id) == ((1).to_bytes(16, "big"), (2).to_bytes(8, "big"))
    assert (link.trace_state, link.flags, attributes(link)) == ("a=b", 0x301, {"l": 1})


@pytest.mark.parametrize(
    ("calls", "code", "message"),
    [
        ([(StatusCode.OK, "ignored")], 1, ""),
        ([(StatusCode.ERROR, "why")], 2, "why"),
        ([(Status(StatusCode.ERROR, "why"), None)], 2, "why"),
        ([(StatusCode.ERROR, "why"), (StatusCode.OK, None)], 1, ""),
        ([(StatusCode.OK, None), (StatusCode.ERROR, "late")], 1, ""),
        ([(StatusCode.ERROR, "why"), (StatusCode.UNSET, None)], 2, "why"),
        ([(StatusCode.ERROR, "a"), (StatusCode.ERROR, "b")], 2, "b"),
        ([(StatusCode.ERROR, None)], 2, ""),
    ],
)
def test_status_rules(telemetry: Telemetry, calls: list[tuple[Any, Any]], code: int, message: str):
    """OTel trace API, "Set Status": OK is final, UNSET is ignored, only ERROR has a description."""
    with managed_span("generation", "a") as span:
        assert span is not None
        for status, description in calls:
            span.set_status(status, description)
    found = telemetry.span("a").status
    assert (found.code, found.message) == (code, message)


def test_ok_set_by_the_user_outlives_the_exception(telemetry: Telemetry):
    """OTel trace API: OK is final."""

    def work() -> None:
        with managed_span("generation", "a") as span:
            assert span is not None
            span.set_status(StatusCode.OK)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        work()
    message = telemetry.span("a")
    assert message.status.code == 1
    assert len(message.events) == 1


def test_kind(telemetry: Telemetry):
    """OTLP counts kinds from UNSPECIFIED, the API from INTERNAL."""
    for kind in SpanKind:
        span = RecordingSpan("generation", kind.name, {})
        span.set_kind(kind)
        span.begin(Context())
        span.end()
    assert {span.name: span.SpanKind.Name(span.kind) for span in telemetry.spans()} == {
        kind.name: f"SPAN_KIND_{kind.name}" for kind in SpanKind
    }


def test_ended_span_changes_no_more(telemetry: Telemetry):
    """A change after the end writes the span a second time, or raises."""
    with managed_span("generation", "a") as span:
        assert span is not None
        assert span.is_recording()
        span.end()
        assert not span.is_recording()
        span.set_attribute("late", 1)
        span.add_event("late")
        span.add_link(SpanContext(1, 2, False))
        span.update_name("late")
        span.set_status(StatusCode.ERROR)
        span.record_exception(ValueError())
        span.end()
    (message,) = telemetry.spans()
    assert message.name == "a"
    assert not message.events
    assert not message.links
    assert message.status.code == 0
    assert "late" not in attributes(message)


def test_span_ended_by_hand(telemetry: Telemetry):
    """``end()`` of a span that was never current ends the current one, or loses its explicit end."""
    with managed_span("generation", "current") as current:
        span = opened("by hand", "reward", n=1)
        assert trace.get_current_span() is current
        span.end(span.start_ns + 5)
        span.end()
    first, second = telemetry.spans()
    assert (first.name, second.name) == ("by hand", "current")
    assert first.end_time_unix_nano - first.start_time_unix_nano == 5
    assert first.parent_span_id == second.span_id
    assert not _state.open_spans


@pytest.mark.parametrize(
    "misuse",
    [
        lambda span: span.set_attributes(None),
        lambda span: span.set_attributes(5),
        lambda span: span.set_attribute(["unhashable"], 1),
        lambda span: span.add_event("e", 5),
        lambda span: span.add_event("e", timestamp="soon"),
        lambda span: span.add_event("e", timestamp=1.5),
        lambda span: span.add_link(None),
        lambda span: span.add_link("abc"),
        lambda span: span.add_link(SpanContext(1, 2, False), 5),
        lambda span: span.set_status("ERROR"),
        lambda span: span.set_status(None),
        lambda span: span.record_exception(ValueError(), 5),
        lambda span: span.record_exception(ValueError(), timestamp="soon"),
        lambda span: span.record_exception("not an exception"),
    ],
    ids=map(str, range(14)),
)
def test_misuse_is_counted_and_never_raises(telemetry: Telemetry, misuse: Any):
    """OTel's API must not raise: a slip in a call to telemetry ends a training run."""
    with managed_span("generation", "a") as span:
        misuse(span)
    assert telemetry.span("a").name == "a"
    # what was recorded in some form is no loss
    assert telemetry.drops in ({"attributes": 1}, {})


def test_end_time_that_is_no_time_costs_the_span_and_not_the_run(telemetry: Telemetry):
    """``end("now")`` raises, or leaves the span open for good."""
    for end in ("now", -1, 2**64, 1.5):
        opened("a").end(end)
    assert telemetry.spans() == []
    assert telemetry.drops == {"spans": 4}
    assert not _state.open_spans


# -- limits ------------------------------------------------------------------------------------------------------------


def test_attributes_beyond_the_limit_are_counted(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch):
    """OTEL_ATTRIBUTE_COUNT_LIMIT: the excess goes, the first ones stay, and the span says how many."""
    monkeypatch.setattr(_encode, "attribute_count_limit", 3)
    with managed_span("generation", "a", **{f"k{n}": n for n in range(5)}) as span:
        assert span is not None
        span.set_attribute("k5", object())
    message = telemetry.span("a")
    assert {key for key in attributes(message) if key.startswith("k")} == {"k0", "k1", "k2"}
    assert message.dropped_attributes_count == 3
    assert telemetry.drops == {"attributes": 3}


def test_bad_attribute_is_counted_on_the_span(telemetry: Telemetry):
    """The span does not say that it lost something."""
    with managed_span("generation", "a", bad=object(), worse=2**64, good=1):
        pass
    message = telemetry.span("a")
    assert message.dropped_attributes_count == 2
    assert attributes(message)["good"] == 1
    assert telemetry.drops == {"attributes": 2}


def test_events_and_links_beyond_their_limits_are_counted(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch):
    """OTEL_SPAN_EVENT_COUNT_LIMIT and its like: a span with an event a token grows without end."""
    monkeypatch.setattr(_encode, "event_count_limit", 2)
    monkeypatch.setattr(_encode, "link_count_limit", 1)

    def work() -> None:
        with managed_span("generation", "a") as span:
            assert span is not None
            for n in range(5):
                span.add_event(f"e{n}")
                span.add_link(SpanContext(1, n + 1, False))
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        work()
    message = telemetry.span("a")
    # the exception that ended the span is there all the same
    assert [event.name for event in message.events] == ["e0", "e1", "exception"]
    assert (message.dropped_events_count, len(message.links), message.dropped_links_count) == (3, 1, 4)
    assert telemetry.drops == {"attributes": 7}


def test_record_of_over_1_mib_loses_its_largest_parts(telemetry: Telemetry):
    """A record beyond the format's limit is damage to every reader."""
    with managed_span("generation", "a", small=1, **{f"k{n}": "x" * 65_000 for n in range(20)}) as span:
        assert span is not None
        span.add_event("e", {f"k{n}": "y" * 65_000 for n in range(3)})
        span.set_attribute("bad", object())
        span.set_status(StatusCode.ERROR, "why")
    (record,) = telemetry.records()
    assert len(record.payload) <= MAX_PAYLOAD
    message = telemetry.span("a")
    found = attributes(message)
    assert found["small"] == 1
    assert message.status.message == "why"
    lost = 20 - sum(key.startswith("k") for key in found) + (not message.events)
    assert lost > 0
    assert message.dropped_attributes_count == lost + 1  # and the one that could not be encoded
    assert telemetry.drops == {"attributes": lost + 1}


def test_span_whose_name_and_scopes_exceed_a_record_is_dropped(telemetry: Telemetry):
    """A record beyond the format's limit is damage to every reader, and all that follows may be lost with it."""
    token = _scopes.var.set(_scopes.make(None, attributes=tuple((f"k{n}", "x" * 65_536) for n in range(20))))
    try:
        with managed_span("generation", "too large"):
            pass
    finally:
        _scopes.leave(token)
    with managed_span("generation", "next"):
        pass
    assert [span.name for span in telemetry.spans()] == ["next"]
    assert telemetry.drops == {"spans": 1}
    assert not _state.open_spans


def test_more_spans_open_than_the_table_has_slots(telemetry: Telemetry):
    """The 257th open span raises, or takes the slot of another."""
    spans = [opened(f"s{n}") for n in range(600)]
    for span in spans:
        span.end()
    assert sorted(span.name for span in telemetry.spans()) == sorted(f"s{n}" for n in range(600))
    assert _state.table is not None
    assert len(set(_state.table.free)) == len(_state.table.free) == 256


# -- contexts, threads, generators -------------------------------------------------------------------------------------


def test_span_of_a_closed_generator_leaves_the_consumers_spans_alone(telemetry: Telemetry):
    """Closing a half-read generator ends the spans that happen to be open around the close, as interrupted."""

    def numbers() -> Any:
        with managed_span("data_processing", "numbers"):
            yield 1
            yield 2

    generator = numbers()
    next(generator)
    with managed_span("generation", "consumer") as consumer:
        generator.close()
        assert consumer is not None
        assert consumer.is_recording()
    assert telemetry.span("consumer").status.code == 0
    assert telemetry.span("numbers").status.code == 0


def test_span_of_a_collected_generator_leaves_the_consumers_spans_alone(telemetry: Telemetry):
    """The collector finds a forgotten generator in the middle of a step, and the step's spans end there."""

    def numbers() -> Any:
        with managed_span("data_processing", "numbers"):
            yield 1

    contextvars.Context().run(next, cycle := numbers())
    holder: list[Any] = [cycle]
    holder.append(holder)  # only the collector can free it
    with umbrella_span("step", "step") as step, managed_span("generation", "inner") as inner:
        del cycle, holder
        gc.collect()
        assert step is not None
        assert inner is not None
        assert step.is_recording()
        assert inner.is_recording()
        assert trace.get_current_span() is inner
    assert len(telemetry.spans()) == 3
    assert {span.status.code for span in telemetry.spans()} == {0}


def test_error_thrown_into_a_generator_leaves_the_consumers_spans_alone(telemetry: Telemetry):
    """An ordinary error in a generator ends its consumer's spans as interrupted."""

    def numbers() -> Any:
        with managed_span("data_processing", "numbers"):
            yield 1

    generator = numbers()
    next(generator)
    with managed_span("generation", "consumer") as consumer:
        with pytest.raises(ValueError, match="x"):
            generator.throw(ValueError("x"))
        assert consumer is not None
        assert consumer.is_recording()
    assert telemetry.span("numbers").status.code == 2


def test_span_that_outlives_its_parent_leaves_nothing_current(telemetry: Telemetry):
    """A generator that began inside a span and is closed after it makes that dead span current, for good."""

    def numbers() -> Any:
        with managed_span("data_processing", "numbers"):
            yield 1

    generator = numbers()
    with managed_span("generation", "outer"):
        next(generator)
    assert not trace.get_current_span().get_span_context().is_valid
    generator.close()
    assert not trace.get_current_span().get_span_context().is_valid
    with managed_span("generation", "later"):
        pass
    assert telemetry.span("later").parent_span_id == b""


def test_span_closed_inside_another_leaves_that_one_current(telemetry: Telemetry):
    """A generator that is closed in the middle of a span takes it away from the rest of its own body."""

    def numbers() -> Any:
        with managed_span("data_processing", "numbers"):
            yield 1

    outside = _span.otel_var.get()
    generator = numbers()
    next(generator)
    with managed_span("generation", "outer") as outer:
        generator.close()
        assert trace.get_current_span() is outer
    _span.otel_var.set(outside)
    foreign = NonRecordingSpan(SpanContext(1, 2, False, TraceFlags(1)))
    generator = numbers()
    next(generator)
    with trace.use_span(foreign):
        generator.close()
        assert trace.get_current_span() is foreign
    _span.otel_var.set(outside)


def test_what_is_left_current_inside_a_span_goes_with_it(telemetry: Telemetry):
    """A generator that is read no further stays the parent of all that its consumer does for the rest of the run."""

    def numbers() -> Any:
        with managed_span("data_processing", "numbers"):
            yield 1

    @contextlib.contextmanager
    def step() -> Any:
        with umbrella_span("step", "step"):
            yield

    kept = []
    for around in (managed_span("generation", "outer"), step()):
        with around:
            kept.append(numbers())
            next(kept[-1])
        assert not trace.get_current_span().get_span_context().is_valid


def test_context_that_somebody_left_attached_goes_with_the_span(telemetry: Telemetry):
    """A library inside the span attaches a context and never detaches it: all later spans are its children."""
    from opentelemetry import context

    with managed_span("generation", "a"):
        context.attach(trace.set_span_in_context(NonRecordingSpan(SpanContext(1, 2, False, TraceFlags(1)))))
    with managed_span("generation", "b"):
        pass
    assert telemetry.span("b").parent_span_id == b""


def test_span_ended_in_another_context_is_kept(telemetry: Telemetry):
    """``Token was created in a different Context`` comes out of a with statement, or the span is lost."""
    span: Any = managed_span("generation", "a")
    contextvars.copy_context().run(span.__enter__)
    span.__exit__(None, None, None)
    assert telemetry.span("a").name == "a"


def test_tasks_of_one_loop_do_not_share_a_current_span(telemetry: Telemetry):
    """Two rollouts in one event loop become each other's children."""

    async def rollout(name: str) -> None:
        with managed_span("generation", name):
            await asyncio.sleep(0)
            with managed_span("reward", f"{name}.reward"):
                await asyncio.sleep(0)

    async def main() -> None:
        with managed_span("data_processing", "main"):
            await asyncio.gather(*(rollout(f"r{n}") for n in range(10)))

    asyncio.run(main())
    spans = {span.name: span for span in telemetry.spans()}
    for n in range(10):
        assert spans[f"r{n}"].parent_span_id == spans["main"].span_id
        assert spans[f"r{n}.reward"].parent_span_id == spans[f"r{n}"].span_id


def test_thread_is_named_on_its_spans(telemetry: Telemetry):
    """Spans of all threads look like one: nobody can tell what overlapped."""

    def work() -> None:
        with managed_span("generation", "a"):
            pass

    thread = threading.Thread(target=work, name="rollout-7")
    thread.start()
    thread.join()
    found = attributes(telemetry.span("a"))
    assert (found["thread.name"], found["thread.id"]) == ("rollout-7", thread.ident)


# -- shutdown and restart ----------------------------------------------------------------------------------------------


def test_open_span_is_truncated_at_shutdown_and_written_once(tmp_path: Path):
    """A span that is open at shutdown is lost, or comes twice when its body ends after all."""
    with running(tmp_path / "run") as telemetry, umbrella_span("job", "job"), managed_span("generation", "a") as span:
        assert span is not None
        span.set_attribute("n", 1)
        setup.shutdown_telemetry()
        span.set_attribute("late", 1)
    spans = [span for span in telemetry.spans() if span.name != "job.started"]
    assert [span.name for span in spans] == ["a", "job"]  # innermost first
    assert all(attributes(span)["rl.truncated"] is True for span in spans)
    assert attributes(spans[0])["n"] == 1
    assert "late" not in attributes(spans[0])


def test_span_across_a_restart_stays_out_of_the_new_run(tmp_path: Path):
    """A span of the first run ends in the spool of the second, whose parent nobody knows."""
    with running(tmp_path / "one") as one:
        outer: Any = managed_span("generation", "outer")
        outer.__enter__()
    with running(tmp_path / "two") as two:
        with managed_span("generation", "new"):
            pass
        outer.__exit__(None, None, None)
        assert [span.name for span in two.spans()] == ["new"]
        assert not _state.open_spans
    assert [span.name for span in one.spans()] == ["outer"]


def test_span_cm_outside_all_groups(telemetry: Telemetry):
    """A span without a group is given a bucket, and counts twice in goodput."""
    with span_cm("a", n=1):
        pass
    found = attributes(telemetry.span("a"))
    assert found["n"] == 1
    assert not {"rl.bucket", "rl.span_group"} & set(found)
