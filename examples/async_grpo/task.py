"""The task: write the digits of the prompt in ascending order. Its reward is a check, not a model.

A prompt is ``num_digits`` digits, the response as many tokens. The reward is the share of places that hold the right
digit, so it is dense enough to learn from scratch and 1.0 exactly where the answer is right.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

#: The digits are 0 to 9; one more token separates prompt and response.
NUM_DIGITS: Final = 10
SEPARATOR: Final = NUM_DIGITS
VOCAB_SIZE: Final = NUM_DIGITS + 1

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def sample_prompts(rng: np.random.Generator, count: int, length: int) -> IntArray:
    """Returns ``[count, length]`` random digits."""
    return rng.integers(0, NUM_DIGITS, size=(count, length), dtype=np.int64)


def score(prompts: IntArray, responses: IntArray) -> FloatArray:
    """Rewards each response by the share of places that hold the right digit.

    Args:
        prompts: ``[prompts, length]``.
        responses: ``[prompts, generations, length]``.

    Returns:
        Rewards in [0, 1], ``[prompts, generations]``.
    """
    answers = np.sort(prompts, axis=1)[:, None, :]
    rewards: FloatArray = (responses == answers).mean(axis=2, dtype=np.float32)
    return rewards
