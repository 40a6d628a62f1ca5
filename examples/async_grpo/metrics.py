"""The metrics of a step: their keys, the series that mirror them, and the file that they are logged to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from examples.async_grpo.training import PolicyUpdate
from raytrace_rl.efficiency import efficiency_category, efficiency_key
from raytrace_rl.vocabulary import TeedMetric, register_teed_metrics

REWARD: Final = "reward"
RESPONSE_LENGTH: Final = "response_length"
KL: Final = "kl"
LOSS: Final = "loss"
ENTROPY: Final = "entropy"
GRAD_NORM: Final = "grad_norm"
LEARNING_RATE: Final = "lr"
VALUE_LOSS: Final = "value_loss"

STEP_SERIES: Final = (
    TeedMetric(REWARD, "rl.reward.mean", description="Mean reward of the responses that the step trained on."),
    TeedMetric(
        RESPONSE_LENGTH,
        "rl.response.length.mean",
        unit="{token}",
        description="Mean tokens of a response; in this task each is as long as its prompt.",
    ),
    TeedMetric(KL, "rl.kl.divergence", unit="nat", description="Per token, to the reference policy; k3 estimate."),
    TeedMetric(LOSS, "rl.policy.loss", description="Clipped surrogate and KL penalty, in the last epoch."),
    TeedMetric(ENTROPY, "rl.entropy", unit="nat", description="Of the policy, per response token."),
    TeedMetric(GRAD_NORM, "rl.grad_norm", description="L2 norm of the averaged gradient, before it is clipped."),
    TeedMetric(LEARNING_RATE, "rl.learning_rate", description="Of the optimizer, in the last epoch."),
)
#: GRPO has no critic, so that nothing here logs this key. It is declared where a loop with one would declare it: the
#: tee records it from the first step whose metrics hold it.
CRITIC_SERIES: Final = (TeedMetric(VALUE_LOSS, "rl.value.loss", description="Of the critic, in the last epoch."),)
register_teed_metrics((*STEP_SERIES, *CRITIC_SERIES))


def step_metrics(
    reward: float, response_length: float, update: PolicyUpdate, *seconds: Mapping[str, float]
) -> dict[str, float]:
    """Returns what is logged under ``train``: the gauges, and the seconds of each efficiency category.

    Args:
        reward: Mean reward of the step's responses.
        response_length: Their mean length in tokens.
        update: What the training ranks measured.
        seconds: Seconds by Timer key, of the driver and of the collector; keys that are no category are passed over.
    """
    return {
        REWARD: reward,
        RESPONSE_LENGTH: response_length,
        KL: update.kl,
        LOSS: update.loss,
        ENTROPY: update.entropy,
        GRAD_NORM: update.grad_norm,
        LEARNING_RATE: update.learning_rate,
        **efficiency_seconds(*seconds),
    }


def efficiency_seconds(*seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the keys of ``seconds`` that are efficiency categories, as they are logged."""
    return {
        efficiency_key(label): spent
        for timed in seconds
        for label, spent in timed.items()
        if efficiency_category(label) is not None
    }


class MetricsFile:
    """A logger as training loops have them: one JSON object a line.

    Args:
        path: The file, appended to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def log_metrics(self, metrics: Mapping[str, object], step: int, prefix: str = "") -> None:
        """Appends one line.

        Args:
            metrics: Values by key.
            step: The step that they belong to; 0 is before the first.
            prefix: The family of the keys, such as ``train``.
        """
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "prefix": prefix, **metrics}) + "\n")
