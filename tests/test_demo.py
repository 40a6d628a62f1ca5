"""The demo, held to its word: a real run is read back from its trace, its summary and its output."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from examples.async_grpo.config import DemoConfig
from examples.async_grpo.metrics import STEP_SERIES
from raytrace_rl import cli
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.bulk import reading
from raytrace_rl.monitor.bulk import report as of_columns
from raytrace_rl.monitor.report import report
from raytrace_rl.monitor.trajectories import trajectories
from tests.bulk_runs import differences
from tests.demo_runs import ancestors, assert_one_tree, named, run_demo

if TYPE_CHECKING:
    from raytrace_rl.monitor import Process, Run, SpanRow
    from tests.demo_runs import Demo

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEFAULTS = DemoConfig()
#: Timer keys of umbrellas over many keys: their spans are called otherwise.
UMBRELLAS = {"total_step_time": "rl.grpo.step", "total_validation_time": "rl.grpo.evaluate"}
#: The gauges of a step, by the key they are logged under.
SERIES = {
    "reward": "rl.reward.mean",
    "response_length": "rl.response.length.mean",
    "kl": "rl.kl.divergence",
    "loss": "rl.policy.loss",
    "entropy": "rl.entropy",
    "grad_norm": "rl.grad_norm",
    "lr": "rl.learning_rate",
}
#: Every process of a run, by the name that reports give it.
LANES = {
    "driver",
    "generation[0] GenerationWorker",
    "generation[1] GenerationWorker",
    "training[0] TrainingRank",
    "training[1] TrainingRank",
    "collector AsyncTrajectoryCollector",
    "replay_buffer ReplayBuffer",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    """The default run, as ``make demo`` does it."""
    return run_demo(tmp_path_factory.mktemp("demo") / "run")


@pytest.fixture(scope="module")
def run(demo) -> Run:
    """The default run's trace."""
    return load_run(demo.run_dir)


def test_columns_say_the_same(demo):
    """Catches spans, or links, of a real run that are read otherwise where a run is large."""
    columns = reading.read(demo.run_dir)
    assert differences(report(load_run(demo.run_dir)), of_columns.report(columns)) == []
    assert len(columns.links.row) == DEFAULTS.steps * DEFAULTS.batches_per_step


def _name(process: Process) -> str:
    return process.label.rpartition(" pid ")[0]


def _number(row: SpanRow, key: str) -> int:
    value = row.attributes[key]
    assert isinstance(value, int), (row, key, value)
    return value


def _overlap_ns(a: SpanRow, b: SpanRow) -> int:
    return min(a.until_ns, b.until_ns) - max(a.start_ns, b.start_ns)


def test_run_prints_rewards_goodput_and_where_the_run_is(demo):
    """Catches a demo that runs and shows nothing: a line a step, the goodput summary, the path at the very end."""
    steps = [line for line in demo.lines if line.startswith("step ")]
    assert len(steps) == DEFAULTS.steps
    for line, reward in zip(steps, demo.summary["rewards"], strict=True):
        assert f"reward {reward:.3f}" in line
    assert any("goodput" in line for line in demo.lines)
    assert demo.lines[-1] == f"run directory: {demo.run_dir}"
    assert "Traceback" not in demo.output


def test_run_takes_less_than_two_minutes(demo):
    """Catches a demo that has grown beyond what someone waits for."""
    assert demo.summary["total_s"] < 120


def test_reward_rises_at_the_fixed_seed(demo):
    """Catches an update, refit or advantage that has come loose: the policy would stay at one digit in ten."""
    rewards = demo.summary["rewards"]
    assert len(rewards) == DEFAULTS.steps
    fifth = len(rewards) // 5
    parts = [sum(rewards[i : i + fifth]) / fifth for i in range(0, 5 * fifth, fifth)]
    assert parts[0] < 0.3
    assert parts[-1] > 0.6
    assert all(later > earlier for earlier, later in pairwise(parts[:4]))
    validation = [accuracy for _, accuracy in sorted((int(k), v) for k, v in demo.summary["validation"].items())]
    assert validation[0] < 0.2 < validation[-1], "and held-out prompts are sorted, not only those trained on"


def test_reward_stays_flat_at_learning_rate_zero(tmp_path):
    """Catches a rise that is not learnt, and a run without telemetry that needs it or leaves a spool all the same."""
    flat = run_demo(tmp_path / "flat", "--lr", "0", "--steps", "20", "--validation-every", "5", "--no-telemetry")
    rewards = flat.summary["rewards"]
    first, last = sum(rewards[:10]) / 10, sum(rewards[10:]) / 10
    # 20,480 digits in each half, right one time in ten: the difference has a standard deviation of 0.003.
    assert abs(last - first) < 0.02
    assert max(rewards) < 0.15
    assert len(set(flat.summary["validation"].values())) == 1, "greedy answers of an unchanged policy are the same"
    assert sorted(path.name for path in flat.run_dir.iterdir()) == ["checkpoints", "metrics.jsonl", "summary.json"]
    assert "goodput" not in flat.output


def test_trace_is_one_tree_under_the_job_span(run):
    """Catches a context that is lost on its way to an actor, a thread or ``__init__``: a second root, or an orphan."""
    assert_one_tree(run)
    assert report(run)["traces"]["missing_parent"] == 0


def test_every_process_contributes_spans_and_closes_its_spool(run):
    """Catches an actor that is not traced, killed before its flush, or that lost anything."""
    spans = Counter(row.process.key for row in run.spans)
    assert sorted(_name(process) for process in run.processes) == sorted(LANES)
    for process in run.processes:
        assert spans[process.key] > 0, process.label
        assert process.state == "closed", process.label
    loss = report(run)["loss"]
    assert (loss["truncated"], loss["open"], loss["dropped"], loss["damaged_records"], loss["drops"]) == (
        0,
        0,
        0,
        0,
        {},
    )


def test_constructors_and_set_up_are_in_the_tree(run):
    """Catches actor creation outside the job: minutes of start-up that no report would show."""
    chains = ancestors(run)
    made = {
        (row.name, _name(row.process), chains[row.span_id][0].name)
        for row in run.spans
        if row.name.startswith("rl.setup.") and row.process.role == "worker"
    }
    assert made == {
        *(("rl.setup.generation_model", f"generation[{i}] GenerationWorker", "rl.setup.workers") for i in (0, 1)),
        *(("rl.setup.training_model", f"training[{i}] TrainingRank", "rl.setup.workers") for i in (0, 1)),
        *(("rl.setup.process_group", f"training[{i}] TrainingRank", "rl.setup.process_group") for i in (0, 1)),
        ("rl.setup.rendezvous", "training[0] TrainingRank", "rl.setup.training"),
        ("rl.setup.staleness_queue", "replay_buffer ReplayBuffer", "rl.setup.workers"),
        ("rl.setup.collector", "collector AsyncTrajectoryCollector", "rl.grpo.job"),
    }


def test_startup_holds_everything_before_the_first_step(run):
    """Catches start-up time outside its umbrella, and a wait for the first batches that counts as starvation."""
    (startup,) = named(run, "rl.startup")
    chains = ancestors(run)
    phases = [row for row in run.spans if chains[row.span_id][:1] == [startup] and row.process.role == "driver"]
    assert [(row.name, row.bucket) for row in phases] == [
        ("rl.setup.ray", None),
        ("rl.setup.workers", None),
        ("rl.setup.training", None),
        ("rl.setup.process_group", None),
        ("rl.setup.generation", None),
        ("rl.grpo.weight_sync", "overhead"),
        ("rl.init.total", None),
    ]
    assert startup.until_ns <= named(run, "rl.grpo.step")[0].start_ns
    rollouts = {chains[row.span_id][0].name for row in named(run, "rl.grpo.rollout")}
    assert rollouts == {"rl.grpo.job"}, "their parent must live as long as they come"


def test_rollouts_run_in_a_thread_each_and_overlap(run, demo):
    """Catches a collector that works off one batch after the other, or reuses one thread and its context."""
    rollouts = named(run, "rl.grpo.rollout")
    assert len(rollouts) == demo.summary["collector"]["started"]
    assert {row.thread for row in rollouts} == {f"rollout-{_number(row, 'rl.batch_id')}" for row in rollouts}
    assert len({row.thread for row in rollouts}) == len(rollouts)
    overlaps = [(a, b) for a, b in pairwise(rollouts) if _overlap_ns(a, b) > 0]
    assert len(overlaps) > len(rollouts) / 2


def test_generation_overlaps_training(run):
    """Catches a run that is synchronous after all: generating, then training, never both."""
    training = [row for row in named(run, "rl.grpo.policy_training") if row.worker_group == "training"]
    generation = [row for row in named(run, "rl.grpo.generation") if row.bucket == "productive"]
    assert generation
    busy = [row for row in training if any(_overlap_ns(row, other) > 0 for other in generation)]
    assert len(busy) > len(training) / 2


def test_stale_batches_are_trained_on_up_to_the_limit_and_refused_beyond(run, demo):
    """Catches a limit that never bites, one that bites too early, and a trace that tells another story than the run."""
    summary = demo.summary
    assert max(summary["staleness"]) == DEFAULTS.max_staleness > 0
    assert len(summary["staleness"]) == DEFAULTS.steps * DEFAULTS.batches_per_step
    assert summary["refused"] >= 1
    pushes, samples = named(run, "rl.grpo.buffer_push"), named(run, "rl.grpo.buffer_sample")
    on_arrival = sum(_number(row, "rl.refused") for row in pushes)
    assert on_arrival + sum(_number(row, "rl.num_refused") for row in samples) == summary["refused"]
    trained = [row for row in named(run, "rl.grpo.policy_training") if row.process.role == "driver"]
    of_step = [summary["staleness"][i : i + DEFAULTS.batches_per_step] for i in range(0, len(summary["staleness"]), 4)]
    assert [row.attributes["rl.staleness.max"] for row in trained] == [max(values) for values in of_step]


def test_each_step_links_to_the_rollouts_that_it_trained_on(run, demo):
    """Catches trajectories whose origin is lost in the buffer, and ages or lags that are another's."""
    rollouts = {row.span_id: row for row in named(run, "rl.grpo.rollout")}
    found = trajectories(run)
    assert [step["iteration"] for step in found["steps"]] == list(range(1, DEFAULTS.steps + 1))
    staleness = demo.summary["staleness"]
    for n, step in enumerate(found["steps"]):
        of_step = staleness[n * DEFAULTS.batches_per_step :][: DEFAULTS.batches_per_step]
        assert (step["lag"]["min"], step["lag"]["max"]) == (min(of_step), max(of_step))
        assert step["count"] == DEFAULTS.batches_per_step
    for each in found["list"]:
        rollout = rollouts.pop(each["span_id"])  # each is trained on once
        assert each["age_s"] > 0
        assert rollout.trace_id == each["trace_id"]
    assert found["other_node"] == found["below_zero"] == 0


def test_every_refit_reaches_both_generation_workers(run):
    """Catches a policy that is trained and never generates: the workers would stay at the first weights."""
    syncs, generations = named(run, "rl.grpo.weight_sync"), named(run, "rl.grpo.generation")
    for rank in (0, 1):
        took = [
            _number(row, "rl.weight_version") for row in syncs if (row.worker_group, row.rank) == ("generation", rank)
        ]
        assert took == list(range(DEFAULTS.steps + 1))
    assert len({_number(row, "rl.weight_version") for row in generations}) > DEFAULTS.steps / 2


def test_both_ranks_average_every_gradient(run):
    """Catches ranks that train apart from each other."""
    counts = Counter(row.rank for row in named(run, "rl.grpo.gradient_all_reduce"))
    assert counts == dict.fromkeys((0, 1), DEFAULTS.steps * DEFAULTS.epochs)


@pytest.mark.parametrize("name", ["rl.grpo.reference_logprobs", "rl.grpo.policy_training"])
def test_a_sharded_call_reaches_each_rank_with_its_own_shard(run, name):
    """Catches a carrier lost on some ranks, by keyword (the log-probabilities) or by proxy; and one shard for all."""
    rows = {row.span_id: row for row in named(run, name)}
    by_step: dict[str, dict[int | None, SpanRow]] = {}
    for row in rows.values():
        if row.process.role == "worker":
            assert rows[row.parent_span_id or ""].process.role == "driver"
            by_step.setdefault(row.parent_span_id or "", {})[row.rank] = row
    assert len(by_step) == DEFAULTS.steps
    for ranks in by_step.values():
        assert sorted(ranks, key=str) == [0, 1]
        assert len({_number(row, "rl.shard.crc32") for row in ranks.values()}) == 2
        assert sum(_number(row, "rl.shard.rows") for row in ranks.values()) == (
            DEFAULTS.batches_per_step * DEFAULTS.num_prompts * DEFAULTS.num_generations
        )


def test_both_calls_of_a_step_deal_out_alike(run):
    """Catches a rank that trains on other rows than those whose log-probabilities it got."""
    seen = [
        {
            (row.iteration, row.rank, row.attributes["rl.shard.crc32"])
            for row in named(run, name)
            if row.worker_group == "training"
        }
        for name in ("rl.grpo.reference_logprobs", "rl.grpo.policy_training")
    ]
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2 * DEFAULTS.steps


def test_steps_reach_the_spans_of_remote_workers(run):
    """Catches scopes that stay behind on the driver: remote spans must know their step and how long they queued."""
    for row in named(run, "rl.grpo.policy_training"):
        if row.worker_group == "training":
            assert row.iteration == row.attributes["rl.weight_version"]
            assert row.queued_ns is not None
            assert row.queued_ns > 0
    assert {row.iteration for row in named(run, "rl.grpo.step")} == set(range(1, DEFAULTS.steps + 1))
    assert {row.iteration for row in named(run, "rl.grpo.rollout")} == {None}, "a rollout belongs to no step yet"


def test_validation_is_overhead_on_remote_workers_too(run):
    """Catches validation counted as goodput: the same method generates for it, in the same process."""
    chains = ancestors(run)
    buckets: dict[str, set[str | None]] = defaultdict(set)
    for row in run.spans:
        if row.name == "rl.grpo.generation":
            under = {parent.name for parent in chains[row.span_id]} & {"rl.grpo.evaluate", "rl.grpo.rollout"}
            buckets[under.pop()].add(row.bucket)
    assert buckets == {"rl.grpo.evaluate": {"overhead"}, "rl.grpo.rollout": {"productive"}}
    evaluations = named(run, "rl.grpo.evaluate")
    every, last = DEFAULTS.validation_every, DEFAULTS.steps
    assert [row.iteration for row in evaluations] == [s for s in range(1, last + 1) if s % every == 0 or s == last]
    assert {row.bucket for row in evaluations} == {None}


def test_waits_have_their_category_and_its_bucket(run, demo):
    """Catches starvation or a bubble that hides in the step, and a wait beside work that is called idle time."""
    waits = Counter((row.name, row.bucket, _name(row.process)) for row in run.spans if row.span_group == "efficiency")
    started, collector = demo.summary["collector"]["started"], "collector AsyncTrajectoryCollector"
    wasted = waits.pop(("rl.wasted.failed_trajectory", "wasted", collector), 0)
    assert wasted == demo.summary["collector"]["unwanted"]
    assert waits == {
        ("rl.init.total", None, "driver"): 1,
        ("rl.idle.buffer_starvation", "idle", "driver"): DEFAULTS.steps,
        ("rl.idle.refit_bubble", "idle", "driver"): DEFAULTS.steps + 1,
        ("rl.idle.buffer_full_backoff", "idle", collector): started,
        ("rl.idle.generation_limit_pause", None, collector): started + 1,
    }


def _span_name(key: str) -> str:
    """The span that a Timer key stands for; the keys with a slash have an owner's prefix."""
    return UMBRELLAS.get(key) or ("rl." if "/" in key else "rl.grpo.") + key.replace("/", ".")


@pytest.mark.parametrize("worker_group", [None, "collector"])
def test_every_timer_key_has_a_span_of_its_name(run, demo, worker_group):
    """Catches seconds in the log that nobody finds in the trace, under another name or of another duration."""
    seconds = demo.summary["seconds"] if worker_group is None else demo.summary["collector"]["seconds"]
    traced: dict[str, float] = defaultdict(float)
    for row in run.spans:
        if row.worker_group == worker_group:
            traced[row.name] += (row.until_ns - row.start_ns) / 1e9
    assert {key: traced[_span_name(key)] for key in seconds} == pytest.approx(seconds, rel=0.05, abs=0.5)
    assert all(traced[_span_name(key)] > 0 for key in seconds)
    assert worker_group or UMBRELLAS.keys() <= seconds.keys()


def test_what_is_logged_is_teed(run, demo):
    """Catches a gauge whose key is never logged, values that differ on the way, and clocks that are mixed up."""
    logged = [json.loads(line) for line in (demo.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if line["prefix"] == "train" and "reward" in line]
    assert [line["reward"] for line in steps] == demo.summary["rewards"]
    points = run.metrics
    assert {point.process.role for point in points if point.name.startswith("rl.")} == {"driver"}
    for key, name in SERIES.items():
        values = [point.value for point in points if point.name == name]
        assert set(values) <= {line[key] for line in steps}, name
        assert values[-1] == steps[-1][key], name
    assert {row.logger_key: row.name for row in STEP_SERIES} == SERIES
    (setup,) = [line for line in logged if line["prefix"] == "timing/setup"]
    phases = {point.attributes["rl.setup.phase"]: point.value for point in points if point.name == "rl.setup.duration"}
    assert phases == {key.removesuffix("_time_s"): setup[key] for key in setup if key not in ("step", "prefix")}
    clocks = {
        point.attributes["rl.efficiency.category"]: point.attributes["rl.efficiency.measurement"]
        for point in points
        if point.name == "rl.efficiency.seconds"
    }
    clocks.pop("wasted/failed_trajectory", None)
    assert clocks == {
        "init/total": "wall_clock",
        "idle/buffer_starvation": "wall_clock",
        "idle/refit_bubble": "wall_clock",
        "idle/buffer_full_backoff": "thread_seconds",
        "idle/generation_limit_pause": "collector_wall_clock",
    }


def test_every_process_says_what_the_run_is(run):
    """Catches a worker whose spans cannot be found by model, algorithm, backend or reward."""
    said = {
        "rl.model": "digit-transformer",
        "rl.algorithm": "grpo",
        "rl.backend": "torch",
        "rl.generation.backend": "torch",
        "rl.reward": "sorted_digits",
        "rl.num_prompt_groups": 32,
        "rl.num_generations_per_prompt": 16,
        "rl.num_rollouts": 512,
    }
    assert {_name(process): process.resource.items() >= said.items() for process in run.processes} == dict.fromkeys(
        LANES, True
    )
    sharded = {_name(p): p.resource.get("nv.dl.topology.size.dp") for p in run.processes}
    assert {name: size for name, size in sharded.items() if size} == {
        "training[0] TrainingRank": 2,
        "training[1] TrainingRank": 2,
    }


def test_checkpoint_holds_a_trained_policy(demo):
    """Catches a checkpoint that is missing, cut short, or of the first weights."""
    path = demo.run_dir / "checkpoints" / f"step-{DEFAULTS.steps:04d}.pt"
    first = demo.run_dir / "checkpoints" / f"step-{DEFAULTS.checkpoint_every:04d}.pt"
    early, late = (torch.load(file, weights_only=True) for file in (first, path))
    assert late["step"] == DEFAULTS.steps
    assert not torch.equal(early["policy"]["head.weight"], late["policy"]["head.weight"])
    assert list(path.parent.glob("*.partial")) == []


def test_report_adds_up(demo, capsys):
    """Catches a summary on the screen that the report on disk does not bear out."""
    assert cli.main(["report", str(demo.run_dir), "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["goodput"]["job"]
    parts = sum(job[f"{bucket}_s"] for bucket in ("productive", "overhead", "idle", "wasted", "unattributed"))
    assert parts == pytest.approx(job["wall_s"], rel=1e-6)
    assert job["productive_s"] > 0
    assert job["coverage"] > 0.9
