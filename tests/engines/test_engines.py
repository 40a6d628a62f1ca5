"""vLLM and Megatron-core, for real, on a CPU: one tree, every request under its own rollout, and all of it survives.

One run serves all tests: two engines of some twenty seconds each, and two Megatron ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from examples.async_grpo.trajectories import TrainingShard
from examples.vllm_megatron_grpo.config import EnginesConfig
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import iteration_scope, setup, traced, umbrella_span
from raytrace_rl.dispatch import dispatch_with_trace_context
from raytrace_rl.integrations.vllm import step_metrics
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.report import report
from tests.conftest import start_cluster
from tests.running import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from raytrace_rl.monitor.model import Run, SpanRow

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("megatron") is None,
        reason="no vLLM and Megatron here: make test-engines",
    ),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM at tensor parallel 2 wants two cores"),
]

REQUESTS = 32
CONFIG = EnginesConfig(num_prompts=8)
ENVIRONMENT = {
    "RAYTRACE_RL_ENABLED": "1",
    "RAYTRACE_RL_SPAN_GROUPS": "all",
    "RAYTRACE_RL_HEARTBEAT_S": "0.2",
    "RAYTRACE_RL_RUN_ID": "engines",
    # Where vLLM's exporters would send to, if they were not taken over.
    "RAYTRACE_RL_OTLP_RECEIVER": "1",
    # Somebody else's, for all processes of the cluster: vLLM must not take it for its own.
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9",
}


@dataclass
class Scenario:
    """What the run did, as its driver saw it."""

    run: Run
    job_id: str
    responses: int
    tokens: list[int]
    log_prob_error: float
    update: Any
    metrics: dict[str, float]
    native_pids: list[int]
    offline_pids: list[int]
    rank_pids: list[int]

    def named(self, name: str) -> list[SpanRow]:
        return [span for span in self.run.spans if span.name == name]

    def ancestors(self, span: SpanRow) -> list[str]:
        """The span ids above a span, nearest first."""
        parents = {other.span_id: other.parent_span_id for other in self.run.spans}
        found, current = [], span.parent_span_id
        while current is not None:
            found.append(current)
            current = parents.get(current)
        return found


@pytest.fixture(scope="module")
def scenario(tmp_path_factory) -> Iterator[Scenario]:
    """The run: generation, refit, log-probabilities and a training step, then SIGKILL for every process of it."""
    import ray

    folder = tmp_path_factory.mktemp("engines")
    run_dir = folder / "run"
    settings = {"enabled": True, "run_dir": str(run_dir), "run_id": "engines", "span_groups": "all"}
    before = dict(os.environ)  # Ray puts the variables of a runtime environment into the driver's own, for good
    start_cluster(num_cpus=16, runtime_env={"env_vars": {**ENVIRONMENT, "RAYTRACE_RL_RUN_DIR": str(run_dir)}})
    setup.init_telemetry_driver(settings)
    try:
        with umbrella_span(G.U_JOB, "rl.test.job") as job:
            yield _drive(CONFIG.model.write(folder / "model"), run_dir, job.span_id.hex())
    finally:
        setup.shutdown_telemetry()
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _drive(model: Path, run_dir: Path, job_id: str) -> Scenario:
    import ray

    from examples.vllm_megatron_grpo.engine import EngineWorker
    from examples.vllm_megatron_grpo.training import MegatronRank
    from raytrace_rl.worker_groups import NamedSharding, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup
    from tests.engines.engine_actors import OfflineEngine, Rollouts

    native = {"env_vars": {"RAYTRACE_RL_VLLM_NATIVE_TRACING": "1"}}
    with umbrella_span(G.U_SETUP, "rl.test.setup"):
        streaming = traced(EngineWorker.options(runtime_env=native)).remote(0, CONFIG, str(model))
        offline = traced(OfflineEngine).remote(str(model))
        ranks = RayWorkerGroup(
            RayVirtualCluster([2], use_gpus=False),
            RayWorkerBuilder(MegatronRank, CONFIG),
            name_prefix="training",
            sharding_annotations=NamedSharding(layout=[[0, 1]], names=["data_parallel", "tensor_parallel"]),
        )
        rank_pids = ray.get(ranks.run_all_workers_single_data("pid"), timeout=300)
        native_pids = ray.get(streaming.pids.remote(), timeout=300)
        offline_pids = ray.get(offline.pids.remote(), timeout=300)
    rollouts = traced(Rollouts).remote(streaming, offline)
    collector_pids = ray.get(rollouts.pids.remote(), timeout=60)
    with umbrella_span(G.U_STEP, "rl.test.step"), iteration_scope(1):
        shards = dispatch_with_trace_context(ranks.run_all_workers_single_data, "export_weights", 1)
        ray.get(traced(streaming).update_weights.remote(shards, 1), timeout=120)
        responses, tokens = ray.get(traced(rollouts).run.remote(REQUESTS), timeout=600)
        prompts = np.arange(32).reshape(8, 4) % 10
        generation = ray.get(traced(streaming).generate.remote(prompts, 2, 1), timeout=120)
        rows = TrainingShard(
            prompts=np.repeat(prompts, 2, axis=0),
            responses=generation.responses.reshape(-1, 4),
            old_log_probs=generation.log_probs.reshape(-1, 4),
            advantages=np.linspace(-1, 1, 16, dtype=np.float32),
        )
        call = dispatch_with_trace_context(ranks.run_all_workers_single_data, "log_probs", rows, False)
        log_probs = ray.get(call, timeout=120)[0]
        call = dispatch_with_trace_context(ranks.run_all_workers_single_data, "train", rows, log_probs, 2)
        update = ray.get(call, timeout=120)[0]
    stats = ray.get([streaming.stats.remote(), offline.stats.remote()], timeout=60)
    # A generation that is under way when its engine dies.
    traced(offline).generate.remote([[1, 10]] * REQUESTS, [{}] * REQUESTS, 60)
    wait_for(lambda: any(s.name == "rl.vllm.generate" and s.end_ns is None for s in load_run(run_dir).spans), "open")
    for pid in [*native_pids, *offline_pids, *rank_pids, *collector_pids]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    workers = wait_for(lambda: _all_dead(run_dir), "the proof that all workers are dead")
    return Scenario(
        workers,
        job_id,
        responses,
        tokens,
        float(np.abs(log_probs - rows.old_log_probs).max()),
        update,
        step_metrics(stats),
        native_pids,
        offline_pids,
        rank_pids,
    )


def _all_dead(run_dir: Path) -> Run | None:
    run = load_run(run_dir)
    return run if all(process.state != "alive" for process in run.processes if process.role == "worker") else None


def test_one_tree(scenario):
    """Catches an engine, a child of one, a collector thread or a rank whose spans start a trace of their own."""
    assert {span.trace_id for span in scenario.run.spans} == {scenario.run.spans[0].trace_id}
    known = {span.span_id for span in scenario.run.spans} | {scenario.job_id}
    assert {
        span.name for span in scenario.run.spans if span.parent_span_id not in known and span.parent_span_id
    } == set()
    roots = {span.name for span in scenario.run.spans if span.parent_span_id is None}
    assert roots <= {"rl.test.job", "rl.test.job.started"}


def test_every_request_has_a_span_under_its_own_rollout_natively(scenario):
    """Catches trace headers that do not reach vLLM, and engine spans that end up in its own exporter."""
    assert scenario.responses == REQUESTS
    rollouts = {span.span_id: span for span in scenario.named("rl.test.rollout")}
    assert len(rollouts) == REQUESTS
    above = Counter(
        next((parent for parent in scenario.ancestors(span) if parent in rollouts), None)
        for span in scenario.named("llm_request")
    )
    outside = above.pop(None)  # the batch that was trained on: 8 prompts, 2 samples each
    assert outside == 16
    assert above == dict.fromkeys(rollouts, 1)
    request = scenario.named("llm_request")[0]
    assert request.attributes["gen_ai.usage.completion_tokens"] == 4
    assert request.process.pid == scenario.native_pids[0], "and in the actor's own spool: it survives a SIGKILL"


def test_every_request_has_a_span_under_its_own_rollout_after_the_fact(scenario):
    """Catches requests of a shared batch that hang under the call, and timings that are not the request's own."""
    assert scenario.tokens == [8] * REQUESTS
    rollouts = {span.span_id for span in scenario.named("rl.test.rollout")}
    requests = scenario.named("rl.vllm.request")
    assert Counter(span.parent_span_id for span in requests) == dict.fromkeys(rollouts, 1)
    (call,) = [
        span
        for span in scenario.named("rl.vllm.generate")
        if span.process.pid == scenario.offline_pids[0] and not span.truncated
    ]
    assert call.attributes["gen_ai.usage.output_tokens"] == 8 * REQUESTS
    assert (call.bucket, call.attributes["rl.weight_version"]) == ("productive", 7)
    phases = ["rl.vllm.request.queued", "rl.vllm.request.prefill", "rl.vllm.request.decode"]
    for request in requests:
        assert request.attributes["rl.vllm.timings"] == "engine"
        assert call.start_ns <= request.start_ns < request.end_ns <= call.end_ns
        children = sorted(
            (s for s in scenario.run.spans if s.parent_span_id == request.span_id), key=lambda s: s.start_ns
        )
        assert [child.name for child in children] == list(phases)
        assert [child.start_ns for child in children[1:]] == [child.end_ns for child in children[:-1]]
    waits = [request.attributes["gen_ai.latency.time_in_queue"] for request in requests]
    assert max(waits) > 2 * min(waits), "16 sequences fit: half of the requests had to wait"


def test_an_engines_processes_have_telemetry(scenario):
    """Catches children of an engine that the environment does not reach, or that pass for their actor's rank."""
    for pids, group in ((scenario.native_pids, "generation"), (scenario.offline_pids, "offline")):
        of_engine = [process for process in scenario.run.processes if process.pid in pids[1:]]
        assert of_engine
        assert {process.worker_group for process in of_engine} == {f"{group}.engine"}
        names = {span.name for span in scenario.run.spans if span.process.pid in pids[1:]}
        assert {"Executor init", "Load model"} <= names
        loads = [span for span in scenario.named("rl.vllm.load_model") if span.process.pid == pids[0]]
        inside = [span for span in scenario.named("Load model") if span.process.pid in pids[1:]]
        assert all(loads[0].span_id in scenario.ancestors(span) for span in inside)


def test_each_worker_of_an_engine_at_tensor_parallel_2_is_seen(scenario):
    """Catches a second worker whose spans, or whose process, are missing."""
    loading = [span for span in scenario.named("Load model") if span.process.pid in scenario.offline_pids]
    assert len({span.process.pid for span in loading}) == 2
    assert {span.process.resource["rl.vllm.process"] for span in loading} == {"VllmWorker-0", "VllmWorker-1"}


def test_nobody_elses_endpoint_switches_vllms_tracing_on(scenario):
    """Catches vLLM's provider in a process that was not asked for it: `EngineCoreProc init` would be its first span."""
    assert {s.process.pid for s in scenario.named("EngineCoreProc init")} <= set(scenario.native_pids)
    assert [s for s in scenario.named("llm_request") if s.process.pid in scenario.offline_pids] == []


def test_nothing_is_exported_as_well_as_kept(scenario):
    """Catches spans of vLLM's that reach the spool and, by its exporter and the local receiver, the spool again."""
    assert [process.key for process in scenario.run.processes if "vllm.process_id" in process.resource] == []
    assert report(scenario.run)["loss"]["duplicates"] == 0


def test_an_engines_processes_are_no_units_of_the_fleet(scenario):
    """Catches an engine's core and workers counted as workers of their own, on a run without a GPU."""
    fleet = report(scenario.run)["goodput"]["fleet"]
    actors = {process.actor_id for process in scenario.run.processes if process.actor_id is not None}
    assert len(actors) == 5, "two engines, two ranks, and the collector"
    assert (fleet["unit"], fleet["units"]) == ("worker", len(actors))


def test_each_megatron_rank_has_its_topology(scenario):
    """Catches a rank whose telemetry started before Megatron knew its place, and never heard of it."""
    ranks = {process.rank: process for process in scenario.run.processes if process.worker_group == "training"}
    assert sorted(ranks) == [0, 1]
    for rank, process in ranks.items():
        assert process.pid == scenario.rank_pids[rank]
        sizes = {axis: process.resource[f"nv.dl.topology.size.{axis}"] for axis in ("tp", "pp", "dp", "cp", "ep")}
        assert sizes == {"tp": 2, "pp": 1, "dp": 1, "cp": 1, "ep": 1}
        spans = [span for span in scenario.run.spans if span.process is process]
        phases = [span for span in spans if span.name.startswith("rl.megatron.")]
        assert {
            "rl.megatron.log_probs",
            "rl.megatron.forward_backward",
            "rl.megatron.optimizer",
            "rl.megatron.weight_export",
            "rl.megatron.timer.forward_backward",
            "rl.megatron.timer.forward_compute",
            "rl.megatron.timer.backward_compute",
        } == {span.name for span in phases}
        assert {span.attributes["dl.tensor_parallel.rank"] for span in phases} == {rank}
        assert {span.attributes["dl.tensor_parallel.size"] for span in phases} == {2}


def test_megatrons_timers_nest_inside_the_phase(scenario):
    """Catches timers that float beside the phase they time."""
    names = {span.span_id: span.name for span in scenario.run.spans}
    parents = Counter(
        (span.name.rpartition(".")[2], names[span.parent_span_id])
        for span in scenario.run.spans
        if span.name.startswith("rl.megatron.timer.")
    )
    calls = 2 * CONFIG.epochs
    assert parents == {
        ("forward_backward", "rl.megatron.forward_backward"): calls,
        ("forward_compute", "rl.megatron.timer.forward_backward"): calls,
        ("backward_compute", "rl.megatron.timer.forward_backward"): calls,
    }


def test_both_engines_have_the_same_weights(scenario):
    """Catches a refit that mixes weights up: the engine's log-probabilities are then not the trainer's."""
    assert scenario.log_prob_error < 1e-3
    assert np.isfinite(scenario.update.loss)
    (refit,) = scenario.named("rl.vllm.refit")
    assert (refit.bucket, refit.attributes["rl.weight_version"]) == ("overhead", 1)


def test_what_was_generated_is_counted(scenario):
    """Catches requests that are counted twice, per step of the stream, or by one of the paths alone."""
    metrics = scenario.metrics
    assert metrics["vllm/generations_ok"] == 2 * REQUESTS + 16
    assert metrics["vllm/generations_failed"] == 0
    assert metrics["vllm/generation_tokens"] == 4 * REQUESTS + 8 * REQUESTS + 16 * 4
    assert metrics["vllm/prompt_tokens"] == 5 * REQUESTS + 2 * REQUESTS + 8 * 5


def test_all_of_it_survives_kill_9(scenario):
    """Catches spans that had ended and were only in memory; what was under way ends where its process did."""
    killed = {*scenario.native_pids, *scenario.offline_pids, *scenario.rank_pids}
    assert {process.state for process in scenario.run.processes if process.pid in killed} <= {"dead", "closed"}
    found = report(scenario.run)
    assert found["loss"]["dropped"] == 0
    assert found["loss"]["damaged_records"] == 0
    truncated = [span.name for span in scenario.run.spans if span.truncated]
    assert truncated.count("rl.vllm.generate") == 1
    assert Counter(span.name for span in scenario.run.spans if not span.truncated)["rl.vllm.request"] == REQUESTS
