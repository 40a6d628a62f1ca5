"""The spans of a run as trees, over columns: children, what is below which step, the rows that a path goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Mask, nearest, running_max, sums
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.rows import ColumnRow
from raytrace_rl.monitor.tree import Complete, Lane, lane_of

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, Run

_STEP: Final = "step"
_NONE: Final = -1
#: Children that are put in order by Python itself: of few that is faster.
_FEW: Final = 24


class ColumnTree:
    """As `raytrace_rl.monitor.tree.Tree`.

    Args:
        columns: The run.

    Attributes:
        columns: As given.
        run: What is known of the run but for its spans.
        steps: Its complete steps.
        step_rows: Their rows.
        owner: Of each span the number of the step that it is below, -1 for none.
        links_by_step: The numbers of links by the step that their span is, or is below; and where those of each begin.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.run: Run = columns.run
        #: So that a row is one object while a path is looked for; steps are it always.
        self._rows: dict[int, ColumnRow] = {}
        self._step_of: dict[int, ColumnRow] = {}
        self._lanes: dict[str, Lane] = {}
        self._first, self._children = _children(columns)
        self.step_rows, self.owner = _steps(columns)
        self.steps = [ColumnRow(columns, at) for at in self.step_rows.tolist()]
        self._step_of = {step.at: step for step in self.steps}
        self._self_ns: Ints | None = None
        self.links_by_step = self._links_by_step()
        self._numbers = {id(step): number for number, step in enumerate(self.steps)}

    def row(self, at: int) -> ColumnRow:
        """Returns the one object of a row."""
        found = self._rows.get(at) or self._step_of.get(at)
        if found is None:
            found = self._rows[at] = ColumnRow(self.columns, at)
        return found

    def forget(self) -> None:
        """Lets go of the rows that were given out, but for the steps."""
        self._rows.clear()

    def parent(self, row: ColumnRow) -> ColumnRow | None:
        """Returns its parent, None for a root and where it is not in the run."""
        at = int(self.columns.parent[row.at])
        return self.row(at) if at >= 0 else None

    def above(self, row: ColumnRow) -> Iterator[ColumnRow]:
        """Yields its ancestors, the nearest first, each once."""
        seen = {row.at}
        at = int(self.columns.parent[row.at])
        while at >= 0 and at not in seen:
            seen.add(at)
            yield self.row(at)
            at = int(self.columns.parent[at])

    def target(self, link: int) -> ColumnRow | None:
        """Returns the span that a link leads to, by the number of the link; None where it is not in the run."""
        at = int(self.columns.link_target[link])
        return None if at < 0 else self.row(at)

    def linking_below(self, step: ColumnRow) -> Iterator[ColumnRow]:
        """Yields the step and the spans below it, those of them that link to others."""
        number = self._numbers[id(step)]
        every, bounds = self.links_by_step
        links = every[bounds[number] : bounds[number + 1]]
        return map(self.row, np.unique(self.columns.links.row[links]).tolist())

    def _links_by_step(self) -> tuple[Ints, Ints]:
        rows = self.columns.links.row
        step = self.owner[rows]
        order = np.argsort(self.step_rows)
        if len(order):
            place = order[np.minimum(np.searchsorted(self.step_rows, rows, sorter=order), len(order) - 1)]
            step = np.where(self.step_rows[place] == rows, place, step)
        links = np.flatnonzero(step >= 0)
        links = links[np.argsort(step[links], kind="stable")]
        return links, np.searchsorted(step[links], np.arange(len(self.step_rows) + 1))

    def lane(self, process: Process) -> Lane:
        """Returns `lane_of` a process of the run, remembered."""
        found = self._lanes.get(process.key)
        if found is None:
            found = self._lanes[process.key] = lane_of(process)
        return found

    def child_rows(self, at: int) -> Codes:
        """Returns the rows of a span's children, in the order of their start."""
        return self._children[self._first[at] : self._first[at + 1]]

    @property
    def first_child(self) -> Codes:
        """Where the children of each span begin in `every_child`."""
        return self._first[:-1]

    @property
    def child_counts(self) -> Codes:
        """How many children each span has."""
        return np.diff(self._first)

    @property
    def every_child(self) -> Codes:
        """The rows of all that have a parent in the run, by that and by their start."""
        return self._children

    def unended(self) -> list[ColumnRow]:
        """Returns the spans that are open, or were when their process ended, in the order of their start."""
        rows = np.flatnonzero(self.columns.opened | self.columns.by_shape("truncated")[self.columns.shape])
        return [ColumnRow(self.columns, at) for at in self.columns.in_order(rows).tolist()]

    def complete(self, names: set[str]) -> dict[str, Complete]:
        """Returns, by name, what is known of the spans of some names that ended by themselves."""
        columns = self.columns
        whole = ~columns.opened
        found = {}
        for name in names:
            alike = np.array([shape.name == name and not shape.truncated for shape in columns.shapes], np.bool_)
            rows = np.flatnonzero(alike[columns.shape] & whole)
            if len(rows):
                lengths = columns.until[rows] - columns.start[rows]
                found[name] = Complete(len(rows), int(lengths.max()), float(np.median(lengths)))
        return found

    def truncated(self, process: Process) -> int:
        """Returns how many spans the end of a process has cut short."""
        columns = self.columns
        lane = next((lane for lane, one in enumerate(columns.processes) if one is process), None)
        if lane is None:
            return 0
        return int(columns.by_shape("truncated")[columns.shape[columns.rows_of(lane)]].sum())

    def own_children(self, step: ColumnRow, chosen: Callable[[Any], bool] = lambda _: True) -> list[ColumnRow]:
        """Returns the children in its own process whose name and bucket are the chosen ones."""
        columns = self.columns
        rows = self.child_rows(step.at)
        rows = rows[columns.lane[rows] == columns.lane[step.at]]
        wanted = {code for code in np.unique(columns.shape[rows]).tolist() if chosen(columns.shapes[code])}
        return [ColumnRow(columns, at) for at in rows.tolist() if int(columns.shape[at]) in wanted]

    def children_by_end(
        self, row: ColumnRow, end_of: Callable[[Any, Any], int], slack: int
    ) -> tuple[Any, Callable[[int], ColumnRow]]:
        """Returns the ends of its children that have a length, in order, and what gives the child of each.

        Args:
            row: The span.
            end_of: Gives the end of a child.
            slack: By how much (ns) that may be before the child's own.
        """
        columns = self.columns
        rows = self.child_rows(row.at)
        if not len(rows):
            return (), self.row
        until = columns.until[rows]
        # Only an end that is a little beyond the parent's may be another by the parent's clock.
        limit = row.until_ns
        if len(rows) <= _FEW:
            few: list[tuple[int, int, int]] = []
            for at, start, end in zip(rows.tolist(), columns.start[rows].tolist(), until.tolist(), strict=True):
                if end > start:
                    few.append((end_of(self.row(at), row) if limit < end <= limit + slack else end, len(few), at))
            few.sort()
            return [one[0] for one in few], lambda n: self.row(few[n][2])
        real = until > columns.start[rows]
        rows, until = rows[real], until[real]
        near = np.flatnonzero((until > limit) & (until <= limit + slack))
        for at in near.tolist():
            until[at] = end_of(self.row(int(rows[at])), row)
        order = np.argsort(until, kind="stable")
        rows = rows[order]
        return until[order], lambda n: self.row(int(rows[n]))

    @property
    def has_children(self) -> Mask:
        """Which spans have children."""
        found: Mask = self._first[1:] > self._first[:-1]
        return found

    @property
    def self_ns(self) -> Ints:
        """The time in each span outside of its children in the same process."""
        if self._self_ns is None:
            self._self_ns = self._outside_of_children()
        return self._self_ns

    def _outside_of_children(self) -> Ints:
        columns = self.columns
        own = columns.until - columns.start
        for lane in range(len(columns.processes)):
            first, last = columns.bounds[lane], columns.bounds[lane + 1]
            rows = self._children[self._first[first] : self._first[last]]
            rows = rows[columns.lane[rows] == lane]
            parent = columns.parent[rows]
            begin = np.maximum(columns.start[rows], columns.start[parent])
            end = np.minimum(columns.until[rows], columns.until[parent])
            real = end > begin
            parent, begin, end = parent[real], begin[real], end[real]
            if not len(parent):
                continue
            new_parent = np.concatenate(([True], parent[1:] != parent[:-1]))
            so_far = running_max(end, np.cumsum(new_parent))
            before = np.concatenate(([0], so_far[:-1]))
            before[new_parent] = 0
            new = np.maximum(0, end - np.maximum(begin, before))
            own[first:last] -= sums(parent - first, new, int(last - first))
        return own


def _children(columns: Columns) -> tuple[Codes, Codes]:
    """Where the children of each span begin in the second array, which has them by parent and start."""
    order = np.argsort(columns.start, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    del order
    rows = np.flatnonzero(columns.parent >= 0).astype(np.int32)
    parent = columns.parent[rows]
    rank = rank[rows]
    rank |= parent.astype(np.int64) << 32
    rows = rows[np.argsort(rank)]
    first = np.zeros(len(columns) + 1, np.int32)
    np.cumsum(np.bincount(parent, minlength=len(columns)), out=first[1:], dtype=np.int32)
    return first, rows


def _steps(columns: Columns) -> tuple[Ints, Codes]:
    """The rows of the complete steps that are in no other, and of each span the number of the step that it is below."""
    size = len(columns)
    step_shape = np.array([shape.span_group == _STEP for shape in columns.shapes], np.bool_)
    is_step = step_shape[columns.shape]
    step_above = nearest(columns.parent, is_step)
    # Steps inside of steps are few: which of them is the outermost is looked up one by one.
    rows = np.flatnonzero(is_step)
    own = step_above[rows]
    inside = (own >= 0) & (own != rows)
    above = dict(zip(rows[inside].tolist(), own[inside].tolist(), strict=True))
    whole = np.array([not shape.truncated for shape in columns.shapes], np.bool_)[columns.shape[rows]]
    whole &= ~columns.opened[rows]
    steps = columns.in_order(rows[whole & ~inside])
    of_step = np.full(size + 1, _NONE, np.int32)
    of_step[steps] = np.arange(len(steps), dtype=np.int32)
    for at in above:
        seen = {at}
        top = at
        while top in above and above[top] not in seen:
            top = above[top]
            seen.add(top)
        of_step[at] = _NONE if top in above else of_step[top]
    owner = of_step[step_above]  # of -1, that is none, the last
    owner[steps] = _NONE  # a step that its own parents lead back to is not below itself
    return steps, owner
