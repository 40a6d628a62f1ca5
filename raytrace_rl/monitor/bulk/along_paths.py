"""What steps waited for, over columns: the section of critical paths, and where the path was in phases of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from raytrace_rl.monitor import critical_path
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, runs, sums, sums_between
from raytrace_rl.monitor.bulk.intervals import Spans, measures, union
from raytrace_rl.monitor.bulk.rows import ColumnRow
from raytrace_rl.monitor.bulk.steps import Steps
from raytrace_rl.monitor.findings import Phases
from raytrace_rl.monitor.tree import Lane

_IDLE: Final = "idle"


class _Named(NamedTuple):
    """Names and lanes of rows: a number for each pair, and what the numbers stand for."""

    code: Ints
    keys: list[tuple[str, Lane]]


def _named(steps: Steps, rows: Codes) -> _Named:
    tree, columns = steps.tree, steps.tree.columns
    lanes = [tree.lane(process) for process in columns.processes]
    places = {lane: n for n, lane in enumerate(dict.fromkeys(lanes))}
    of_lane = np.array([places[lane] for lane in lanes], np.int64)
    name, names = columns.coded("name")
    code = name[columns.shape[rows]].astype(np.int64) * len(places) + of_lane[columns.lane[rows]]
    return _Named(code, [(name, lane) for name in names for lane in places])


def of_paths(steps: Steps) -> dict[str, Any] | None:
    """As `critical_path.critical_path`."""
    paths = steps.paths
    if not len(paths):
        return None
    named = _named(steps, paths.row)
    key = named.code * len(paths) + paths.step
    order = np.argsort(key, kind="stable")
    bounds = runs(key[order])
    length = sums_between(bounds, (paths.end - paths.start)[order])
    code = named.code[order[bounds[:-1]]]
    of_code = runs(code)
    found = []
    for begin, end in zip(of_code[:-1].tolist(), of_code[1:].tolist(), strict=True):
        first = int(order[bounds[begin] : bounds[end]].min())
        row: Any = ColumnRow(steps.tree.columns, int(paths.row[first]))
        lane = named.keys[int(code[begin])][1]
        found.append(critical_path.Sum(row, lane, length[begin:end].tolist()))
    tree: Any = steps.tree
    return critical_path.section(tree, paths, found)


def in_phases(steps: Steps, chosen: Callable[[Any], bool]) -> Phases:
    """Returns the time of each step in its phases of one kind, and what the path was in meanwhile."""
    tree, columns, paths = steps.tree, steps.tree.columns, steps.paths
    whole = columns.until[tree.step_rows] - columns.start[tree.step_rows]
    # Steps may overlap: each is moved to a place of its own.
    moved = np.concatenate(([0], np.cumsum(whole + 1)))[:-1] - columns.start[tree.step_rows]
    step, rows = steps.own_children
    wanted = np.array([chosen(shape) for shape in columns.shapes], np.bool_)[columns.shape[rows]]
    step, rows = step[wanted], rows[wanted]
    start, until = columns.start[rows], columns.until[rows]
    at = tree.step_rows[step]
    phases = union(
        np.maximum(start, columns.start[at]) + moved[step], np.minimum(until, columns.until[at]) + moved[step]
    )
    length = measures(phases, paths.start + moved[paths.step], paths.end + moved[paths.step])
    busy = np.array([shape.bucket != _IDLE for shape in columns.shapes], np.bool_)[columns.shape[paths.row]]
    name, names = columns.coded("name")
    met = np.flatnonzero(length)
    named = _named(steps, paths.row[met])
    return Phases(
        _parts(_by_step(phases, moved + columns.start[tree.step_rows]), whole),
        _parts(sums(paths.step, np.where(busy, length, 0), len(paths)), whole),
        _in_order(name[columns.shape[rows]], until - start, names),
        _in_order(named.code, length[met], named.keys),
    )


def _by_step(phases: Spans, begin: Ints) -> Ints:
    """The time of each step, which begins at that place, in phases."""
    step = np.searchsorted(begin, phases.start, side="right") - 1
    return sums(step, phases.end - phases.start, len(begin))


def _parts(length: Ints, whole: Ints) -> list[float]:
    found: list[float] = np.where(whole > 0, length / np.maximum(whole, 1), 0.0).tolist()
    return found


def _in_order(code: Any, length: Ints, keys: list[Any]) -> dict[Any, int]:
    """The sum of the lengths of each number, in the order in which they come up."""
    different, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    summed = sums(inverse, length, len(different)).tolist()
    return {keys[int(different[n])]: summed[n] for n in np.argsort(first).tolist()}
