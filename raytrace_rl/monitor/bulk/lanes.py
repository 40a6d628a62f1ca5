"""What each process left, while a run's columns are gathered: its spans in order, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Mask, Words
from raytrace_rl.monitor.bulk.coder import Coder
from raytrace_rl.monitor.bulk.links import LinkCoders, Links, joined_links, links_of
from raytrace_rl.monitor.bulk.parts import LATEST_NS, Part, shape_of
from raytrace_rl.monitor.bulk.templates import NUMBERS
from raytrace_rl.monitor.bulk.threads import Threads, threads_of
from raytrace_rl.monitor.model import Process, SpanRow

_NONE: Final = -1


class NotForColumnsError(Exception):
    """The run holds something that columns cannot say: it has to be read row by row."""


class Lane:
    """What one process left, while the columns are gathered: its spans in the order of their start, each once.

    Args:
        process: Whose.
        parts: Its segments, in their order.
        singles: Rows that came one by one, and whether that was because they were open at the end; the others came
            before the segments.
        coders: Of the run: of shapes, traces, threads, iterations and links.
    """

    def __init__(
        self, process: Process, parts: Sequence[Part], singles: Sequence[tuple[SpanRow, bool]], coders: Coders
    ) -> None:
        self.process = process
        parts = [_single_part([row for row, late in singles if not late]), *parts]
        parts.append(_single_part([row for row, late in singles if late]))
        late = len(parts[-1].span)
        self.start: Ints = np.concatenate([part.start for part in parts])
        self.end: Ints = np.concatenate([part.end for part in parts])
        self.span: Words = np.concatenate([part.span for part in parts])
        self.parent: Words = np.concatenate([part.parent for part in parts])
        self.shape = _recoded(parts, "shape", "shapes", coders.shapes)
        self.trace = _recoded(parts, "trace", "traces", coders.traces)
        self.thread = coders.numbered(parts)
        self.iteration = _recoded(parts, "iteration", "iterations", coders.iterations)
        #: Spans that were open when all had been read; if met elsewhere too, the other one holds.
        self.late: Mask = np.zeros(len(self.start), np.bool_)
        self.late[len(self.start) - late :] = True
        firsts = np.cumsum([0, *(len(part.span) for part in parts)])
        self.queued = sparse([(part.queued, first) for part, first in zip(parts, firsts, strict=False)])
        self.version = sparse([(part.version, first) for part, first in zip(parts, firsts, strict=False)])
        self.links = joined_links(
            [coders.recoded(part, int(first)) for part, first in zip(parts, firsts, strict=False)]
        )
        truncated = np.array([shape.truncated for shape in coders.shapes.things], np.bool_)
        self.duplicates, keep = _once(self, truncated)
        order = np.argsort(self.start[keep], kind="stable")
        self._arrange(keep[order])

    def _arrange(self, order: Ints) -> None:
        for name in ("start", "end", "span", "parent", "shape", "trace", "thread", "iteration", "late"):
            setattr(self, name, getattr(self, name)[order])
        place = np.full(int(order.max()) + 1 if len(order) else 0, _NONE, np.int64)
        place[order] = np.arange(len(order))
        self.links = self.links.of_rows(place)
        for name in ("queued", "version"):
            at, values = getattr(self, name)
            there = at < len(place)
            at, values = place[at[there]], values[there]
            sort = np.argsort(at[at >= 0])
            setattr(self, name, (at[at >= 0][sort], values[at >= 0][sort]))

    def last_of(self, at: int) -> int:
        """Its last sign of life of one span, ns since the epoch."""
        return int(self.end[at] or self.start[at])


def _single_part(rows: Sequence[SpanRow]) -> Part:
    shapes, traces, iterations, links = Coder(), Coder(), Coder(), LinkCoders()
    numbers = [row.attributes.get(NUMBERS[2]) for row in rows]
    queued = [(n, row.queued_ns) for n, row in enumerate(rows) if row.queued_ns is not None]
    version = [(n, value) for n, value in enumerate(numbers) if type(value) is int]
    times = [time for row in rows for time in (row.start_ns, row.end_ns or 0)]
    if any(time >= LATEST_NS for time in times):
        raise NotForColumnsError("a time that no clock shows")

    def ids(texts: Sequence[str | None]) -> Words:
        return np.array([int(text, 16) if text and len(text) == 16 else 0 for text in texts], np.uint64)

    def codes(values: Sequence[int]) -> Codes:
        return np.array(values, np.int32)

    def pairs(values: Sequence[tuple[int, Any]]) -> tuple[Ints, Ints]:
        return np.array([at for at, _ in values], np.int64), np.array([value for _, value in values], np.int64)

    return Part(
        ids([row.span_id for row in rows]),
        ids([row.parent_span_id for row in rows]),
        np.array(times[::2], np.int64),
        np.array(times[1::2], np.int64),
        codes([shapes.code(shape_of(row)) for row in rows]),
        codes([traces.code(bytes.fromhex(row.trace_id)) for row in rows]),
        np.arange(len(rows), dtype=np.int32),
        codes([_NONE if row.iteration is None else iterations.code(row.iteration) for row in rows]),
        shapes.things,
        traces.things,
        threads_of((row.thread, row.thread_id) for row in rows),
        iterations.things,
        pairs(queued),
        pairs(version),
        links_of(((n, link) for n, row in enumerate(rows) for link in row.links), links),
        links.traces.things,
        links.nodes.things,
        False,
    )


class Coders:
    """The numbers of shapes, traces, threads, iterations and what links lead to, for all of a run."""

    def __init__(self) -> None:
        self.shapes, self.traces, self.iterations = Coder(), Coder(), Coder()
        self.links = LinkCoders()
        self.threads: list[Threads] = []
        self._threads = 0

    def numbered(self, parts: Sequence[Part]) -> Codes:
        """Returns numbers for the threads of parts; those of different parts are not compared."""
        arrays = []
        for part in parts:
            arrays.append(part.thread + np.int32(self._threads))
            self._threads += len(part.threads)
            self.threads.append(part.threads)
        return np.concatenate(arrays)

    def recoded(self, part: Part, first: int) -> Links:
        """Returns the links of a part by the numbers of the run, its spans' rows from ``first`` on."""
        links = part.links
        traces = np.array([*map(self.links.traces.code, part.link_traces)], np.int32)
        nodes = np.array([*map(self.links.nodes.code, part.nodes), _NONE], np.int32)  # -1 leads to the last
        return links._replace(row=links.row + first, trace=traces[links.trace], node=nodes[links.node])


def _recoded(parts: Sequence[Part], column: str, things: str, coder: Coder) -> Codes:
    arrays = []
    for part in parts:
        codes = np.array([*map(coder.code, getattr(part, things)), _NONE], np.int32)  # -1 leads to the last
        arrays.append(codes[getattr(part, column)])
    return np.concatenate(arrays)


def sparse(pairs: Sequence[tuple[tuple[Ints, Ints], Any]]) -> tuple[Ints, Ints]:
    """Joins rows and their values, each pair with the number of the first row."""
    return np.concatenate([at + first for (at, _), first in pairs]), np.concatenate(
        [values for (_, values), _ in pairs]
    )


def keys_of(span: Words, trace: Codes) -> Words:
    """One number for trace and span id. Two that are not the same may have the same number: whoever asks looks."""
    if not len(trace) or not trace.max():
        return span
    mix = np.random.Generator(np.random.PCG64(11)).integers(1, 1 << 63, int(trace.max()) + 1, np.uint64)
    mix[0] = 0
    mixed: Words = span ^ mix[trace]
    return mixed


def _once(lane: Lane, truncated: Mask) -> tuple[int, Ints]:
    """How often a span was met again within the lane, and the rows that hold, as `Builder.add` takes them."""
    size = len(lane.span)
    keys = keys_of(lane.span, lane.trace)
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    if not same.any():
        return 0, np.arange(size)
    groups = np.split(order, np.flatnonzero(~same) + 1)
    dropped: list[int] = []
    duplicates = 0
    stands_for = np.arange(size)
    for group in groups:
        if len(group) < 2:
            continue
        first, *others = group.tolist()
        held = first
        for at in others:
            if lane.span[at] != lane.span[held] or lane.trace[at] != lane.trace[held]:
                raise NotForColumnsError("two ids that look alike")
            duplicates += 1
            cut, held_cut = bool(truncated[lane.shape[at]]), bool(truncated[lane.shape[held]])
            opened = not lane.end[at] or bool(lane.late[at])
            if opened or (lane.end[held] and (cut or not held_cut)):
                if lane.last_of(at) > lane.last_of(held):
                    raise NotForColumnsError("a span that was met twice, and ended later the second time")
                dropped.append(at)
            else:
                dropped.append(held)
                stands_for[at] = first
                held = at
    keep = np.ones(size, np.bool_)
    keep[dropped] = False
    kept = np.flatnonzero(keep)
    return duplicates, kept[np.argsort(stands_for[kept], kind="stable")]


def across(lanes: Sequence[Lane], truncated: Mask) -> int:
    """Lets each span that several processes left count once, as `Builder.add` does; returns how many came again."""
    if len(lanes) < 2:
        return 0
    keys = keys_of(np.concatenate([lane.span for lane in lanes]), np.concatenate([lane.trace for lane in lanes]))
    ordered = np.sort(keys)
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(again):
        return 0
    rows = np.flatnonzero(np.isin(keys, again))
    bounds = np.cumsum([0, *(len(lane.span) for lane in lanes)])
    held: dict[tuple[int, int], tuple[int, int]] = {}
    dropped: dict[int, list[int]] = {}
    duplicates = 0
    for row in rows.tolist():
        number = int(np.searchsorted(bounds, row, side="right")) - 1
        lane, at = lanes[number], row - int(bounds[number])
        key = int(lane.trace[at]), int(lane.span[at])
        if key not in held:
            held[key] = number, at
            continue
        if lane.duplicates or lanes[held[key][0]].duplicates:
            raise NotForColumnsError("spans that were met several times, in one process and in others")
        other, place = lanes[held[key][0]], held[key][1]
        cut, other_cut = bool(truncated[lane.shape[at]]), bool(truncated[other.shape[place]])
        if lane.late[at]:
            duplicates += not other.end[place] or other_cut
        else:
            duplicates += 1
            if lane.end[at] and not (other.end[place] and (cut or not other_cut)):
                dropped.setdefault(held[key][0], []).append(place)
                held[key] = number, at
                continue
        started = int(lane.start[at])
        if (started if lane.late[at] else lane.last_of(at)) >= lane.process.last_ns:
            raise NotForColumnsError("a span that another process has ended, and that is the last of its own")
        dropped.setdefault(number, []).append(at)
    for number, places in dropped.items():
        keep = np.ones(len(lanes[number].span), np.bool_)
        keep[places] = False
        lanes[number]._arrange(np.flatnonzero(keep))
    return duplicates
