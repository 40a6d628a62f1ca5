"""Trajectories over columns: how old they were when they were trained on, and how many weight versions behind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from raytrace_rl import semconv
from raytrace_rl.monitor.believed import LONGEST_S
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Mask, Reals, lengths_to_groups, nearest, runs, sums_between
from raytrace_rl.monitor.bulk.links import COUNTED, LAG, MADE, VERSION
from raytrace_rl.monitor.tables import MAX_LISTED
from raytrace_rl.monitor.trajectories import ROLLOUT

if TYPE_CHECKING:
    from raytrace_rl.monitor.bulk.columns import Columns

_NS: Final = 1e9


class _Consumed(NamedTuple):
    """Links by which a step was trained on the trajectories of a rollout; as `trajectories.Consumed`.

    Attributes:
        link: Their numbers.
        step: A number for attempt, iteration and span name.
        number, age, version, lag, other_node: As there; ``age`` is NaN where it is not known.
        has_version, has_lag: Whether these are known.
    """

    link: Ints
    step: Ints
    number: Ints
    age: Reals
    version: Ints
    has_version: Mask
    lag: Ints
    has_lag: Mask
    other_node: Mask


def trajectories(columns: Columns) -> dict[str, Any]:
    """As `trajectories.trajectories`."""
    found, steps = _consumed(columns)
    whole = _summaries(found._replace(step=np.zeros(len(found.link), np.int64)), 1)[0]
    listed = _summaries(found, len(steps))
    entries = [
        {"attempt": attempt, "iteration": iteration, "span": name, **summary, "weight_versions": versions}
        for (attempt, iteration, name), summary, versions in zip(
            steps, listed, _versions(found, len(steps)), strict=True
        )
    ]
    return {**whole, "steps": entries, "list": _listed(columns, found, steps)}


def _listed(columns: Columns, found: _Consumed, steps: list[tuple[int, int | None, str]]) -> list[dict[str, Any]]:
    some = _Consumed._make(column[:MAX_LISTED] for column in found)
    entries = []
    for at, link in enumerate(some.link.tolist()):
        trace, odd = columns.link_traces[columns.links.trace[link]]
        attempt, iteration, _ = steps[int(some.step[at])]
        entries.append(
            {
                "attempt": attempt,
                "iteration": iteration,
                "trace_id": trace.hex(),
                "span_id": f"{int(columns.links.span[link]):016x}" if odd is None else odd.hex(),
                "count": int(some.number[at]),
                "age_s": None if np.isnan(some.age[at]) else float(some.age[at]),
                "weight_version": int(some.version[at]) if some.has_version[at] else None,
                "lag": int(some.lag[at]) if some.has_lag[at] else None,
            }
        )
    return entries


def _consumed(columns: Columns) -> tuple[_Consumed, list[tuple[int, int | None, str]]]:
    """What each step was trained on, in the order in which it comes up, and what the numbers of steps stand for."""
    links, target = columns.links, columns.link_target
    group = np.array([shape.span_group == ROLLOUT for shape in columns.shapes], np.bool_)
    chosen = np.flatnonzero((links.there & COUNTED != 0) | ((target >= 0) & group[columns.shape[target]]))
    consumers = np.unique(links.row[chosen])
    told = np.zeros(len(columns), np.bool_)
    told[consumers] = True
    if len(chosen):
        above = nearest(columns.parent, told)[consumers]
        told[consumers[(above >= 0) & (above != consumers)]] = False  # the span around it has said so already
    chosen = chosen[told[links.row[chosen]]]
    chosen = chosen[np.argsort(columns.start[links.row[chosen]], kind="stable")]
    row, at, of = links.row[chosen], target[chosen], links.taken(chosen)
    age = _ages(columns, row, at, of.age)
    version, has_version = _weight_versions(columns, at, of.version, of.there & VERSION != 0)
    attempt = np.array([process.attempt for process in columns.processes], np.int64)[columns.lane[row]]
    # The same trajectories may be linked to by several spans of a step: they count once, by what says most.
    has_made = of.there & MADE != 0
    keys = (
        np.where(has_version, version, 0), has_version, np.where(has_made, of.made, 0), has_made,
        of.span, of.trace, columns.iteration[row], attempt,
    )  # fmt: skip
    first, best = _once(keys, of.number)
    order = np.argsort(first, kind="stable")
    best = best[order]
    step, steps = _numbered(columns, attempt[best], row[best])
    found = _Consumed(
        chosen[best],
        step,
        of.number[best],
        age[best],
        version[best],
        has_version[best],
        of.lag[best],
        of.there[best] & LAG != 0,
        _from_other_nodes(columns, row[best], at[best], of.node[best]),
    )
    return found, steps


def _ages(columns: Columns, row: Ints, target: Codes, said: Reals) -> Reals:
    """What links say of the age, else the time from the rollout's end on."""
    since = (columns.start[row] - columns.until[target]) / _NS if len(columns) else said
    since = np.where((target >= 0) & (np.abs(since) <= LONGEST_S), since, np.nan)
    return np.where(np.isnan(said), since, said)


def _weight_versions(columns: Columns, target: Codes, said: Ints, there: Mask) -> tuple[Ints, Mask]:
    """What links say of the weight version, else what the rollout's span says."""
    rows, values = columns.version
    if not len(rows):
        return said, there
    place = np.minimum(np.searchsorted(rows, target), len(rows) - 1)
    known = rows[place] == target
    return np.where(there, said, values[place]), there | known


def _once(keys: tuple[Any, ...], number: Ints) -> tuple[Ints, Ints]:
    """Of those with the same keys the first place, and the first of those with the largest number."""
    order = np.lexsort(keys)
    changed = np.zeros(len(order), np.bool_)
    for values in keys:
        changed[1:] |= values[order][1:] != values[order][:-1]
    bounds = runs(np.cumsum(changed))
    if not len(order):
        return order, order
    first, numbers = bounds[:-1], number[order]
    most = np.maximum.reduceat(numbers, first)[lengths_to_groups(bounds)]
    return order[first], np.minimum.reduceat(np.where(numbers == most, order, len(order)), first)


def _numbered(columns: Columns, attempt: Ints, row: Ints) -> tuple[Ints, list[tuple[int, int | None, str]]]:
    """Numbers for attempt, iteration and name of rows, in the order in which they come up; and what these are."""
    name, names = columns.coded("name")
    key = (attempt * (len(columns.iterations) + 1) + columns.iteration[row]) * max(1, len(names)) + name[
        columns.shape[row]
    ]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    first = first[order]
    iterations = [*columns.iterations, None]  # -1 leads to the last
    of_row = columns.iteration[row[first]].tolist(), name[columns.shape[row[first]]].tolist()
    listed = zip(attempt[first].tolist(), *of_row, strict=True)
    return number[inverse], [(number_of, iterations[code], names[named]) for number_of, code, named in listed]


def _from_other_nodes(columns: Columns, row: Ints, target: Codes, node: Codes) -> Mask:
    """Which were made on another node than the one that they were used on."""
    lane = columns.lane[row].astype(np.int64)
    nodes = {node: n for n, node in enumerate(dict.fromkeys(process.node for process in columns.processes))}
    of_lane = np.array([nodes[process.node] for process in columns.processes], np.int32)
    other: Mask = (target >= 0) & (of_lane[columns.lane[target]] != of_lane[lane]) if len(row) else node < 0
    pairs, inverse = np.unique(lane * (len(columns.nodes) + 1) + node + 1, return_inverse=True)
    said = []
    for number, named in (divmod(pair, len(columns.nodes) + 1) for pair in pairs.tolist()):
        process = columns.processes[number]
        here = re.sub(r"[^\w.-]", "_", process.text(semconv.HOST_NAME) or "")
        said.append(named > 0 and bool(here) and columns.nodes[named - 1] not in (here, process.node))
    return np.where(node >= 0, np.array(said, np.bool_)[inverse], other)


# -- summed up


def _summaries(found: _Consumed, count: int) -> list[dict[str, Any]]:
    """As `trajectories._summary` of each step."""
    order = np.argsort(found.step, kind="stable")
    bounds = np.searchsorted(found.step[order], np.arange(count + 1))
    of = _Consumed._make(column[order] for column in found)
    known = ~np.isnan(of.age)
    counts = sums_between(bounds, of.number).tolist()
    below_zero = sums_between(bounds, np.where(known & (of.age < 0), of.number, 0)).tolist()
    elsewhere = sums_between(bounds, np.where(of.other_node, of.number, 0)).tolist()
    ages = _spreads(of.step[known], np.maximum(0.0, of.age[known]), of.number[known], count)
    lags = _spreads(of.step[of.has_lag], of.lag[of.has_lag], of.number[of.has_lag], count)
    return [
        {"count": one, "age_s": age, "lag": lag, "below_zero": early, "other_node": other}
        for one, age, lag, early, other in zip(counts, ages, lags, below_zero, elsewhere, strict=True)
    ]


def _spreads(step: Ints, values: Any, number: Ints, count: int) -> list[dict[str, float] | None]:
    """Minimum, median (the lower of two) and maximum by step of values that stand for several trajectories each."""
    found: list[dict[str, float] | None] = [None] * count
    if not len(step):
        return found
    order = np.lexsort((values, step))
    step, values, number = step[order], values[order], number[order]
    bounds = runs(step)
    groups = lengths_to_groups(bounds)
    passed = np.cumsum(number)
    before = np.concatenate(([0], passed))[bounds[:-1]]
    short = (passed - before[groups]) * 2 < sums_between(bounds, number)[groups]
    median = bounds[:-1] + np.add.reduceat(short, bounds[:-1], dtype=np.int64)
    listed = (step[bounds[:-1]], values[bounds[:-1]], values[median], values[bounds[1:] - 1])
    for at, least, middle, most in zip(*(column.tolist() for column in listed), strict=True):
        found[at] = {"min": least, "median": middle, "max": most}
    return found


def _versions(found: _Consumed, count: int) -> list[dict[str, int]]:
    """How many trajectories of each step each weight version made."""
    told: list[dict[str, int]] = [{} for _ in range(count)]
    step, version, number = (column[found.has_version] for column in (found.step, found.version, found.number))
    order = np.lexsort((version, step))
    step, version = step[order], version[order]
    bounds = runs(np.cumsum(np.append(False, (step[1:] != step[:-1]) | (version[1:] != version[:-1]))[: len(step)]))
    first = bounds[:-1]
    listed = step[first].tolist(), version[first].tolist(), sums_between(bounds, number[order]).tolist()
    for at, one, many in zip(*listed, strict=True):
        told[at][str(one)] = many
    return told
