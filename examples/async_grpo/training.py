"""The training ranks: a group of Ray actors that score shards and update the policy on them, by gloo among each other.

The group gives each its rank, its name and the sizes of its axes.
"""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy.typing as npt
import ray
import torch
import torch.distributed as dist

from examples.async_grpo.config import CALL_TIMEOUT_S, DemoConfig
from examples.async_grpo.loss import clipped_policy_loss, kl_estimate
from examples.async_grpo.model import Policy, chosen, mean_entropy
from examples.async_grpo.task import FloatArray
from examples.async_grpo.trajectories import TrainingShard
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import TracedActor, accepts_trace_context, managed_span, umbrella_span
from raytrace_rl.instrumentation import setup_span
from raytrace_rl.worker_groups import NamedSharding, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyUpdate:
    """What one step's update measured in its last epoch, over all ranks.

    Attributes:
        loss: The loss.
        kl: KL divergence to the reference policy per token, in nats; the k3 estimate.
        entropy: The policy's entropy per response token, in nats.
        grad_norm: L2 norm of the averaged gradient, before it was clipped.
        learning_rate: The optimizer's.
    """

    loss: float
    kl: float
    entropy: float
    grad_norm: float
    learning_rate: float


@ray.remote
class TrainingRank(TracedActor):
    """One data-parallel rank: the same seed gives every rank the same weights, averaged gradients keep them equal.

    Args:
        config: The run's settings.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        with umbrella_span(G.U_MODEL_INIT, "rl.setup.training_model"):
            torch.set_num_threads(1)
            torch.manual_seed(config.seed)
            self._rank = int(os.environ["RANK"])
            self._config = config
            self._policy = Policy(config.prompt_length)
            self._reference = Policy(config.prompt_length).requires_grad_(False)
            self._reference.load_state_dict(self._policy.state_dict())
            self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=config.lr)
            self._store: Any = None

    @accepts_trace_context
    def open_rendezvous(self) -> tuple[str, int]:
        """On rank 0: opens the group's store on a port that the system picks; returns its host and port."""
        with setup_span("rendezvous"):
            host = ray.util.get_node_ip_address()
            self._store = dist.TCPStore(
                host, 0, self._config.num_training_ranks, is_master=True, wait_for_workers=False
            )
            return host, self._store.port

    @accepts_trace_context
    def join(self, address: tuple[str, int]) -> None:
        """Joins the process group whose store is at ``address``."""
        with setup_span("process_group"):
            world_size = self._config.num_training_ranks
            timeout = timedelta(seconds=CALL_TIMEOUT_S)
            store = self._store or dist.TCPStore(*address, world_size, is_master=False, timeout=timeout)
            dist.init_process_group("gloo", store=store, rank=self._rank, world_size=world_size, timeout=timeout)

    @accepts_trace_context
    def reference_log_probs(self, shard: TrainingShard) -> FloatArray:
        """Returns the reference policy's log-probabilities of the shard's responses, ``[rows, length]``."""
        with managed_span(G.LOGPROB, "rl.grpo.reference_logprobs", **_identity(shard)), torch.no_grad():
            log_probs = self._reference.response_log_probs(_tensor(shard.prompts), _tensor(shard.responses))
            array: FloatArray = log_probs.numpy()
            return array

    @accepts_trace_context
    def train(self, shard: TrainingShard, reference_log_probs: FloatArray, version: int) -> PolicyUpdate:
        """Runs one step's update on this rank's shard.

        Args:
            shard: This rank's rows.
            reference_log_probs: What `reference_log_probs` returned for it.
            version: The weight version that the update makes.

        Returns:
            What it measured; the same on every rank.
        """
        config = self._config
        attributes = {"rl.weight_version": version, **_identity(shard)}
        with managed_span(G.POLICY_UPDATE, "rl.grpo.policy_training", **attributes):
            prompts, responses = _tensor(shard.prompts), _tensor(shard.responses)
            old, reference = _tensor(shard.old_log_probs), _tensor(reference_log_probs)
            advantages = _tensor(shard.advantages)
            measured, grad_norm = torch.zeros(3), torch.zeros(())
            for _ in range(config.epochs):
                distributions = self._policy.response_distributions(prompts, responses)
                log_probs = chosen(distributions, responses)
                loss = clipped_policy_loss(
                    log_probs, old, reference, advantages, clip=config.clip, kl_coefficient=config.kl_coefficient
                )
                self._optimizer.zero_grad()
                loss.backward()
                self._average_gradients()
                grad_norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
                self._optimizer.step()
                with torch.no_grad():
                    divergence = kl_estimate(log_probs, reference).mean()
                    measured = torch.stack([loss, divergence, mean_entropy(distributions)])
            mean_loss, kl, entropy = self._mean_over_ranks(measured)
            update = PolicyUpdate(mean_loss, kl, entropy, grad_norm.item(), self._optimizer.param_groups[0]["lr"])
            logger.info("version %d: loss %+.4f, gradient norm %.3f", version, update.loss, update.grad_norm)
            return update

    @accepts_trace_context
    def weights(self) -> dict[str, FloatArray]:
        """Returns the policy's weights by name, ready for the object store."""
        with managed_span(G.DATA_PLANE, "rl.grpo.weight_export"):
            return {name: tensor.numpy().copy() for name, tensor in self._policy.state_dict().items()}

    @accepts_trace_context
    def save_checkpoint(self, path: Path, step: int) -> None:
        """Writes weights and optimizer state to ``path``, whole or not at all."""
        with managed_span(G.CHECKPOINT, "rl.grpo.checkpointing"):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            state = {"step": step, "policy": self._policy.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, partial)
            partial.replace(path)
            logger.info("wrote %s", path)

    def _average_gradients(self) -> None:
        """Averages the gradients over the ranks, as one flat tensor: one message an update."""
        gradients = [weight.grad for weight in self._policy.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with managed_span(G.POLICY_UPDATE, "rl.grpo.gradient_all_reduce", **{"rl.num_bytes": flat.nbytes}):
            dist.all_reduce(flat)
        flat /= self._config.num_training_ranks
        for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))

    def _mean_over_ranks(self, values: torch.Tensor) -> list[float]:
        """Averages each of ``values`` (one dimension) over the ranks."""
        total = values.clone()
        dist.all_reduce(total)
        means: list[float] = (total / self._config.num_training_ranks).tolist()
        return means


def training_group(config: DemoConfig) -> RayWorkerGroup:
    """Starts the training ranks, side by side, as one data-parallel axis, and waits for none."""
    ranks = config.num_training_ranks
    return RayWorkerGroup(
        RayVirtualCluster([ranks], use_gpus=False, name="training"),
        RayWorkerBuilder(TrainingRank, config),
        name_prefix="training",
        sharding_annotations=NamedSharding.of(data_parallel=ranks),
    )


def _identity(shard: TrainingShard) -> dict[str, int]:
    """Attributes by which a trace shows which rank had which rows."""
    return {"rl.shard.rows": len(shard.responses), "rl.shard.crc32": zlib.crc32(shard.responses.tobytes())}


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A copy as a tensor: arrays out of Ray's object store are read-only and shared, which torch does not know."""
    return torch.tensor(array)
