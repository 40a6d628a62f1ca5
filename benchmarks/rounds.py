"""Interleaved measurement: rounds of every contender in turn, CPU time, medians and ratios.

A shared machine slows down and speeds up within seconds; what is measured side by side within one round is comparable,
what is measured minutes apart is not.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import process_time
from typing import Final

ROUNDS: Final = 15


@dataclass(frozen=True)
class Figure:
    """One contender's cost.

    Attributes:
        median_us: Median over the rounds, microseconds of CPU time a turn.
        best_us: The fastest round.
        spread: Interquartile range of the rounds over their median.
    """

    median_us: float
    best_us: float
    spread: float


@dataclass(frozen=True)
class Ratio:
    """A contender over its baseline.

    Attributes:
        median: Median of the rounds' own ratios.
        spread: Interquartile range of the rounds' ratios.
    """

    median: float
    spread: float


def measure(
    contenders: Mapping[str, Callable[[int], object]], turns: int, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Runs every contender ``rounds`` times, in turn.

    Args:
        contenders: Name to a function that performs the given number of turns.
        turns: Turns in a round.
        rounds: Rounds.

    Returns:
        Name to seconds of CPU time a turn, one value a round.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(max(1, turns // 10))
    for _ in range(rounds):
        for name, run in contenders.items():
            gc.collect()
            begun = process_time()
            run(turns)
            found[name].append((process_time() - begun) / turns)
    return found


def figure(samples: list[float]) -> Figure:
    """Summarises the rounds of one contender."""
    first, median, third = statistics.quantiles(samples, n=4)
    return Figure(median * 1e6, min(samples) * 1e6, (third - first) / median)


def ratio(samples: list[float], baseline: list[float]) -> Ratio:
    """Summarises a contender against its baseline, round by round."""
    each = [mine / theirs for mine, theirs in zip(samples, baseline, strict=True)]
    first, median, third = statistics.quantiles(each, n=4)
    return Ratio(median, third - first)
