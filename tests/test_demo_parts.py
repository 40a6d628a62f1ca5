"""The parts of the demo that need no cluster: task, model, loss, advantages, buffer rule, settings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from examples.async_grpo.collector import AsyncTrajectoryCollector, CollectorReport, _score
from examples.async_grpo.config import DemoConfig, parse_arguments
from examples.async_grpo.loss import clipped_policy_loss, kl_estimate
from examples.async_grpo.metrics import CRITIC_SERIES, STEP_SERIES, VALUE_LOSS, MetricsFile, step_metrics
from examples.async_grpo.model import Policy, chosen, mean_entropy
from examples.async_grpo.replay_buffer import Sample, StalenessQueue
from examples.async_grpo.results import Results
from examples.async_grpo.task import NUM_DIGITS, sample_prompts, score
from examples.async_grpo.training import PolicyUpdate
from examples.async_grpo.trajectories import Generation, RolloutBatch, group_relative_advantages, shard
from raytrace_rl import span_cm
from raytrace_rl.metrics import TeeingLogger
from raytrace_rl.monitor import load_run
from raytrace_rl.vocabulary import teed_metrics
from tests.running import attributes, running
from tests.signals_running import signals

pytest_plugins = ["tests.telemetry_fixtures"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _batch(batch_id: int, version: int, prompts: int = 2, generations: int = 3, length: int = 4) -> RolloutBatch:
    rng = np.random.default_rng(batch_id)
    shape = (prompts, generations, length)
    return RolloutBatch(
        batch_id,
        sample_prompts(rng, prompts, length),
        Generation(rng.integers(0, NUM_DIGITS, shape), rng.random(shape, dtype=np.float32), version),
        rng.random((prompts, generations), dtype=np.float32),
    )


def _policy(seed: int = 0, prompt_length: int = 4) -> Policy:
    torch.manual_seed(seed)
    return Policy(prompt_length)


def test_reward_is_the_share_of_right_places():
    """Catches a reward that compares with the prompt instead of its sorted digits, or along the wrong axis."""
    prompts = np.array([[3, 1, 2], [5, 5, 0]])
    responses = np.array([[[1, 2, 3], [3, 1, 2]], [[0, 5, 5], [0, 5, 4]]])
    np.testing.assert_allclose(score(prompts, responses), [[1, 0], [1, 2 / 3]], rtol=1e-6)


def test_prompts_are_digits_and_repeat_with_the_seed():
    """Catches prompts outside the vocabulary, and runs that a seed does not repeat."""
    prompts = sample_prompts(np.random.default_rng(3), 500, 4)
    assert prompts.shape == (500, 4)
    assert set(np.unique(prompts)) == set(range(NUM_DIGITS))
    np.testing.assert_array_equal(prompts, sample_prompts(np.random.default_rng(3), 500, 4))


def test_sampled_log_probs_are_those_the_trainer_computes():
    """Catches a ratio that does not start at 1: sampling and training must score the same tokens alike."""
    policy = _policy()
    prompts = torch.from_numpy(sample_prompts(np.random.default_rng(0), 16, 4))
    responses, log_probs = policy.sample(prompts, torch.Generator().manual_seed(1))
    assert responses.shape == log_probs.shape == (16, 4)
    with torch.no_grad():
        torch.testing.assert_close(policy.response_log_probs(prompts, responses), log_probs)


def test_sampling_repeats_with_its_seed_and_greedy_takes_the_likeliest():
    """Catches sampling from a global generator, and validation that is not greedy."""
    policy = _policy()
    prompts = torch.from_numpy(sample_prompts(np.random.default_rng(0), 64, 4))
    first, _ = policy.sample(prompts, torch.Generator().manual_seed(1))
    again, _ = policy.sample(prompts, torch.Generator().manual_seed(1))
    other, _ = policy.sample(prompts, torch.Generator().manual_seed(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    _, greedy = policy.sample(prompts, None)
    with torch.no_grad():
        opened = torch.nn.functional.pad(prompts, (0, 1), value=NUM_DIGITS)
        torch.testing.assert_close(greedy[:, 0], policy(opened)[:, -1].max(dim=1).values)


def test_model_does_not_see_the_future():
    """Catches attention that is not causal: the answer would leak into its own log-probabilities."""
    policy = _policy()
    tokens = torch.from_numpy(sample_prompts(np.random.default_rng(0), 4, 7))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % NUM_DIGITS
    with torch.no_grad():
        before, after = policy(tokens), policy(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_advantages_are_relative_to_their_own_group():
    """Catches a baseline over the batch, and a group of equal rewards that is blown up instead of ignored."""
    advantages = group_relative_advantages(np.array([[0, 1, 0, 1], [0.5, 0.5, 0.5, 0.5]], dtype=np.float32))
    np.testing.assert_allclose(advantages, [[-1, 1, -1, 1], [0, 0, 0, 0]], atol=1e-3)


def test_shards_cover_every_row_once_and_keep_rows_together():
    """Catches a row whose response, log-probability or advantage comes from another, and a group that is split."""
    batches = [_batch(0, 0, prompts=3), _batch(1, 0, prompts=2)]
    advantages = group_relative_advantages(np.concatenate([batch.rewards for batch in batches]))
    parts = shard(batches, advantages, ranks=2)
    assert [len(part.prompts) for part in parts] == [9, 6]
    row = 0
    for batch in batches:
        for i, j in np.ndindex(batch.rewards.shape):
            part, k = (parts[0], row) if row < 9 else (parts[1], row - 9)
            np.testing.assert_array_equal(part.prompts[k], batch.prompts[i])
            np.testing.assert_array_equal(part.responses[k], batch.generation.responses[i, j])
            np.testing.assert_array_equal(part.old_log_probs[k], batch.generation.log_probs[i, j])
            assert part.advantages[k] == advantages.reshape(-1)[row]
            row += 1
    assert row == 15


def _gradient(log_prob: float, old: float, advantage: float, *, reference: float = 0.0, kl: float = 0.0) -> float:
    value = torch.tensor([[log_prob]], requires_grad=True)
    clipped_policy_loss(
        value,
        torch.tensor([[old]]),
        torch.tensor([[reference]]),
        torch.tensor([advantage]),
        clip=0.2,
        kl_coefficient=kl,
    ).backward()
    assert value.grad is not None
    return value.grad.item()


def test_loss_pushes_with_the_advantage_and_stops_at_the_clip():
    """Catches a sign error, and a clip that is missing or on the wrong side."""
    assert _gradient(-1.0, -1.0, 1.0) == pytest.approx(-1.0)
    assert _gradient(-1.0, -1.0, -2.0) == pytest.approx(2.0)
    assert _gradient(-1.0, -1.3, 1.0) == 0.0, "a ratio above 1.2 gains no more from a good token"
    assert _gradient(-1.3, -1.0, -1.0) == 0.0, "a ratio below 0.8 loses no more from a bad one"
    assert _gradient(-1.3, -1.0, 1.0) == pytest.approx(-np.exp(-0.3)), "but may come back"
    assert _gradient(-1.0, -1.3, -1.0) == pytest.approx(np.exp(0.3)), "but may come back"


def test_kl_penalty_pulls_towards_the_reference():
    """Catches a penalty of the wrong sign, and one that acts at the reference itself."""
    assert _gradient(-1.0, -1.0, 0.0, reference=-1.0, kl=0.5) == 0.0
    assert _gradient(-0.5, -0.5, 0.0, reference=-1.0, kl=0.5) > 0
    assert _gradient(-2.0, -2.0, 0.0, reference=-1.0, kl=0.5) < 0


def test_update_makes_rewarded_responses_likelier():
    """Catches loss, model and advantages that do not fit together: the policy would learn nothing, or the contrary."""
    policy = _policy()
    prompts = torch.from_numpy(np.repeat(sample_prompts(np.random.default_rng(0), 4, 4), 8, axis=0))
    responses, old = policy.sample(prompts, torch.Generator().manual_seed(0))
    rewards = (responses[:, 0] < NUM_DIGITS // 2).float().numpy().reshape(4, 8)
    advantages = torch.from_numpy(group_relative_advantages(rewards).reshape(-1))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for _ in range(5):
        log_probs = policy.response_log_probs(prompts, responses)
        loss = clipped_policy_loss(log_probs, old, old, advantages, clip=0.2, kl_coefficient=0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        gain = (policy.response_log_probs(prompts, responses) - old).sum(dim=1)
    assert gain[advantages > 0].mean() > 0 > gain[advantages < 0].mean()


def test_buffer_refuses_what_is_too_stale_on_arrival():
    """Catches a limit that is off by one, or not applied to a batch that was too long under way."""
    queue = StalenessQueue(capacity=4, max_staleness=1)
    queue.advance(3)
    assert queue.put(_batch(0, version=2))
    assert not queue.put(_batch(1, version=1))
    assert queue.refused == 1
    assert [batch.batch_id for batch in queue.take(1)] == [0]


def test_buffer_refuses_what_grew_stale_while_it_waited():
    """Catches a batch that was fresh when stored and is trained on versions later."""
    queue = StalenessQueue(capacity=4, max_staleness=1)
    for batch_id, version in enumerate([0, 1, 0, 1]):
        assert queue.put(_batch(batch_id, version))
    assert queue.full
    assert queue.advance(2) == 2
    assert queue.refused == 2
    assert len(queue) == 2
    assert [batch.batch_id for batch in queue.take(len(queue))] == [1, 3], "and the order of arrival is kept"


def test_buffer_without_staleness_takes_on_policy_batches_only():
    """Catches max_staleness=0 taken for no limit."""
    queue = StalenessQueue(capacity=1, max_staleness=0)
    queue.advance(5)
    assert queue.put(_batch(0, version=5))
    queue.advance(6)
    assert (len(queue), queue.refused) == (0, 1)


def test_every_setting_is_a_flag():
    """Catches a flag that is parsed and does not reach the configuration."""
    arguments = parse_arguments(
        ["--steps", "7", "--lr", "0", "--max-staleness", "3", "--run-dir", "x", "--no-telemetry"]
    )
    assert arguments.config == DemoConfig(steps=7, lr=0.0, max_staleness=3)
    assert str(arguments.run_dir) == "x"
    assert not arguments.telemetry
    assert parse_arguments([]).config == DemoConfig()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--steps", "0"], "steps"),
        (["--num-generations", "1"], "num_generations"),
        (["--buffer-batches", "1"], "buffer_batches"),
        (["--num-training-ranks", "99"], "training ranks"),
        (["--lr", "fast"], "--lr"),
        (["--lr", "nan"], "lr must"),
        (["--max-staleness", "-1"], "max_staleness"),
    ],
)
def test_bad_settings_end_in_one_clear_line(flags, named, capsys):
    """Catches a bad value that surfaces minutes later, as a hang (a buffer too small) or a remote traceback."""
    with pytest.raises(SystemExit) as stop:
        parse_arguments(flags)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_entropy_is_that_of_the_distributions():
    """Catches a sign, a base of the logarithm, or a sum where a mean belongs."""
    uniform = torch.full((2, 3, 8), 1 / 8).log()
    assert mean_entropy(uniform).item() == pytest.approx(np.log(8))
    certain = torch.nn.functional.log_softmax(torch.eye(4)[None] * 50, dim=2)
    assert mean_entropy(certain).item() == pytest.approx(0, abs=1e-6)


def test_kl_estimate_is_right_on_average():
    """Catches the two policies taken for each other: over the policy's own samples the estimate is the divergence."""
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    exact = (policy * (policy / reference).log()).sum()
    estimate = (policy * kl_estimate(policy.log(), reference.log())).sum()
    assert estimate.item() == pytest.approx(exact.item())
    assert torch.equal(kl_estimate(policy.log(), policy.log()), torch.zeros(3))


def test_log_probs_are_picked_from_the_distributions_of_their_places():
    """Catches a training rank whose entropy and log-probabilities are of different places."""
    policy = _policy()
    prompts = torch.from_numpy(sample_prompts(np.random.default_rng(0), 8, 4))
    responses = torch.from_numpy(sample_prompts(np.random.default_rng(1), 8, 4))
    with torch.no_grad():
        distributions = policy.response_distributions(prompts, responses)
        torch.testing.assert_close(distributions.exp().sum(dim=2), torch.ones(8, 4))
        torch.testing.assert_close(chosen(distributions, responses), policy.response_log_probs(prompts, responses))


def test_step_metrics_hold_gauges_and_efficiency_seconds():
    """Catches seconds under a key that the tee does not know, and phases that are no category among them."""
    driver = {"idle/refit_bubble": 0.5, "weight_sync": 2.0}
    collector = {"idle/buffer_full_backoff": 7.0, "reward": 1.0}
    found = step_metrics(0.25, 4.0, PolicyUpdate(0.1, 0.2, 0.3, 0.4, 0.5), driver, collector)
    assert found == {
        "reward": 0.25,
        "response_length": 4.0,
        "loss": 0.1,
        "kl": 0.2,
        "entropy": 0.3,
        "grad_norm": 0.4,
        "lr": 0.5,
        "efficiency/idle/refit_bubble_s": 0.5,
        "efficiency/idle/buffer_full_backoff_s": 7.0,
    }


def test_every_gauge_of_a_step_is_declared_where_it_is_logged():
    """Catches one of the step's gauges that no code declares, so that no run ever has it."""
    declared = {row.name for row in (*STEP_SERIES, *CRITIC_SERIES)}
    assert declared == {
        "rl.reward.mean",
        "rl.kl.divergence",
        "rl.policy.loss",
        "rl.value.loss",
        "rl.entropy",
        "rl.response.length.mean",
        "rl.grad_norm",
        "rl.learning_rate",
    }
    assert declared <= {row.name for row in teed_metrics()}
    logged = step_metrics(0.25, 4.0, PolicyUpdate(0.1, 0.2, 0.3, 0.4, 0.5))
    assert {row.logger_key for row in STEP_SERIES} == logged.keys()


def test_a_loop_with_a_critic_has_its_loss_teed(tmp_path):
    """Catches a declared row that the tee does not know: a series that would stay empty where there is a critic."""
    with signals(tmp_path / "run") as started:
        logged = step_metrics(0.25, 4.0, PolicyUpdate(0.1, 0.2, 0.3, 0.4, 0.5))
        TeeingLogger(MetricsFile(tmp_path / "metrics.jsonl")).log_metrics(
            {**logged, VALUE_LOSS: 0.75}, 1, prefix="train"
        )
    points = {row.name: row.value for row in load_run(started.run_dir).metrics}
    assert (points["rl.value.loss"], points["rl.response.length.mean"]) == (0.75, 4.0)


def test_response_lengths_are_averaged_over_responses():
    """Catches batches that weigh alike, whatever their number of responses."""
    batches = tuple(
        RolloutBatch(
            n, np.zeros((p, 4)), Generation(np.zeros((p, 2, length)), np.zeros((p, 2, length)), 0), np.zeros(1)
        )
        for n, (p, length) in enumerate([(3, 4), (1, 8)])
    )
    assert Sample(batches, (0, 0), 0).mean_response_length == 5.0


def test_metrics_file_has_a_line_for_each_call(tmp_path):
    """Catches a file that keeps the last line only, and values without their step."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log_metrics({"a": 1.5}, 1, prefix="train")
    file.log_metrics({"a": 2.5}, 2)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "prefix": "train", "a": 1.5},
        {"step": 2, "prefix": "", "a": 2.5},
    ]


def test_seconds_add_up_over_steps():
    """Catches a summary of the last step only: the Timer starts anew with each."""
    results = Results()
    results.add_seconds({"a": 1.0, "b": 2.0})
    results.add_seconds({"a": 0.5})
    assert results.seconds == {"a": 1.5, "b": 2.0}


def test_a_failed_rollout_is_waste_and_frees_its_slot(telemetry):
    """Catches a failure whose thread-seconds nobody sees, and one that stops the collection: a slot is gone."""
    collector = AsyncTrajectoryCollector.__ray_metadata__.modified_class(DemoConfig(max_inflight=1), [], None)
    collector._stopping.set()  # no pause after the failure
    with span_cm("parent"):
        collector._rollout(7, sample_prompts(np.random.default_rng(0), 2, 4))
    report = collector.report()
    assert (report.failed, report.unwanted, report.last_error is None) == (1, 0, False)
    span = telemetry.span("rl.wasted.failed_trajectory")
    found = attributes(span)
    assert (found["rl.bucket"], found["rl.efficiency.category"], found["rl.batch_id"]) == (
        "wasted",
        "wasted/failed_trajectory",
        7,
    )
    assert span.parent_span_id == telemetry.span("parent").span_id
    seconds = report.seconds["wasted/failed_trajectory"]
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(seconds, abs=1e-3)
    assert [collector._free_slots.acquire(blocking=False) for _ in range(3)] == [True, True, False]


def test_prompts_have_spans_of_their_own_where_all_are_asked_for(tmp_path):
    """Catches spans by the prompt in a run that did not ask for them, and rewards that scoring one by one changes."""
    rng = np.random.default_rng(0)
    prompts = sample_prompts(rng, 3, 4)
    responses = rng.integers(0, NUM_DIGITS, (3, 2, 4))
    for groups, count in (("per_step", 0), ("all", 3)):
        with running(tmp_path / groups, span_groups=groups) as telemetry:
            np.testing.assert_array_equal(_score(prompts, responses), score(prompts, responses))
        assert [span.name for span in telemetry.spans()].count("rl.grpo.prompt_reward") == count


def test_summary_file_holds_settings_and_results(tmp_path):
    """Catches results that JSON cannot hold, found out only when a run has ended."""
    results = Results(
        rewards=[0.25, 0.5],
        validation={2: 0.125},
        staleness=[0, 1],
        refused=3,
        collector=CollectorReport(9, 1, 0, None),
    )
    results.write(tmp_path / "summary.json", DemoConfig(steps=2))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["config"]["steps"] == 2
    assert summary["rewards"] == [0.25, 0.5]
    assert summary["collector"]["started"] == 9
    assert "0.250 in the first 1 steps, 0.500 in the last 1" in results.describe()
    assert "3 refused" in results.describe()
