"""`telemetry_session`, on real Ray, as a driver uses it: a process of its own."""

from __future__ import annotations

import pytest

from raytrace_rl import session
from raytrace_rl.monitor import load_run
from tests.running import drive

pytestmark = [pytest.mark.ray]

DRIVER = """
import os, sys
import ray
from raytrace_rl import (RLSpanGroup as G, TracedActor, accepts_trace_context, iteration_scope,
                         managed_span, telemetry_session, traced, umbrella_span)

@ray.remote
class Generator(TracedActor):
    @accepts_trace_context
    def generate(self, prompts):
        with managed_span(G.GENERATION, "rl.vllm.generate", **{"rl.num_prompt_groups": len(prompts)}):
            return [prompt.upper() for prompt in prompts]

with telemetry_session() as session:
    session.init_ray(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    generator = Generator.remote()
    with umbrella_span(G.U_JOB, "rl.grpo.job"):
        for step in range(1, 4):
            with iteration_scope(step), umbrella_span(G.U_STEP, "rl.grpo.step"):
                with umbrella_span(G.U_ROLLOUT, "rl.grpo.generation"):
                    batch = ray.get(traced(generator).generate.remote(["a", "b"]))
        if "fail" in sys.argv:
            raise RuntimeError("the loop broke")
print("batch", batch, "run", session.run_dir)
print("runtime_env", dict(ray.get_runtime_context().runtime_env))
"""


def test_the_example_of_the_readme_is_one_tree_and_prints_its_goodput(tmp_path):
    """Catches a session that starts, flushes or sums up only part of what a driver's ten lines ask for."""
    done = drive(DRIVER, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "batch ['A', 'B']" in done.stdout
    assert "goodput" in done.stdout
    assert "runtime_env {}" in done.stdout  # with one, the workers that Ray has started beforehand would stay idle
    run = load_run(tmp_path / "run")
    roots = [span for span in run.spans if span.parent_span_id is None]
    assert [span.name for span in roots] == ["rl.grpo.job"]
    assert len({span.trace_id for span in run.spans}) == 1
    ids = {span.span_id: span for span in run.spans}
    calls = [span for span in run.spans if span.name == "rl.vllm.generate"]
    assert [span.iteration for span in calls] == [1, 2, 3]
    assert {ids[str(span.parent_span_id)].name for span in calls} == {"rl.grpo.generation"}
    assert {process.state for process in run.processes} == {"closed"}  # the actor was flushed, not only killed
    assert not [span for span in run.spans if span.truncated]


def test_an_exception_of_the_body_passes_and_nothing_is_lost(tmp_path):
    """Catches a session that swallows the driver's error, or leaves without flushing because of it."""
    done = drive(DRIVER, tmp_path, "fail")

    assert done.returncode == 1
    assert "RuntimeError: the loop broke" in done.stderr
    run = load_run(tmp_path / "run")
    job = next(span for span in run.spans if span.name == "rl.grpo.job")
    assert job.status == "ERROR"
    assert {process.state for process in run.processes} == {"closed"}


def test_the_environment_switches_it_off(tmp_path):
    """Catches telemetry that code turns on although the operator has turned it off: the environment beats code."""
    done = drive(DRIVER, tmp_path, RAYTRACE_RL_ENABLED="0")

    assert done.returncode == 0, done.stderr
    assert "batch ['A', 'B']" in done.stdout
    assert "run None" in done.stdout
    assert not (tmp_path / "run").exists()


SLOW_TO_FLUSH = """
import os, sys, time
import ray
from raytrace_rl import RLSpanGroup as G, TracedActor, accepts_trace_context, telemetry_session, traced, umbrella_span

@ray.remote
class Busy(TracedActor):
    @accepts_trace_context
    def work(self, seconds):
        time.sleep(seconds)

with telemetry_session(flush_timeout_s=5) as session:
    session.init_ray(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    busy = Busy.remote()
    with umbrella_span(G.U_JOB, "rl.grpo.job"):
        ray.get(traced(busy).work.remote(0))
        call = traced(busy).work.remote(60)
        os.kill(os.getpid(), 15)
        ray.get(call)
"""


def test_a_terminated_driver_has_the_time_that_it_was_given_to_flush(tmp_path):
    """Ray aborts a driver three seconds after a SIGTERM, in the midst of a flush that was given five (exit 134)."""
    done = drive(SLOW_TO_FLUSH, tmp_path)

    assert done.returncode == 15, done.stderr
    assert "goodput" in done.stdout
    (job,) = [span for span in load_run(tmp_path / "run").spans if span.name == "rl.grpo.job"]
    assert not job.truncated


@pytest.mark.parametrize(
    ("kwargs", "variable", "starts"),
    [
        ({"num_cpus": 2}, "", True),
        ({"num_cpus": 0}, "", True),
        ({"address": "local"}, "10.0.0.1:6379", True),
        ({}, "", False),
        ({"num_cpus": 2}, "ray://10.0.0.1:10001", False),
        ({"address": "auto", "num_cpus": 2}, "", False),
        ({"address": "10.0.0.1:6379"}, "", False),
    ],
)
def test_settings_are_sent_wherever_a_cluster_may_be_up_already(kwargs, variable, starts, monkeypatch):
    """Workers of a cluster that somebody else started know nothing of the run, and it has no spans of theirs."""
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert session._starts_cluster(kwargs) is starts
