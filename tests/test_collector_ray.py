"""A collector as a Ray actor: one trace from its creation on, and a kill that finds nothing open."""

from __future__ import annotations

import time
from typing import Any

import pytest

from raytrace_rl import dispatch_with_trace_context, traced
from raytrace_rl.actors import FlushReport, flush_actors, flush_and_kill
from tests import collector_actors
from tests.readback import get, wait_until

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = pytest.mark.ray


def started(name: str, **arguments: Any) -> tuple[Any, Any]:
    """A collector that has parked with its rollouts done, and its buffer."""
    import ray

    buffer = ray.remote(num_cpus=0.01)(collector_actors.Buffer).remote()
    cls = ray.remote(num_cpus=0.01)(getattr(collector_actors, name))
    collector = dispatch_with_trace_context(cls, buffer, **arguments)
    get(traced(collector).start_collection.remote())
    wait_until(lambda: len(get(buffer.all.remote())) == 3, "three trajectories")
    return collector, buffer


@pytest.mark.parametrize("name", ["Collector", "AsyncCollector"])
def test_a_collectors_life_is_one_trace_that_ends_before_it_is_killed(name, traced_test):
    """Catches threads whose spans are roots, and spans that are cut short though the collector was flushed."""
    collector, buffer = started(name)
    trajectories = get(buffer.all.remote())
    report = flush_and_kill([collector], timeout_s=20)
    assert len(report.flushed) == 1
    rollouts = {span.attributes["batch"]: span for span in traced_test.named("rollout", 3)}
    pause = traced_test.one("limit_pause")
    assert not pause.truncated
    for span in (*rollouts.values(), pause, traced_test.one("rl.collector.quiesce")):
        assert span.parent_span_id == traced_test.root_id
        assert span.iteration is None, "the step in which it was made is not that of all it does"
    traced_test.assert_dispatched("made")
    teachers = traced_test.named("teacher", 6)
    assert {span.parent_span_id for span in teachers} == {span.span_id for span in rollouts.values()}
    for trajectory in trajectories:
        carried = trajectory["trace_carrier"]["traceparent"]
        assert carried.split("-")[2] == rollouts[trajectory["batch"]].span_id


def test_a_wedged_rollout_costs_its_budget_and_is_named(traced_test):
    """Catches a flush that waits for what will not come, or that does not say who it was."""
    collector, _ = started("Collector", wedged=600.0)
    began = time.monotonic()
    assert get(collector.flush_telemetry.remote(8, quiesce_timeout_s=1.0)) is False
    assert time.monotonic() - began < 20
    span = traced_test.one("rl.collector.quiesce")
    assert span.attributes["rl.collector.left"] == ["rollout-0"]
    cut = [row for row in traced_test.all() if row.name == "rollout" and row.trace_id == traced_test.trace_id]
    assert [row.truncated for row in sorted(cut, key=lambda row: row.attributes["batch"])] == [True, False, False]
    flush_and_kill([collector])


def test_a_wedged_rollout_shows_in_the_report(traced_test):
    """Catches a collector that is reported as flushed though a rollout of it was cut short."""
    collector, _ = started("Collector", wedged=600.0)
    report = flush_and_kill([collector], timeout_s=3)
    assert report == FlushReport(incomplete=(collector,))


def test_a_flush_in_between_leaves_it_running(traced_test):
    """Catches a checkpoint's flush that stops the collection."""
    collector, _ = started("Collector")
    assert len(flush_actors([collector], 10, final=False).flushed) == 1
    assert "collection-loop" in get(collector.threads.remote())
    assert len(flush_and_kill([collector], timeout_s=20).flushed) == 1
    assert not traced_test.one("limit_pause").truncated
