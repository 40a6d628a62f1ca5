"""Critical paths over columns: the walks through all steps side by side, as `raytrace_rl.monitor.critical_path.path`.

Each round takes every walk one span further: what a walk costs is then a few dozen array operations for all. Where few
walks are left, and where one meets something odd, the walk of rows does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from raytrace_rl.monitor.bulk import by_end
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Mask
from raytrace_rl.monitor.bulk.rows import ColumnRow
from raytrace_rl.monitor.bulk.tree import ColumnTree
from raytrace_rl.monitor.critical_path import SKEW_NS, Segment, path
from raytrace_rl.monitor.model import BUCKETS

_NONE: Final = -1
_IDLE: Final = BUCKETS.index("idle")
#: Walks below which one after the other is faster; and spans within each other from which on a walk is odd.
_FEW: Final = 32
_DEEP: Final = 64


class Paths(Sequence[list[Segment]]):
    """The critical path of each step: kept as arrays, for there may be millions of stretches.

    Args:
        tree: The run.
        last: Of each row the row that came last into its meeting, -1 where it is in none; empty without any.

    Attributes:
        start, end: Of each stretch, ns since the epoch.
        row: The row that it is in.
        bounds: Where the stretches of each step begin.
        step: Of each stretch the number of its step.
    """

    def __init__(self, tree: ColumnTree, last: Codes) -> None:
        self._columns = tree.columns
        count = len(tree.steps)
        pieces, odd = _Walks(tree, last).pieces() if count >= _FEW else ([], np.arange(count))
        pieces += [_one_by_one(tree, odd, last)]
        step, start, end, row = (np.concatenate(columns) for columns in zip(*reversed(pieces), strict=True))
        order = np.lexsort((start, step))
        self.start: Ints = start[order]
        self.end: Ints = end[order]
        self.row: Codes = row[order]
        self.step: Codes = step[order]
        self.bounds: Ints = np.searchsorted(self.step, np.arange(count + 1))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: Any) -> Any:
        some = slice(int(self.bounds[number]), int(self.bounds[number + 1]))
        made: dict[int, Any] = {}
        segments = []
        listed = self.start[some].tolist(), self.end[some].tolist(), self.row[some].tolist()
        for start, end, at in zip(*listed, strict=True):
            row = made.get(at) or made.setdefault(at, ColumnRow(self._columns, at))
            segments.append(Segment(start, end, row))
        return segments


class _Stretches(NamedTuple):
    """Of stretches of paths the number of the step, start, end and row."""

    step: Codes
    start: Ints
    end: Ints
    row: Codes


def _one_by_one(tree: ColumnTree, steps: Ints, last: Codes) -> _Stretches:
    """The paths of some steps, walked from row to row."""

    def last_to_come(row: Any) -> Any:
        at = int(last[row.at]) if len(last) else _NONE
        return tree.row(at) if at >= 0 else None

    found: list[tuple[int, int, int, int]] = []
    walked: Any = tree
    for number in steps.tolist():
        segments: Any = path(walked, walked.steps[number], last_to_come)
        found += [(number, one.start_ns, one.end_ns, one.row.at) for one in segments]
        tree.forget()
    told = np.array(found, np.int64).reshape(-1, 4)
    return _Stretches(told[:, 0].astype(np.int32), told[:, 1], told[:, 2], told[:, 3].astype(np.int32))


class _Walks:
    """The walks of all steps; each has a stack of the spans that its path is in.

    Attributes:
        _step: Of each walk that goes on the number of its step; what follows is by its place in here.
        _now: Where its path has got to, ns.
        _depth: Spans that it is in, at most as many as ``_row`` and the others have columns.
        _row, _opened: Of each of these spans its row, -1 beyond the depth, and where the path leaves it.
        _children, _made: Where those of its children, and of the producers, end that the path has been past.
    """

    def __init__(self, tree: ColumnTree, last: Codes) -> None:
        self._columns = columns = tree.columns
        self._last = last
        self._below, self._producers = by_end.children(tree), by_end.producers(tree)
        self._idle: Mask = columns.ranks() == _IDLE
        self._several_nodes = bool(by_end.nodes(columns).any())
        count = len(tree.steps)
        self._step: Codes = np.arange(count, dtype=np.int32)
        self._now: Ints = columns.until[tree.step_rows]
        self._depth = np.zeros(count, np.int64)
        self._row = np.full((count, 8), _NONE, np.int32)
        self._opened, self._children, self._made = (np.zeros((count, 8), np.int64) for _ in range(3))
        self._odd = np.zeros(count, np.bool_)
        self._found: list[_Stretches] = []
        self._enter(np.arange(count), tree.step_rows.astype(np.int32), columns.start[tree.step_rows])

    def pieces(self) -> tuple[list[_Stretches], Ints]:
        """Walks; returns the stretches, and the steps whose paths are still to be found."""
        odd: list[Codes] = []
        while len(self._step) >= _FEW:
            self._round()
            if (gone := self._odd | (self._depth == 0)).any():
                odd.append(self._step[self._odd])
                self._keep(~gone)
        left = np.concatenate([*odd, self._step])
        if not len(left):
            return self._found, left
        unfinished = np.zeros(int(left.max()) + 1, np.bool_)
        unfinished[left] = True
        kept = []
        for piece in self._found:
            good = (piece.step >= len(unfinished)) | ~unfinished[np.minimum(piece.step, len(unfinished) - 1)]
            kept.append(_Stretches(*(column[good] for column in piece)))
        return kept, left

    def _keep(self, which: Mask) -> None:
        for name in ("_step", "_now", "_depth", "_row", "_opened", "_children", "_made", "_odd"):
            setattr(self, name, getattr(self, name)[which])

    def _round(self) -> None:
        """Takes each walk to the child that ended last, or out of the span that it is in."""
        walk, top = np.arange(len(self._step)), self._depth - 1
        row, opened = self._row[walk, top], self._opened[walk, top]
        child, end = self._next_child(walk, top, row)
        leaves = end <= opened
        end = np.where(leaves, opened, end)
        self._back_to(walk, end, row)
        out = walk[leaves]
        self._row[out, top[leaves]] = _NONE
        self._depth[out] -= 1
        into, child, opened = walk[~leaves], child[~leaves], opened[~leaves]
        start = self._columns.start[child]
        if len(self._last):
            last = self._last[child]
            change = np.flatnonzero((last >= 0) & (last != child))
            begins = self._columns.start[last[change]]
            change = change[(np.maximum(opened[change], start[change]) < begins) & (begins < self._now[into[change]])]
            changed = np.zeros(len(child), np.bool_)
            changed[change] = self._change_over(into[change], child[change], last[change])
            into, child, opened, start = into[~changed], child[~changed], opened[~changed], start[~changed]
        self._enter(into, child, np.maximum(opened, start))

    def _next_child(self, walk: Ints, top: Ints, row: Codes) -> tuple[Codes, Ints]:
        """Takes the child, or producer, that ended last before now; returns it and its end (0 where there is none)."""
        below, producers = self._below, self._producers
        first, first_made = below.first[row].astype(np.int64), producers.first[self._step]
        children = below.before(self._now, first, self._children[walk, top])
        made = producers.before(self._now, first_made, self._made[walk, top])
        asked = walk
        child, end = np.full(len(walk), _NONE, np.int32), np.zeros(len(walk), np.int64)
        while len(asked):
            has_child, has_made = children[asked] > first[asked], made[asked] > first_made[asked]
            own = np.where(has_child, _at(below.end, children[asked] - 1), 0)
            other = np.where(has_made, _at(producers.end, made[asked] - 1), 0)
            from_made = has_made & (~has_child | (other >= own))
            own_row, other_row = _at(below.row, children[asked] - 1), _at(producers.row, made[asked] - 1)
            child[asked] = np.where(from_made, other_row, np.where(has_child, own_row, _NONE))
            end[asked] = np.where(from_made, other, own)
            children[asked] -= ~from_made & has_child
            made[asked] -= from_made
            met = child[asked]
            asked = asked[(met >= 0) & (self._row[asked] == met[:, None]).any(axis=1)]  # it is in there already
        # What is not taken, because the span was opened later, is not asked for again.
        self._children[walk, top], self._made[walk, top] = children, made
        return child, end

    def _back_to(self, walk: Ints, time_ns: Ints, row: Codes) -> None:
        moves = self._now[walk] > time_ns
        some, time_ns = walk[moves], time_ns[moves]
        self._found.append(_Stretches(self._step[some], time_ns, self._now[some], row[moves]))
        self._now[some] = time_ns

    def _enter(self, walk: Ints, row: Codes, opened: Ints) -> None:
        depth = self._depth[walk]
        if len(depth) and int(depth.max()) >= self._row.shape[1]:
            self._deepen()
        self._row[walk, depth], self._opened[walk, depth] = row, opened
        self._children[walk, depth] = self._below.first[row + 1]
        step = self._step[walk]
        first, after = self._producers.first[step], self._producers.first[step + 1]
        waits = self._idle[self._columns.shape[row]] & (first < after)
        self._made[walk, depth] = np.where(waits, after, first)
        self._depth[walk] += 1
        self._odd[walk[depth + 1 >= _DEEP]] = True
        if self._several_nodes and waits.any():  # a producer's end may be another by the clock of who waits
            limit = self._columns.until[row[waits]]
            low, high = (self._producers.before(by, first[waits], after[waits]) for by in (limit, limit + SKEW_NS))
            self._odd[walk[waits][low < high]] = True

    def _deepen(self) -> None:
        more = self._row.shape[1]
        self._row = np.pad(self._row, ((0, 0), (0, more)), constant_values=_NONE)
        for name in ("_opened", "_children", "_made"):
            setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))

    def _change_over(self, walk: Ints, child: Codes, last: Codes) -> Mask:
        """Goes on with who came last into the meeting ``child``; returns where that could be reached."""
        place = np.full(len(walk), _NONE, np.int64)
        chain: list[Codes] = []
        asked, at = np.arange(len(walk)), last
        while len(asked) and len(chain) < _DEEP:
            above = self._columns.parent[at]
            asked, above = asked[above >= 0], above[above >= 0]
            met = self._row[walk[asked]] == above[:, None]
            found = met.any(axis=1)
            place[asked[found]] = met[found].argmax(axis=1)
            asked, at = asked[~found], above[~found]
            passed = np.full(len(walk), _NONE, np.int32)
            passed[asked] = at
            chain.append(passed)
        self._odd[walk[asked]] = True  # parents in a circle, or very many of them
        reached = place >= 0
        walk, place = walk[reached], place[reached]
        self._back_to(walk, self._columns.start[last[reached]], child[reached])
        self._row[walk] = np.where(np.arange(self._row.shape[1]) > place[:, None], _NONE, self._row[walk])
        self._depth[walk] = place + 1
        for of_all in reversed(chain):
            rows = of_all[reached]
            into, rows = walk[rows >= 0], rows[rows >= 0]
            opened = self._opened[into, self._depth[into] - 1]
            self._enter(into, rows, np.maximum(opened, self._columns.start[rows]))
        return reached


def _at(values: Any, places: Ints) -> Any:
    """What is at some places; anything where there is no such place."""
    return (
        values[np.minimum(np.maximum(places, 0), len(values) - 1)] if len(values) else np.zeros(len(places), np.int64)
    )
