"""Spans in the order of their end, which critical paths go back along: the children of spans, what steps link to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raytrace_rl.monitor.bulk.arrays import Codes, Ints
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.tree import ColumnTree
from raytrace_rl.monitor.critical_path import SKEW_NS


class Below(NamedTuple):
    """Spans by what they are below, and there by their end: ``first`` of each, rows and ends."""

    first: Ints | Codes
    row: Codes
    end: Ints

    def before(self, now: Ints, low: Ints | Codes, high: Ints | Codes) -> Ints:
        """Returns for each of several stretches, given by their bounds, where what ends after ``now`` begins."""
        low, high = low.astype(np.int64), high.astype(np.int64)
        searched = np.flatnonzero(low < high)
        while len(searched):
            middle = (low[searched] + high[searched]) >> 1
            later = self.end[middle] > now[searched]
            high[searched[later]] = middle[later]
            low[searched[~later]] = middle[~later] + 1
            searched = searched[low[searched] < high[searched]]
        return high


def children(tree: ColumnTree) -> Below:
    """Returns the children of each span that have a length, in the order of their end by the parent's clock."""
    columns = tree.columns
    rows = tree.every_child
    rows = rows[columns.until[rows] > columns.start[rows]]
    parent, end = columns.parent[rows], columns.until[rows]
    node = nodes(columns)
    if node.any():
        limit = columns.until[parent]
        early = (end > limit) & (end <= limit + SKEW_NS) & (node[columns.lane[rows]] != node[columns.lane[parent]])
        end[early] = limit[early]
    first = np.zeros(len(columns) + 1, np.int32)
    np.cumsum(np.bincount(parent, minlength=len(columns)), out=first[1:], dtype=np.int32)
    # Most children are in that order already, since they are in that of their start.
    unordered = np.zeros(len(columns), np.bool_)
    unordered[parent[1:][(parent[1:] == parent[:-1]) & (end[1:] < end[:-1])]] = True
    at = np.flatnonzero(unordered[parent])
    order = at[np.lexsort((end[at], parent[at]))]
    rows[at], end[at] = rows[order], end[order]
    return Below(first, rows, end)


def producers(tree: ColumnTree) -> Below:
    """Returns what the spans of each step link to, in the order of their end."""
    columns = tree.columns
    links, bounds = tree.links_by_step
    step = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    row = columns.link_target[links]
    real = np.flatnonzero((row >= 0) & ~columns.opened[row]) if len(columns) else links[:0]
    step, row = step[real], row[real]
    order = np.lexsort((row, columns.span[row], columns.start[row], columns.until[row], step))
    step, row = step[order], row[order]
    new = np.ones(len(row), np.bool_)
    new[1:] = (step[1:] != step[:-1]) | (row[1:] != row[:-1])
    step, row = step[new], row[new]
    return Below(np.searchsorted(step, np.arange(len(bounds))), row, columns.until[row])


def nodes(columns: Columns) -> Codes:
    """Returns a number for the node of each lane."""
    nodes = {node: n for n, node in enumerate(dict.fromkeys(process.node for process in columns.processes))}
    return np.array([nodes[process.node] for process in columns.processes], np.int32)
