"""The journal of open spans: each noted once in full, again when its attributes change, and struck out when it ends.

A file of its own, rewritten when full with what is open then: long-open spans never push ended ones out of the spool.
Only the heartbeat writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import monotonic
from typing import Final, Protocol

from raytrace_rl import _state
from raytrace_rl.spool.format import MAX_PAYLOAD, Kind, pack_record
from raytrace_rl.spool.segment import Segment, create_segment
from raytrace_rl.spool.writer import SpoolWriter

_SMALLEST: Final = 64 << 10
#: A bound of its own: beyond it, further open spans are only in the table of open spans.
LARGEST: Final = 8 << 20
#: With more open spans than the bound allows, seconds until the file is next written anew.
FULL_PAUSE_S: Final = 30.0
#: Stacks of spans that are open, kept in memory for the next time the file is written anew; the oldest go first.
STACKS_MAX: Final = LARGEST // 2


class OpenSpan(Protocol):
    """What the journal and the heartbeat ask of a span that is open."""

    @property
    def version(self) -> int:
        """Goes up when an attribute changes."""
        ...

    @property
    def ids(self) -> bytes:
        """Trace id (16) and span id (8)."""
        ...

    def open_payload(self) -> bytes:
        """OTLP ``Span`` without an end time."""
        ...


class Journal:
    """The open-span file of one process."""

    def __init__(self, writer: SpoolWriter) -> None:
        self._writer = writer
        self._segment: Segment | None = None
        self._number = 0
        self._noted: dict[bytes, int] = {}
        self._open: list[OpenSpan] = []
        #: The latest STACK record of each open span.
        self._stacks: dict[bytes, bytes] = {}
        self._stacks_size = 0
        self._rewrite_at = 0.0
        #: Something that should be in the file is not: it is written anew when that may be.
        self._incomplete = False

    def note(self, spans: Iterable[OpenSpan]) -> None:
        """Brings the file up to date with ``spans``, the spans open now."""
        records: list[bytes] = []
        current: dict[bytes, int] = {}
        self._open = list(spans)
        for span in self._open:
            try:
                ids, version = span.ids, span.version
            except Exception as error:
                _warn_of_span(error)
                continue
            if self._noted.get(ids) != version:
                records += _open_record(span)
            current[ids] = version
        for ids in self._noted:
            if ids not in current:
                records.append(pack_record(Kind.SPAN_GONE, ids))
                self._stacks_size -= len(self._stacks.pop(ids, b""))
        self._noted = current
        if self._incomplete and monotonic() >= self._rewrite_at:
            self._rewrite()
        elif records:
            self._write(records)

    def note_stack(self, ids: bytes, time_ns: int, stack: str) -> None:
        """Notes where the thread of an open span stands."""
        payload = ids + time_ns.to_bytes(8, "little") + stack.encode("utf-8", "backslashreplace")[:65536]
        record = pack_record(Kind.STACK, payload)
        self._stacks_size += len(record) - len(self._stacks.pop(ids, b""))
        self._stacks[ids] = record
        while self._stacks_size > STACKS_MAX:
            self._stacks_size -= len(self._stacks.pop(next(iter(self._stacks))))
        self._write([record])

    def stacks(self) -> list[bytes]:
        """Returns the latest STACK record of each span that was open at the last `note`."""
        return list(self._stacks.values())

    def _write(self, records: list[bytes]) -> None:
        data = b"".join(records)
        segment = self._segment
        if segment is None or segment.position + len(data) > segment.capacity:
            self._incomplete = True
            if monotonic() >= self._rewrite_at:
                self._rewrite()
            return
        _place(segment, data)

    def _rewrite(self) -> None:
        """Begins anew with what is open, the outermost first, then where it stands: as much as the bound allows."""
        room = LARGEST - 4096 - len(self._writer.resource)
        kept: list[bytes] = []
        size = 0
        complete = True
        for record in [*(record for span in self._open for record in _open_record(span)), *self._stacks.values()]:
            if size + len(record) <= room:
                kept.append(record)
                size += len(record)
            else:
                complete = False
                self._rewrite_at = monotonic() + FULL_PAUSE_S
        path, link = self._writer.paths(f".open.{self._number}.rts")
        header = self._writer.header(self._number)
        try:
            new = create_segment(
                path, link, min(max(_SMALLEST, 2 * size + 4096 + len(header.resource)), LARGEST), header
            )
        except OSError as error:
            self._noted = {}  # tried again at the next beat
            self._writer.warn_of(error)
            return
        self._incomplete = not complete
        self._number += 1
        _place(new, b"".join(kept))  # before the old file goes: the process may be killed between the two
        old, self._segment = self._segment, new
        if old is not None:
            _remove(old)

    def close(self) -> None:
        """Removes the file: after a clean close nothing is open."""
        if self._segment is not None:
            _remove(self._segment)
            self._segment = None


def _open_record(span: OpenSpan) -> list[bytes]:
    try:
        payload = span.open_payload()
    except Exception as error:  # a foreign span in the midst of a change: the others are noted all the same
        _warn_of_span(error)
        return []
    return [pack_record(Kind.OPEN_SPAN, payload)] if len(payload) <= MAX_PAYLOAD else []


def _warn_of_span(error: Exception) -> None:
    _state.warn_once("journal-span", "An open span cannot be noted: %r", error)


def _place(segment: Segment, data: bytes) -> None:
    start = segment.position
    segment.position = start + len(data)
    segment.buffer[start : start + len(data)] = data


def _remove(segment: Segment) -> None:
    segment.close()
    for path in {segment.link, segment.path}:
        try:
            os.unlink(path)
        except OSError:
            pass
