"""Goodput over columns: what `raytrace_rl.monitor.goodput` asks of a lane."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from raytrace_rl.monitor import families, goodput, goodput_lanes
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, sums
from raytrace_rl.monitor.bulk.coder import Coder
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.intervals import Timeline, measure, merged, spans_of, timeline, union
from raytrace_rl.monitor.bulk.rows import ColumnRow
from raytrace_rl.monitor.model import BUCKETS
from raytrace_rl.monitor.windows import Windows
from raytrace_rl.semconv import ROLE_DRIVER

if TYPE_CHECKING:
    from raytrace_rl.monitor.goodput import Goodput
    from raytrace_rl.monitor.lanes import Interval
    from raytrace_rl.monitor.model import Process

_STEP: Final = "step"
_NONE: Final = -1
#: NumPy lets go of the GIL while it sorts.
_THREADS: Final = 2
_MAY_BE_WASTED: Final = (BUCKETS.index("productive"), BUCKETS.index("overhead"))


class Timelines:
    """Who owns the time of each lane, by the spans' own buckets, and by what they count as.

    Args:
        columns: The run.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._ranks = columns.ranks()
        self._thread = columns.thread_ids()
        self._last_attempt = _last_attempts(columns)
        every = range(len(columns.processes))
        with ThreadPoolExecutor(_THREADS) as pool:
            self.own = list(pool.map(self._own, every))
        self._counted: dict[int, Timeline] = {}

    def _own(self, lane: int) -> Timeline:
        return self._timeline(lane, self._ranks[self._columns.shape[self._columns.rows_of(lane)]])

    def _timeline(self, lane: int, ranks: Codes) -> Timeline:
        columns, rows = self._columns, self._columns.rows_of(lane)
        first, size = rows.start, rows.stop - rows.start
        parent = columns.parent[rows].astype(np.int64) - first
        parent[(parent < 0) | (parent >= size)] = _NONE
        return timeline(ranks, columns.start[rows], columns.until[rows], parent, self._thread[columns.thread[rows]])

    def ranks(self, lane: int) -> Codes:
        """Returns what each span of a lane counts as: what a later attempt did again is wasted, whatever it was."""
        columns, rows = self._columns, self._columns.rows_of(lane)
        ranks = self._ranks[columns.shape[rows]]
        if self._last_attempt is not None:
            again = self._last_attempt[columns.iteration[rows]] > columns.processes[lane].attempt
            ranks[again & np.isin(ranks, _MAY_BE_WASTED)] = BUCKETS.index("wasted")
        return ranks

    def counted(self, lane: int) -> Timeline:
        """Returns who owns the time of a lane by that."""
        if self._last_attempt is None:
            return self.own[lane]
        found = self._counted.get(lane)
        if found is None:
            found = self._counted[lane] = self._timeline(lane, self.ranks(lane))
        return found


def _last_attempts(columns: Columns) -> Ints | None:
    """The last attempt that did each iteration's step; None where there was but one attempt."""
    attempts = np.array([process.attempt for process in columns.processes], np.int64)
    if len(set(attempts.tolist())) < 2:
        return None
    last = np.zeros(len(columns.iterations) + 1, np.int64)  # the last place is that of no iteration
    of_step = np.array([shape.span_group == _STEP for shape in columns.shapes], np.bool_)
    rows = np.flatnonzero(of_step[columns.shape] & (columns.iteration >= 0))
    np.maximum.at(last, columns.iteration[rows], attempts[columns.lane[rows]])
    return last


class _ColumnTime(goodput_lanes.Time):
    def __init__(self, owned: Timeline) -> None:
        self.owned = owned

    def times(self, windows: Sequence[Interval]) -> dict[str, int]:
        within = spans_of(windows)
        of = [self.owned.of(rank) for rank in range(len(BUCKETS))]
        return {bucket: measure(within, *mine) for bucket, mine in zip(BUCKETS, of, strict=True)}

    def covered(self, windows: Sequence[Interval]) -> int:
        return measure(spans_of(windows), self.owned.start, self.owned.end)


class _ColumnLane(goodput_lanes.Lane):
    def __init__(self, columns: Columns, lane: int, timelines: Timelines) -> None:
        super().__init__(columns.processes[lane])
        self.columns = columns
        self.number = lane
        self.rows = columns.rows_of(lane)
        self.timelines = timelines

    @property
    def first_ns(self) -> int | None:
        return int(self.columns.start[self.rows.start]) if self.rows.stop > self.rows.start else None

    @property
    def truncated(self) -> int:
        return int(self.columns.by_shape("truncated")[self.columns.shape[self.rows]].sum())

    def of_group(self, group: str | None) -> list[Interval]:
        start, until = self.columns.start[self.rows], self.columns.until[self.rows]
        if group is None:
            return [(int(start.min()), int(until.max()))] if len(start) else []
        chosen = np.array([shape.span_group == group for shape in self.columns.shapes], np.bool_)
        mine = chosen[self.columns.shape[self.rows]]
        return list(zip(start[mine].tolist(), until[mine].tolist(), strict=True))

    def tagged(self) -> tuple[dict[str, int], int]:
        ranks = self.timelines.ranks(self.number)
        start, until = self.columns.start[self.rows], self.columns.until[self.rows]
        mine = ranks >= 0
        ranks, start, until = ranks[mine], start[mine], until[mine]
        by_rank = sums(ranks, until - start, len(BUCKETS)).tolist()
        return dict(zip(BUCKETS, by_rank, strict=True)), sum(by_rank) - union(start, until).total

    def covered(self, windows: Sequence[Interval]) -> int:
        return measure(spans_of(windows), *union(self.columns.start[self.rows], self.columns.until[self.rows]))

    def time(self, others: Sequence[goodput_lanes.Lane] = ()) -> _ColumnTime:
        lanes = [self, *(lane for lane in others if isinstance(lane, _ColumnLane))]
        return _ColumnTime(merged([self.timelines.counted(lane.number) for lane in lanes]))


def of_columns(columns: Columns, timelines: Timelines) -> Goodput:
    """Computes the three views of a run."""
    place = {process.key: lane for lane, process in enumerate(columns.processes)}
    every: list[goodput_lanes.Lane] = []
    for process in columns.run.processes:
        lane = place.get(process.key)
        if lane is None:  # only known by what was lost of it
            every += [_NoLane(process)] if process.start_ns else []
        elif columns.bounds[lane] < columns.bounds[lane + 1] or process.start_ns:
            every.append(_ColumnLane(columns, lane, timelines))
    return goodput.views(every, partial(heads, columns), columns.run.windows or Windows())


class _NoLane(goodput_lanes.Lane):
    """A process without a file of its own."""

    first_ns = None
    truncated = 0

    def of_group(self, group: str | None) -> list[Interval]:
        del group
        return []

    def tagged(self) -> tuple[dict[str, int], int]:
        return dict.fromkeys(BUCKETS, 0), 0

    def covered(self, windows: Sequence[Interval]) -> int:
        del windows
        return 0

    def time(self, others: Sequence[goodput_lanes.Lane] = ()) -> goodput_lanes.Time:
        if others:
            return others[0].time([lane for lane in others[1:] if not isinstance(lane, _NoLane)])
        empty = np.zeros(0, np.int64)
        return _ColumnTime(Timeline(empty, empty, empty.astype(np.int8)))


def heads(columns: Columns, processes: Sequence[Process]) -> dict[str, Process]:
    """As `families.heads`: of the spans it is given those that it goes by, the first that hangs from an actor's."""
    found: list[tuple[int, int, int]] = []
    actor = np.array([process.actor_id is not None for process in columns.processes], np.bool_)
    coder = Coder()
    node_ids = np.array([coder.code(process.node_id) for process in columns.processes])
    nodes = np.array([coder.code(process.node) for process in columns.processes])
    for lane, process in enumerate(columns.processes):
        if process.role == ROLE_DRIVER or process.actor_id is not None:
            continue
        rows = np.arange(columns.bounds[lane], columns.bounds[lane + 1])
        parents = columns.parent[rows]
        near = actor & ((node_ids == node_ids[lane]) | (nodes == nodes[lane]))
        good = (parents >= 0) & near[columns.lane[parents]]
        rows, parents = rows[good], parents[good]
        if len(rows):
            first = np.lexsort((parents, columns.start[parents]))[0]
            found.append((int(columns.start[parents[first]]), int(parents[first]), int(rows[first])))
    spans = [ColumnRow(columns, at) for _, parent, row in sorted(found) for at in (parent, row)]
    return families.heads(processes, spans)  # type: ignore[arg-type]
