"""The driver: sets the actors up, trains step by step, refits, validates, saves, and takes everything down again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from examples.async_grpo.collector import AsyncTrajectoryCollector
from examples.async_grpo.config import CALL_TIMEOUT_S, DemoConfig
from examples.async_grpo.generation import GenerationWorker
from examples.async_grpo.metrics import MetricsFile, efficiency_seconds, step_metrics
from examples.async_grpo.replay_buffer import ReplayBuffer, Sample
from examples.async_grpo.results import Results
from examples.async_grpo.task import sample_prompts, score
from examples.async_grpo.training import PolicyUpdate, training_group
from examples.async_grpo.trajectories import group_relative_advantages, shard
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import iteration_scope, managed_span, traced, umbrella_span
from raytrace_rl.actors import flush_and_kill
from raytrace_rl.context import TraceContext
from raytrace_rl.dispatch import trace_context_kwargs
from raytrace_rl.instrumentation import efficiency_span, evaluate_span, setup_span, startup_span
from raytrace_rl.integrations.collector import rollout_links
from raytrace_rl.metrics import SETUP_TIMING_PREFIX, SetupTimingMetrics, TeeingLogger
from raytrace_rl.timer import Timer
from raytrace_rl.worker_groups import RayWorkerGroup

logger = logging.getLogger(__name__)


class Driver:
    """One run: ``set_up``, ``train``, ``take_down``; made right under the job span.

    Args:
        config: The run's settings.
        run_dir: Where checkpoints and metrics go.
    """

    def __init__(self, config: DemoConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._job = TraceContext.capture()
        self._timer = Timer(span_prefix="rl.grpo")
        self._logger = TeeingLogger(MetricsFile(run_dir / "metrics.jsonl"))
        self._generators: list[Any] = []
        self._refitted: list[Any] = []
        self._training: RayWorkerGroup | None = None
        self._buffer: Any = None
        self._collector: Any = None
        held_out = np.random.default_rng([config.seed, 1])
        self._validation_prompts = sample_prompts(held_out, config.validation_prompts, config.prompt_length)
        self.results = Results()

    def set_up(self, init_ray: Callable[[], object]) -> None:
        """Does everything before the first step, up to a buffer that holds the first step's batches.

        Args:
            init_ray: Starts Ray.
        """
        timer, started = self._timer, time.perf_counter()
        with startup_span():
            with timer.time("setup/ray", span=setup_span("ray")):
                init_ray()
            with timer.time("setup/workers", span=setup_span("workers")):
                self._create_actors()
            with timer.time("setup/training", span=setup_span("training")):
                address = _get(traced(self._ranks).run_single_worker_single_data("open_rendezvous", 0))
            with timer.time("setup/process_group", span=setup_span("process_group")):
                _get(traced(self._ranks).run_all_workers_single_data("join", address=address))
            with timer.time("setup/generation", span=setup_span("generation")):
                _wait([worker.drain.remote() for worker in self._generators])
            self._refit(version=0)
            _get(traced(self._collector).start.remote())
            with timer.time("init/total", span=efficiency_span("init/total")):
                _get(self._buffer.wait_for.remote(self._config.batches_per_step))
        self._log_startup(time.perf_counter() - started)

    def train(self) -> None:
        """Runs every training step, printing one line for each."""
        for step in range(1, self._config.steps + 1):
            with iteration_scope(step):
                with self._timer.time("total_step_time", span=umbrella_span(G.U_STEP, "rl.grpo.step")):
                    sample, update = self._train_step(step)
                self._log_step(step, sample, update)

    def take_down(self) -> None:
        """Stops the collector, flushes every actor's telemetry and only then kills the actors."""
        if self._collector is not None:
            try:
                ray.get(self._buffer.close.remote(), timeout=CALL_TIMEOUT_S / 4)
                report = ray.get(traced(self._collector).stop.remote(), timeout=CALL_TIMEOUT_S / 2)
                self.results.collector = report
                last = len(self.results.rewards)
                self._logger.log_metrics(efficiency_seconds(report.seconds), last, prefix="train")
            except (RayError, GetTimeoutError) as error:
                logger.warning("the collector did not stop cleanly: %s", _reason(error))
        actors = [self._collector, self._buffer, *self._generators]
        flush_and_kill([actor for actor in actors if actor is not None])
        if self._training is not None:
            self._training.shutdown()

    def _create_actors(self) -> None:
        """Creates every actor and waits for none, so that their processes start side by side."""
        config = self._config
        self._generators = [traced(GenerationWorker).remote(i, config) for i in range(config.num_generators)]
        self._buffer = traced(ReplayBuffer).remote(config.buffer_batches, config.max_staleness)
        with self._job.attach():
            # The collector's threads hang from what is current here as long as they live, and startup will be over.
            self._collector = traced(AsyncTrajectoryCollector).remote(config, self._generators, self._buffer)
        self._training = training_group(config)

    @property
    def _ranks(self) -> RayWorkerGroup:
        """The training ranks, once they have been created."""
        assert self._training is not None
        return self._training

    def _train_step(self, step: int) -> tuple[Sample, PolicyUpdate]:
        config, timer = self._config, self._timer
        with timer.time("idle/buffer_starvation", span=efficiency_span("idle/buffer_starvation")):
            sample: Sample = _get(traced(self._buffer).sample.remote(config.batches_per_step, step - 1))
        with timer.time("advantage", group=G.ADVANTAGE):
            advantages = group_relative_advantages(sample.rewards)
            shards = shard(sample.batches, advantages, config.num_training_ranks)
        with timer.time("reference_logprobs", group=G.LOGPROB):
            # References: shards and log-probabilities go to the ranks by way of the object store, once each.
            parts = [ray.put(part) for part in shards]
            # One way to send the trace context along: the keywords that go to every rank as they are.
            references = self._ranks.run_all_workers_sharded_data(
                "reference_log_probs",
                shard=parts,
                in_sharded_axes=["data_parallel"],
                common_kwargs=trace_context_kwargs(),
            ).futures
            _wait(references)
        attributes = {"rl.staleness.max": max(sample.staleness), "rl.reward.mean": float(sample.rewards.mean())}
        links = rollout_links(sample.batches, weight_version=step - 1)
        span = managed_span(G.POLICY_UPDATE, "rl.grpo.policy_training", links=links, **attributes)
        with timer.time("policy_training", span=span):
            # The other way: a view of the group whose calls bring it.
            calls = traced(self._ranks).run_all_workers_sharded_data(
                "train",
                shard=parts,
                reference_log_probs=references,
                in_sharded_axes=["data_parallel"],
                output_is_replicated=["data_parallel"],
                common_kwargs={"version": step},
            )
            update: PolicyUpdate = self._ranks.get_all_worker_results(calls, timeout=CALL_TIMEOUT_S)[0]
        self._refit(version=step)
        if step % config.validation_every == 0 or step == config.steps:
            self._validate(step)
        if step % config.checkpoint_every == 0 or step == config.steps:
            self._save_checkpoint(step)
        return sample, update

    def _refit(self, version: int) -> None:
        """Brings the generation workers to ``version``; one that is lost is left out until the next time."""
        sync = managed_span(G.DATA_PLANE, "rl.grpo.weight_sync", **{"rl.weight_version": version})
        with self._timer.time("weight_sync", span=sync):
            # The weights go from rank 0 to the object store and from there to every worker, never through the driver.
            weights = traced(self._ranks).run_single_worker_single_data("weights", 0)
            _wait([weights])
            drained = [worker.drain.remote() for worker in self._generators]
            calls = [traced(worker).update_weights.remote(weights, version) for worker in self._generators]
            with self._timer.time("idle/refit_bubble", span=efficiency_span("idle/refit_bubble")):
                # Workers take the weights after what they are generating now. One that is lost is found out below.
                ray.wait(drained, num_returns=len(drained), timeout=CALL_TIMEOUT_S, fetch_local=False)
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
        with self._timer.time("total_validation_time", span=evaluate_span("grpo")):
            parts = np.array_split(self._validation_prompts, len(self._refitted))
            calls = [
                traced(worker).generate.remote(part, 1, None)
                for worker, part in zip(self._refitted, parts, strict=True)
            ]
            try:
                with self._timer.time("validation", group=G.GENERATION):
                    generations = _get(calls)
            except (RayError, GetTimeoutError) as error:
                logger.warning("no validation at step %d: %s", step, _reason(error))
                return
            with self._timer.time("reward", group=G.REWARD):
                scores = score(self._validation_prompts, np.concatenate([g.responses for g in generations]))
                accuracy = float((scores == 1).mean())
            self.results.validation[step] = accuracy
            print(f"validation at step {step}: {accuracy:.0%} of {len(scores)} held-out prompts sorted", flush=True)

    def _save_checkpoint(self, step: int) -> None:
        path = self._run_dir / "checkpoints" / f"step-{step:04d}.pt"
        with self._timer.time("checkpointing", group=G.CHECKPOINT):
            _get(traced(self._ranks).run_single_worker_single_data("save_checkpoint", 0, path=path, step=step))

    def _log_startup(self, total_s: float) -> None:
        spent = self._take_seconds()
        phases = SetupTimingMetrics(
            worker_setup_time_s=spent["setup/workers"],
            policy_init_time_s=spent["setup/training"],
            collective_init_time_s=spent["setup/process_group"],
            generation_init_time_s=spent["setup/generation"],
            weight_sync_time_s=spent["weight_sync"],
            total_setup_time_s=total_s,
            extras={"ray_init_time_s": spent["setup/ray"], "first_batches_time_s": spent["init/total"]},
        )
        self._logger.log_metrics(phases.to_metrics_dict(), 0, prefix=SETUP_TIMING_PREFIX)
        self._logger.log_metrics(efficiency_seconds(spent), 0, prefix="train")

    def _log_step(self, step: int, sample: Sample, update: PolicyUpdate) -> None:
        spent = self._take_seconds()
        reward = float(sample.rewards.mean())
        self.results.rewards.append(reward)
        self.results.losses.append(update.loss)
        self.results.staleness.extend(sample.staleness)
        self.results.refused = sample.refused
        collector = _get(self._collector.report.remote())
        metrics = step_metrics(reward, sample.mean_response_length, update, spent, collector.seconds)
        self._logger.log_metrics(metrics, step, prefix="train")
        self._logger.log_metrics(spent, step, prefix="timing/train")
        print(
            f"step {step:3d}/{self._config.steps}  reward {reward:.3f}  loss {update.loss:+.4f}  "
            f"staleness {' '.join(map(str, sample.staleness))}  refused {sample.refused}  "
            f"wait {spent['idle/buffer_starvation']:.2f} s  train {spent['policy_training']:.2f} s  "
            f"refit {spent['weight_sync']:.2f} s",
            flush=True,
        )

    def _take_seconds(self) -> dict[str, float]:
        """Returns the Timer's seconds by key, and starts it anew."""
        spent = self._timer.totals()
        self._timer.reset()
        self.results.add_seconds(spent)
        return spent


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
