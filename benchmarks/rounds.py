"""Interleaved measurement: rounds of every contender in turn, medians, ratios, and how sure these are.

A shared machine slows down and speeds up within seconds; what is measured side by side within one round is comparable,
what is measured minutes apart is not. Two processes that do the same differ as well, for as long as they live: where
that matters, a figure is made of several groups of rounds, each by processes of its own.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import process_time
from typing import Final

from benchmarks.table import Row

ROUNDS: Final = 15
#: Samples drawn for a standard error.
_DRAWS: Final = 500


def measure(
    contenders: Mapping[str, Callable[[int], object]],
    turns: int,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = process_time,
    *,
    collect: bool = True,
) -> dict[str, list[float]]:
    """Runs every contender ``rounds`` times, in turn, each second round the other way round.

    Args:
        contenders: Name to a function that performs the given number of turns.
        turns: Turns in a round.
        rounds: Rounds.
        clock: CPU time of this process unless told; wall-clock time where other processes do the work.
        collect: Collect garbage before each; short rounds are better left to the collector's own pace.

    Returns:
        Name to seconds a turn, one value a round.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(max(1, turns // 10))
    order = list(contenders.items())
    for _ in range(rounds):
        for name, run in order:
            if collect:
                gc.collect()
            begun = clock()
            run(turns)
            found[name].append((clock() - begun) / turns)
        order.reverse()
    return found


def ratio(what: str, mine: Sequence[float], theirs: Sequence[float], *, bar: float, aim: float) -> Row:
    """Returns the row of a contender over its baseline: the median of the rounds' own ratios."""
    return ratio_of_groups(what, [mine], [theirs], bar=bar, aim=aim)


def ratio_of_groups(
    what: str, mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, bar: float, aim: float
) -> Row:
    """Returns the row of a contender over its baseline, measured by several groups of processes.

    Args:
        what: What is compared.
        mine: For each group its rounds, seconds a turn.
        theirs: The baseline's, round by round beside them.
        bar: The most that the figure may be.
        aim: What we should like.
    """
    each = [[a / b for a, b in zip(ours, others, strict=True)] for ours, others in zip(mine, theirs, strict=True)]
    return _row(what, each, mine, theirs, bar, aim, "")


def difference_us(what: str, mine: Sequence[float], theirs: Sequence[float], *, bar: float, aim: float) -> Row:
    """Returns the row of a contender less its baseline, in microseconds a turn."""
    each = [(a - b) * 1e6 for a, b in zip(mine, theirs, strict=True)]
    return _row(what, [each], [mine], [theirs], bar, aim, "µs")


def standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Returns the bootstrap's standard error of the median of all values: groups are drawn, then values within each.

    Drawn with a seed of its own, so that equal values give an equal answer.
    """
    draw = random.Random(0)
    medians = []
    for _ in range(_DRAWS):
        drawn = draw.choices(groups, k=len(groups))
        medians.append(statistics.median([value for group in drawn for value in draw.choices(group, k=len(group))]))
    return statistics.pstdev(medians)


def _row(
    what: str,
    each: Sequence[Sequence[float]],
    mine: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    bar: float,
    aim: float,
    unit: str,
) -> Row:
    first, median, third = statistics.quantiles(_flat(each), n=4)
    return Row(
        what,
        median,
        third - first,
        bar,
        aim,
        duration(_flat(mine)),
        duration(_flat(theirs)),
        unit,
        error=standard_error(each),
    )


def _flat(groups: Sequence[Sequence[float]]) -> list[float]:
    return [value for group in groups for value in group]


def duration(samples: Sequence[float]) -> str:
    """Returns the median of ``samples`` (seconds), as printed."""
    seconds = statistics.median(samples)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
