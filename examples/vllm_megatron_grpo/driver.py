"""The driver: engines and trainer side by side, one weight version a step; after `examples.async_grpo.driver`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from examples.async_grpo.collector import AsyncTrajectoryCollector
from examples.async_grpo.config import CALL_TIMEOUT_S
from examples.async_grpo.metrics import MetricsFile, efficiency_seconds, step_metrics
from examples.async_grpo.replay_buffer import ReplayBuffer, Sample
from examples.async_grpo.training import PolicyUpdate
from examples.async_grpo.trajectories import group_relative_advantages, shard
from examples.vllm_megatron_grpo.config import EnginesConfig
from examples.vllm_megatron_grpo.engine import EngineWorker
from examples.vllm_megatron_grpo.training import MegatronRank
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import iteration_scope, managed_span, traced, umbrella_span
from raytrace_rl.actors import flush_and_kill
from raytrace_rl.context import TraceContext
from raytrace_rl.dispatch import dispatch_with_trace_context
from raytrace_rl.instrumentation import efficiency_span, setup_span, startup_span
from raytrace_rl.integrations import vllm
from raytrace_rl.integrations.collector import rollout_links
from raytrace_rl.metrics import TeeingLogger
from raytrace_rl.timer import Timer
from raytrace_rl.worker_groups import NamedSharding, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup

#: An engine that starts beside others on few cores takes its time. Seconds.
_START_TIMEOUT_S = 600.0
_AXES = {"in_sharded_axes": ["data_parallel"], "replicate_on_axes": ["tensor_parallel"]}


class Driver:
    """One run: ``set_up``, ``train``, ``take_down``; made right under the job span.

    Args:
        config: The run's settings.
        run_dir: Where the model and the metrics go.
    """

    def __init__(self, config: EnginesConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._job = TraceContext.capture()
        self._timer = Timer(span_prefix="rl.grpo")
        self._logger = TeeingLogger(MetricsFile(run_dir / "metrics.jsonl"))
        self._engines: list[Any] = []
        self._trainer: RayWorkerGroup | None = None
        self._buffer: Any = None
        self._collector: Any = None
        #: Mean reward of each step.
        self.rewards: list[float] = []

    def set_up(self, init_ray: Callable[[], object]) -> None:
        """Does everything before the first step.

        Args:
            init_ray: Starts Ray.
        """
        config, timer = self._config, self._timer
        with startup_span():
            with timer.time("setup/ray", span=setup_span("ray")):
                init_ray()
                gpus = ray.cluster_resources().get("GPU", 0) >= config.num_gpus
            with timer.time("setup/workers", span=setup_span("workers")):
                self._create_actors(gpus)
            with timer.time("setup/engines", span=setup_span("engines")):
                starting = [engine.stats.remote() for engine in self._engines]
                starting += self._group.run_all_workers_single_data("pid")
                ray.get(starting, timeout=_START_TIMEOUT_S)
            self._refit(version=0)
            _get(traced(self._collector).start.remote())
            with timer.time("init/total", span=efficiency_span("init/total")):
                _get(self._buffer.wait_for.remote(config.batches_per_step))
        self._logger.log_metrics(efficiency_seconds(self._take_seconds()), 0, prefix="train")

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
                ray.get(traced(self._collector).stop.remote(), timeout=CALL_TIMEOUT_S / 2)
            except (RayError, GetTimeoutError) as error:
                print(f"the collector did not stop cleanly: {error}")
        flush_and_kill([actor for actor in [self._collector, self._buffer, *self._engines] if actor is not None])
        if self._trainer is not None:
            self._trainer.shutdown()

    @property
    def _group(self) -> RayWorkerGroup:
        assert self._trainer is not None
        return self._trainer

    def _create_actors(self, gpus: bool) -> None:
        """Creates every actor and waits for none, so that engines and trainer start side by side."""
        config = self._config
        folder = str(config.model.write(self._run_dir / "model"))
        engine = EngineWorker.options(num_gpus=config.engine_tensor_parallel if gpus else 0)
        self._engines = [traced(engine).remote(i, config, folder) for i in range(config.num_generators)]
        self._buffer = traced(ReplayBuffer).remote(config.buffer_batches, config.max_staleness)
        with self._job.attach():
            self._collector = traced(AsyncTrajectoryCollector).remote(config, self._engines, self._buffer)
        ranks = np.arange(config.num_training_ranks).reshape(config.data_parallel, config.tensor_parallel)
        self._trainer = RayWorkerGroup(
            RayVirtualCluster([config.num_training_ranks], use_gpus=gpus),
            RayWorkerBuilder(MegatronRank, config),
            name_prefix="training",
            sharding_annotations=NamedSharding(layout=ranks, names=["data_parallel", "tensor_parallel"]),
        )

    def _train_step(self, step: int) -> tuple[Sample, PolicyUpdate]:
        config, timer = self._config, self._timer
        with timer.time("idle/buffer_starvation", span=efficiency_span("idle/buffer_starvation")):
            sample: Sample = _get(traced(self._buffer).sample.remote(config.batches_per_step, step - 1))
        with timer.time("advantage", group=G.ADVANTAGE):
            shards = shard(sample.batches, group_relative_advantages(sample.rewards), config.data_parallel)
        with timer.time("reference_logprobs", group=G.LOGPROB):
            references = self._on_ranks("log_probs", shards, of_reference=True)
        links = rollout_links(sample.batches, weight_version=step - 1)
        update = managed_span(G.POLICY_UPDATE, "rl.grpo.policy_training", links=links)
        with timer.time("policy_training", span=update):
            updates = self._on_ranks("train", shards, references, version=step)
        self._refit(version=step)
        return sample, updates[0]

    def _on_ranks(self, method: str, *data: Sequence[Any], **common: Any) -> list[Any]:
        """Calls a method on every rank with its replica's share of ``data``; returns one result a replica."""
        future = dispatch_with_trace_context(
            self._group.run_all_workers_sharded_data,
            method,
            *data,
            **_AXES,
            output_is_replicated=["tensor_parallel"],
            common_kwargs=common,
        )
        return self._group.get_all_worker_results(future, timeout=CALL_TIMEOUT_S)

    def _refit(self, version: int) -> None:
        """Brings every engine to ``version``: shards from the ranks of one replica, by way of the object store."""
        sync = managed_span(G.DATA_PLANE, "rl.grpo.weight_sync", **{"rl.weight_version": version})
        with self._timer.time("weight_sync", span=sync):
            shards = dispatch_with_trace_context(
                self._group.run_all_workers_single_data,
                "export_weights",
                version,
                run_rank_0_only_axes=["data_parallel"],
            )
            calls = [traced(engine).update_weights.remote(shards, version) for engine in self._engines]
            with self._timer.time("idle/refit_bubble", span=efficiency_span("idle/refit_bubble")):
                _get(calls)

    def _log_step(self, step: int, sample: Sample, update: PolicyUpdate) -> None:
        spent = self._take_seconds()
        self.rewards.append(float(sample.rewards.mean()))
        collector = _get(self._collector.report.remote())
        logged = {
            **step_metrics(self.rewards[-1], sample.mean_response_length, update, spent, collector.seconds),
            **vllm.step_metrics(_get([engine.stats.remote() for engine in self._engines])),
        }
        self._logger.log_metrics(logged, step, prefix="train")
        print(
            f"step {step:3d}/{self._config.steps}  reward {self.rewards[-1]:.3f}  loss {update.loss:+.4f}  "
            f"staleness {' '.join(map(str, sample.staleness))}  "
            f"{logged[vllm.GENERATION_TOKENS]:.0f} tokens  wait {spent['idle/buffer_starvation']:.2f} s  "
            f"train {spent['policy_training']:.2f} s  refit {spent['weight_sync']:.2f} s",
            flush=True,
        )

    def _take_seconds(self) -> dict[str, float]:
        """Returns the Timer's seconds by key, and starts it anew."""
        spent = self._timer.totals()
        self._timer.reset()
        return spent


def summary(rewards: Sequence[float], started: float) -> str:
    """Returns one line on what a run has learnt.

    Args:
        rewards: Mean reward of each step.
        started: ``time.monotonic()`` at its start.
    """
    third = max(len(rewards) // 3, 1)
    first, last = (sum(part) / third for part in (rewards[:third], rewards[-third:]))
    seconds = time.monotonic() - started
    return f"mean reward {first:.3f} in the first {third} steps, {last:.3f} in the last; {seconds:.0f} s in all"


def _get(refs: Any) -> Any:
    """``ray.get`` that never waits for ever."""
    return ray.get(refs, timeout=CALL_TIMEOUT_S)
