"""Sets of instants as two arrays, starts and ends, disjoint and in order; and who owns each instant of a lane.

What `raytrace_rl.monitor.lanes` does event by event is done here for all events at once. It rests on this: a bucketed
span owns an instant of its thread if it is open and no bucketed descendant of it (by the links of `lanes`) is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Mask, Ranks, nearest, running_max
from raytrace_rl.monitor.lanes import Interval
from raytrace_rl.monitor.model import BUCKETS

_NONE: Final = -1
_FREE: Final = len(BUCKETS)


class Spans(NamedTuple):
    """Disjoint intervals in order."""

    start: Ints
    end: Ints

    @property
    def total(self) -> int:
        """Their summed length."""
        return int((self.end - self.start).sum())


class Timeline(NamedTuple):
    """Which bucket (its place in `BUCKETS`) owns which time of a lane; disjoint and in order."""

    start: Ints
    end: Ints
    rank: Ranks

    def of(self, rank: int) -> Spans:
        """The time of one bucket."""
        mine = self.rank == rank
        return Spans(self.start[mine], self.end[mine])


def spans_of(intervals: Sequence[Interval]) -> Spans:
    """Returns disjoint intervals in order as arrays."""
    pairs = np.array(intervals, np.int64).reshape(-1, 2)
    return Spans(pairs[:, 0].copy(), pairs[:, 1].copy())


def union(start: Ints, end: Ints) -> Spans:
    """Returns the same instants as disjoint intervals; ``start`` ascends."""
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return Spans(start, end)
    so_far = np.maximum.accumulate(end)
    edges = np.flatnonzero(start[1:] > so_far[:-1])
    return Spans(start[np.concatenate(([0], edges + 1))], so_far[np.concatenate((edges, [len(start) - 1]))])


def measure(within: Spans, start: Ints, end: Ints) -> int:
    """Returns the summed length of what intervals (in any order, disjoint or not) have in ``within``."""
    return int(measures(within, start, end).sum())


def measures(within: Spans, start: Ints, end: Ints) -> Ints:
    """Returns the length of what each interval has in ``within``."""
    if not len(within.start):
        return np.zeros(len(start), np.int64)
    before = np.concatenate(([0], np.cumsum(within.end - within.start)))

    def up_to(times: Ints) -> Ints:
        at = np.searchsorted(within.start, times, side="right") - 1
        inside = np.minimum(times, within.end[at]) - within.start[at]
        return np.where(at >= 0, before[at] + inside, 0)

    return np.where(end > start, up_to(end) - up_to(start), 0)


def complement(of: Spans, within: Spans) -> Spans:
    """Returns the instants of ``within`` that are not in ``of``."""
    edges = np.concatenate((within.start, within.end, of.start, of.end))
    change = np.concatenate(
        [
            np.full(len(one), sign, np.int32)
            for one, sign in ((within.start, 1), (within.end, -1), (of.start, -2), (of.end, 2))
        ]
    )
    return _where(edges, change, 1)


def intersection(left: Spans, right: Spans) -> Spans:
    """Returns the instants that are in both."""
    edges = np.concatenate((left.start, left.end, right.start, right.end))
    change = np.concatenate(
        [
            np.full(len(one), sign, np.int32)
            for one, sign in ((left.start, 1), (left.end, -1), (right.start, 1), (right.end, -1))
        ]
    )
    return _where(edges, change, 2)


def _where(edges: Ints, change: Codes, level: int) -> Spans:
    """Where the sum of changes so far is ``level``."""
    if not len(edges):
        return Spans(edges, edges)
    order = np.argsort(edges)
    edges = edges[order]
    last = np.flatnonzero(np.concatenate((edges[1:] != edges[:-1], [True])))
    edges, there = edges[last], np.cumsum(change[order])[last] == level
    return union(edges[:-1][there[:-1]], edges[1:][there[:-1]])


# -- who owns what


def timeline(rank: Codes, start: Ints, until: Ints, parent: Ints, thread: Codes) -> Timeline:
    """Returns who owns the time of one lane, as `lanes.timeline` does.

    Args:
        rank: Of each of its spans the place of its bucket in `BUCKETS`, -1 for none.
        start, until: ns; ``start`` ascends.
        parent: Its parent's place in the lane, -1 if that is elsewhere.
        thread: A number for its thread.
    """
    node = (rank >= 0) & (until > start)
    nodes = np.flatnonzero(node)
    if not len(nodes):
        return Timeline(start[:0], start[:0], rank[:0].astype(np.int8))
    pairs = _blocked(nodes, _links(node, start, parent, thread), start, until)
    at = np.concatenate((start[nodes], until[nodes], pairs.start, pairs.end))
    ranks = np.concatenate((rank[nodes], rank[nodes], rank[pairs.of], rank[pairs.of]))
    change = np.ones(len(at), np.int8)
    change[len(nodes) : 2 * len(nodes) + len(pairs.of)] = -1
    return sweep(at, ranks, change)


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Returns one timeline of lanes that share a unit, as `lanes.merge` does."""
    if len(timelines) == 1:
        return timelines[0]
    start, end, rank = (np.concatenate(arrays) for arrays in zip(*timelines, strict=True))
    change = np.ones(2 * len(start), np.int8)
    change[len(start) :] = -1
    return sweep(np.concatenate((start, end)), np.concatenate((rank, rank)), change)


def sweep(at: Ints, rank: Codes | Ranks, change: Ranks) -> Timeline:
    """Returns who owns the time when so many of each bucket come or go at given times."""
    if not len(at):
        return Timeline(at, at, rank.astype(np.int8))
    order = np.argsort(at)
    at, rank, change = at[order], rank[order].astype(np.int8), change[order]
    last = np.flatnonzero(np.concatenate((at[1:] != at[:-1], [True])))
    owner = np.full(len(last), _FREE, np.int8)
    for one in range(_FREE - 1, -1, -1):
        mine = rank == one
        if mine.any():
            owner[np.cumsum(np.where(mine, change, 0), dtype=np.int32)[last] > 0] = one
    at = at[last]
    begins = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
    begin, owner = at[begins], owner[begins]
    end = np.append(begin[1:], at[-1])
    owned = owner < _FREE
    return Timeline(begin[owned], end[owned], owner[owned].astype(np.int8))


def _links(node: Mask, start: Ints, parent: Ints, thread: Codes) -> Ints:
    """For each node the nearest node above it, if that is of the same thread, else -1."""
    up = np.where((parent >= 0) & (parent != np.arange(len(node))) & (start[parent] <= start), parent, _NONE)
    nodes = np.flatnonzero(node)
    above = nearest(up, node)[nodes]
    return np.where((above >= 0) & (thread[above] == thread[nodes]), above, _NONE)


class _Blocked(NamedTuple):
    of: Ints
    start: Ints
    end: Ints


def _blocked(nodes: Ints, links: Ints, start: Ints, until: Ints) -> _Blocked:
    """When each node has a descendant open: disjoint intervals of each, within its own."""
    place = np.full(len(start), _NONE, np.int64)
    place[nodes] = np.arange(len(nodes))
    above, who = links, nodes
    pairs: list[tuple[Ints, Ints]] = []
    while True:
        there = above >= 0
        above, who = above[there], who[there]
        if not len(who):
            break
        pairs.append((above, who))
        # What lies within the span above counts further up by way of that one.
        out = until[who] > until[above]
        above, who = links[place[above[out]]], who[out]
    if not pairs:
        empty = np.zeros(0, np.int64)
        return _Blocked(empty, empty, empty)
    of, who = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    order = np.lexsort((who, of)) if len(pairs) > 1 else np.argsort(of, kind="stable")
    of, who = of[order], who[order]
    begin, end = start[who], np.minimum(until[who], until[of])
    real = end > begin
    of, begin, end = of[real], begin[real], end[real]
    if not len(of):
        return _Blocked(of, begin, end)
    groups = np.concatenate(([0], np.cumsum(of[1:] != of[:-1])))
    so_far = running_max(end, groups)
    new = np.concatenate(([True], (groups[1:] != groups[:-1]) | (begin[1:] > so_far[:-1])))
    first = np.flatnonzero(new)
    return _Blocked(of[first], begin[first], so_far[np.append(first[1:] - 1, len(of) - 1)])
