"""Adds the spool files of one process to a run: spans, metrics, logs, what was open, and whether it still lives."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from raytrace_rl import _decode
from raytrace_rl.monitor import otlp_parts
from raytrace_rl.monitor.builder import check_ids, identify
from raytrace_rl.monitor.model import StackRow
from raytrace_rl.monitor.otlp_parts import Wrong
from raytrace_rl.monitor.signals import log_rows, metric_rows
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool import listing, liveness
from raytrace_rl.spool.reader import Cursor, Damage, Record, UnreadableFileError, read_whole

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from raytrace_rl.monitor.builder import Builder
    from raytrace_rl.monitor.model import SpanRow, State

_PROVEN_OVER = ("dead", "closed")


def is_spool_file(path: Path) -> bool:
    """Whether the file is one of the spool's, by its first bytes or else by its name."""
    if path.suffix in {".rts", ".open"}:
        return True
    try:
        return read_whole(str(path), len(fmt.MAGIC)) == fmt.MAGIC
    except UnreadableFileError:
        return False


def single_file(path: Path) -> listing.ProcessFiles:
    """Returns the files of a process of which one file alone is to be read."""
    path = path.absolute()
    match = re.match(r"(\d{1,10}-\d{1,20})\.", path.name)
    stem = match.group(1) if match else "0-0"
    files = listing.ProcessFiles(path.parent.name, stem, str(path.parent / f"{stem}.live"))
    if path.suffix == ".open":
        files.slots = str(path)
    else:
        files.segments[0] = str(path)
    return files


def add_process(builder: Builder, files: listing.ProcessFiles) -> None:
    """Adds one process.

    The order matters while it lives: its state first (all that a process proven dead wrote is then there to be read),
    then what is open, then what has ended, so that a span that ends meanwhile is found ended.
    """
    ProcessReader(builder, files).read()


def boot_id(files: listing.ProcessFiles) -> bytes:
    """Returns the boot id of the host that a process ran on; zeros where its files do not say."""
    for path in [*files.segments.values(), *files.journals.values(), files.slots]:
        if path is None:
            continue
        try:
            return fmt.parse_header(read_whole(path, fmt.MAX_HEADER_SIZE)).boot_id
        except (UnreadableFileError, ValueError):
            continue
    return bytes(16)


def rubbish(path: str, kind: int, offset: int, size: int, part: tuple[int, int, object]) -> Damage:
    """Returns the damage that a part of a record's content is.

    Args:
        path: The file.
        kind: Of the record.
        offset: Where the record starts.
        size: Of its content.
        part: Where in the content the part starts, how long it is, and why it cannot be read.
    """
    at, length, why = part
    where = f", at {at}" if length < size else ""
    return Damage(path, offset, length, f"content of a record of kind {kind}{where}: {why}", "payload")


class ProcessReader:
    """Reads one process's files into a `Run` under construction."""

    def __init__(self, builder: Builder, files: listing.ProcessFiles) -> None:
        self.builder = builder
        self.files = files
        self.process = builder.process(f"{files.node}/{files.stem}")
        self.open: dict[bytes, _decode.Span] = {}
        self.gone: set[bytes] = set()
        self.headers: list[fmt.Header] = []
        self.resource: _decode.Attributes | None = None
        self.anchors: list[tuple[int, int]] = []
        #: Told of parts of the present record that cannot be read.
        self.wrong = Wrong(lambda *_: None)
        #: What is damaged in the last segment written to: of a killed process, maybe the record that it was placing.
        self.last_damage: list[Damage] = []
        #: Offset of the last whole record in that segment.
        self.last_offset = -1

    def read(self) -> None:
        """Reads them all."""
        files, process = self.files, self.process
        process.node, process.pid, process.start_ns = files.node, files.pid, files.start_ns
        process.state = self._state()
        self._slots()
        for _, path in sorted(files.journals.items()):
            self._file(path)
        for number, path in self._segments():
            self._file(path, number)
        self._close()

    def _state(self) -> State:
        """Whether it lives."""
        return liveness.state(self.files.live, boot_id(self.files))

    def _segments(self) -> list[tuple[int, str]]:
        """The segments to read, by number."""
        return sorted(self.files.segments.items())

    def _slots(self) -> None:
        if self.files.slots is None:
            return
        header, spans, damage = listing.read_slots(self.files.slots)
        if header is not None:
            self.headers.append(header)
        if damage is not None and damage.kind != "vanished":
            self.builder.damage(damage)
        for data in spans:
            try:
                self._note_open(_decode.span(data))
            except ValueError:
                continue  # a slot is written while it is read; the journal has the span too

    def _note_open(self, span: _decode.Span) -> None:
        span.end_ns = 0
        self.open[span.trace_id + span.span_id] = span

    def _file(self, path: str, number: int | None = None) -> None:
        process = self.process
        ended = 0
        last = -1
        with Cursor(path) as cursor:
            for record in cursor.poll(final=process.state in _PROVEN_OVER):
                last = record.offset
                ended += self._take(path, record)
            header = cursor.header
            if number is not None:
                self._settle(path, header, cursor.damage, last, ended)
                return
            self._damaged(cursor.damage)
        if header is not None:
            self.headers.append(header)

    def _settle(
        self, path: str, header: fmt.Header | None, damage: Iterable[Damage], last_offset: int, ended: int
    ) -> None:
        """Notes what a segment that was read through says of itself.

        Args:
            path: Of the segment.
            header: Of it; None if it cannot be read.
            damage: What is damaged in it.
            last_offset: Of its last whole record, -1 if there is none.
            ended: Span records in it that can be read.
        """
        if header is None:
            self._damaged(damage)
            return
        damage = list(damage)
        if damage or last_offset >= 0:  # else it was made ahead of need: the process was writing the one before it
            self._damaged(self.last_damage)
            self.last_damage, self.last_offset = damage, last_offset
        self.headers.append(header)
        if header.sealed and ended < header.span_count:
            reason = f"sealed with {header.span_count} span records, {ended} of them can be read"
            self.builder.damage(Damage(path, 0, 0, reason, "count", header.span_count - ended))

    def _take(self, path: str, record: Record) -> bool:
        """Takes one record, or what is not rubbish of it; returns as `_record` does."""
        size = len(record.payload)

        def note(at: int, length: int, why: object) -> None:
            self.builder.damage(rubbish(path, record.kind, record.offset, size, (at, length, why)))

        self.wrong = Wrong(note)
        try:
            return self._record(record) and not self.wrong.count
        except (ValueError, RecursionError) as error:
            self.wrong(0, size, error)
            return False

    def _record(self, record: Record) -> bool:
        """Takes one record; returns whether it is one of those that a sealed header counts."""
        kind, payload = record.kind, record.payload
        if kind == fmt.Kind.SPAN:
            self.builder.add(_decode.span(payload), self.process)
            return True
        if kind == fmt.Kind.SCOPE_SPANS:
            scope, spans = otlp_parts.scope_spans(payload, self.wrong, check_ids)
            for span in spans:
                self.builder.add(span, self.process, scope)
            return True
        if kind == fmt.Kind.OPEN_SPAN:
            self._note_open(_decode.span(payload))
        elif kind == fmt.Kind.SPAN_GONE:
            self.gone.add(payload[:24])
        elif kind == fmt.Kind.METRICS:
            self.builder.run.metrics += metric_rows(payload, self.process, self.wrong)
        elif kind == fmt.Kind.LOGS:
            self.builder.run.logs += log_rows(payload, self.process, self.wrong)
        elif kind == fmt.Kind.RESOURCE:
            self.resource = _decode.resource(payload)
        elif kind == fmt.Kind.CLOCK:
            if len(payload) < 16:
                raise ValueError("clock record is too short")
            self.anchors.append((int.from_bytes(payload[:8], "little"), int.from_bytes(payload[8:16], "little")))
        elif kind == fmt.Kind.PEER_CLOCK:
            delay_ns, node = fmt.read_peer_clock(payload)
            self.process.peers[node] = min(delay_ns, self.process.peers.get(node, delay_ns))
        elif kind == fmt.Kind.DROPS:
            drops = json.loads(payload)
            if isinstance(drops, dict):
                self.process.drops = {str(k): v for k, v in drops.items() if type(v) is int and v >= 0}
        elif kind == fmt.Kind.STACK:
            if len(payload) < 32:
                raise ValueError("stack record is too short")
            time_ns = int.from_bytes(payload[24:32], "little")
            text = payload[32:].decode("utf-8", "replace")
            row = StackRow(payload[:16].hex(), payload[16:24].hex(), time_ns, text)
            if payload[:24] == fmt.NO_SPAN:
                self.process.threads = row
            else:
                self.builder.stack(row)
        return False

    def _identify(self) -> None:
        resource = self.resource
        if resource is None:
            for header in sorted(self.headers, key=lambda header: header.heartbeat_ns, reverse=True):
                try:
                    resource = _decode.resource(header.resource)
                except ValueError:
                    continue
                break
        identify(self.process, resource or {})

    def _clocks(self) -> None:
        """Notes the process's clocks; a header that was made up for want of its own has no monotonic one."""
        for header in self.headers:
            if header.monotonic_anchor_ns and any(header.boot_id):
                self.process.boot_id = header.boot_id.hex()
                first = (header.wall_anchor_ns, header.monotonic_anchor_ns)
                self.process.anchors = [first, *sorted(self.anchors, key=lambda anchor: anchor[1])]
                return

    def _damaged(self, found: Iterable[Damage]) -> None:
        for damage in found:
            self.builder.damage(damage)

    def _close(self) -> None:
        """Settles what came of the open spans, now that everything has been read."""
        process = self.process
        # A kill may come in the midst of placing a record: one a process, since the GIL lets one place at a time. Its
        # span had not ended then. It is among the open ones, named as truncated, and not lost a second time.
        torn = [damage for damage in self.last_damage if damage.kind == "record" and damage.offset > self.last_offset]
        if process.state == "dead" and [damage.count for damage in torn] == [1]:
            self.last_damage.remove(torn[0])
        self._damaged(self.last_damage)
        self._identify()
        self._clocks()
        process.heartbeat_ns = max((header.heartbeat_ns for header in self.headers), default=0)
        process.last_ns = max(process.last_ns, process.heartbeat_ns, process.start_ns)
        dropped = max((header.dropped_spans for header in self.headers), default=0)
        if dropped:
            process.drops["spans"] = max(dropped, process.drops.get("spans", 0))
        rows: list[SpanRow] = []
        for key, span in self.open.items():
            if key in self.gone or self.builder.ended(span):
                continue
            try:
                row = self.builder.add(span, process)
            except ValueError:
                continue  # a torn slot
            if row is not None:
                rows.append(row)
        if process.state in _PROVEN_OVER:
            # A span that ended after the last beat is a later sign of life than that.
            for row in rows:
                row.truncate(process.last_ns)
