"""The clipped policy-gradient loss with a KL penalty: the arithmetic of the update and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    kl_coefficient: float,
) -> Tensor:
    """PPO's clipped surrogate plus the k3 estimate of the KL divergence to the reference policy.

    The ratio is taken against the policy that generated the tokens, whichever weight version that was, so a stale
    batch is corrected for as far as the clip allows.

    Args:
        log_probs: Under the policy being trained, ``[rows, length]``; the only argument with a gradient.
        old_log_probs: Under the weights that generated the tokens, ``[rows, length]``.
        reference_log_probs: Under the reference policy, ``[rows, length]``.
        advantages: One a row.
        clip: Range of the ratio around 1.
        kl_coefficient: Weight of the penalty.

    Returns:
        The loss, a scalar: the mean over tokens.
    """
    ratio = (log_probs - old_log_probs).exp()
    weights = advantages.unsqueeze(1)
    surrogate = torch.minimum(ratio * weights, ratio.clamp(1 - clip, 1 + clip) * weights)
    return (kl_coefficient * kl_estimate(log_probs, reference_log_probs) - surrogate).mean()


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Each token's k3 estimate of the KL divergence to the reference policy (Schulman, "Approximating KL Divergence").

    Args:
        log_probs: Under the policy, ``[rows, length]``.
        reference_log_probs: Under the reference policy, ``[rows, length]``.

    Returns:
        Nats, ``[rows, length]``; never negative, and zero where the two policies agree.
    """
    towards_reference = reference_log_probs - log_probs
    return towards_reference.exp() - towards_reference - 1
