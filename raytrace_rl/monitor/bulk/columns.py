"""`Columns`: the spans of a run as arrays, lane by lane, and who is whose parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Mask, Words, give_back, nearest, total
from raytrace_rl.monitor.bulk.coder import Coder
from raytrace_rl.monitor.bulk.lanes import Coders, Lane, NotForColumnsError, keys_of, sparse
from raytrace_rl.monitor.bulk.links import Links, Trace, joined_links
from raytrace_rl.monitor.bulk.parts import LATEST_NS, Shape
from raytrace_rl.monitor.bulk.templates import NUMBERS
from raytrace_rl.monitor.bulk.threads import Threads, joined_threads, threads_of
from raytrace_rl.monitor.model import BUCKETS, Run

_NONE: Final = -1
_RANK: Final = {bucket: rank for rank, bucket in enumerate(BUCKETS)}


class Columns:
    """A run.

    Args:
        run: Its processes, damage and stacks; without spans.
        lanes: What each process left, in the order in which they were read; they are taken apart.
        coders: Of its shapes, traces, threads and iterations.

    Attributes:
        run: As given.
        processes: Of each lane.
        bounds: Where each lane begins, and at last the number of spans; a lane's are in the order of their start.
        start, until: ns since the epoch; ``until`` as `SpanRow.until_ns`.
        opened: Still without an end.
        shape, trace, thread, iteration: Places in ``shapes``, ``traces``, ``threads`` and ``iterations`` (-1:
            none).
        span: Ids as numbers.
        parent: Row of its parent, -1 without one in the run.
        lane: Its lane.
        queued, version: Row and value of ``rl.queued_ns`` and ``rl.weight_version``.
        links, link_traces, nodes: What spans link to, and the traces and nodes that these are of.
        link_target: Row of the span that each link leads to, -1 where it is not in the run.
    """

    def __init__(self, run: Run, lanes: list[Lane], coders: Coders) -> None:
        self.run = run
        self.processes = [lane.process for lane in lanes]
        sizes = [len(lane.start) for lane in lanes]
        self.bounds: Ints = np.cumsum([0, *sizes])
        self.shapes: list[Shape] = coders.shapes.things
        self.traces: list[bytes] = coders.traces.things
        self.threads: Threads = joined_threads(coders.threads or [threads_of(())])
        self.iterations: list[int] = coders.iterations.things
        self.queued = sparse([(lane.queued, at) for lane, at in zip(lanes, self.bounds, strict=False)] or _NO_PAIRS)
        self.version = sparse([(lane.version, at) for lane, at in zip(lanes, self.bounds, strict=False)] or _NO_PAIRS)
        of_lanes = zip(lanes, self.bounds, strict=False)
        self.links: Links = joined_links([lane.links._replace(row=lane.links.row + first) for lane, first in of_lanes])
        self.link_traces: list[Trace] = coders.links.traces.things
        self.nodes: list[str] = coders.links.nodes.things
        self.start: Ints = _taken(lanes, "start", np.int64)
        end: Ints = _taken(lanes, "end", np.int64)
        self.span: Words = _taken(lanes, "span", np.uint64)
        self.shape: Codes = _taken(lanes, "shape", np.int32)
        self.trace: Codes = _taken(lanes, "trace", np.int32)
        self.thread: Codes = _taken(lanes, "thread", np.int32)
        self.iteration: Codes = _taken(lanes, "iteration", np.int32)
        self.lane: Codes = np.repeat(np.arange(len(lanes), dtype=np.int32), sizes)
        self.opened: Mask = end == 0
        last_signs = [time for process in self.processes for time in (process.last_ns, process.start_ns)]
        if any(time >= LATEST_NS for time in last_signs):
            raise NotForColumnsError("a time that no clock shows")
        last = np.array(last_signs[::2], np.int64)
        if self.opened.any():
            end[self.opened] = last[self.lane[self.opened]]
        self.until: Ints = np.maximum(end, self.start, out=end)
        give_back()
        if total(self.until - self.start) >= LATEST_NS:  # from here on sums of 64 bits are exact
            raise NotForColumnsError("times that no clock shows")
        self.parent, self.link_target = _parents(self, _taken(lanes, "parent", np.uint64))
        _refuse_circles(self)

    def __len__(self) -> int:
        return len(self.start)

    def rows_of(self, lane: int) -> slice:
        """The rows of a lane."""
        return slice(int(self.bounds[lane]), int(self.bounds[lane + 1]))

    def by_shape(self, of: str, kind: Any = np.bool_) -> Any:
        """Returns a field of each shape as an array."""
        return np.array([getattr(shape, of) for shape in self.shapes], kind)

    def ranks(self) -> Codes:
        """Returns the place in `BUCKETS` of each shape's bucket, -1 without one."""
        return np.array([_RANK.get(shape.bucket or "", _NONE) for shape in self.shapes], np.int32)

    def thread_ids(self) -> Codes:
        """Returns a number for the id of each thread; whatever its name, a thread is the one that has that id."""
        known, ids = self.threads.known, self.threads.id
        found: Codes = (np.unique(np.where(known, ids, 0), return_inverse=True)[1] * 2 + known).astype(np.int32)
        return found

    def coded(self, of: str) -> tuple[Codes, list[Any]]:
        """Returns a number for a field of each shape, and what the numbers stand for."""
        coder = Coder()
        return np.array([coder.code(getattr(shape, of)) for shape in self.shapes], np.int32), coder.things

    def few_attributes(self, row: int) -> dict[str, int]:
        """Returns those attributes of a row that were kept: its weight version."""
        at = int(np.searchsorted(self.version[0], row))
        there = at < len(self.version[0]) and self.version[0][at] == row
        return {NUMBERS[2]: int(self.version[1][at])} if there else {}

    def in_order(self, rows: Ints) -> Ints:
        """Returns rows in the order of their start, as a run has them."""
        rows = np.sort(rows)
        return rows[np.argsort(self.start[rows], kind="stable")]


_NO_PAIRS: Final = [((np.zeros(0, np.int64), np.zeros(0, np.int64)), 0)]


def _taken(lanes: Sequence[Lane], name: str, kind: Any) -> Any:
    """One column of all lanes, which lose it: there is never a second copy of more than one column."""
    whole = np.empty(sum(len(getattr(lane, name)) for lane in lanes), kind)
    at = 0
    for lane in lanes:
        column = getattr(lane, name)
        whole[at : at + len(column)] = column
        at += len(column)
        delattr(lane, name)
    return whole


def _parents(columns: Columns, parent: Words) -> tuple[Codes, Codes]:
    """Who is whose parent, and where links lead to."""
    found = np.full(len(parent), _NONE, np.int32)
    keys = keys_of(columns.span, columns.trace)
    order = np.argsort(keys).astype(np.int32)
    ordered = keys[order]
    del keys

    def look_up(wanted: Words) -> Ints:
        at = np.searchsorted(ordered, wanted)
        at[at == len(ordered)] = 0
        return np.where(ordered[at] == wanted, order[at], _NONE)

    if len(parent):
        # Neighbours mostly have the same parent: each is looked up once.
        wanted = keys_of(parent, columns.trace)
        heads = np.flatnonzero(np.concatenate(([True], (wanted[1:] != wanted[:-1]))))
        sort = np.argsort(wanted[heads])
        rows = np.empty(len(heads), np.int64)
        rows[sort] = look_up(wanted[heads[sort]])
        found[:] = np.repeat(rows, np.diff(heads, append=len(parent)))
        found[parent == 0] = _NONE
        there = np.flatnonzero(found >= 0)
        wrong = (columns.span[found[there]] != parent[there]) | (columns.trace[found[there]] != columns.trace[there])
        if wrong.any():
            raise NotForColumnsError("two ids that look alike")
    return found, _targets(columns, look_up)


def _refuse_circles(columns: Columns) -> None:
    """Where parents run in a circle within a lane, all at one time, `lanes` cuts it by the order of its spans."""
    rows = np.flatnonzero(columns.parent >= 0)
    parent = columns.parent[rows]
    close = (columns.start[parent] == columns.start[rows]) & (columns.lane[parent] == columns.lane[rows])
    close &= parent != rows
    rows, parent = rows[close], parent[close]
    size = len(rows)
    if not size:
        return
    place = np.minimum(np.searchsorted(rows, parent), size - 1)
    up = np.where(rows[place] == parent, place, _NONE)
    if (nearest(up, up < 0)[up >= 0] < 0).any():
        raise NotForColumnsError("spans whose parents run in a circle")


def _targets(columns: Columns, look_up: Any) -> Codes:
    links = columns.links
    found = np.full(len(links.row), _NONE, np.int32)
    places = {trace: n for n, trace in enumerate(columns.traces)}
    place = [places.get(trace, _NONE) if odd is None else _NONE for trace, odd in columns.link_traces]
    trace = np.array([*place, _NONE], np.int32)[links.trace]
    known = np.flatnonzero(trace >= 0)
    if not len(known) or not len(columns):
        return found
    span, trace = links.span[known], trace[known]
    if trace.max() < len(columns.traces) - 1:  # the numbers are made for as many traces as there are
        span, trace = np.append(span, np.uint64(0)), np.append(trace, np.int32(len(columns.traces) - 1))
    rows = look_up(keys_of(span, trace))[: len(known)]
    span, trace = span[: len(known)], trace[: len(known)]
    there = rows >= 0
    known, rows, span, trace = known[there], rows[there], span[there], trace[there]
    if ((columns.span[rows] != span) | (columns.trace[rows] != trace)).any():
        raise NotForColumnsError("two ids that look alike")
    found[known] = rows
    return found
