"""The journal of open spans: each noted once in full, again when its attributes change, and struck out when it ends.

A file of its own, rewritten when full with what is open then: long-open spans never push ended ones out of the spool.
Only the heartbeat writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, Protocol

from raytrace_rl import _state
from raytrace_rl.spool.format import MAX_PAYLOAD, Kind, pack_record
from raytrace_rl.spool.segment import Segment, create_segment
from raytrace_rl.spool.writer import SpoolWriter

_SMALLEST: Final = 64 << 10
#: A bound of its own: beyond it, further open spans are only in the table of open spans.
LARGEST: Final = 8 << 20


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

    def note(self, spans: Iterable[OpenSpan]) -> None:
        """Brings the file up to date with ``spans``, the spans open now."""
        records: list[bytes] = []
        current: dict[bytes, int] = {}
        open_now = list(spans)
        for span in open_now:
            ids = span.ids
            version = span.version
            if self._noted.get(ids) != version:
                payload = span.open_payload()
                if len(payload) <= MAX_PAYLOAD:
                    records.append(pack_record(Kind.OPEN_SPAN, payload))
            current[ids] = version
        records += [pack_record(Kind.SPAN_GONE, ids) for ids in self._noted if ids not in current]
        self._noted = current
        if records:
            self._write(records, open_now)

    def note_stack(self, ids: bytes, time_ns: int, stack: str) -> None:
        """Notes where the thread of an open span stands."""
        payload = ids + time_ns.to_bytes(8, "little") + stack.encode("utf-8", "backslashreplace")[:65536]
        self._write([pack_record(Kind.STACK, payload)], ())

    def _write(self, records: list[bytes], open_now: Iterable[OpenSpan]) -> None:
        data = b"".join(records)
        if self._segment is None or self._segment.position + len(data) > self._segment.capacity:
            if self._segment is not None:  # full: begin anew with what is open, and nothing else
                whole = [pack_record(Kind.OPEN_SPAN, span.open_payload()) for span in open_now]
                data = b"".join(whole) if whole else data
            if not self._rewrite(len(data)):
                return
        segment = self._segment
        if segment is None or segment.position + len(data) > segment.capacity:
            return
        start = segment.position
        segment.position = start + len(data)
        segment.buffer[start : start + len(data)] = data

    def _rewrite(self, needed: int) -> bool:
        size = min(max(_SMALLEST, 2 * needed + 4096 + len(self._writer.resource)), LARGEST)
        path, link = self._writer.paths(f".open.{self._number}.rts")
        try:
            segment = create_segment(path, link, size, self._writer.header(self._number))
        except OSError as error:
            _state.warn_once("journal", "Open spans cannot be noted in %s: %s", link, error)
            return False
        self._number += 1
        old, self._segment = self._segment, segment
        if old is not None:
            _remove(old)
        return True

    def close(self) -> None:
        """Removes the file: after a clean close nothing is open."""
        if self._segment is not None:
            _remove(self._segment)
            self._segment = None


def _remove(segment: Segment) -> None:
    segment.close()
    for path in {segment.link, segment.path}:
        try:
            os.unlink(path)
        except OSError:
            pass
