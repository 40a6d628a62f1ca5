"""Spans of particular phases, in both states: enabled, with name, attributes and parent; disabled, without trace."""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, get_current_span

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import _state, init_telemetry_driver, managed_span, shutdown_telemetry
from raytrace_rl.instrumentation import (
    Bucket,
    bucket_scope,
    checkpoint_finalize_span,
    efficiency_span,
    emit_span,
    evaluate_span,
    in_per_prompt_scope,
    per_prompt_scope,
    setup_span,
    span_attributes,
    start_efficiency_span,
    startup_span,
    streaming_umbrella_span,
    umbrella_span,
)
from raytrace_rl.monitor import load_run
from tests.disks import warnings_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Recorded:
    """Telemetry into a run directory, and what it recorded once it was shut down."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": str(run_dir)})

    def spans(self) -> dict[str, Any]:
        shutdown_telemetry()
        return {span.name: span for span in load_run(self.run_dir).spans}


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Telemetry with every group enabled."""
    return Recorded(tmp_path / "run")


#: How each is opened, the name of its span, its group and its bucket.
PHASES: dict[str, tuple[Callable[[], Any], str, str, str | None]] = {
    "startup_span": (startup_span, "rl.startup", "setup", None),
    "setup_span": (lambda: setup_span("workers"), "rl.setup.workers", "setup", None),
    "evaluate_span": (lambda: evaluate_span("grpo"), "rl.grpo.evaluate", "evaluate", None),
    "checkpoint_finalize_span": (
        lambda: checkpoint_finalize_span("grpo"),
        "rl.grpo.checkpoint_finalize",
        "checkpoint",
        "overhead",
    ),
    "idle/buffer_starvation": (
        lambda: efficiency_span("idle/buffer_starvation"),
        "rl.idle.buffer_starvation",
        "efficiency",
        "idle",
    ),
    "wasted/failed_trajectory": (
        lambda: efficiency_span("wasted/failed_trajectory"),
        "rl.wasted.failed_trajectory",
        "efficiency",
        "wasted",
    ),
    "init/total": (lambda: efficiency_span("init/total"), "rl.init.total", "efficiency", None),
    "idle/refit_event_wait": (
        lambda: efficiency_span("idle/refit_event_wait"),
        "rl.idle.refit_event_wait",
        "efficiency",
        None,
    ),
    "idle/generation_limit_pause": (
        lambda: efficiency_span("idle/generation_limit_pause"),
        "rl.idle.generation_limit_pause",
        "efficiency",
        None,
    ),
}


@pytest.mark.parametrize("phase", PHASES)
def test_enabled_it_is_a_current_child_with_its_name_group_and_bucket(phase, recorded):
    """Catches a phase under another name, in another group, with a bucket that it must not have, or beside the tree."""
    opened, name, group, bucket = PHASES[phase]
    with umbrella_span(G.U_JOB, "rl.grpo.job") as job, opened() as span:
        assert get_current_span() is span
        assert job is not None
        assert span.parent_id == job.span_id

    read = recorded.spans()[name]
    assert (read.span_group, read.bucket) == (group, bucket)


@pytest.mark.parametrize("phase", PHASES)
def test_disabled_it_yields_none_and_the_body_runs(phase):
    """Catches a phase that costs the body, or its exception, when telemetry is off."""
    ran: list[Any] = []

    def body() -> None:
        with PHASES[phase][0]() as span:
            ran.append(span)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert ran == [None]


@pytest.mark.parametrize("groups", [None, "default", "none"])
def test_disabled_nothing_is_emitted_started_or_counted(groups, tmp_path):
    """Catches a primitive without a ``with`` that records, or counts a loss, while its group, or telemetry, is off."""
    if groups is not None:
        init_telemetry_driver({"enabled": True, "span_groups": groups, "run_dir": str(tmp_path / "run")})
    emit_span(G.GENERATION, "rl.grpo.late", 1.0, 2.0, attributes={"rl.x": 1})
    assert start_efficiency_span("idle/refit_bubble", **{"rl.x": 1}) is None
    with span_attributes({"rl.x": 1}), bucket_scope(Bucket.IDLE), per_prompt_scope(3, of=8):
        assert in_per_prompt_scope()
        with managed_span(G.GENERATION, "rl.grpo.generation") as span:
            assert span is None
        with streaming_umbrella_span(G.U_ROLLOUT, "rl.grpo.rollout") as step, step() as span:
            assert span is None
    assert not in_per_prompt_scope()
    assert not any(_state.drops.values())
    shutdown_telemetry()
    if groups is not None:
        assert load_run(tmp_path / "run").spans == []


def test_an_exception_is_recorded_and_passes(recorded):
    """Catches a phase that swallows the body's exception, or leaves its scope open behind it."""
    with pytest.raises(KeyError), evaluate_span("grpo"):
        raise KeyError
    with managed_span(G.GENERATION, "after"):
        pass
    read = recorded.spans()
    assert read["rl.grpo.evaluate"].status == "ERROR"
    assert read["after"].bucket == "productive"


def test_validation_is_overhead_all_the_way_down(recorded):
    """Catches tokens of validation counted as goodput."""
    with evaluate_span("grpo"), managed_span(G.GENERATION, "validate"):
        pass
    assert recorded.spans()["validate"].bucket == "overhead"


@pytest.mark.parametrize("scope", list(Bucket))
def test_an_efficiency_span_keeps_its_bucket_whatever_the_scope(scope, recorded):
    """Catches a caller that makes a wait productive, or gives a bucket to a wait that overlaps bucketed work."""
    with bucket_scope(scope), efficiency_span("idle/refit_bubble"), efficiency_span("init/total"):
        pass
    read = recorded.spans()
    assert read["rl.idle.refit_bubble"].bucket == "idle"
    assert read["rl.init.total"].bucket is None
    assert read["rl.init.total"].attributes["rl.efficiency.category"] == "init/total"


def test_an_unknown_category_is_overhead_and_warned_of_once(recorded, caplog):
    """Catches a misspelt category that falls out of goodput without a word."""
    for _ in range(2):
        with efficiency_span("idle/buffer_starvatoin"):
            pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "idle/buffer_starvatoin" in caplog.text
    assert recorded.spans()["rl.idle.buffer_starvatoin"].bucket == "overhead"


@pytest.mark.parametrize("junk", [[], {}, 5, None, "", object()], ids=str)
def test_what_is_no_category_is_one_warning_and_the_body_runs(junk, recorded, caplog):
    """Catches junk for a category that ends the wait it was to name, or becomes the name of a span."""
    ran = []
    for _ in range(2):
        with efficiency_span(junk) as span:
            ran.append(span)
        ran.append(start_efficiency_span(junk))
    assert ran == [None] * 4
    assert len(warnings_of(caplog)) == 1
    assert recorded.spans() == {}


def test_a_category_of_an_enumeration_is_the_string_in_it(recorded):
    """Catches a category recorded as ``Wait.BUBBLE``, without its bucket."""

    class Wait(str, Enum):
        BUBBLE = "idle/refit_bubble"

    with efficiency_span(Wait.BUBBLE):
        pass
    (span,) = recorded.spans().values()
    assert (span.name, span.bucket) == ("rl.idle.refit_bubble", "idle")


def test_a_hand_ended_wait_adopts_no_children(recorded):
    """Catches a poll loop's span that becomes the parent of whatever is started while it waits."""
    with umbrella_span(G.U_STEP, "rl.grpo.step") as step:
        wait: Any = start_efficiency_span("idle/buffer_starvation", **{"rl.idle.polls": 3})
        with managed_span(G.GENERATION, "meanwhile") as span:
            assert step is not None
            assert span is not None
            assert span.parent_id == step.span_id
        wait.end()
    read = recorded.spans()["rl.idle.buffer_starvation"]
    assert read.bucket == "idle"
    assert read.attributes["rl.idle.polls"] == 3
    shutdown_telemetry()
    assert start_efficiency_span("idle/buffer_starvation") is None


def test_a_stream_is_current_step_by_step_and_never_in_its_consumer(recorded):
    """Catches a span of a stream that leaks into the consumer, or ends before the stream does."""

    async def stream():
        with streaming_umbrella_span(G.U_ROLLOUT, "rl.grpo.stream") as step:
            for item in range(3):
                with step() as current, managed_span(G.GENERATION, f"item {item}"):
                    assert current is not None
                    await asyncio.sleep(0)
                yield item

    async def consume():
        outside = get_current_span()
        async for _ in stream():
            assert get_current_span() is outside

    asyncio.run(consume())
    read = recorded.spans()
    assert {read[f"item {n}"].parent_span_id for n in range(3)} == {read["rl.grpo.stream"].span_id}
    assert read["rl.grpo.stream"].end_ns >= read["item 2"].end_ns
    assert read["rl.grpo.stream"].bucket is None


def test_a_stream_when_disabled_is_nothing():
    """Catches a disabled stream whose caller needs a branch of its own."""
    with streaming_umbrella_span(G.U_ROLLOUT, "rl.grpo.stream") as step, step() as span:
        assert span is None


def test_a_span_of_known_times(recorded):
    """Catches times in the wrong unit, a kind or a parent lost, and attributes left out."""
    now = time.time()
    with umbrella_span(G.U_STEP, "rl.grpo.step") as step:
        emit_span(G.GENERATION, "rl.vllm.request", now - 2, now - 1.5, attributes={"n": 1}, kind=SpanKind.CLIENT)
    read = recorded.spans()["rl.vllm.request"]
    assert step is not None
    assert read.parent_span_id == step.span_id.hex()
    assert read.duration_ns == pytest.approx(0.5e9, abs=1e3)
    assert read.start_ns == pytest.approx((now - 2) * 1e9, abs=1e3)
    assert (read.kind, read.bucket, read.attributes["n"]) == ("CLIENT", "productive", 1)


def test_an_inverted_interval_is_clamped_and_says_so(recorded, caplog):
    """Catches a negative duration that a report would subtract."""
    emit_span(G.GENERATION, "backwards", 1_700_000_010.0, 1_700_000_000.0)
    read = recorded.spans()["backwards"]
    assert read.duration_ns == 0
    assert read.attributes["rl.given_start_s"] == 1_700_000_010.0
    assert read.attributes["rl.given_end_s"] == 1_700_000_000.0
    assert "backwards" in caplog.text


@pytest.mark.parametrize("times", [("soon", 1.0), (float("nan"), 1.0), (1.0, float("inf")), (-5.0, -4.0)])
def test_impossible_times_lose_that_span_alone(times, recorded, caplog):
    """Catches a bad timestamp of an engine that ends the rollout it describes."""
    emit_span(G.GENERATION, "impossible", *times)
    with managed_span(G.GENERATION, "after"):
        pass
    dropped = recorded.spans()
    assert "after" in dropped
    assert "impossible" not in dropped
    assert "impossible" in caplog.text


def test_shared_attributes_reach_every_span_inside_and_a_span_s_own_wins(recorded):
    """Catches a shared attribute that is lost, doubled, or stronger than the span's own."""
    with span_attributes({"task": "math", "left out": None}), span_attributes({"shard": 3}):
        with managed_span(G.GENERATION, "both"):
            pass
        with managed_span(G.GENERATION, "own", task="code"):
            pass
    with managed_span(G.GENERATION, "outside"):
        pass
    read = recorded.spans()
    assert (read["both"].attributes["task"], read["both"].attributes["shard"]) == ("math", 3)
    assert read["own"].attributes["task"] == "code"
    assert "left out" not in read["both"].attributes
    assert "task" not in read["outside"].attributes


def test_per_prompt_scope_says_so_inside_only():
    """Catches per-prompt volume that one switch cannot turn off, because a call does not know where it stands."""
    assert not in_per_prompt_scope()
    with per_prompt_scope():
        assert in_per_prompt_scope()
        with bucket_scope(Bucket.OVERHEAD):
            assert in_per_prompt_scope()
    assert not in_per_prompt_scope()


def test_a_foreign_tracer_makes_the_span(recorded):
    """Catches a tracer argument that is taken and not used."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("theirs")
    with setup_span("workers", tracer=tracer), efficiency_span("idle/refit_bubble", tracer=tracer):
        pass
    with efficiency_span("idle/refit_event_wait", tracer=tracer):
        pass
    wait: Any = start_efficiency_span("init/total", tracer=tracer)
    wait.end()
    with streaming_umbrella_span(G.U_ROLLOUT, "rl.grpo.stream", tracer=tracer) as step, step():
        pass
    found = {span.name: dict(span.attributes or {}) for span in exporter.get_finished_spans()}
    assert found["rl.setup.workers"] == {"rl.span_group": "setup"}
    assert found["rl.idle.refit_bubble"]["rl.bucket"] == "idle"
    assert "rl.bucket" not in found["rl.init.total"]
    assert "rl.bucket" not in found["rl.idle.refit_event_wait"]
    assert found["rl.grpo.stream"] == {"rl.span_group": "rollout"}


def test_kinds_and_links_are_given_at_the_start(recorded):
    """Catches a kind or a link that is recorded as an attribute, and an attribute of these names that is taken away."""
    with managed_span(G.GENERATION, "first") as first:
        pass
    assert first is not None
    context = first.get_span_context()
    with managed_span(G.GENERATION, "client", kind=SpanKind.CLIENT, links=[context]):
        pass
    with managed_span(G.GENERATION, "words", kind="train", links=["a", "b"]):
        pass
    read = recorded.spans()
    assert read["client"].kind == "CLIENT"
    assert [link.span_id for link in read["client"].links] == [bytes.fromhex(read["first"].span_id)]
    assert read["words"].kind == "INTERNAL"
    assert (read["words"].attributes["kind"], list(read["words"].attributes["links"])) == ("train", ["a", "b"])
