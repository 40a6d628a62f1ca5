"""What travels from the generation workers to the training ranks, and the advantages on the way. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from examples.async_grpo.task import FloatArray, IntArray

#: Keeps a group whose rewards hardly differ from being blown up to full advantages.
_STD_FLOOR: Final = 1e-4


@dataclass(frozen=True)
class Generation:
    """Responses from one generation worker.

    Attributes:
        responses: Tokens, ``[prompts, generations, length]``.
        log_probs: Their log-probabilities under the weights that sampled them, same shape.
        weight_version: The version of these weights.
    """

    responses: IntArray
    log_probs: FloatArray
    weight_version: int


@dataclass(frozen=True)
class RolloutBatch:
    """One rollout batch, scored: what the replay buffer holds.

    Attributes:
        batch_id: Counts the collector's batches from 0.
        prompts: ``[prompts, length]``.
        generation: The responses.
        rewards: ``[prompts, generations]``.
        trace_carrier: Its rollout, for the step that trains on it to link to; empty without telemetry.
    """

    batch_id: int
    prompts: IntArray
    generation: Generation
    rewards: FloatArray
    trace_carrier: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight_version(self) -> int:
        """The version of the weights that generated it."""
        return self.generation.weight_version


@dataclass(frozen=True)
class TrainingShard:
    """One training rank's share of a step, flattened to rows; ``rows`` is prompts times generations.

    Attributes:
        prompts: ``[rows, length]``.
        responses: ``[rows, length]``.
        old_log_probs: Log-probabilities under the weights that generated them, ``[rows, length]``.
        advantages: One a row.
    """

    prompts: IntArray
    responses: IntArray
    old_log_probs: FloatArray
    advantages: FloatArray


def group_relative_advantages(rewards: FloatArray) -> FloatArray:
    """Centres and scales each prompt's rewards within their own group (GRPO, arXiv:2402.03300, section 4.1).

    Args:
        rewards: ``[prompts, generations]``.

    Returns:
        Advantages of the same shape; zero in a group whose rewards are all equal.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages: FloatArray = centred / (rewards.std(axis=1, keepdims=True) + _STD_FLOOR)
    return advantages


def shard(batches: Sequence[RolloutBatch], advantages: FloatArray, ranks: int) -> list[TrainingShard]:
    """Splits a step's batches by prompt groups over the training ranks.

    Args:
        batches: The step's rollout batches.
        advantages: ``[prompts, generations]``, their groups one after the other.
        ranks: Training ranks.

    Returns:
        One shard a rank; no group is split.
    """
    prompts = np.concatenate([batch.prompts for batch in batches])
    responses = np.concatenate([batch.generation.responses for batch in batches])
    log_probs = np.concatenate([batch.generation.log_probs for batch in batches])
    length = prompts.shape[1]
    generations = responses.shape[1]
    return [
        TrainingShard(
            prompts=np.repeat(prompts[groups], generations, axis=0),
            responses=responses[groups].reshape(-1, length),
            old_log_probs=log_probs[groups].reshape(-1, length),
            advantages=advantages[groups].reshape(-1),
        )
        for groups in np.array_split(np.arange(len(prompts)), ranks)
    ]
