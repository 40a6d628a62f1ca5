"""The training rank: a Megatron-core ``GPTModel``, split by tensor parallelism, in a `RayWorkerGroup`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from examples.async_grpo.loss import clipped_policy_loss, kl_estimate
from examples.async_grpo.model import chosen, mean_entropy
from examples.async_grpo.task import NUM_DIGITS, SEPARATOR, FloatArray
from examples.async_grpo.training import PolicyUpdate
from examples.async_grpo.trajectories import TrainingShard
from examples.vllm_megatron_grpo.config import EnginesConfig
from examples.vllm_megatron_grpo.cpu import pretend_megatron_has_a_gpu
from raytrace_rl import accepts_trace_context
from raytrace_rl.instrumentation import setup_span
from raytrace_rl.integrations.megatron import SpanTimers, TracedMegatronWorker


class MegatronRank(TracedMegatronWorker, model_init=True):
    """One rank. Its place comes from the worker group's environment, its telemetry's topology from Megatron.

    Args:
        config: The run's settings.
    """

    def __init__(self, config: EnginesConfig) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._config = config
        self._gpu = torch.cuda.is_available()
        if self._gpu:
            torch.cuda.set_device(0)  # the one that Ray gave this actor
        else:
            pretend_megatron_has_a_gpu()
        with setup_span("process_group"):
            dist.init_process_group("nccl" if self._gpu else "gloo")
        with setup_span("megatron"):
            self._build()
        self.describe_parallelism()

    def _build(self) -> None:
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=self._config.tensor_parallel)
        torch.manual_seed(self._config.seed)
        if self._gpu:
            tensor_parallel.model_parallel_cuda_manual_seed(self._config.seed)
        self._settings = self._config.model.megatron(
            tensor_parallel=self._config.tensor_parallel, timers=SpanTimers(), on_cpu=not self._gpu
        )
        self._policy = self._new_model()
        self._reference = self._new_model().requires_grad_(False)
        self._reference.load_state_dict(self._policy.state_dict())
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=self._config.lr)

    def _new_model(self) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        model = GPTModel(
            config=self._settings,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=self._config.model.vocabulary,
            max_sequence_length=self._config.model.context,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            parallel_output=False,
        )
        return model.to(self._device)

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda" if self._gpu else "cpu")

    @accepts_trace_context
    def log_probs(self, shard: TrainingShard, of_reference: bool) -> FloatArray:
        """Returns the log-probabilities of the shard's responses, ``[rows, length]``.

        Args:
            shard: The rows.
            of_reference: Those of the first policy; else of the current one, which an engine with the same weights
                agrees with.
        """
        model = self._reference if of_reference else self._policy
        facts = {"rl.num_rows": len(shard.prompts), "rl.of_reference": of_reference}
        with self.log_prob_span(**facts), torch.no_grad():
            distributions = self._response_distributions(self._logits(model, shard))
            found: FloatArray = chosen(distributions, self._tensor(shard.responses)).cpu().numpy()
            return found

    @accepts_trace_context
    def train(self, shard: TrainingShard, reference_log_probs: FloatArray, version: int) -> PolicyUpdate:
        """Runs one step's update on this rank's shard; see `examples.async_grpo.training.TrainingRank.train`."""
        measured, norm = torch.zeros(3), 0.0
        for epoch in range(self._config.epochs):
            facts = {"rl.weight_version": version, "rl.epoch": epoch}
            with self.forward_backward_span(**facts):
                measured = self._forward_backward(shard, self._tensor(reference_log_probs))
            with self.optimizer_span(**facts):
                norm = self._step()
        loss, divergence, entropy = measured.tolist()
        return PolicyUpdate(loss, divergence, entropy, norm, self._optimizer.param_groups[0]["lr"])

    @accepts_trace_context
    def export_weights(self, version: int) -> dict[str, FloatArray]:
        """Returns this rank's shard of the policy's weights, by Megatron's names, ready for the object store."""
        with self.weight_export_span(**{"rl.weight_version": version}):
            state = self._policy.state_dict()
            return {name: value.cpu().numpy().copy() for name, value in state.items() if torch.is_tensor(value)}

    def pid(self) -> int:
        """Returns this rank's process."""
        return os.getpid()

    def _forward_backward(self, shard: TrainingShard, reference: torch.Tensor) -> torch.Tensor:
        """Has Megatron's schedule run the passes over the shard as one microbatch; returns loss, KL and entropy."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        responses, old = self._tensor(shard.responses), self._tensor(shard.old_log_probs)
        advantages = self._tensor(shard.advantages)
        measured: list[torch.Tensor] = []

        def loss_of(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            distributions = self._response_distributions(logits)
            log_probs = chosen(distributions, responses)
            loss = clipped_policy_loss(
                log_probs,
                old,
                reference,
                advantages,
                clip=self._config.clip,
                kl_coefficient=self._config.kl_coefficient,
            )
            with torch.no_grad():
                measured.append(
                    torch.stack([loss, kl_estimate(log_probs, reference).mean(), mean_entropy(distributions)])
                )
            return loss, {}

        def forward_step(batches: Iterator[TrainingShard], model: Any) -> tuple[torch.Tensor, Any]:
            return self._logits(model, next(batches)), loss_of

        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([shard]),
            model=self._policy,
            num_microbatches=1,
            seq_length=2 * shard.prompts.shape[1],
            micro_batch_size=len(shard.prompts),
            forward_only=False,
        )
        return measured[-1]

    def _step(self) -> float:
        """Averages the gradients over the replicas, clips them, and takes a step; returns their norm."""
        from megatron.core import parallel_state

        weights = [weight for weight in self._policy.parameters() if weight.grad is not None]
        replicas = parallel_state.get_data_parallel_world_size()
        squares = torch.zeros(2, device=self._device)  # of what each rank has its own part of; of what all have alike
        for weight in weights:
            if replicas > 1:
                dist.all_reduce(weight.grad, group=parallel_state.get_data_parallel_group())
                weight.grad /= replicas
            squares[0 if getattr(weight, "tensor_model_parallel", False) else 1] += weight.grad.square().sum()
        dist.all_reduce(squares[:1], group=parallel_state.get_tensor_model_parallel_group())
        norm = float(squares.sum().sqrt())
        for weight in weights:
            weight.grad *= min(1.0, 1.0 / (norm + 1e-6))
        self._optimizer.step()
        return norm

    def _logits(self, model: Any, shard: TrainingShard) -> torch.Tensor:
        """Runs a model over prompts, separator and responses; ``[rows, places, vocabulary]``."""
        separator = np.full((len(shard.prompts), 1), SEPARATOR)
        tokens = self._tensor(np.concatenate([shard.prompts, separator, shard.responses[:, :-1]], axis=1))
        places = tokens.shape[1]
        positions = torch.arange(places, device=self._device)[None].expand(len(tokens), -1)
        hidden = torch.triu(torch.ones(1, 1, places, places, device=self._device), 1).bool()
        logits: torch.Tensor = model(tokens, positions, hidden)
        return logits

    def _response_distributions(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the digits, the only tokens that the engine may sample, at each response place."""
        return logits[:, self._config.prompt_length :, :NUM_DIGITS].float().log_softmax(-1)

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.tensor(array, device=self._device)
