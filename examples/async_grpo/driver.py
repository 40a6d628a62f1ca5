"""The driver: sets the actors up, trains step by step, refits, validates, saves, and takes everything down again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from examples.async_grpo.collector import AsyncTrajectoryCollector
from examples.async_grpo.config import CALL_TIMEOUT_S, DemoConfig
from examples.async_grpo.generation import GenerationWorker
from examples.async_grpo.replay_buffer import ReplayBuffer, Sample
from examples.async_grpo.results import Results
from examples.async_grpo.task import sample_prompts, score
from examples.async_grpo.timer import Timer
from examples.async_grpo.training import TrainingRank
from examples.async_grpo.trajectories import group_relative_advantages, shard
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import iteration_scope, managed_span, traced, umbrella_span
from raytrace_rl.actors import flush_and_kill
from raytrace_rl.buckets import Bucket, bucket_scope

logger = logging.getLogger(__name__)


class Driver:
    """One run: ``set_up``, ``train``, ``take_down``.

    Args:
        config: The run's settings.
        run_dir: Where checkpoints go.
    """

    def __init__(self, config: DemoConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._timer = Timer()
        self._generators: list[Any] = []
        self._refitted: list[Any] = []
        self._ranks: list[Any] = []
        self._buffer: Any = None
        self._collector: Any = None
        held_out = np.random.default_rng([config.seed, 1])
        self._validation_prompts = sample_prompts(held_out, config.validation_prompts, config.prompt_length)
        self.results = Results(seconds=self._timer.seconds)

    def set_up(self) -> None:
        """Creates every actor, joins the training ranks in one process group and starts collecting.

        Actors are created first and waited for afterwards, so that their processes start side by side.
        """
        config = self._config
        with umbrella_span(G.U_SETUP, "rl.setup.generation"):
            self._generators = [traced(GenerationWorker).remote(i, config) for i in range(config.num_generators)]
        with umbrella_span(G.U_SETUP, "rl.setup.replay_buffer"):
            self._buffer = traced(ReplayBuffer).remote(config.buffer_batches, config.max_staleness)
        # Under the job span itself: the collector's threads hang from what is current here as long as they live.
        self._collector = traced(AsyncTrajectoryCollector).remote(config, self._generators, self._buffer)
        with umbrella_span(G.U_SETUP, "rl.setup.training"):
            self._ranks = [traced(TrainingRank).remote(i, config) for i in range(config.num_training_ranks)]
            address = _get(traced(self._ranks[0]).open_rendezvous.remote())
            _get([traced(rank).join.remote(address) for rank in self._ranks])
        self._refit(version=0)
        _get(traced(self._collector).start.remote())

    def train(self) -> None:
        """Runs every training step, printing one line for each."""
        for step in range(1, self._config.steps + 1):
            with iteration_scope(step), umbrella_span(G.U_STEP, "rl.grpo.step"):
                self._train_step(step)

    def take_down(self) -> None:
        """Stops the collector, flushes every actor's telemetry and only then kills the actors."""
        if self._collector is not None:
            try:
                ray.get(self._buffer.close.remote(), timeout=CALL_TIMEOUT_S / 4)
                self.results.collector = ray.get(traced(self._collector).stop.remote(), timeout=CALL_TIMEOUT_S / 2)
            except (RayError, GetTimeoutError) as error:
                logger.warning("the collector did not stop cleanly: %s", _reason(error))
        actors = [self._collector, self._buffer, *self._generators, *self._ranks]
        flush_and_kill([actor for actor in actors if actor is not None])

    def _train_step(self, step: int) -> None:
        config, timer = self._config, self._timer
        before = dict(timer.seconds)
        with (
            timer.time("buffer_starvation"),
            managed_span(G.EFFICIENCY, "rl.grpo.buffer_starvation", **{"rl.bucket": "idle"}),
        ):
            sample: Sample = _get(traced(self._buffer).sample.remote(config.batches_per_step, step - 1))
        with timer.time("advantage"), managed_span(G.ADVANTAGE, "rl.grpo.advantage"):
            rewards = np.concatenate([batch.rewards for batch in sample.batches])
            shards = shard(sample.batches, group_relative_advantages(rewards), len(self._ranks))
        with timer.time("reference_logprobs"), managed_span(G.LOGPROB, "rl.grpo.reference_logprobs"):
            # References: shards and log-probabilities go to the ranks by way of the object store, once each.
            parts = [ray.put(part) for part in shards]
            references = [
                traced(rank).reference_log_probs.remote(part) for rank, part in zip(self._ranks, parts, strict=True)
            ]
            _wait(references)
        attributes = {"rl.staleness.max": max(sample.staleness), "rl.reward.mean": float(rewards.mean())}
        with timer.time("policy_training"), managed_span(G.POLICY_UPDATE, "rl.grpo.policy_training", **attributes):
            calls = [
                traced(rank).train.remote(part, reference, step)
                for rank, part, reference in zip(self._ranks, parts, references, strict=True)
            ]
            losses = _get(calls)
        self._refit(version=step)
        if step % config.validation_every == 0 or step == config.steps:
            self._validate(step)
        if step % config.checkpoint_every == 0 or step == config.steps:
            self._save_checkpoint(step)
        self._record(step, sample, float(rewards.mean()), losses[0], before)

    def _refit(self, version: int) -> None:
        """Brings the generation workers to ``version``; one that is lost is left out until the next time."""
        with (
            self._timer.time("weight_sync"),
            managed_span(G.DATA_PLANE, "rl.grpo.weight_sync", **{"rl.weight_version": version}),
        ):
            # The weights go from rank 0 to the object store and from there to every worker, never through the driver.
            weights = traced(self._ranks[0]).weights.remote()
            calls = [traced(worker).update_weights.remote(weights, version) for worker in self._generators]
            self._refitted = []
            for worker, call in zip(self._generators, calls, strict=True):
                try:
                    _get(call)
                    self._refitted.append(worker)
                except (RayError, GetTimeoutError) as error:
                    self.results.missed_refits += 1
                    logger.warning("a generation worker missed the refit to version %d: %s", version, _reason(error))

    def _validate(self, step: int) -> None:
        """Decodes the held-out prompts greedily on the refitted workers; overhead, whatever its spans' groups are."""
        if not self._refitted:
            logger.warning("no validation at step %d: no generation worker has its weights", step)
            return
        with (
            self._timer.time("validation"),
            umbrella_span(G.U_EVALUATE, "rl.grpo.evaluate"),
            bucket_scope(Bucket.OVERHEAD),
        ):
            parts = np.array_split(self._validation_prompts, len(self._refitted))
            calls = [
                traced(worker).generate.remote(part, 1, None)
                for worker, part in zip(self._refitted, parts, strict=True)
            ]
            try:
                with managed_span(G.GENERATION, "rl.grpo.validation"):
                    generations = _get(calls)
            except (RayError, GetTimeoutError) as error:
                logger.warning("no validation at step %d: %s", step, _reason(error))
                return
            with managed_span(G.REWARD, "rl.grpo.reward"):
                scores = score(self._validation_prompts, np.concatenate([g.responses for g in generations]))
                accuracy = float((scores == 1).mean())
            self.results.validation[step] = accuracy
            print(f"validation at step {step}: {accuracy:.0%} of {len(scores)} held-out prompts sorted", flush=True)

    def _save_checkpoint(self, step: int) -> None:
        path = self._run_dir / "checkpoints" / f"step-{step:04d}.pt"
        with self._timer.time("checkpointing"), managed_span(G.CHECKPOINT, "rl.grpo.checkpointing"):
            _get(traced(self._ranks[0]).save_checkpoint.remote(path, step))

    def _record(self, step: int, sample: Sample, reward: float, loss: float, before: dict[str, float]) -> None:
        self.results.rewards.append(reward)
        self.results.losses.append(loss)
        self.results.staleness.extend(sample.staleness)
        self.results.refused = sample.refused
        spent = {key: seconds - before.get(key, 0.0) for key, seconds in self._timer.seconds.items()}
        print(
            f"step {step:3d}/{self._config.steps}  reward {reward:.3f}  loss {loss:+.4f}  "
            f"staleness {' '.join(map(str, sample.staleness))}  refused {sample.refused}  "
            f"wait {spent['buffer_starvation']:.2f} s  train {spent['policy_training']:.2f} s  "
            f"refit {spent['weight_sync']:.2f} s",
            flush=True,
        )


def _get(refs: Any) -> Any:
    """``ray.get`` that never waits for ever."""
    return ray.get(refs, timeout=CALL_TIMEOUT_S)


def _wait(refs: list[Any]) -> None:
    """Waits until ``refs`` are ready, and leaves their values where they are."""
    _, late = ray.wait(refs, num_returns=len(refs), timeout=CALL_TIMEOUT_S, fetch_local=False)
    if late:
        raise GetTimeoutError(f"{len(late)} of {len(refs)} calls took longer than {CALL_TIMEOUT_S:.0f} s")


def _reason(error: BaseException) -> str:
    """The first line of an error: Ray's go on with the remote traceback."""
    return (str(error).splitlines() or [type(error).__name__])[0]
