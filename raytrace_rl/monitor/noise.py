"""Whether two samples of durations differ by more than their noise: medians, with the median absolute deviation."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log
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


#: Parts (one of so many) of the ranks among which a rank may come out slowest, step after step.
PARTS: Final = (2, 3, 4, 8, 16, 64)


def by_chance(often: Sequence[int], times: int, ranks: int) -> float:
    """Returns at most how likely it is that any of so many equal ranks comes out slowest so often.

    Whatever the noise is: where no rank is slower than another, each is as likely as any to be among the slowest half
    of a step, the slowest quarter, and so on. The bound is Chernoff's, times the ranks and parts that were looked at.

    Args:
        often: For each of `PARTS`, how often a rank was among the slowest of that part; of the first ones alone where
            no more is known.
        times: Steps.
        ranks: Ranks that are compared.
    """
    looked_at = [(part, count) for part, count in zip(PARTS, often, strict=False) if part <= ranks]
    if not looked_at or not times:
        return 1.0
    least = min(_tail(1 / part, count, times) for part, count in looked_at)
    return min(1.0, ranks * len(looked_at) * least)


def _tail(part: float, count: int, times: int) -> float:
    share = count / times
    if share <= part:
        return 1.0
    rest = (1 - share) * log((1 - share) / (1 - part)) if share < 1 else 0.0
    return exp(-times * (share * log(share / part) + rest))
