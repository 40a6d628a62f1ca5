"""What `diff` compares of a large run, from columns: as `raytrace_rl.monitor.diff.side` gives it of rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from raytrace_rl.monitor.bulk import goodput
from raytrace_rl.monitor.bulk.arrays import Ints
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.goodput import Timelines
from raytrace_rl.monitor.bulk.tree import ColumnTree
from raytrace_rl.monitor.diff import Sample, Side, sample
from raytrace_rl.monitor.tree import lane_of


def side(columns: Columns) -> Side:
    """Returns what is compared of a run."""
    steps = ColumnTree(columns).steps
    lengths = sample([step.until_ns - step.start_ns for step in steps])
    code_of_shape, names = columns.coded("name")
    rows = np.flatnonzero(~(columns.opened | columns.by_shape("truncated")[columns.shape]))
    codes = code_of_shape[columns.shape[rows]].astype(np.int64)
    durations = columns.until[rows] - columns.start[rows]
    by_name = {names[code]: found for code, found in _samples(codes, durations)}
    lanes = [lane_of(process) for process in columns.processes]
    places = {lane: number for number, lane in enumerate(dict.fromkeys(one for one in lanes if one.rank is not None))}
    place_of_lane = np.array([places.get(lane, -1) for lane in lanes], np.int64)
    place = place_of_lane[columns.lane[rows]] if lanes else np.zeros(0, np.int64)
    ranked = place >= 0
    keys = place[ranked] * len(names) + codes[ranked]
    listed = list(places)
    by_rank = {}
    for key, found in _samples(keys, durations[ranked]):
        lane = listed[key // len(names)]
        if lane.rank is not None:
            by_rank[lane.group, lane.rank, names[key % len(names)]] = found
    views = goodput.of_columns(columns, Timelines(columns))
    return Side(columns.run.run_id, columns.run.path, len(columns), lengths, by_name, by_rank, views)


def _samples(keys: Ints, durations: Ints) -> list[tuple[int, Sample]]:
    """The durations of each key."""
    order = np.lexsort((durations, keys))
    keys, durations = keys[order], durations[order]
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    return [(int(keys[begin]), _sample(durations[begin:end])) for begin, end in pairwise(edges) if end > begin]


def _sample(ordered: Ints) -> Sample:
    middle = _median(ordered)
    deviations = np.sort(np.abs(ordered - middle))
    return Sample(len(ordered), middle, _median(deviations), int(ordered.sum()))


def _median(ordered: Ints) -> float:
    """As `statistics.median` has it: an integer of an odd number of them."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half].item()  # type: ignore[no-any-return]
    return (ordered[half - 1].item() + ordered[half].item()) / 2  # type: ignore[no-any-return]
