"""The spans of ranks, in order, over columns; and which of them are meetings.

The spans that ranks have below steps are put in order once: by step, by worker group and name, by rank, by start. What
lies between two bounds there is a *cell*, the spans of one name of one rank in one step.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from raytrace_rl.monitor import meetings
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, lengths_to_groups, runs
from raytrace_rl.monitor.bulk.tree import ColumnTree

_NONE: Final = -1


class Ordered(NamedTuple):
    """Rows by keys: ``rows`` in order, ``bounds`` of those with the same keys, and the keys at each of these."""

    rows: Codes
    bounds: Ints
    keys: tuple[Ints, ...]


def by_keys(rows: Codes, keys: list[tuple[Any, int]]) -> Ordered:
    """Puts rows, which ascend, in order by keys; each key with the number of values that it may have."""
    bits = max(1, len(rows)).bit_length()
    order: Codes
    if prod(max(1, count) for _, count in keys) << bits < 1 << 63:
        # A number sorts three times as fast as an index does: so the index travels in its lower bits.
        packed = np.zeros(len(rows), np.int64)
        for values, count in keys:
            packed *= max(1, count)
            packed += values
        packed <<= bits
        packed += np.arange(len(rows), dtype=np.int32)
        packed.sort()
        order = (packed & ((1 << bits) - 1)).astype(np.int32)
        packed >>= bits
        bounds = runs(packed)
        del packed
    else:
        order = np.lexsort([values for values, _ in reversed(keys)]).astype(np.int32)
        changed = np.zeros(len(rows), np.bool_)
        for values, _ in keys:
            changed[1:] |= values[order][1:] != values[order][:-1]
        bounds = runs(np.cumsum(changed))
    first = order[bounds[:-1]]
    return Ordered(rows[order], bounds, tuple(np.asarray(values)[first].astype(np.int64) for values, _ in keys))


class Meetings(NamedTuple):
    """Rows by meeting, and by rank in each; of each row its name (of a group) and its step; bounds of the meetings."""

    rows: Codes
    name: Ints
    step: Ints
    bounds: Ints


class Cells:
    """The cells of a run.

    Args:
        tree: The run.

    Attributes:
        tree: As given.
        names: Worker group and name, by number.
        ranks: Ranks, by number.
        rows, bounds: The spans in order, and where each cell begins.
        step, name, rank: Of each cell its step, and the numbers of its name and its rank.
        meeting: The meetings.
    """

    def __init__(self, tree: ColumnTree) -> None:
        self.tree = tree
        self._group_names()
        columns = tree.columns
        inside = (tree.owner >= 0) & self._ranked[columns.lane] & ~columns.opened
        cells = self._cells(np.flatnonzero(inside).astype(np.int32), [(tree.owner, len(tree.steps))])
        self.rows, self.bounds = cells.rows, cells.bounds
        self.step, self.name, self.rank = cells.keys
        self.meeting = self._meetings()

    def _group_names(self) -> None:
        columns = self.tree.columns
        processes = columns.processes
        self._ranked = np.array([p.worker_group is not None and p.rank is not None for p in processes], np.bool_)
        groups = sorted({p.worker_group for p in processes if p.worker_group is not None})
        ranks = sorted({p.rank for p in processes if p.rank is not None})
        group_of, rank_of = ({value: n for n, value in enumerate(values)} for values in (groups, ranks))
        self._group = np.array([group_of.get(p.worker_group or "", 0) for p in processes], np.int64)
        self._rank = np.array([0 if p.rank is None else rank_of[p.rank] for p in processes], np.int64)
        self._name, names = columns.coded("name")
        self.ranks: list[int] = ranks
        self.names = [(group, name) for group in groups for name in names]
        self._names = len(names)

    def _cells(self, rows: Codes, keys: list[tuple[Any, int]]) -> Ordered:
        """Rows by keys, worker group and name, and rank; within these by start."""
        columns = self.tree.columns
        lane = columns.lane[rows]
        name = self._group[lane] * self._names + self._name[columns.shape[rows]]
        of_rows = [(values[rows], count) for values, count in keys]
        every = [*of_rows, (name, len(self.names)), (self._rank[lane], len(self.ranks))]
        found = by_keys(rows, every)
        del every, of_rows, name, lane
        start = columns.start[found.rows]
        same = np.ones(max(0, len(rows) - 1), np.bool_)
        same[found.bounds[1:-1] - 1] = False
        # Rows of one lane are in order already. Of a rank that was in several processes, and of equals, they are not.
        if (same & (start[1:] <= start[:-1])).any():
            cell = lengths_to_groups(found.bounds)
            order = np.lexsort((columns.span[found.rows], columns.until[found.rows], start, cell))
            found = found._replace(rows=found.rows[order])
        return found

    # -- meetings

    def _meetings(self) -> Meetings:
        size = np.diff(self.bounds)
        of_step = runs(self.step * len(self.names) + self.name)
        several = np.diff(of_step) > 1
        alike = np.ones(len(several), np.bool_)
        if len(several):
            alike &= np.maximum.reduceat(size, of_step[:-1]) == np.minimum.reduceat(size, of_step[:-1])
            parents = self.tree.has_children[self.rows]
            above = np.maximum.reduceat(parents, self.bounds[:-1])
            alike &= ~np.maximum.reduceat(above, of_step[:-1])
        name = self.name[of_step[:-1]]
        refused = set(name[several & ~alike].tolist())
        chosen = np.array([n not in refused for n in name.tolist()], np.bool_) & several
        cells = np.flatnonzero(np.repeat(chosen, np.diff(of_step)))
        cells = cells[np.argsort(self.name[cells], kind="stable")]
        found = [one for some in np.split(cells, runs(self.name[cells])[1:-1]) if (one := self._meetings_of(some))]
        if not found:
            none = np.zeros(0, np.int64)
            return Meetings(none.astype(np.int32), none, none, np.zeros(1, np.int64))
        before = np.cumsum([0, *(len(one.rows) for one in found)])
        bounds = [one.bounds[:-1] + first for one, first in zip(found, before, strict=False)]
        return Meetings(
            np.concatenate([one.rows for one in found]),
            np.concatenate([one.name for one in found]),
            np.concatenate([one.step for one in found]),
            np.concatenate([*bounds, before[-1:]]),
        )

    def _meetings_of(self, cells: Ints) -> Meetings | None:
        """The meetings of one name, whose cells are in the order of the steps and ranks; None if they are none."""
        columns = self.tree.columns
        if not len(cells):
            return None
        # The n-th span of each rank makes the n-th meeting of the step.
        size = self.bounds[cells + 1] - self.bounds[cells]
        cell = np.repeat(cells, size)
        turn = np.arange(len(cell)) - np.repeat(np.cumsum(size) - size, size)
        at = self.bounds[cell] + turn
        keys = [
            (self.step[cell], len(self.tree.steps)),
            (turn, int(turn.max()) + 1),
            (self.rank[cell], len(self.ranks)),
        ]
        order = by_keys(np.arange(len(at), dtype=np.int32), keys).rows
        rows, cell, turn = self.rows[at[order]], cell[order], turn[order]
        bounds = runs(self.step[cell] * (int(turn.max()) + 1) + turn)
        first = bounds[:-1]
        start, until = columns.start[rows], columns.until[rows]
        low, high = np.minimum.reduceat(start, first), np.maximum.reduceat(start, first)
        early, late = np.minimum.reduceat(until, first), np.maximum.reduceat(until, first)
        at_once = int((high <= early).sum())
        if not meetings.are_meetings((high - low).tolist(), (late - early).tolist(), at_once):
            return None
        return Meetings(rows, self.name[cell], self.step[cell], bounds)

    def last_to_come(self) -> Codes:
        """Returns of each row the one that came last into its meeting, -1 where it is in none; empty without any."""
        found = self.meeting
        if not len(found.rows):
            return found.rows
        start = self.tree.columns.start[found.rows]
        meeting = lengths_to_groups(found.bounds)
        order = np.lexsort((np.arange(len(start)), start, meeting))  # ranks ascend within a meeting
        last = found.rows[order[found.bounds[1:] - 1]][meeting]
        of = np.full(len(self.tree.columns), _NONE, np.int32)
        of[found.rows] = last
        return of
