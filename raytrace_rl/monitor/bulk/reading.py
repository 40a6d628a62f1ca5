"""Reads the spools of a run into `Columns`: segments in parallel processes, then process by process.

What is no ended span (open ones, resources, stacks, what was dropped) is rare, and goes the way of `spool_files`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raytrace_rl.monitor import otlp_parts, spool_files
from raytrace_rl.monitor.builder import Builder, check_ids
from raytrace_rl.monitor.bulk import clocks
from raytrace_rl.monitor.bulk.arrays import give_back_at_once
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.decoding import Decoder
from raytrace_rl.monitor.bulk.framing import SegmentFile
from raytrace_rl.monitor.bulk.lanes import Coders, Lane, NotForColumnsError, across
from raytrace_rl.monitor.bulk.parts import Part
from raytrace_rl.monitor.load import ALONE_BYTES, Progress, file_size, spool_processes
from raytrace_rl.monitor.model import SpanRow, UnreadableRunError
from raytrace_rl.monitor.relay_counters import add_home_losses
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool import liveness
from raytrace_rl.spool.reader import Damage, Record

if TYPE_CHECKING:
    from raytrace_rl._decode import Scope, Span
    from raytrace_rl.monitor.model import Process
    from raytrace_rl.spool.listing import ProcessFiles

#: Segments read ahead of their turn, for each process that reads.
_AHEAD: Final = 4


@dataclass(slots=True)
class _Segment:
    """What one segment held."""

    part: Part
    others: list[Record]
    payload_damage: list[Damage]
    damage: list[Damage]
    header: fmt.Header | None
    last_offset: int
    ended: int


def _read_segment(path: str, final: bool) -> _Segment:
    file = SegmentFile(path, final=final)
    decoder = Decoder()
    others: list[Record] = []
    damage: list[Damage] = []
    ended = 0
    for frames in file.frames():
        decoder.add(frames)
        span = (frames.kind == fmt.Kind.SPAN) | (frames.kind == fmt.Kind.SCOPE_SPANS)
        ended += int(span.sum()) - len({at for at, *_ in decoder.errors})
        wrong: list[tuple[int, int, int, object]] = list(decoder.errors)
        for at in np.flatnonzero(~span).tolist():
            kind = int(frames.kind[at])
            if kind not in {fmt.Kind.METRICS, fmt.Kind.LOGS}:
                others.append(Record(kind, frames.payload(at), int(frames.offset[at])))
                continue
            # The report has no use for them, but says if one is damaged.
            decode: Any = otlp_parts.scope_metrics if kind == fmt.Kind.METRICS else otlp_parts.scope_logs
            parts: list[tuple[int, int, object]] = []
            decode(frames.payload(at), otlp_parts.Wrong(lambda *part, parts=parts: parts.append(part)))
            wrong += [(at, *part) for part in parts]
        for at, begin, length, why in sorted(wrong, key=lambda one: one[0]):
            kind, offset, size = (int(of[at]) for of in (frames.kind, frames.offset, frames.size))
            damage.append(spool_files.rubbish(path, kind, offset, size, (begin, length, why)))
    return _Segment(decoder.part(), others, damage, file.damage, file.header, file.last_offset, ended)


class _Builder(Builder):
    """Keeps the rows that come one by one: spans that were open, and those of journals."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.singles: list[tuple[SpanRow, bool]] = []
        self.closing = False
        self.is_ended: Callable[[bytes], bool] = lambda _: False

    def ended(self, span: Span) -> bool:
        """Whether the span has been met with its end, in the same process."""
        return self.is_ended(span.trace_id + span.span_id)

    def add(self, span: Span, process: Process, scope: Scope | None = None) -> SpanRow | None:
        """Keeps a span."""
        check_ids(span)
        row = SpanRow(span, process, scope)
        process.last_ns = max(process.last_ns, row.end_ns or row.start_ns)
        self.singles.append((row, self.closing))
        return row


class _ProcessReader(spool_files.ProcessReader):
    """Reads one process, its segments from what other processes have made of them."""

    def __init__(self, builder: _Builder, files: ProcessFiles, segments: _Segments) -> None:
        super().__init__(builder, files)
        self.parts: list[Part] = []
        self._own_builder = builder
        self._read_by_others = segments
        self._following: Iterator[_Segment] | None = None

    def _file(self, path: str, number: int | None = None) -> None:
        if number is None:
            super()._file(path)
            return
        if self._following is None:
            self._following = self._read_by_others.of(self.files, final=self.process.state in {"dead", "closed"})
        segment = next(self._following)
        damages = list(segment.payload_damage)
        for record in segment.others:
            try:
                self._record(record)
            except (ValueError, RecursionError) as error:
                reason = f"content of a record of kind {record.kind}: {error}"
                damages.append(Damage(path, record.offset, len(record.payload), reason, "payload"))
        for damage in sorted(damages, key=lambda damage: damage.offset):
            self.builder.damage(damage)
        self.parts.append(segment.part)
        if len(segment.part.start):
            if segment.part.absurd:
                raise NotForColumnsError("a time that no clock shows")
            start, end = segment.part.start, segment.part.end
            self.process.last_ns = max(self.process.last_ns, int(np.where(end > 0, end, start).max()))
        self._settle(path, segment.header, segment.damage, segment.last_offset, segment.ended)

    def _close(self) -> None:
        self._own_builder.closing = True
        self._own_builder.is_ended = self._ended_ids().__contains__
        super()._close()
        self._own_builder.closing = False

    def _ended_ids(self) -> set[bytes]:
        """Which of the spans that were noted as open have ended."""
        wanted = np.array([int.from_bytes(key[16:24], "big") for key in self.open if len(key) == 24], np.uint64)
        found: set[bytes] = set()
        for part in self.parts if len(wanted) else ():
            for at in np.flatnonzero(np.isin(part.span, wanted)).tolist():
                if part.end[at] and not part.shapes[part.shape[at]].truncated:
                    found.add(part.traces[part.trace[at]] + int(part.span[at]).to_bytes(8, "big"))
        return found


def read(path: str | os.PathLike[str], progress: Progress | None = None, *, align: bool = False) -> Columns:
    """Reads the spools of a run directory.

    Args:
        path: As `raytrace_rl.monitor.load_run` takes it; a directory.
        progress: Called with how many bytes have been read, and how many there are.
        align: Shift the times of other nodes, as `raytrace_rl.monitor.load_run` does.

    Raises:
        UnreadableRunError: Nothing is there to read.
        NotForColumnsError: It has to be read row by row.
    """
    give_back_at_once()
    path = Path(path)
    builder = _Builder(str(path))
    coders = Coders()
    lanes: list[Lane] = []
    with contextlib.ExitStack() as stack:
        every = spool_processes(path)
        segments = _Segments(every, progress, stack)
        for files in every:
            builder.singles = []
            reader = _ProcessReader(builder, files, segments)
            reader.read()
            lanes.append(Lane(reader.process, reader.parts, builder.singles, coders))
    truncated = np.array([shape.truncated for shape in coders.shapes.things], np.bool_)
    run = builder.run
    run.duplicates += sum(lane.duplicates for lane in lanes) + across(lanes, truncated)
    for lane in lanes:
        if not lane.process.start_ns and len(lane.start):
            lane.process.start_ns = int(lane.start[0])
    columns = Columns(builder.finish(), lanes, coders)
    add_home_losses(columns.run)
    if align:
        clocks.shift(columns)
    return columns


def _result(job: Future[_Segment], path: str) -> _Segment:
    try:
        return job.result()
    except BrokenProcessPool:
        raise UnreadableRunError(f"{path}: the process that read it was killed (out of memory?)") from None


class _Segments:
    """The segments of all processes in their order, read a few ahead."""

    def __init__(self, every: list[ProcessFiles], progress: Progress | None, stack: contextlib.ExitStack) -> None:
        self._waiting = deque((files, path) for files in every for _, path in sorted(files.segments.items()))
        self._sizes = {path: file_size(path) for _, path in self._waiting}
        self._whole = sum(self._sizes.values())
        self._done = 0
        self._progress = progress
        self._running: dict[str, Future[_Segment]] = {}
        self._begun: set[str] = set()
        self._pool: ProcessPoolExecutor | None = None
        workers = min(os.cpu_count() or 1, len(self._waiting))
        self._ahead = workers * _AHEAD
        if workers > 1 and self._whole > ALONE_BYTES:
            # Started anew rather than forked: this process may have threads.
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
            stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)

    def of(self, files: ProcessFiles, *, final: bool) -> Iterator[_Segment]:
        """Yields the segments of one process, whose turn it is; ``final``: it is proven to have ended."""
        own = deque(path for _, path in sorted(files.segments.items()))
        while own:
            if self._pool is None:
                segment = _read_segment(own[0], final)
            else:
                for path in list(own)[: self._ahead]:
                    self._start(self._pool, path, final)
                self._read_ahead(self._pool)
                segment = _result(self._running.pop(own[0]), own[0])
            self._done += self._sizes[own.popleft()]
            if self._progress is not None:
                self._progress(self._done, self._whole)
            yield segment

    def _start(self, pool: ProcessPoolExecutor, path: str, final: bool) -> None:
        if path not in self._begun:
            self._begun.add(path)
            self._running[path] = pool.submit(_read_segment, path, final)

    def _read_ahead(self, pool: ProcessPoolExecutor) -> None:
        """Starts on segments of processes whose turn comes, but not of one that lives: what it had open comes first."""
        while self._waiting and len(self._running) < self._ahead:
            files, path = self._waiting[0]
            if path not in self._begun:
                if liveness.state(files.live, spool_files.boot_id(files)) not in {"dead", "closed"}:
                    return
                self._start(pool, path, final=True)
            self._waiting.popleft()
