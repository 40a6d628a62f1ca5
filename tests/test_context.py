"""Carriers: what is written, what is read, what rubbish costs, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import pickle
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from raytrace_rl import (
    TraceContext,
    _carrier,
    _invocation,
    _scopes,
    _span,
    bucket_scope,
    current_trace_carrier,
    iteration_scope,
    managed_span,
    remote_trace_context,
    setup,
    umbrella_span,
)
from raytrace_rl.context import receive

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def telemetry() -> Iterator[None]:
    """Telemetry on, its spans going nowhere."""
    setup.init_telemetry_driver({"enabled": True, "exporter": "none", "span_groups": "all"})
    yield
    setup.shutdown_telemetry()


def current_parent() -> str | None:
    """The current span as ``trace-span``, None if there is none."""
    found = trace.get_current_span().get_span_context()
    return f"{found.trace_id:032x}-{found.span_id:016x}" if found.is_valid else None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this library warned of."""
    return [record.getMessage() for record in caplog.records if record.name == "raytrace_rl"]


# ---------------------------------------------------------------------------------------------------------- writing


def test_off_a_carrier_is_empty():
    """Catches carriers that travel, and cost, while telemetry is off."""
    with trace.use_span(NonRecordingSpan(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)))):
        assert current_trace_carrier() == {}


def test_with_nothing_to_carry_a_carrier_is_empty(telemetry):
    """Catches a carrier that only says that there is none, and still costs a keyword on every call."""
    assert current_trace_carrier() == {}
    assert _carrier.sent() == {}


def test_the_carrier_of_our_own_span_is_what_opentelemetry_would_write(telemetry):
    """Catches a hand-made header that differs from the W3C's by a digit."""
    for name in ("a", "b"):  # twice: the header of the span before is remembered
        with managed_span("generation", name):
            official: dict[str, str] = {}
            propagate.inject(official)
            assert current_trace_carrier() == official


def test_the_flags_and_the_state_of_a_foreign_span_travel(telemetry):
    """Catches a carrier that makes every trace sampled, or loses a vendor's state on the way through our spans."""
    state = TraceState([("vendor", "x"), ("other", "y")])
    foreign = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(0), trace_state=state))
    with trace.use_span(foreign):
        carrier = current_trace_carrier()
        assert carrier == {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-00", "tracestate": "vendor=x,other=y"}
        with managed_span("generation", "between"):
            below = current_trace_carrier()
    assert below["tracestate"] == "vendor=x,other=y"
    assert below["traceparent"].endswith("-00")
    with remote_trace_context(carrier):
        assert trace.get_current_span().get_span_context().trace_state == state
        assert current_trace_carrier() == carrier


def test_the_users_baggage_travels_and_ours_is_not_in_it(telemetry):
    """Catches scopes that leak into baggage, which every tool server would be sent."""
    token = context.attach(baggage.set_baggage("user", "ann, bob"))
    try:
        with managed_span("generation", "x"), iteration_scope(7), bucket_scope("overhead"):
            carrier = current_trace_carrier()
            outgoing: dict[str, str] = {}
            propagate.inject(outgoing)
    finally:
        context.detach(token)
    assert carrier["baggage"] == outgoing["baggage"] == "user=ann%2C+bob"
    assert set(outgoing) == {"traceparent", "baggage"}
    with remote_trace_context(carrier):
        assert baggage.get_all() == {"user": "ann, bob"}
    assert baggage.get_all() == {}


def test_scopes_travel_without_a_span_too(telemetry):
    """Catches an iteration that is lost where no span is current, and a parent made up for it."""
    with iteration_scope(7):
        carrier = current_trace_carrier()
    assert carrier == {"raytrace": "i=7"}
    attachment = receive(carrier)
    assert attachment is not None
    assert attachment[0] is _span.otel_var.get()


def test_only_dispatch_sends_the_time(telemetry):
    """Catches a send time in a carrier that outlives its call, whose delay would grow for ever."""
    with umbrella_span("step", "s"), iteration_scope(3):
        assert current_trace_carrier()["raytrace"] == "i=3"
        text, _, sender = _carrier.sent()["raytrace"].partition("|")
    assert text == "i=3"
    assert abs(time.time_ns() - int(sender.split(",")[0])) < 60 * 10**9


@given(
    iteration=st.none() | st.integers(-(2**62), 2**62),
    bucket=st.none() | st.sampled_from(["productive", "overhead", "idle", "wasted"]),
    per_prompt=st.sampled_from([(False, False), (True, False), (True, True)]),
)
def test_scopes_come_back_as_they_were_sent(iteration, bucket, per_prompt):
    """Catches a scope that the compact form cannot tell from another."""
    scopes = _scopes.Scopes(iteration, bucket, per_prompt[0], (), [], muted=per_prompt[1])
    assert _carrier._parse_scopes(_carrier._scopes_text(scopes)) == (iteration, bucket, *per_prompt)


# ---------------------------------------------------------------------------------------------------------- reading


def test_a_remote_context_is_the_parent_inside_and_gone_after(telemetry):
    """Catches a parent that is not the carrier's, and a context that stays attached."""
    with remote_trace_context({"traceparent": PARENT}):
        assert current_parent() == f"{TRACE_ID}-{SPAN_ID}"
        with managed_span("generation", "child") as child:
            assert child is not None
            assert child.get_span_context().trace_id == int(TRACE_ID, 16)
    assert current_parent() is None


def test_a_carrier_wins_over_what_is_current(telemetry):
    """Catches a local span that is taken for the parent though a carrier says otherwise."""
    with managed_span("generation", "local"):
        here = current_parent()
        with remote_trace_context({"traceparent": PARENT}):
            assert current_parent() == f"{TRACE_ID}-{SPAN_ID}"
        assert current_parent() == here


@pytest.mark.parametrize("empty", [None, {}])
def test_no_carrier_changes_nothing(empty, telemetry):
    """Catches an empty carrier that makes its children roots."""
    with managed_span("generation", "local"):
        here = current_parent()
        with remote_trace_context(empty):
            assert current_parent() == here


def test_a_kept_carrier_brings_no_scopes(telemetry):
    """Catches the training step of the call that brought a carrier on the spans of all later ones."""
    with managed_span("generation", "x"), iteration_scope(7):
        carrier = current_trace_carrier()
    with remote_trace_context(carrier):
        assert _scopes.var.get() is None
    with iteration_scope(8), remote_trace_context(carrier):
        scopes = _scopes.var.get()
        assert scopes is not None
        assert scopes.iteration == 8


def test_a_delay_below_zero_says_so(telemetry):
    """Catches a delay made up where the clock of the sending node is ahead: that it is says something of the clocks."""
    attachment = receive({"traceparent": PARENT, "raytrace": f"|{time.time_ns() + 10**10},elsewhere"})
    assert attachment is not None
    assert attachment[1] is not None
    queued_ns = attachment[1].take_queued()
    assert queued_ns is not None
    assert -(10**10) <= queued_ns < 0


@pytest.mark.parametrize(
    "carrier",
    [
        "text",
        b"\xff",
        7,
        ["traceparent"],
        {"traceparent": 7},
        {"traceparent": [PARENT]},
        {"traceparent": ""},
        {"traceparent": PARENT.upper()},
        {"traceparent": PARENT + "-more"},
        {"traceparent": PARENT + "\n"},
        {"traceparent": "ff" + PARENT[2:]},
        {"traceparent": f"00-{'0' * 32}-{SPAN_ID}-01"},
        {"traceparent": f"00-{TRACE_ID}-{'0' * 16}-01"},
        {"traceparent": "x" * 10_000_000},
        {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-\u0660\u0661"},
        {"raytrace": 7},
        {"raytrace": "i=" + "9" * 40},
        {"raytrace": "i=seven"},
        {"raytrace": "b=splendid"},
        {"raytrace": "nonsense"},
        {"raytrace": "|yesterday,here"},
        {"raytrace": "|1,here"},
        {"raytrace": f"|{2**62},here"},
        {"raytrace": "i=1;" * 100_000},
        {"baggage": 7},
        {"baggage": "x" * 100_000},
    ],
)
def test_rubbish_costs_one_warning_and_changes_nothing(carrier, telemetry, caplog):
    """Catches a broken carrier that ends a call, changes its parent, or fills a log."""
    with managed_span("generation", "local"):
        here, otel = current_parent(), _span.otel_var.get()
        for _ in range(3):
            with remote_trace_context(carrier):
                assert current_parent() == here
            attachment = receive(carrier)
            assert attachment is None or attachment[0] is otel
    assert len(warnings(caplog)) == 1
    assert len(warnings(caplog)[0]) < 300


def test_rubbish_beside_a_good_parent_spoils_only_itself(telemetry):
    """Catches a parent thrown away with a broken scope."""
    attachment = receive({"traceparent": PARENT, "raytrace": "i=seven", "baggage": 7, "tracestate": 7})
    assert attachment is not None
    parent = trace.get_current_span(attachment[0]).get_span_context()
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert attachment[1] is None


def test_a_later_version_of_the_header_is_read_as_far_as_we_know_it(telemetry):
    """Catches a sender's newer traceparent being refused, which W3C trace context 3.2.2 forbids."""
    with remote_trace_context({"traceparent": f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes-later"}):
        assert current_parent() == f"{TRACE_ID}-{SPAN_ID}"


class _Hostile(Mapping[str, str]):
    def __getitem__(self, key: str) -> str:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")


def test_a_hostile_mapping_is_rubbish_too(telemetry):
    """Catches an exception out of someone else's mapping that ends a call."""
    assert receive(_Hostile()) is None
    assert TraceContext(_Hostile()).carrier == {}


@given(
    st.one_of(
        st.text(),
        st.binary(),
        st.dictionaries(
            st.sampled_from(["traceparent", "tracestate", "baggage", "raytrace", "x"]),
            st.one_of(st.text(max_size=80), st.integers(), st.none(), st.binary(), st.just(PARENT)),
        ),
    )
)
def test_no_carrier_whatever_raises(carrier):
    """Catches any other rubbish that gets an exception out."""
    _carrier.read(carrier, True)
    _carrier.read(carrier, False)
    TraceContext(carrier)


def test_off_a_carrier_changes_nothing(monkeypatch):
    """Catches a parent attached, or a start tried again on every call, in a process whose telemetry is off."""
    asked = []
    monkeypatch.setattr(setup, "start_from_carrier", lambda: asked.append(1))
    monkeypatch.setattr("raytrace_rl.context._asked", None)
    for _ in range(3):
        with remote_trace_context({"traceparent": PARENT}):
            assert current_parent() is None
    assert asked == [1]


def test_the_first_carrier_starts_telemetry(monkeypatch, tmp_path):
    """Catches plain remote functions, which have no ``__init__``, that never trace."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("raytrace_rl.context._asked", None)
    monkeypatch.setattr(setup, "_finished_pid", 0)
    assert receive({}) is None
    assert setup.get_telemetry_handle() is None
    assert receive({"traceparent": PARENT}) is not None
    assert setup.get_telemetry_handle() is not None


# ------------------------------------------------------------------------------------------------------ TraceContext


def test_a_captured_context_is_attached_again_and_again(telemetry):
    """Catches a collector's context that can be used once, or that depends on a span being open."""
    with managed_span("generation", "x") as span, iteration_scope(7):
        captured = TraceContext.capture()
    assert span is not None
    for _ in range(2):
        with captured.attach():
            assert trace.get_current_span().get_span_context().span_id == span.get_span_context().span_id
            assert _scopes.var.get() is None
        assert current_parent() is None
    assert set(captured.carrier) == {"traceparent"}


def test_a_context_captured_with_nothing_current_changes_nothing(telemetry):
    """Catches a capture outside all spans that would detach whoever attaches it."""
    nothing = TraceContext.capture()
    with managed_span("generation", "local"):
        here = current_parent()
        with nothing.attach():
            assert current_parent() == here


def test_a_captured_context_pickles(telemetry):
    """Catches a collector that cannot be handed its context."""
    captured = TraceContext({"traceparent": PARENT, "raytrace": "i=7"})
    assert pickle.loads(pickle.dumps(captured)).carrier == {"traceparent": PARENT}


def test_a_wrapped_function_runs_attached_whatever_its_kind(telemetry):
    """Catches a wrapped coroutine function or generator that is attached only while it is made."""
    captured = TraceContext({"traceparent": PARENT})

    @captured.wrap
    def plain() -> str | None:
        return current_parent()

    @captured.wrap
    def generator() -> Iterator[str | None]:
        yield current_parent()
        yield current_parent()

    @captured.wrap
    async def coroutine() -> str | None:
        await asyncio.sleep(0)
        return current_parent()

    inside = f"{TRACE_ID}-{SPAN_ID}"
    assert plain() == inside
    assert list(generator()) == [inside, inside]
    assert asyncio.run(coroutine()) == inside
    assert plain.__name__ == "plain"
    assert current_parent() is None


def test_a_context_manager_that_is_left_elsewhere_detaches_nothing_there(telemetry, caplog):
    """Catches "Failed to detach context", and a context taken from whoever happens to collect a generator."""

    def abandoned() -> Iterator[None]:
        with remote_trace_context({"traceparent": PARENT}):
            yield

    caplog.set_level(logging.DEBUG)
    elsewhere = contextvars.copy_context()
    generator = elsewhere.run(lambda: (started := abandoned(), next(started))[0])
    with managed_span("generation", "here"):
        here = current_parent()
        del generator
        gc.collect()
        assert current_parent() == here
    assert not [record for record in caplog.records if "detach" in record.getMessage()]


def test_here_is_what_is_current(telemetry):
    """Catches a capture for threads that takes the span and forgets the scopes."""
    with managed_span("generation", "x"), iteration_scope(7):
        otel, scopes = _invocation.here()
        assert otel is _span.otel_var.get()
        assert scopes is _scopes.var.get()
