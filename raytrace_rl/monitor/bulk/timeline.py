"""The timeline of a large run: what is long enough to be seen is laid out span by span, the rest summed up in bins.

Short spans are drawn where they would be seen if they were longer: one level below the span around them that is drawn,
else on the first row of their thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from raytrace_rl.monitor import tracks as of_rows
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, nearest
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.goodput import Timelines
from raytrace_rl.monitor.bulk.rows import ColumnRow
from raytrace_rl.monitor.model import BUCKETS
from raytrace_rl.monitor.timeline import BINS, BUDGET, CODES, Names, Slice, about, code_of, flat, groups

_US: Final = 1000
_NONE: Final = -1


class _Row:
    """One row of the page: a level of a track, its slices that are drawn by themselves, and the blocks of others."""

    def __init__(self) -> None:
        self.long: list[Slice] = []
        self.blocks: list[Slice] = []

    def slices(self) -> Iterator[Slice]:
        """Yields them in order, none of them into the next."""
        every = sorted([*self.long, *self.blocks])
        for one, after in zip(every, [*every[1:], None], strict=True):
            start, length, *rest = one
            yield (start, length if after is None else max(0, min(length, after[0] - start)), *rest)  # type: ignore[misc]


class _Drawing:
    """The run, as it is drawn at one resolution (us)."""

    def __init__(self, columns: Columns, budget: int) -> None:
        self.columns = columns
        self.begin = int(columns.start.min()) if len(columns) else 0
        self.end = int(columns.until.max()) if len(columns) else self.begin
        self.length = max(1, (self.end - self.begin) // _US)
        self.names = Names()
        self.thread = columns.thread_ids()
        self.codes = np.array([_code(columns, n) for n in range(len(columns.shapes))], np.int64)
        self.name_of_shape, self.every_name = columns.coded("name")
        self.resolution = self._resolution(budget)

    def _resolution(self, budget: int) -> int:
        if len(self.columns) <= budget:
            return 0
        threads = self.thread[self.columns.thread]
        resolution = max(1, self.length // (4 * budget))
        while resolution < self.length and self._count(threads, resolution) > budget:
            resolution *= 2
        return resolution

    def _count(self, threads: Codes, resolution: int) -> int:
        """How many slices there would be, roughly: of each thread the long ones, and the bins with short ones."""
        columns = self.columns
        count = 0
        for lane in range(len(columns.processes)):
            rows = columns.rows_of(lane)
            start = (columns.start[rows] - self.begin) // _US
            short = columns.until[rows] - columns.start[rows] < resolution * _US
            count += int((~short).sum())
            bins = start[short] // resolution
            for thread in np.unique(threads[rows][short]).tolist():
                mine = bins[threads[rows][short] == thread]
                count += 1 + int((mine[1:] != mine[:-1]).sum()) if len(mine) else 0
        return count

    def lane(self, number: int) -> list[dict[str, Any]]:
        """Returns the tracks of a lane."""
        columns, rows = self.columns, self.columns.rows_of(number)
        size = rows.stop - rows.start
        long = columns.until[rows] - columns.start[rows] >= self.resolution * _US
        #: Of each span that is drawn by itself its row on the page, one number for track and level.
        place = np.full(size, _NONE, np.int64)
        listed: list[tuple[str, list[_Row]]] = []
        first_of_thread: dict[int, int] = {}
        wanted = np.flatnonzero(long)
        for track in of_rows.tracks([ColumnRow(columns, rows.start + at) for at in wanted.tolist()]):  # type: ignore[misc]
            levels: list[_Row] = []
            for row, depth in zip(track.rows, of_rows.depths(track), strict=True):
                while len(levels) <= depth:
                    levels.append(_Row())
                begin = (row.start_ns - self.begin) // _US
                length = max(0, (row.until_ns - self.begin) // _US - begin)
                levels[depth].long.append((begin, length, self.names.of(row.name), code_of(row), 1))
                place[row.at - rows.start] = len(listed) << 16 | min(depth, 0xFFFF)  # type: ignore[attr-defined]
            first_of_thread.setdefault(track.thread_id, len(listed))
            listed.append((track.name, levels))
        self._short(number, ~long, place, listed, first_of_thread)
        return [{"name": name, "rows": [flat(level.slices()) for level in levels]} for name, levels in listed]

    def _short(
        self, number: int, short: Any, place: Ints, listed: list[tuple[str, list[_Row]]], firsts: dict[int, int]
    ) -> None:
        if not short.any():
            return
        columns, rows = self.columns, self.columns.rows_of(number)
        above = self._drawn_above(number, place)
        at = np.flatnonzero(short)
        where = np.where(above[at] >= 0, place[above[at]] + 1, _NONE)
        alone = where == _NONE
        of_row = columns.thread[rows][at[alone]]
        different, inverse = np.unique(of_row, return_inverse=True)
        first = np.zeros(len(different), np.int64)
        for number_of, code in enumerate(different.tolist()):
            name, thread_id = columns.threads.thread(code)
            thread = thread_id or 0
            if thread not in firsts:
                firsts[thread] = len(listed)
                listed.append((name or (f"thread {thread}" if thread else "spans"), []))
            first[number_of] = firsts[thread] << 16
        where[alone] = first[inverse]
        order = np.argsort(where, kind="stable")
        edges = np.flatnonzero(np.diff(where[order])) + 1
        for some in np.split(order, edges):
            track, level = divmod(int(where[some[0]]), 1 << 16)
            levels = listed[track][1]
            while len(levels) <= level:
                levels.append(_Row())
            self._blocks(levels[level], rows.start + at[some])

    def _drawn_above(self, number: int, place: Ints) -> Ints:
        """Of each span the nearest above it, in its lane and thread, that is drawn by itself; -1 without one."""
        columns, rows = self.columns, self.columns.rows_of(number)
        size = rows.stop - rows.start
        parent = columns.parent[rows].astype(np.int64) - rows.start
        thread = self.thread[columns.thread[rows]]
        real = (parent >= 0) & (parent < size)
        real &= thread[np.where(real, parent, 0)] == thread
        found: Ints = nearest(np.where(real, parent, _NONE), place >= 0)
        return found

    def _blocks(self, row: _Row, at: Ints) -> None:
        """Sums up the short spans of a row, which come in the order of their start, bin by bin."""
        columns = self.columns
        start = (columns.start[at] - self.begin) // _US
        end = (columns.until[at] - self.begin) // _US
        drawn = np.searchsorted(np.sort(np.array([one[0] for one in row.long], np.int64)), start, side="right")
        bins = start // max(1, self.resolution)
        new = np.concatenate(([True], (bins[1:] != bins[:-1]) | (drawn[1:] != drawn[:-1])))
        first = np.flatnonzero(new)
        block = np.cumsum(new) - 1
        shape = columns.shape[at]
        name = self._longest(
            block, self.name_of_shape[shape].astype(np.int64) * 8 + (self.codes[shape] & 7), end - start
        )
        flags = np.bitwise_or.reduceat(self.codes[shape] & (CODES["truncated"] | CODES["error"]), first)
        count = np.diff(np.append(first, len(at)))
        until = np.maximum.reduceat(end, first)
        columns_of_blocks = (start[first].tolist(), until.tolist(), name.tolist(), flags.tolist(), count.tolist())
        for begin, stop, told, flag, many in zip(*columns_of_blocks, strict=True):
            code = told & 7 | flag | (CODES["merged"] if many > 1 else 0)
            row.blocks.append((begin, stop - begin, self.names.of(self.every_name[told >> 3]), code, many))

    @staticmethod
    def _longest(block: Ints, told: Ints, length: Ints) -> Ints:
        """Of each block the name and bucket that take longest in it."""
        order = np.lexsort((told, block))
        changed = np.concatenate(([True], (np.diff(block[order]) != 0) | (np.diff(told[order]) != 0)))
        first = np.flatnonzero(changed)
        weight = np.add.reduceat(length[order] + 1, first)
        of, what = block[order][first], told[order][first]
        best = np.lexsort((-np.arange(len(of)), weight, of))
        found: Ints = what[best[np.flatnonzero(np.append(np.diff(of[best]) != 0, True))]]
        return found


def _code(columns: Columns, shape: int) -> int:
    one = columns.shapes[shape]
    code = BUCKETS.index(one.bucket) + 1 if one.bucket else 0
    return code | (CODES["truncated"] if one.truncated else 0) | (CODES["error"] if one.error else 0)


def timeline(columns: Columns, timelines: Timelines, budget: int = BUDGET) -> dict[str, Any]:
    """Returns the timeline of a run as plain JSON values, as `raytrace_rl.monitor.timeline.timeline` does.

    Args:
        columns: The run.
        timelines: Of its lanes.
        budget: Slices, about.
    """
    drawing = _Drawing(columns, budget)
    place = {process.key: lane for lane, process in enumerate(columns.processes)}
    every = [process for process in columns.run.processes if process.key in place]
    sizes = np.diff(columns.bounds)
    processes = [process for process in every if sizes[place[process.key]]]
    edges = drawing.begin + (drawing.end - drawing.begin) * np.arange(BINS + 1, dtype=np.float64) / BINS
    listed = [
        {**about(process), "spans": int(sizes[place[process.key]]), "tracks": drawing.lane(place[process.key])}
        for process in processes
    ]
    return {
        "start_ms": drawing.begin / 1e6,
        "length": drawing.length,
        "resolution": drawing.resolution,
        "names": list(drawing.names.index),
        "lanes": listed,
        "bins": BINS,
        "groups": groups(
            processes,
            lambda number: _sums(timelines, place[processes[number].key], edges.astype(np.int64)),
            drawing.end - drawing.begin,
        ),
    }


def _sums(timelines: Timelines, lane: int, edges: Ints) -> list[list[int]]:
    """The time of each bucket of a lane between neighbouring edges."""
    sums = []
    for rank in range(len(BUCKETS)):
        start, end = timelines.own[lane].of(rank)
        before = np.concatenate(([0], np.cumsum(end - start)))
        at = np.searchsorted(start, edges, side="right") - 1
        if len(start):
            up_to = np.where(at >= 0, before[at] + np.minimum(edges, end[at]) - start[at], 0)
            sums.append(np.diff(up_to).tolist())
        else:
            sums.append([0] * (len(edges) - 1))
    return sums
