"""Writes a run as a Perfetto trace (protobuf), which opens at ui.perfetto.dev.

A thread has a track, and more of them where its tasks overlap (`tracks`).

Field numbers are those of ``protos/perfetto/trace/`` in the Perfetto sources; the tests read what is written with the
official classes. Packets are written track by track, so that of events at one moment an end comes before the next
start, and an outer start before an inner one: Perfetto sorts by time and keeps the order of what is equal.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, Final

from raytrace_rl._encode import delimited, varint
from raytrace_rl.monitor.tracks import Track, tracks

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, Run, SpanRow

_UINT64: Final = 1 << 64
_SLICE_BEGIN: Final = 1
_SLICE_END: Final = 2
_INSTANT: Final = 3
_BOOTTIME: Final = 6
_REALTIME: Final = 1
#: The one sequence of packets, and that its interned names are its own.
_SEQUENCE: Final = b"\x50\x01"
_CLEARED: Final = b"\x68\x01"
_NEEDS_NAMES: Final = b"\x68\x02"
#: Arrows from a span to its children in other processes; beyond this they are a thicket.
_ARROWS_MAX: Final = 100
#: The UI shows no more of a text anyway.
_TEXT_MAX: Final = 4096


def _uint(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value % _UINT64)


def _bytes(number: int, value: bytes) -> bytes:
    return delimited(varint(number << 3 | 2), value)


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value[:_TEXT_MAX].encode("utf-8", "replace"))


class _Names:
    """Names that are written once and then named by a number (``InternedData``)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], int] = {}
        self._new: list[bytes] = []

    def iid(self, kind: int, name: str) -> int:
        """The number of a name; ``kind`` is its field in ``InternedData``: categories, event names, annotations."""
        found = self._known.get((kind, name))
        if found is None:
            found = self._known[kind, name] = len(self._known) + 1
            self._new.append(_bytes(kind, _uint(1, found) + _text(2, name)))
        return found

    def take(self) -> bytes:
        """The ``InternedData`` field for the next packet."""
        new, self._new = self._new, []
        return _bytes(12, b"".join(new)) if new else b""


_CATEGORIES: Final = 1
_EVENTS: Final = 2
_ANNOTATIONS: Final = 3


class _Writer:
    def __init__(self, run: Run, out: IO[bytes]) -> None:
        self._run = run
        self._out = out
        self._names = _Names()
        self._next_uuid = 1
        self._arrows = _arrows(run)

    def _packet(self, content: bytes) -> None:
        self._out.write(_bytes(1, _SEQUENCE + self._names.take() + content))

    def _uuid(self) -> int:
        self._next_uuid += 1
        return self._next_uuid

    def write(self, progress: Callable[[int, int], None]) -> None:
        """Writes the whole trace."""
        written = 0
        first = min((row.start_ns for row in self._run.spans), default=0)
        clocks = b"".join(_bytes(1, _uint(1, clock) + _uint(2, first)) for clock in (_BOOTTIME, _REALTIME))
        self._packet(_CLEARED + _uint(8, first) + _bytes(6, clocks))
        by_process: dict[str, list[SpanRow]] = {}
        for row in self._run.spans:
            by_process.setdefault(row.process.key, []).append(row)
        for number, process in enumerate(self._run.processes, 1):
            rows = by_process.pop(process.key, [])
            self._process(process, number, rows)
            written += len(rows)
            progress(written, len(self._run.spans))

    def _process(self, process: Process, number: int, rows: list[SpanRow]) -> None:
        # Ids are numbers of our own: Perfetto takes equal pids, which two nodes may well have, for one process.
        uuid = self._uuid()
        name = f"{process.label} on {process.node}" if process.node else process.label
        self._packet(_bytes(60, _uint(1, uuid) + _text(2, name) + _bytes(3, _uint(1, number) + _text(6, name))))
        threads: dict[int, int] = {}
        for position, track in enumerate(tracks(rows), 1):
            own = self._uuid()
            if track.number == 0:
                threads[track.thread_id] = own
                thread = _uint(1, number) + _uint(2, number * 1_000_000 + position) + _text(5, track.name)
                self._packet(_bytes(60, _uint(1, own) + _uint(5, uuid) + _bytes(4, thread)))
            else:
                # An asynchronous track below the thread's.
                self._packet(_bytes(60, _uint(1, own) + _uint(5, threads[track.thread_id]) + _text(2, track.name)))
            for event in self._events(track, own):
                self._packet(event)

    def _events(self, track: Track, uuid: int) -> Iterator[bytes]:
        to_end: list[SpanRow] = []

        def ends(until: int | None) -> Iterator[bytes]:
            while to_end and (until is None or (to_end[-1].end_ns or _UINT64) <= until):
                row = to_end.pop()
                if row.end_ns is not None:
                    event = _uint(9, _SLICE_END) + _uint(11, uuid)
                    yield _NEEDS_NAMES + _uint(8, max(row.end_ns, row.start_ns)) + _bytes(11, event)

        for row in track.rows:
            yield from ends(row.start_ns)
            yield self._begin(row, uuid)
            to_end.append(row)
            for event in row.events:
                content = _uint(9, _INSTANT) + _uint(11, uuid) + _text(23, event.name)
                content += self._annotations(event.attributes)
                yield _NEEDS_NAMES + _uint(8, min(max(event.time_ns, row.start_ns), row.until_ns)) + _bytes(11, content)
        yield from ends(None)

    def _begin(self, row: SpanRow, uuid: int) -> bytes:
        iid = self._names.iid
        parts = [_uint(9, _SLICE_BEGIN), _uint(11, uuid), _uint(10, iid(_EVENTS, row.name))]
        parts += [_uint(3, iid(_CATEGORIES, name)) for name in (row.bucket, row.span_group) if name]
        started, ended = self._arrows.get(row.trace_id + row.span_id, ((), None))
        parts += [varint(47 << 3 | 1) + flow.to_bytes(8, "little") for flow in started]
        if ended is not None:
            parts.append(varint(48 << 3 | 1) + ended.to_bytes(8, "little"))
        about: dict[str, Any] = {**row.attributes, "trace_id": row.trace_id, "span_id": row.span_id}
        if row.status != "UNSET":
            about["status"] = row.status
        if row.status_message:
            about["status_message"] = row.status_message
        parts.append(self._annotations(about))
        return _NEEDS_NAMES + _uint(8, row.start_ns) + _bytes(11, b"".join(parts))

    def _annotations(self, values: Mapping[str, Any]) -> bytes:
        return b"".join(
            _bytes(4, _uint(1, self._names.iid(_ANNOTATIONS, key)) + _value(value)) for key, value in values.items()
        )


def _value(value: Any) -> bytes:
    """The value of a ``DebugAnnotation``."""
    if isinstance(value, bool):
        return _uint(2, value)
    if isinstance(value, int):
        return _uint(4, value)
    if isinstance(value, float):
        return varint(5 << 3 | 1) + struct.pack("<d", value)
    return _text(6, value if isinstance(value, str) else str(value))


def _arrows(run: Run) -> dict[str, tuple[list[int], int | None]]:
    """Of each span the flows that start at it (to children in other processes), and the one that ends at it."""
    owners = {row.trace_id + row.span_id: row.process for row in run.spans}
    arrows: dict[str, tuple[list[int], int | None]] = {}
    for number, row in enumerate(run.spans, 1):
        parent = row.trace_id + (row.parent_span_id or "")
        owner = owners.get(parent)
        if owner is None or owner is row.process:
            continue
        started = arrows.setdefault(parent, ([], None))[0]
        if len(started) < _ARROWS_MAX:
            started.append(number)
            key = row.trace_id + row.span_id
            arrows[key] = arrows.get(key, ([], None))[0], number
    return arrows


def write(run: Run, out: IO[bytes], progress: Callable[[int, int], None]) -> int:
    """Writes every span of ``run`` to ``out``; returns how many. A span that is still open has no end.

    Args:
        run: The run.
        out: A binary file.
        progress: Called with how many spans have been written, and how many there are.
    """
    _Writer(run, out).write(progress)
    return len(run.spans)
