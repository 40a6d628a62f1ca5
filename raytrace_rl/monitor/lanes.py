"""Who owns each instant of a lane: from spans that nest and overlap to a timeline on which no instant counts twice.

Within one thread or task the deepest open bucketed span owns the time: a bucketed span steps back while a bucketed
descendant in the same thread is open, however many spans without a bucket lie between them. Across the threads and
tasks of a lane the first of productive > overhead > wasted > idle owns it. All of it is one sweep, O(n log n).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Final

from raytrace_rl.monitor.model import BUCKETS, SpanRow

#: Start and end, ns since the epoch.
Interval = tuple[int, int]
#: Start, end (ns since the epoch), bucket.
Owned = tuple[int, int, str]

_RANK: Final = {bucket: rank for rank, bucket in enumerate(BUCKETS)}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same set of instants as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> int:
    """Returns the summed length of disjoint intervals, ns."""
    return sum(end - start for start, end in intervals)


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Returns the instants that are in both of two lists of disjoint intervals in order."""
    if len(right) == 1:  # of many steps one process's life
        return _within(left, *right[0])
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def _within(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    first = bisect_right(intervals, begin, key=itemgetter(1))
    last = bisect_left(intervals, end, key=itemgetter(0))
    common = [one for one in intervals[first:last] if one[0] < one[1]]
    if common:
        common[0] = max(common[0][0], begin), common[0][1]
        common[-1] = common[-1][0], min(common[-1][1], end)
    return common


def complement(intervals: Sequence[Interval], within: Sequence[Interval]) -> list[Interval]:
    """Returns the instants of ``within`` that are in none of ``intervals``; both disjoint and in order."""
    left: list[Interval] = []
    i = 0
    for start, end in within:
        at = start
        while i < len(intervals) and intervals[i][1] <= at:
            i += 1
        j = i
        while j < len(intervals) and intervals[j][0] < end:
            if intervals[j][0] > at:
                left.append((at, intervals[j][0]))
            at = max(at, intervals[j][1])
            j += 1
        if at < end:
            left.append((at, end))
    return left


def times(timeline: Iterable[Owned], windows: Sequence[Interval]) -> dict[str, int]:
    """Returns ns by bucket of a timeline within ``windows`` (disjoint, in order); every bucket is there."""
    by_bucket: dict[str, list[Interval]] = {bucket: [] for bucket in BUCKETS}
    for start, end, bucket in timeline:
        by_bucket[bucket].append((start, end))
    return {bucket: total(intersection(owned, windows)) for bucket, owned in by_bucket.items()}


def bucket_of(row: SpanRow) -> str | None:
    """Returns the span's own bucket."""
    return row.bucket


def timeline(rows: Sequence[SpanRow], bucket: Callable[[SpanRow], str | None] = bucket_of) -> list[Owned]:
    """Returns which bucket owns which time of one lane, disjoint and in order; gaps belong to none.

    Args:
        rows: All spans of the lane, also those without a bucket, through which the nesting goes.
        bucket: Gives a span's bucket, None for a span that has none.
    """
    nodes: list[int] = []
    ranks = [-1] * len(rows)
    events: list[tuple[int, int, int, int]] = []
    for i, row in enumerate(rows):
        name = bucket(row)
        if name is not None and (end := row.until_ns) > row.start_ns:
            ranks[i] = _RANK[name]
            nodes.append(i)
            events.append((end, 0, 0, i))
    if not nodes:
        return []
    links = _links(rows, ranks)
    depths = _depths(nodes, links)
    events += [(rows[i].start_ns, 1, depths[i], i) for i in nodes]
    events.sort()
    return _sweep(events, ranks, links)


def _links(rows: Sequence[SpanRow], ranks: list[int]) -> list[int]:
    """For each bucketed span the nearest bucketed ancestor, if that is of the same thread, else -1.

    A parent that starts after its child does not enclose it. (So a link never leads to a span that opens later.)
    """
    index = {row.trace_id + row.span_id: i for i, row in enumerate(rows)}
    unknown, visiting = -2, -3
    nearest = [unknown] * len(rows)
    links = [-1] * len(rows)

    def parent(i: int) -> int:
        row = rows[i]
        found = index.get(row.trace_id + row.parent_span_id, -1) if row.parent_span_id else -1
        return found if found != i and found >= 0 and rows[found].start_ns <= row.start_ns else -1

    for i, rank in enumerate(ranks):
        if rank < 0:
            continue
        path: list[int] = []
        at = parent(i)
        while at >= 0 and ranks[at] < 0 and nearest[at] == unknown:
            nearest[at] = visiting
            path.append(at)
            at = parent(at)
        if at >= 0 and ranks[at] < 0:
            at = max(nearest[at], -1)  # visiting: the parents run in a circle
        for step in path:
            nearest[step] = at
        if at >= 0 and rows[at].thread_id == rows[i].thread_id:
            links[i] = at
    return links


def _depths(nodes: list[int], links: list[int]) -> dict[int, int]:
    """Links above each node; a circle of links is cut where it closes."""
    depths: dict[int, int] = {}
    for node in nodes:
        path: list[int] = []
        on_path: set[int] = set()
        at = node
        while at >= 0 and at not in depths:
            if at in on_path:
                links[path[-1]] = -1
                break
            path.append(at)
            on_path.add(at)
            at = links[at]
        depth = depths.get(links[path[-1]], -1) if path else 0
        for step in reversed(path):
            depth += 1
            depths[step] = depth
    return depths


def _sweep(events: list[tuple[int, int, int, int]], ranks: list[int], links: list[int]) -> list[Owned]:
    size = len(ranks)
    is_open = bytearray(size)
    #: Ended, and without an open descendant: never to own time again. Links lead past such spans.
    over = bytearray(size)
    children = [0] * size
    owners = [0] * len(BUCKETS)
    owned: list[Owned] = []
    before = 0

    def living(i: int) -> int:
        at = links[i]
        while at >= 0 and over[at]:
            at = links[at]
        while (step := links[i]) >= 0 and step != at:
            links[i], i = at, step
        return at

    for now, opens, _, i in events:
        if now > before:
            for rank, count in enumerate(owners):
                if count:
                    name = BUCKETS[rank]
                    if owned and owned[-1][1] == before and owned[-1][2] == name:
                        owned[-1] = owned[-1][0], now, name
                    else:
                        owned.append((before, now, name))
                    break
            before = now
        if opens:
            is_open[i] = 1
            owners[ranks[i]] += 1
            above = living(i)
            if above >= 0:
                if not children[above] and is_open[above]:
                    owners[ranks[above]] -= 1
                children[above] += 1
            continue
        is_open[i] = 0
        if children[i]:
            continue
        owners[ranks[i]] -= 1
        over[i] = 1
        above = living(i)
        while above >= 0:
            children[above] -= 1
            if children[above]:
                break
            if is_open[above]:
                owners[ranks[above]] += 1
                break
            over[above] = 1
            above = living(above)
    return owned


def merge(timelines: Sequence[Sequence[Owned]]) -> list[Owned]:
    """Returns one timeline of several lanes that share a unit: at each instant the first bucket in the order wins."""
    if len(timelines) == 1:
        return list(timelines[0])
    events: list[tuple[int, int, int, int]] = []
    ranks: list[int] = []
    for lane in timelines:
        for start, end, name in lane:
            events.append((start, 1, 0, len(ranks)))
            events.append((end, 0, 0, len(ranks)))
            ranks.append(_RANK[name])
    events.sort()
    return _sweep(events, ranks, [-1] * len(ranks))
