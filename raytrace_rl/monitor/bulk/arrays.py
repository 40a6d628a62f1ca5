"""Names of array types, and arithmetic over groups: sums, medians and running maxima, all of them exact."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_M_MMAP_THRESHOLD: Final = -3

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
Ranks = npt.NDArray[np.int8]
Reals = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def give_back() -> None:
    """Returns freed memory to the system, where the C library keeps it: of thousands of arrays it keeps a lot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_at_once() -> None:
    """Has the C library return large arrays to the system when they are freed: of those up to 32 MiB it keeps many."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def total(values: Ints) -> int:
    """Returns the sum of integers that are not negative, whatever its size."""
    if not len(values):
        return 0
    if int(values.max()) < (1 << 62) // len(values):
        return int(values.sum())
    return (int((values >> 31).sum()) << 31) + int((values & ((1 << 31) - 1)).sum())


def sums(groups: npt.NDArray[Any], values: Ints, count: int) -> Ints:
    """Returns the sum of the values of each group 0 to ``count`` - 1."""
    found = np.zeros(count, np.int64)
    np.add.at(found, groups, values)
    return found


def runs(sorted_keys: npt.NDArray[Any]) -> Ints:
    """Returns where each run of equal keys begins, and at last the length."""
    if not len(sorted_keys):
        return np.zeros(1, np.int64)
    edges = np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1
    return np.concatenate(([0], edges, [len(sorted_keys)])).astype(np.int64)


def lengths_to_groups(bounds: Ints) -> Ints:
    """Returns the number of its group for each element; ``bounds`` as `runs` returns it."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def running_max(values: Ints, groups: Ints) -> Ints:
    """Returns the maximum so far within each group; ``groups`` ascends."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    if (high - low + 1) * (int(groups[-1]) + 1) < 1 << 62:
        lifted = groups * (high - low + 1) + (values - low)
        np.maximum.accumulate(lifted, out=lifted)
        return lifted - groups * (high - low + 1) + low
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values))
    best = np.maximum.accumulate(groups * len(values) + rank) - groups * len(values)
    found: Ints = values[order[best]]
    return found


def medians(bounds: Ints, ordered: Reals) -> Reals:
    """Returns the median of each group of values that are in order within it; no group is empty."""
    size = np.diff(bounds)
    low = ordered[bounds[:-1] + (size - 1) // 2]
    high = ordered[bounds[:-1] + size // 2]
    found: Reals = np.where(size % 2 == 1, low, (low + high) / 2)
    return found


def in_order(bounds: Ints, values: npt.NDArray[Any]) -> Ints:
    """Returns the order that sorts the values of each group."""
    order: Ints = np.lexsort((values, lengths_to_groups(bounds)))
    return order


def medians_of_others(bounds: Ints, values: Reals) -> Reals:
    """Returns for each value the median of the other values of its group; NaN where it is alone."""
    order = in_order(bounds, values)
    ordered = values[order]
    groups = lengths_to_groups(bounds)
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    first = bounds[:-1][groups]
    others = np.diff(bounds)[groups] - 1

    def other(number: Ints) -> Reals:
        at = first + np.clip(number, 0, None)
        picked: Reals = ordered[np.minimum(at + (at >= place), len(ordered) - 1)]
        return picked

    low, high = other((others - 1) // 2), other(others // 2)
    found = np.where(others % 2 == 1, low, (low + high) / 2)
    return np.where(others > 0, found, np.nan)


def sums_between(bounds: Ints, values: Ints) -> Ints:
    """Returns the sum of the values of each group."""
    before = np.concatenate(([0], np.cumsum(values)))
    summed: Ints = before[bounds[1:]] - before[bounds[:-1]]
    return summed


def nearest(up: npt.NDArray[Any], stop: Mask) -> Any:
    """Returns for each element the nearest one above it that is a stop; -1 where there is none.

    Parents that run in a circle without a stop lead to none.

    Args:
        up: The place of each one's parent, -1 without one.
        stop: Where to stop.
    """
    size = len(up)
    up = np.where(up >= 0, up, up.dtype.type(size))
    # Each leads to itself where it is a stop, else to its parent; then to where that one leads.
    jump = np.append(np.where(stop, np.arange(size, dtype=up.dtype), up), up.dtype.type(size))
    stop = np.append(stop, True)
    for _ in range(size.bit_length() + 1):
        if stop[jump].all():
            break
        jump = jump[jump]
    else:
        jump[~stop[jump]] = size
    found = jump[up]
    found[found == size] = -1
    return found
