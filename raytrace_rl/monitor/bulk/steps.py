"""Ranks in steps, over columns: who is slow or late, what steps consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from raytrace_rl.monitor import noise, step_times
from raytrace_rl.monitor.bulk.arrays import (
    Codes,
    Ints,
    Mask,
    Reals,
    in_order,
    lengths_to_groups,
    medians,
    medians_of_others,
    runs,
    sums_between,
)
from raytrace_rl.monitor.bulk.cells import Cells
from raytrace_rl.monitor.bulk.paths import Paths
from raytrace_rl.monitor.bulk.tree import ColumnTree
from raytrace_rl.monitor.stragglers import LEAST, LEAST_SPANS, Excess, Ranks


class Steps(Cells):
    """What is found out about a run's steps once, and asked by several sections; as `raytrace_rl.monitor.why.Steps`.

    Args:
        tree: The run.

    Attributes:
        met: The numbers of the names that are meetings.
        paths: The critical path of each step.
    """

    def __init__(self, tree: ColumnTree) -> None:
        super().__init__(tree)
        self.met = set(np.unique(self.meeting.name).tolist())
        self.paths = Paths(tree, self.last_to_come())

    # -- who is slow

    @cached_property
    def cell_self_ns(self) -> Ints:
        """The time of each cell outside of its spans' children in the same process."""
        return sums_between(self.bounds, self.tree.self_ns[self.rows])

    @cached_property
    def compared(self) -> Mask:
        """The cells of names that several ranks have in the step, and that are no meetings."""
        of_step = runs(self.step * len(self.names) + self.name)
        several = np.repeat(np.diff(of_step) > 1, np.diff(of_step))
        return several & ~np.isin(self.name, list(self.met))

    def stragglers(self) -> dict[str, Any]:
        """As `stragglers.Stragglers.report`."""
        found = Ranks(self.tree.steps)  # type: ignore[arg-type]
        chosen = np.flatnonzero(self.compared)
        values = self.cell_self_ns[chosen].astype(np.float64)
        self._in_steps(found, "slow", self.name[chosen], self.step[chosen], self.rank[chosen], values)
        self._in_steps(found, "late", *self._lateness())
        self._outside(found)
        return found.report()

    def _lateness(self) -> tuple[Ints, Ints, Ints, Reals]:
        """By name, step and rank: how much later than the median of the others it came to a step's meetings."""
        rows, name, step, bounds = self.meeting
        meeting = lengths_to_groups(bounds)
        start = self.tree.columns.start[rows]
        if not len(start):
            return name, step, name, start.astype(np.float64)
        since = (start - np.minimum.reduceat(start, bounds[:-1])[meeting]).astype(np.float64)
        late = since - medians_of_others(bounds, since)
        rank = self._rank[self.tree.columns.lane[rows]]
        order = np.lexsort((meeting, rank, name, step))
        places = runs((step[order] * len(self.names) + name[order]) * len(self.ranks) + rank[order])
        first = order[places[:-1]]
        return name[first], step[first], rank[first], np.add.reduceat(late[order], places[:-1])

    def _in_steps(self, found: Ranks, kind: str, name: Ints, step: Ints, rank: Ints, values: Reals) -> None:
        if not len(values):
            return
        order = np.lexsort((rank, step, name))
        name, step, rank, values = name[order], step[order], rank[order], values[order]
        typical = medians_of_others(runs(name * max(1, len(self.tree.steps)) + step), values)
        excess = values if kind == "late" else values - typical
        slowest = _among_slowest(name * max(1, len(self.tree.steps)) + step, values)
        ranks_of: dict[int, int] = {}
        order = np.lexsort((step, rank, name))
        places = runs(name[order] * len(self.ranks) + rank[order])
        first = order[places[:-1]]
        for one in name[first].tolist():
            ranks_of[one] = ranks_of.get(one, 0) + 1
        long = np.diff(places) >= LEAST
        compared = _Compared(places, excess[order], typical[order], [of_part[order] for of_part in slowest])
        nodes = self._first_nodes()
        for at in np.flatnonzero(long).tolist():
            group, span = self.names[int(name[first[at]])]
            one = compared.excess(at, span, kind, in_steps=True)
            key = int(name[first[at]]), int(rank[first[at]])
            found.note(group, self.ranks[key[1]], nodes(*key), one, ranks_of[key[0]])

    def _first_nodes(self) -> Callable[[int, int], set[str]]:
        """Gives the nodes that a rank's spans of a name were on in the first step that has any."""
        order = np.lexsort((self.step, self.rank, self.name))
        key = self.name[order] * len(self.ranks) + self.rank[order]
        first = runs(key)[:-1]
        cell_of = dict(zip(key[first].tolist(), order[first].tolist(), strict=True))
        columns = self.tree.columns

        def nodes(name: int, rank: int) -> set[str]:
            cell = cell_of[name * len(self.ranks) + rank]
            rows = self.rows[self.bounds[cell] : self.bounds[cell + 1]]
            return {columns.processes[lane].node for lane in np.unique(columns.lane[rows]).tolist()}

        return nodes

    def _outside(self, found: Ranks) -> None:
        """Spans of ranks outside of steps, by the medians of the whole run."""
        columns = self.tree.columns
        whole = ~columns.by_shape("truncated")
        outside = (self.tree.owner < 0) & self._ranked[columns.lane] & ~columns.opened & whole[columns.shape]
        cells = self._cells(np.flatnonzero(outside).astype(np.int32), [])
        if not len(cells.rows):
            return
        name, rank = cells.keys
        lengths = (columns.until[cells.rows] - columns.start[cells.rows]).astype(np.float64)
        ordered = lengths[in_order(cells.bounds, lengths)]
        of_cell = medians(cells.bounds, ordered)
        by_name = runs(name)
        typical = medians_of_others(by_name, of_cell)
        ranks = np.repeat(np.diff(by_name), np.diff(by_name))
        of_group = np.repeat(typical, np.diff(cells.bounds))
        compared = _Compared(cells.bounds, lengths - of_group, of_group, [lengths > of_group])
        for at in np.flatnonzero((np.diff(cells.bounds) >= LEAST_SPANS) & (ranks > 1)).tolist():
            group, span = self.names[int(name[at])]
            rows = cells.rows[cells.bounds[at] : cells.bounds[at + 1]]
            nodes = {columns.processes[lane].node for lane in np.unique(columns.lane[rows]).tolist()}
            one = compared.excess(at, span, "slow", in_steps=False)
            found.note(group, self.ranks[int(rank[at])], nodes, one, int(ranks[at]))

    def at_work(self) -> Iterator[dict[str, dict[int, float]]]:
        """As `why.Steps.at_work`."""
        spent: list[dict[str, dict[int, float]]] = [{} for _ in self.tree.steps]
        chosen = np.flatnonzero(self.compared)
        listed = (self.step[chosen].tolist(), self.name[chosen].tolist(), self.rank[chosen].tolist())
        for step, name, rank, own_ns in zip(*listed, self.cell_self_ns[chosen].tolist(), strict=True):
            own = spent[step].setdefault(self.names[name][0], {})
            own[self.ranks[rank]] = own.get(self.ranks[rank], 0.0) + own_ns / 1e6
        yield from spent

    # -- what steps consist of

    def phases(self) -> list[dict[str, Any]]:
        """As `step_times.phases`."""
        tree, columns = self.tree, self.tree.columns
        step, rows = self.own_children
        at = tree.step_rows[step]
        begin = np.maximum(columns.start[rows], columns.start[at])
        length = np.maximum(0, np.minimum(columns.until[rows], columns.until[at]) - begin)
        key = self._name[columns.shape[rows]].astype(np.int64) * max(1, len(tree.steps)) + step
        order = np.argsort(key, kind="stable")
        bounds = runs(key[order])
        summed = sums_between(bounds, length[order])
        name, of_step = np.divmod(key[order[bounds[:-1]]], max(1, len(tree.steps)))
        of_name = runs(name)
        spent: dict[str | None, dict[int, int]] = {}
        for first, end in zip(of_name[:-1].tolist(), of_name[1:].tolist(), strict=True):
            by_step = zip(of_step[first:end].tolist(), summed[first:end].tolist(), strict=True)
            spent[self.names_of(int(name[first]))] = dict(by_step)
        if tree.steps:
            spent[None] = dict(enumerate(tree.self_ns[tree.step_rows].tolist()))
        return step_times.phase_entries(tree.steps, spent)  # type: ignore[arg-type]

    @cached_property
    def own_children(self) -> tuple[Ints, Codes]:
        """The children of steps in the steps' own processes: the numbers of their steps, in order, and their rows."""
        tree, columns = self.tree, self.tree.columns
        first, count = tree.first_child[tree.step_rows].astype(np.int64), tree.child_counts[tree.step_rows]
        step = np.repeat(np.arange(len(count)), count)
        place = np.arange(len(step)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        rows = tree.every_child[place]
        own = columns.lane[rows] == columns.lane[tree.step_rows[step]]
        return step[own], rows[own]

    def names_of(self, code: int) -> str:
        """The span name of a number."""
        return self._span_names[code]

    @cached_property
    def _span_names(self) -> list[str]:
        return self.tree.columns.coded("name")[1]

    def first_step(self) -> dict[str, Any] | None:
        """As `step_times.first_step`."""
        tree, columns = self.tree, self.tree.columns
        keys, longest = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for lane in range(len(columns.processes)):
            rows = columns.rows_of(lane)
            below = np.flatnonzero(tree.owner[rows] >= 0) + rows.start
            key = tree.owner[below].astype(np.int64) * self._names + self._name[columns.shape[below]]
            order = np.argsort(key, kind="stable")
            bounds = runs(key[order])
            lengths = sums_between(bounds, (columns.until[below] - columns.start[below])[order])
            keys.append(key[order][bounds[:-1]])
            longest.append(lengths)
        key, length = np.concatenate(keys), np.concatenate(longest)
        order = np.argsort(key, kind="stable")
        key = key[order]
        bounds = runs(key)
        key, length = key[bounds[:-1]], np.maximum.reduceat(length[order], bounds[:-1]) if len(key) else length
        numbers = {id(one): number for number, one in enumerate(tree.steps)}

        def by_name(step: Any) -> dict[str, int]:
            first = numbers[id(step)] * self._names
            some = slice(*np.searchsorted(key, [first, first + self._names]).tolist())
            codes = (key[some] - first).tolist()
            return {self.names_of(code): one for code, one in zip(codes, length[some].tolist(), strict=True)}

        return step_times.first_step(tree, by_name)  # type: ignore[arg-type]


def _among_slowest(groups: Ints, values: Reals) -> list[Mask]:
    """For each of `noise.PARTS` whether a value is among the largest of that part of its group; groups ascend."""
    order = np.lexsort((values, groups))
    same = np.diff(runs(groups))
    size, end = np.repeat(same, same), np.repeat(np.cumsum(same), same)
    equal = _runs_of_pairs(groups[order], values[order])
    place = np.empty(len(values), np.int64)
    place[order] = end - np.repeat(equal[:-1], np.diff(equal))
    return [place * part <= size for part in noise.PARTS]


def _runs_of_pairs(groups: Ints, values: Reals) -> Ints:
    """As `runs`, of pairs."""
    if not len(groups):
        return np.zeros(1, np.int64)
    edges = np.flatnonzero((groups[1:] != groups[:-1]) | (values[1:] != values[:-1])) + 1
    return np.concatenate(([0], edges, [len(groups)])).astype(np.int64)


class _Compared:
    """Values by group, and what they say of it."""

    def __init__(self, bounds: Ints, excess: Reals, typical: Reals, slowest: Sequence[Mask]) -> None:
        self._size = np.diff(bounds)
        groups = lengths_to_groups(bounds)
        self._middle = medians(bounds, excess[in_order(bounds, excess)])
        off = np.abs(excess - self._middle[groups])
        self._deviation = medians(bounds, off[in_order(bounds, off)])
        known = np.nan_to_num(typical)
        self._typical = medians(bounds, known[in_order(bounds, known)])
        self._often = np.add.reduceat(excess > 0, bounds[:-1], dtype=np.int64)
        self._slowest = np.stack([np.add.reduceat(of_part, bounds[:-1], dtype=np.int64) for of_part in slowest])

    def excess(self, at: int, name: str, kind: str, *, in_steps: bool) -> Excess:
        """Returns what the group number ``at`` says."""
        size, middle = int(self._size[at]), float(self._middle[at])
        score = noise.score(middle, noise.of_deviation(float(self._deviation[at]), size))
        typical = 0.0 if kind == "late" else float(self._typical[at])
        often, slowest = int(self._often[at]) / size, tuple(self._slowest[:, at].tolist())
        return Excess(name, kind, middle, typical, score, often, size, in_steps=in_steps, slowest=slowest)
