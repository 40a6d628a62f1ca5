"""Whether two samples of durations differ by more than their noise: medians, with the median absolute deviation."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from statistics import median
from typing import Final

#: The MAD of normal noise is this much smaller than its standard deviation, and that of its median so much larger than
#: that of its mean.
SIGMA: Final = 1.4826
MEDIAN: Final = 1.2533
#: Of few values the MAD itself is uncertain: the noise counts as larger by this over their number.
FEW: Final = 4
#: How far a difference must stand out of its noise, over what the largest of many does by chance.
SCORE: Final = 2.0


def of_median(values: Sequence[float], middle: float) -> float:
    """Returns the noise (standard deviation) of ``middle``, the median of ``values``."""
    return of_deviation(median(abs(value - middle) for value in values), len(values))


def of_deviation(deviation: float, count: int) -> float:
    """Returns the same of the median absolute deviation of so many values."""
    few = 1 + FEW / count
    return few * MEDIAN * SIGMA * deviation / float(count**0.5)


def score(difference: float, noise: float) -> float:
    """Returns a difference in units of its noise, infinite where there is none."""
    if noise > 0:
        return difference / noise
    return 0.0 if not difference else inf if difference > 0 else -inf


def threshold(comparisons: int) -> float:
    """Returns the score from which on one of so many comparisons stands out."""
    return SCORE + MEDIAN * float((2 * log(max(1, comparisons))) ** 0.5)
