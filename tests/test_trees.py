"""Where a trace begins: the run as one, or each step and rollout as one of its own, linked to the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl._span import ManagedSpan
from raytrace_rl.context import current_trace_carrier, remote_trace_context
from raytrace_rl.instrumentation import (
    iteration_scope,
    managed_span,
    trace_fn,
    umbrella_span,
    umbrella_trace_fn,
)
from tests.running import Telemetry, running

pytest_plugins = ["tests.telemetry_fixtures"]


def write_a_run() -> None:
    """A job with two steps; each has a rollout with a leaf in it, and a collector's rollout runs beside them."""
    with umbrella_span("job", "rl.grpo.job"):
        with umbrella_span("rollout", "rl.grpo.collector"), managed_span("generation", "rl.vllm.early"):
            pass
        for step in (1, 2):
            with iteration_scope(step), umbrella_span("step", "rl.grpo.step"):
                with umbrella_span("rollout", "rl.grpo.generation"), managed_span("generation", "rl.vllm.generate"):
                    pass
                with umbrella_span("evaluate", "rl.grpo.evaluate"):
                    pass


def by_name(telemetry: Telemetry) -> dict[str, list[Span]]:
    """The ended spans by their names."""
    found: dict[str, list[Span]] = {}
    for span in telemetry.spans():
        found.setdefault(span.name, []).append(span)
    return found


def links(span: Span) -> list[tuple[bytes, bytes]]:
    """Whom a span links to."""
    return [(link.trace_id, link.span_id) for link in span.links]


@pytest.mark.parametrize("settings", [{}, {"trace_per": "run"}, {"trace_per": "run", "exporter": "otlp"}])
def test_one_trace_for_the_run(tmp_path: Path, settings: dict[str, Any]):
    """A run falls into many traces though nobody asked for that."""
    with running(tmp_path / "run", **settings) as telemetry:
        write_a_run()
        spans = by_name(telemetry)
    (job,) = spans["rl.grpo.job"]
    everything = [span for named in spans.values() for span in named]
    assert {span.trace_id for span in everything} == {job.trace_id}
    assert [span.name for span in everything if not span.parent_span_id] == ["rl.grpo.job"]
    assert not any(span.links for span in everything)


@pytest.mark.parametrize("settings", [{"trace_per": "step"}, {"exporter": "otlp"}])
def test_each_step_and_each_collectors_rollout_is_a_trace(tmp_path: Path, settings: dict[str, Any]):
    """A backend gets one trace of a million spans; or steps are alone in the world, not linked to their job."""
    with running(tmp_path / "run", **settings) as telemetry:
        write_a_run()
        spans = by_name(telemetry)
    (job,) = spans["rl.grpo.job"]
    roots = [*spans["rl.grpo.step"], *spans["rl.grpo.collector"]]
    assert len({span.trace_id for span in [job, *roots]}) == 4
    for root in roots:
        assert root.parent_span_id == b""
        assert links(root) == [(job.trace_id, job.span_id)]
    for step, rollout, leaf, evaluation in zip(
        spans["rl.grpo.step"],
        spans["rl.grpo.generation"],
        spans["rl.vllm.generate"],
        spans["rl.grpo.evaluate"],
        strict=True,
    ):
        assert rollout.parent_span_id == evaluation.parent_span_id == step.span_id
        assert leaf.parent_span_id == rollout.span_id
        assert step.trace_id == rollout.trace_id == leaf.trace_id == evaluation.trace_id
    (early,) = spans["rl.vllm.early"]
    assert early.parent_span_id == spans["rl.grpo.collector"][0].span_id


def test_a_step_without_a_job_is_a_root_without_a_link(tmp_path: Path):
    """A step outside any job links to the span id 0."""
    with running(tmp_path / "run", trace_per="step") as telemetry:
        with umbrella_span("step", "step"):
            pass
        assert (telemetry.span("step").parent_span_id, links(telemetry.span("step"))) == (b"", [])


def test_a_rollout_on_a_worker_is_linked_to_whoever_sent_for_it(tmp_path: Path):
    """A collector in another process begins traces that nothing connects with the job."""
    with running(tmp_path / "run", trace_per="step") as telemetry:
        with umbrella_span("job", "job"):
            carrier = current_trace_carrier()
        with remote_trace_context(carrier), umbrella_span("rollout", "rollout"):
            pass
        job, rollout = telemetry.span("job"), telemetry.span("rollout")
        assert rollout.trace_id != job.trace_id
        assert links(rollout) == [(job.trace_id, job.span_id)]


def test_what_was_current_is_current_again(tmp_path: Path):
    """After a step with a trace of its own the job is no longer current, and the next spans are roots."""
    with running(tmp_path / "run", trace_per="step") as telemetry, umbrella_span("job", "job") as job:
        with umbrella_span("step", "step") as step:
            assert trace.get_current_span() is step
            assert isinstance(step, ManagedSpan)
            assert step.parent_id is None
        assert trace.get_current_span() is job
        with managed_span("checkpoint", "after"):
            pass
        assert telemetry.span("after").parent_span_id == job.span_id


def test_every_way_to_open_a_step_is_the_same(tmp_path: Path):
    """``managed_span`` on an umbrella group, or a decorator, gives another tree than ``umbrella_span``."""

    @trace_fn("step", "by trace_fn")
    def one() -> None:
        pass

    @umbrella_trace_fn("step", "by umbrella_trace_fn")
    def two() -> None:
        pass

    with running(tmp_path / "run", trace_per="step") as telemetry:
        with managed_span("job", "job"):
            with managed_span("step", "by managed_span"):
                pass
            with umbrella_span("step", "by umbrella_span"):
                pass
            one()
            two()
        spans = by_name(telemetry)
    (job,) = spans.pop("job")
    (started,) = spans.pop("job.started")
    assert started.parent_span_id == job.span_id
    assert len(spans) == 4
    for (span,) in spans.values():
        assert (span.parent_span_id, links(span)) == (b"", [(job.trace_id, job.span_id)])


def test_a_job_says_at_once_that_it_lives(telemetry: Telemetry):
    """A backend shows a run only when it is over: the root ends last."""
    with umbrella_span("job", "rl.grpo.job", model="tiny") as job:
        (started,) = telemetry.spans()
        assert started.name == "rl.grpo.job.started"
        assert started.parent_span_id == job.span_id
        assert started.trace_id == job.trace_id
        assert started.start_time_unix_nano == started.end_time_unix_nano == job.start_ns
        assert trace.get_current_span() is job
    assert [span.name for span in telemetry.spans()] == ["rl.grpo.job.started", "rl.grpo.job"]


def test_a_job_in_a_group_that_is_off(tmp_path: Path):
    """A job announces itself although its group does not record."""
    with running(tmp_path / "run", span_groups="checkpoint") as telemetry:
        with umbrella_span("job", "job") as job:
            assert job is None
        assert telemetry.spans() == []


def test_exception_in_a_step(tmp_path: Path):
    """A step with a trace of its own loses its error, or the job's context with it."""
    with running(tmp_path / "run", trace_per="step") as telemetry:
        with pytest.raises(ValueError, match="broke"), umbrella_span("job", "job"), umbrella_span("step", "step"):
            raise ValueError("it broke")
        step = telemetry.span("step")
        assert step.status.code == step.status.STATUS_CODE_ERROR
        assert [event.name for event in step.events] == ["exception"]
        assert len(step.links) == 1
        assert trace.get_current_span() is trace.INVALID_SPAN
