"""Interleaved measurement: rounds of every contender in turn, medians and ratios.

A shared machine slows down and speeds up within seconds; what is measured side by side within one round is comparable,
what is measured minutes apart is not.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from time import process_time
from typing import Final

from benchmarks.table import Row

ROUNDS: Final = 15


def measure(
    contenders: Mapping[str, Callable[[int], object]],
    turns: int,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = process_time,
) -> dict[str, list[float]]:
    """Runs every contender ``rounds`` times, in turn.

    Args:
        contenders: Name to a function that performs the given number of turns.
        turns: Turns in a round.
        rounds: Rounds.
        clock: CPU time of this process unless told; wall-clock time where other processes do the work.

    Returns:
        Name to seconds a turn, one value a round.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(max(1, turns // 10))
    for _ in range(rounds):
        for name, run in contenders.items():
            gc.collect()
            begun = clock()
            run(turns)
            found[name].append((clock() - begun) / turns)
    return found


def ratio(what: str, mine: list[float], theirs: list[float], *, bar: float, aim: float) -> Row:
    """Returns the row of a contender over its baseline: the median of the rounds' own ratios."""
    each = [a / b for a, b in zip(mine, theirs, strict=True)]
    return _row(what, each, mine, theirs, bar, aim, "")


def difference_us(what: str, mine: list[float], theirs: list[float], *, bar: float, aim: float) -> Row:
    """Returns the row of a contender less its baseline, in microseconds a turn."""
    each = [(a - b) * 1e6 for a, b in zip(mine, theirs, strict=True)]
    return _row(what, each, mine, theirs, bar, aim, "µs")


def _row(
    what: str, each: list[float], mine: list[float], theirs: list[float], bar: float, aim: float, unit: str
) -> Row:
    first, median, third = statistics.quantiles(each, n=4)
    return Row(what, median, third - first, bar, aim, duration(mine), duration(theirs), unit)


def duration(samples: list[float]) -> str:
    """Returns the median of ``samples`` (seconds), as printed."""
    seconds = statistics.median(samples)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
