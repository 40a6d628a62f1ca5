"""Skew and queueing over columns: delays by the two processes that they lie between, and times shifted lane by lane."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raytrace_rl.monitor import align, queueing, skew
from raytrace_rl.monitor.believed import LONGEST_S
from raytrace_rl.monitor.bulk.arrays import Ints, runs
from raytrace_rl.monitor.skew_bounds import Message
from raytrace_rl.monitor.skew_messages import Clocks, message

if TYPE_CHECKING:
    from raytrace_rl.monitor.bulk.columns import Columns
    from raytrace_rl.monitor.model import Process
    from raytrace_rl.monitor.skew import Skew


class _Delays(NamedTuple):
    """Delays of calls that came the same way: places in ``columns.queued``, who sent and received, what was said."""

    at: Ints
    sender: str | None
    receiver: Process
    parent: Process | None


def _delays(columns: Columns) -> Iterator[_Delays]:
    """Yields the delays that are believed."""
    rows, values = columns.queued
    believed = np.flatnonzero(np.abs(values) <= LONGEST_S * 1e9)
    rows = rows[believed]
    names, told = columns.coded("queued_from")
    parent = columns.parent[rows]
    parent_lane = np.where(parent >= 0, columns.lane[parent], -1)
    order = np.lexsort((parent_lane, columns.lane[rows], names[columns.shape[rows]]))
    keys = np.stack((names[columns.shape[rows]], columns.lane[rows], parent_lane))[:, order]
    change = np.concatenate(([True], (keys[:, 1:] != keys[:, :-1]).any(axis=0))) if len(rows) else np.zeros(0, np.bool_)
    bounds = np.append(np.flatnonzero(change), len(rows))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        name, lane, above = keys[:, begin].tolist()
        sender = columns.processes[above] if above >= 0 else None
        yield _Delays(believed[order[begin:end]], told[name], columns.processes[lane], sender)


def of_columns(columns: Columns) -> Skew:
    """As `skew.skew`."""
    run = columns.run
    if run.skew is not None:
        return run.skew
    clocks = Clocks(run.processes)
    with_spans = _nodes_with_spans(columns)
    if len(with_spans) < 2:
        return skew.of_messages(run.processes, with_spans, clocks, ())
    found = skew.of_messages(run.processes, with_spans, clocks, _messages(columns, clocks))
    found.early, found.early_ns = _early(columns)
    return found


def _nodes_with_spans(columns: Columns) -> dict[str, None]:
    sizes = np.diff(columns.bounds).tolist()
    named = [process.node for process, size in zip(columns.processes, sizes, strict=True) if size and process.node]
    return dict.fromkeys(named)


def _messages(columns: Columns, clocks: Clocks) -> Iterator[Message]:
    values = columns.queued[1]
    for way in _delays(columns):
        if way.sender is not None:
            smallest = int(values[way.at].min())
            sent = message(smallest, way.sender, way.receiver, way.parent, clocks)
            if sent is not None:
                yield sent._replace(number=len(way.at))
    links = columns.links
    told = np.flatnonzero((links.node >= 0) & ~np.isnan(links.age))
    ways = columns.lane[links.row[told]].astype(np.int64) * len(columns.nodes) + links.node[told]
    order = np.argsort(ways, kind="stable")
    bounds = runs(ways[order])
    if len(order):
        smallest = np.minimum.reduceat(links.age[told][order], bounds[:-1]).tolist()
        firsts = ways[order][bounds[:-1]].tolist()
        for way, age_s, number in zip(firsts, smallest, np.diff(bounds).tolist(), strict=True):
            lane, node = divmod(way, len(columns.nodes))
            sent = message(ceil(age_s * 1e9), columns.nodes[node], columns.processes[lane], None, clocks)
            if sent is not None:
                yield sent._replace(number=number)


def _early(columns: Columns) -> tuple[int, int]:
    """As `skew.early`."""
    nodes = {node: n for n, node in enumerate(dict.fromkeys(process.node for process in columns.processes))}
    node = np.array([nodes[process.node] for process in columns.processes], np.int32)
    rows = np.flatnonzero(columns.parent >= 0)
    parent = columns.parent[rows]
    by = columns.start[parent] - columns.start[rows]
    by = by[(by > 0) & (node[columns.lane[rows]] != node[columns.lane[parent]])]
    return len(by), int(by.max(initial=0))


def shift(columns: Columns) -> None:
    """As `align.align`: shifts the times of a run to the clock of the driver's node."""
    run = columns.run
    found = of_columns(columns)
    if found.aligned:
        return
    clocks = Clocks(run.processes)
    ahead_ns = {node.node: estimate for node in found.nodes if (estimate := node.estimate_ns) is not None}
    values = columns.queued[1]
    for way in list(_delays(columns)):
        if way.sender is not None:
            sent = message(0, way.sender, way.receiver, way.parent, clocks)
            if sent is not None and sent.sender in ahead_ns and sent.receiver in ahead_ns:
                values[way.at] += sent.delay_ns - (ahead_ns[sent.receiver] - ahead_ns[sent.sender])
    place = {process.key: lane for lane, process in enumerate(columns.processes)}
    for process in run.processes:
        by_ns = clocks.own_ns(process) - ahead_ns.get(process.node, 0) if process.node else 0
        if by_ns and process.key in place:
            rows = columns.rows_of(place[process.key])
            columns.start[rows] += by_ns
            columns.until[rows] += by_ns
        align.shift_process(process, by_ns)
    for node in found.nodes:
        node.aligned = node.node in ahead_ns
    found.aligned = True
    found.early, found.early_ns = _early(columns)
    run.skew = found


def queueing_of(columns: Columns) -> dict[str, Any]:
    """As `queueing.queueing`."""
    clocks, aligned = Clocks(columns.run.processes), queueing.aligned_nodes(columns.run)
    ranks: dict[tuple[str, int | None], queueing.Rank] = {}
    for way in _delays(columns):
        here = way.receiver.node
        rank = ranks.setdefault((queueing.callee(way.receiver), way.receiver.rank), queueing.Rank())
        delays = columns.queued[1][way.at]
        rank.delays += np.maximum(0, delays).tolist()
        rank.below_zero += int((delays < 0).sum())
        if way.sender is not None:
            sender = clocks.named(way.sender)
            rank.unknown_node += len(delays) if sender is None else 0
            rank.other_node += len(delays) if sender not in {None, here} else 0
            rank.corrected += len(delays) if sender != here and {sender, here} <= aligned else 0
    return queueing.section(ranks)
