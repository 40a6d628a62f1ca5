"""What idle lanes waited for, over columns; as `raytrace_rl.monitor.bubbles`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raytrace_rl import semconv
from raytrace_rl.monitor import bubbles, lanes
from raytrace_rl.monitor.bubbles import Wait
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, sums
from raytrace_rl.monitor.bulk.goodput import heads
from raytrace_rl.monitor.bulk.intervals import Spans, complement, intersection, measures, spans_of
from raytrace_rl.monitor.bulk.steps import Steps
from raytrace_rl.monitor.model import BUCKETS

if TYPE_CHECKING:
    from raytrace_rl.monitor.bulk.columns import Columns
    from raytrace_rl.monitor.bulk.goodput import Timelines
    from raytrace_rl.monitor.tree import Lane

_IDLE: Final = BUCKETS.index("idle")
#: Gaps that are looked at together.
_AT_ONCE: Final = 1 << 16


class _Path:
    """Where the critical path was: stretches in order, and of each the wait that it makes of a gap meanwhile."""

    def __init__(self, steps: Steps) -> None:
        tree, columns = steps.tree, steps.tree.columns
        self.windows = lanes.union((step.start_ns, step.until_ns) for step in tree.steps)
        self.start: Ints = steps.paths.start
        self.end: Ints = steps.paths.end
        row = steps.paths.row
        if (self.start[:-1] > self.start[1:]).any():
            order = np.argsort(self.start, kind="stable")
            self.start, self.end, row = self.start[order], self.end[order], row[order]
        if (self.end[:-1] > self.start[1:]).any():  # steps that overlap have paths side by side
            _, found = bubbles.waited_for(tree.steps, steps.paths)  # type: ignore[arg-type]
            segments: Any = found
            self.start = np.array([start for start, _, _ in segments], np.int64)
            self.end = np.array([end for _, end, _ in segments], np.int64)
            row = np.array([one.at for _, _, one in segments], np.int32)
        names, told = columns.coded("name")
        pairs, wait = np.unique(
            names[columns.shape[row]].astype(np.int64) * len(columns.processes) + columns.lane[row], return_inverse=True
        )
        self.wait: Codes = wait.astype(np.int32)
        self.waits = [
            Wait("step", told[name], str(tree.lane(columns.processes[lane])))
            for name, lane in (divmod(pair, len(columns.processes)) for pair in pairs.tolist())
        ]


def of_steps(steps: Steps, timelines: Timelines) -> dict[str, Any] | None:
    """As `bubbles.bubbles`."""
    tree = steps.tree
    if not tree.steps:
        return None
    path = _Path(steps)
    of_worker = heads(tree.columns, tree.columns.processes)
    listed: dict[Lane, dict[Wait, int]] = {}
    wall: dict[Lane, int] = {}
    for number, process in enumerate(tree.columns.processes):
        rows = tree.columns.rows_of(number)
        if process.role == semconv.ROLE_DRIVER or rows.start == rows.stop or of_worker[process.key] is not process:
            continue
        lane = tree.lane(process)
        first = int(tree.columns.start[rows.start])
        life = [(min(process.start_ns or first, first), process.last_ns)]
        inside = lanes.intersection(path.windows, life)
        wall[lane] = wall.get(lane, 0) + lanes.total(inside)
        waits = listed.setdefault(lane, {})
        if inside:
            for wait, length in _waits(tree.columns, number, spans_of(inside), path, timelines):
                waits[wait] = waits.get(wait, 0) + length
    return bubbles.entries(listed, wall)


def _waits(
    columns: Columns, number: int, inside: Spans, path: _Path, timelines: Timelines
) -> Iterator[tuple[Wait, int]]:
    owned = timelines.own[number]
    yield from _said(columns, number, intersection(owned.of(_IDLE), inside))
    gaps = complement(Spans(owned.start, owned.end), inside)
    found = np.zeros(len(path.waits), np.int64)
    for begin in range(0, len(gaps.start), _AT_ONCE):
        start, end = gaps.start[begin : begin + _AT_ONCE], gaps.end[begin : begin + _AT_ONCE]
        first = np.maximum(0, np.searchsorted(path.start, start, side="right") - 1)
        last = np.searchsorted(path.start, end, side="left")
        # Each gap with each stretch of the path that it may overlap.
        count = np.maximum(0, last - first)
        gap = np.repeat(np.arange(len(count)), count)
        at = np.arange(len(gap)) - np.repeat(np.cumsum(count) - count, count) + first[gap]
        length = np.minimum(path.end[at], end[gap]) - np.maximum(path.start[at], start[gap])
        real = length > 0
        found += sums(path.wait[at[real]], length[real], len(path.waits))
    for code in np.flatnonzero(found).tolist():
        yield path.waits[code], int(found[code])


def _said(columns: Columns, number: int, idle: Spans) -> Iterator[tuple[Wait, int]]:
    """The time that spans of bucket idle own, by their names."""
    if not len(idle.start):
        return
    rows = columns.rows_of(number)
    mine = (columns.ranks() == _IDLE)[columns.shape[rows]]
    start, until, shape = columns.start[rows][mine], columns.until[rows][mine], columns.shape[rows][mine]
    real = until > start
    start, until, shape = start[real], until[real], shape[real]
    if (start[1:] >= until[:-1]).all():  # one after the other
        length = measures(idle, start, until)
        found = sums(shape, length, len(columns.shapes))
        for code in np.flatnonzero(found).tolist():
            yield Wait("span", columns.shapes[code].name, ""), int(found[code])
        return
    named: Any = list(zip(start.tolist(), until.tolist(), shape.tolist(), strict=True))
    for begin, end, code in bubbles.overlaps(zip(idle.start.tolist(), idle.end.tolist(), strict=True), named):
        yield Wait("span", columns.shapes[code].name, ""), end - begin
