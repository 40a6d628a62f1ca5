"""Spans of other instrumentation in our spool: through the tracers that we hand out, and through the SDK's own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from raytrace_rl import _state, setup
from raytrace_rl._foreign import SpoolSpanProcessor
from raytrace_rl._provider import SpoolTracer, SpoolTracerProvider
from raytrace_rl.instrumentation import iteration_scope, managed_span, umbrella_span
from raytrace_rl.monitor import load_run
from raytrace_rl.spool.format import Kind
from tests.running import Telemetry, attributes, child, running

pytest_plugins = ["tests.telemetry_fixtures"]


def sdk_provider() -> TracerProvider:
    """The SDK's provider with our processor, as where somebody else has installed one."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpoolSpanProcessor())
    return provider


@pytest.fixture(params=["ours", "sdk"])
def provider(request: pytest.FixtureRequest) -> Any:
    """Both kinds of provider whose spans reach the spool."""
    return SpoolTracerProvider({}) if request.param == "ours" else sdk_provider()


@pytest.fixture
def tracer(provider: Any) -> trace.Tracer:
    """A tracer of either provider."""
    found: trace.Tracer = provider.get_tracer("library", "1.2", "https://example.com/schema")
    return found


def test_span_is_in_the_file_when_it_has_ended(telemetry: Telemetry, tracer: trace.Tracer):
    """A foreign span is queued, or its scope, kind, link, event, status or time is lost."""
    linked = SpanContext(5, 6, is_remote=True, trace_flags=TraceFlags(1))
    span = tracer.start_span("a", None, SpanKind.CLIENT, {"n": 1, "s": "x"}, [Link(linked, {"l": 1})], 1000)
    assert telemetry.spans() == []
    span.add_event("e", {"k": 2}, 1500)
    span.set_status(Status(StatusCode.ERROR, "why"))
    span.end(2000)
    (record,) = telemetry.records()
    assert record.kind == Kind.SCOPE_SPANS
    scope_spans = ScopeSpans.FromString(record.payload)
    assert (scope_spans.scope.name, scope_spans.scope.version) == ("library", "1.2")
    assert scope_spans.schema_url == "https://example.com/schema"
    (message,) = scope_spans.spans
    assert (message.name, message.kind) == ("a", message.SPAN_KIND_CLIENT)
    assert (message.start_time_unix_nano, message.end_time_unix_nano) == (1000, 2000)
    found = attributes(message)
    assert (found["n"], found["s"]) == (1, "x")
    assert not {"rl.bucket", "rl.span_group"} & set(found)
    (event,) = message.events
    assert (event.name, event.time_unix_nano, attributes(event)) == ("e", 1500, {"k": 2})
    (link,) = message.links
    assert (link.trace_id, link.span_id, attributes(link)) == (
        (5).to_bytes(16, "big"),
        (6).to_bytes(8, "big"),
        {"l": 1},
    )
    assert (message.status.code, message.status.message) == (2, "why")
    assert not _state.open_spans


def test_nesting_both_ways(telemetry: Telemetry, tracer: trace.Tracer):
    """Foreign spans and ours make two trees."""
    with (
        umbrella_span("job", "1 ours"),
        tracer.start_as_current_span("2 theirs"),
        managed_span("generation", "3 ours"),
        tracer.start_as_current_span("4 theirs") as current,
    ):
        assert trace.get_current_span() is current
    assert not trace.get_current_span().get_span_context().is_valid
    with tracer.start_as_current_span("5 theirs"), managed_span("generation", "6 ours"):
        pass
    spans = {span.name: span for span in telemetry.spans()}
    parents = {span.name: span.parent_span_id for span in spans.values()}
    for parent, below in (
        ("1 ours", "2 theirs"),
        ("2 theirs", "3 ours"),
        ("3 ours", "4 theirs"),
        ("5 theirs", "6 ours"),
    ):
        assert parents[below] == spans[parent].span_id
        assert spans[below].trace_id == spans[parent].trace_id
    assert parents["1 ours"] == parents["5 theirs"] == b""
    assert spans["1 ours"].trace_id != spans["5 theirs"].trace_id


def test_explicit_context_and_remote_parent(telemetry: Telemetry, tracer: trace.Tracer):
    """A server span, whose parent comes out of a request's headers, hangs from whatever is current."""
    remote = NonRecordingSpan(SpanContext(0xA, 0xB, is_remote=True, trace_flags=TraceFlags(1)))
    with managed_span("generation", "current"):
        tracer.start_span("served", trace.set_span_in_context(remote)).end()
    served = telemetry.span("served")
    assert served.trace_id == (0xA).to_bytes(16, "big")
    assert served.parent_span_id == (0xB).to_bytes(8, "big")
    assert served.flags == 0x301


@pytest.mark.parametrize("record", [True, False])
def test_exception(telemetry: Telemetry, tracer: trace.Tracer, record: bool):
    """A failed request reads as a success, or its error is recorded twice."""
    error = LookupError("mine")

    def fail() -> None:
        with tracer.start_as_current_span("a", record_exception=record, set_status_on_exception=record):
            raise error

    with pytest.raises(LookupError) as caught:
        fail()
    assert caught.value is error
    message = telemetry.span("a")
    assert message.status.code == (2 if record else 0)
    assert [event.name for event in message.events] == ["exception"] * record
    if record:
        assert message.status.message == "LookupError: mine"


def test_decorator(telemetry: Telemetry, tracer: trace.Tracer):
    """``@tracer.start_as_current_span`` is a common way to instrument a function."""

    @tracer.start_as_current_span("decorated")
    def work() -> int:
        with managed_span("generation", "inside"):
            return 5

    assert [work(), work()] == [5, 5]
    assert [span.name for span in telemetry.spans()] == ["inside", "decorated"] * 2


def test_span_that_is_open_at_shutdown(tmp_path: Path, tracer: trace.Tracer):
    """A foreign span that is open at shutdown is lost, or comes twice when it ends after all."""
    with running(tmp_path / "run") as telemetry:
        span = tracer.start_span("open", attributes={"n": 1})
        setup.shutdown_telemetry()
        span.set_attribute("late", 1)
        span.end()
    (message,) = telemetry.spans()
    found = attributes(message)
    assert (found["n"], found["rl.truncated"]) == (1, True)
    assert "late" not in found


def test_span_across_a_restart(tmp_path: Path, tracer: trace.Tracer):
    """A foreign span of the first run ends in the spool of the second."""
    with running(tmp_path / "one") as one:
        span = tracer.start_span("across")
    with running(tmp_path / "two") as two:
        span.end()
        tracer.start_span("new").end()
        assert [span.name for span in two.spans()] == ["new"]
    assert [span.name for span in one.spans()] == ["across"]


def test_nothing_is_kept_while_telemetry_is_off(tmp_path: Path, tracer: trace.Tracer):
    """A span that began before telemetry did is written with half of its story; or one without telemetry fails."""
    early = tracer.start_span("early")
    with tracer.start_as_current_span("off") as span:
        span.set_attribute("n", 1)
    with running(tmp_path / "run") as telemetry:
        early.end()
        assert telemetry.spans() == []
        assert telemetry.drops == {}


def test_misuse_costs_no_run(telemetry: Telemetry, tracer: trace.Tracer):
    """An attribute that nobody can encode takes the foreign span with it."""
    with tracer.start_as_current_span("a", attributes={"bad": object(), "good": 1}) as span:  # type: ignore[dict-item]
        span.set_attribute("worse", {1, 2})
    found = attributes(telemetry.span("a"))
    assert found["good"] == 1
    assert "bad" not in found
    if isinstance(tracer, SpoolTracer):  # the SDK writes its str() in the place of a set
        assert "worse" not in found
        assert telemetry.drops == {"attributes": 2}


def test_record_of_over_1_mib(telemetry: Telemetry, tracer: trace.Tracer):
    """A foreign span too large for a record is damage to every reader, or vanishes uncounted."""
    with tracer.start_as_current_span("large") as span:
        for n in range(40):
            span.set_attribute(f"k{n}", "x" * 65_000)
    tracer.start_span("next").end()
    names = [span.name for span in telemetry.spans()]
    assert names in (["large", "next"], ["next"])
    assert telemetry.drops.get("attributes", 0) > 0 if "large" in names else telemetry.drops.get("spans") == 1


def test_many_threads(telemetry: Telemetry, tracer: trace.Tracer):
    """Eight threads of an HTTP client lose each other's spans."""

    def work(thread: int) -> None:
        for n in range(200):
            with tracer.start_as_current_span("a", attributes={"thread": thread, "n": n}):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {(attributes(span)["thread"], attributes(span)["n"]) for span in telemetry.spans()}
    assert found == {(thread, n) for thread in range(8) for n in range(200)}
    assert len(telemetry.spans()) == 1600


def test_sdk_sampler_of_the_user_decides_for_his_spans_alone(telemetry: Telemetry):
    """A user's sampler switches our spans off, or his unsampled spans are kept against his will."""
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SpoolSpanProcessor())
    with provider.get_tracer("x").start_as_current_span("unsampled"), managed_span("generation", "ours"):
        pass
    (ours,) = telemetry.spans()
    assert ours.name == "ours"
    assert ours.flags & 1 == 0  # as its parent


def test_tracer_given_by_hand_makes_the_span_in_its_own_pipeline(telemetry: Telemetry):
    """``tracer=`` is ignored, or the span loses what says where its time belongs."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("mine")
    with (
        umbrella_span("job", "job") as job,
        iteration_scope(4),
        managed_span("generation", "made", tracer=tracer, n=1, none=None) as made,
        managed_span("reward", "inside"),
    ):
        assert made is trace.get_current_span() or made is not None
    (span,) = exporter.get_finished_spans()
    assert job is not None
    assert span.parent is not None
    assert span.parent.span_id == job.get_span_context().span_id
    assert dict(span.attributes or {}) == {
        "rl.span_group": "generation",
        "rl.bucket": "productive",
        "rl.iteration": 4,
        "n": 1,
    }
    # ours do not enter its pipeline, its spans not our spool, and both are parents of each other
    inside = telemetry.span("inside")
    assert span.context is not None
    assert inside.parent_span_id == span.context.span_id.to_bytes(8, "big")
    assert sorted(message.name for message in telemetry.spans()) == ["inside", "job", "job.started"]


def test_ours_do_not_enter_the_pipeline_of_an_installed_provider(tmp_path: Path):
    """A provider that was installed first is replaced, sees our spans, or its spans stay out of the spool."""
    child(
        """
        import sys
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter = InMemorySpanExporter()
        mine = TracerProvider()
        mine.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(mine)

        from raytrace_rl import setup
        from raytrace_rl.instrumentation import managed_span

        for n in range(2):  # once more: the processor is not added twice
            setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": f"{sys.argv[1]}/{n}"})
            assert trace.get_tracer_provider() is mine
            with trace.get_tracer("lib").start_as_current_span("theirs"), managed_span("generation", "ours"):
                pass
            setup.shutdown_telemetry()
        assert [span.name for span in exporter.get_finished_spans()] == ["theirs"] * 2
        """,
        tmp_path,
    )
    for n in range(2):
        run = load_run(tmp_path / str(n))
        spans = {row.name: row for row in run.spans}
        assert set(spans) == {"theirs", "ours"}
        assert run.duplicates == 0
        assert spans["ours"].parent_span_id == spans["theirs"].span_id


@pytest.mark.parametrize("sdk", [False, True])
def test_killed_with_a_foreign_span_open(tmp_path: Path, sdk: bool):
    """What a killed process was waiting for, an HTTP call of some library, is not to be seen."""
    child(
        """
        import os, sys, time
        from opentelemetry import trace
        from raytrace_rl import _state, setup
        from raytrace_rl.instrumentation import managed_span

        if sys.argv[2] == "True":
            from opentelemetry.sdk.trace import TracerProvider
            trace.set_tracer_provider(TracerProvider())
        handle = setup.init_telemetry_driver(
            {"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "heartbeat_s": 0.02}
        )
        with managed_span("generation", "outer"), trace.get_tracer("lib").start_as_current_span("call") as span:
            span.set_attribute("url", "x")
            deadline = time.monotonic() + 20
            while not [name for name in os.listdir(os.path.join(sys.argv[1], "spool", os.listdir(
                    os.path.join(sys.argv[1], "spool"))[0])) if ".open.0." in name]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os._exit(0)
        """,
        tmp_path / "run",
        sdk,
    )
    run = load_run(tmp_path / "run")
    spans = {row.name: row for row in run.spans}
    assert {name: row.truncated for name, row in spans.items()} == {"outer": True, "call": True}
    assert spans["call"].parent_span_id == spans["outer"].span_id


@pytest.mark.parametrize("sdk", [False, True])
def test_foreign_spans_across_a_fork(tmp_path: Path, sdk: bool):
    """A foreign span that is open across a fork comes twice, from the parent and from the child."""
    child(
        """
        import os, sys
        from opentelemetry import trace
        from raytrace_rl import setup

        if sys.argv[2] == "True":
            from opentelemetry.sdk.trace import TracerProvider
            trace.set_tracer_provider(TracerProvider())
        setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": sys.argv[1]})
        tracer = trace.get_tracer("lib")
        with tracer.start_as_current_span("across"):
            pid = os.fork()
            with tracer.start_as_current_span("inside"):
                pass
        if not pid:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """,
        tmp_path / "run",
        sdk,
    )
    run = load_run(tmp_path / "run")
    assert sorted((row.name, str(row.process.role)) for row in run.spans) == [
        ("across", "driver"),
        ("inside", "driver"),
        ("inside", "worker"),
    ]
    assert run.duplicates == 0
    assert len({row.span_id for row in run.spans}) == 3
