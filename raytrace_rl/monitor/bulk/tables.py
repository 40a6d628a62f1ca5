"""The tables of a report over columns: what `raytrace_rl.monitor.tables` is told of steps, names, processes, traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from raytrace_rl.monitor import tables
from raytrace_rl.monitor.bulk.arrays import Ints, Mask, sums
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.rows import ColumnRow


def rows_where(columns: Columns, which: Mask) -> list[ColumnRow]:
    """Returns the chosen spans, in the order of their start; there must be few."""
    return [ColumnRow(columns, at) for at in columns.in_order(np.flatnonzero(which)).tolist()]


def steps(columns: Columns) -> dict[str, Any]:
    """As `tables.steps`."""
    of_group = np.array([shape.span_group == tables.STEP for shape in columns.shapes], np.bool_)
    return tables.step_table(rows_where(columns, of_group[columns.shape]))  # type: ignore[arg-type]


def span_names(columns: Columns) -> list[dict[str, Any]]:
    """As `tables.span_names`."""
    name_of_shape, names = columns.coded("name")
    by_shape = np.bincount(columns.shape, ~columns.opened, len(columns.shapes)).astype(np.int64)
    groups: list[Counter[str | None]] = [Counter() for _ in names]
    buckets: list[Counter[str | None]] = [Counter() for _ in names]
    errors = [0] * len(names)
    for shape, code, count in zip(columns.shapes, name_of_shape.tolist(), by_shape.tolist(), strict=True):
        if count:
            groups[code][shape.span_group] += count
            buckets[code][shape.bucket] += count
            errors[code] += count if shape.error else 0
    # By name; what is open is behind them all. Small numbers are sorted in one pass.
    codes = np.where(columns.opened, len(names), name_of_shape[columns.shape])
    order = np.argsort(codes.astype(np.uint16) if len(names) < 1 << 16 else codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names) + 1)).tolist()
    del codes
    table = []
    for code, (begin, end) in enumerate(pairwise([0, *ends[:-1]])):
        rows = order[begin:end]
        if len(rows):
            times = of_lengths(columns.until[rows] - columns.start[rows])
            table.append(tables.name_entry(names[code], groups[code], buckets[code], times, errors[code]))
    return sorted(table, key=tables.by_total)


def of_lengths(lengths: Ints) -> dict[str, Any]:
    """As `tables.durations`, of durations in any order."""
    return tables.of_durations(_Ordered(np.sort(lengths)), int(lengths.sum()))


class _Ordered(Sequence[int]):
    """An array as the sequence of Python's numbers that it holds."""

    def __init__(self, values: Ints) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        return self._values[at].item()


def processes(columns: Columns) -> list[dict[str, Any]]:
    """As `tables.processes`."""
    truncated = columns.by_shape("truncated")[columns.shape]
    count = len(columns.processes)

    def by_key(rows: Mask | None) -> Counter[str]:
        lanes = columns.lane if rows is None else columns.lane[rows]
        found = np.bincount(lanes, minlength=count).tolist()
        return Counter({process.key: number for process, number in zip(columns.processes, found, strict=True)})

    return tables.process_table(columns.run, by_key(None), by_key(truncated), by_key(columns.opened))


def loss(columns: Columns) -> dict[str, Any]:
    """As `tables.loss`."""
    truncated = rows_where(columns, columns.by_shape("truncated")[columns.shape])
    opened = rows_where(columns, columns.opened)
    return tables.loss_table(columns.run, len(columns), truncated, opened)  # type: ignore[arg-type]


def traces(columns: Columns) -> dict[str, Any]:
    """As `tables.traces`."""
    has_parent = columns.by_shape("has_parent")
    name_of_shape, names = columns.coded("name")

    def by_name(shapes: Any) -> Counter[str]:
        counts = sums(name_of_shape, np.bincount(shapes, minlength=len(columns.shapes)), len(names)).tolist()
        return Counter({name: count for name, count in zip(names, counts, strict=True) if count})

    roots = columns.shape[~has_parent[columns.shape]]
    orphans = columns.shape[(columns.parent < 0) & has_parent[columns.shape]]
    return tables.trace_table(len(np.unique(columns.trace)), by_name(roots), by_name(orphans))
