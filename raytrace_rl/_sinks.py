"""Where records go when they do not go to a spool: nowhere, counted; nowhere, wanted; the console; or a test."""

from __future__ import annotations

import sys
from typing import Protocol

from raytrace_rl import _decode, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.spool.format import RECORD_HEADER, Kind, pack_record


class Sink(Protocol):
    """What the span path asks of the writer behind the current segment."""

    def append_record(self, record: bytes) -> bool:
        """Takes one whole record. False: it is lost, and the caller counts it."""
        ...

    def append(self, kind: int, payload: bytes) -> bool:
        """Takes one record's payload, as `append_record`."""
        ...


class NoSink:
    """The directory is unusable: everything is lost, and counted by the caller."""

    def append_record(self, record: bytes) -> bool:
        """Loses the record."""
        return False

    def append(self, kind: int, payload: bytes) -> bool:
        """Loses the record."""
        return False


class NullSink(NoSink):
    """``exporter="none"``: spans are made, for their context and for others' instrumentation, and kept nowhere."""

    def append_record(self, record: bytes) -> bool:
        """Takes the record and forgets it, as asked."""
        return True

    def append(self, kind: int, payload: bytes) -> bool:
        """Takes the record and forgets it, as asked."""
        return True


class MemorySink:
    """Keeps records for a test to look at.

    Attributes:
        records: Kind and payload of each, in the order in which they came.
    """

    def __init__(self) -> None:
        self.records: list[tuple[int, bytes]] = []

    def append_record(self, record: bytes) -> bool:
        """Keeps the record."""
        return self.append(record[4], record[RECORD_HEADER.size :])

    def append(self, kind: int, payload: bytes) -> bool:
        """Keeps the record."""
        self.records.append((kind, payload))  # atomic: threads need no lock
        return True


class ConsoleSink:
    """``exporter="console"``: one line a span on standard error."""

    def append_record(self, record: bytes) -> bool:
        """Prints the span in ``record``."""
        kind = record[4]
        payload = record[RECORD_HEADER.size :]
        try:
            if kind == Kind.SPAN:
                self._print(_decode.span(payload))
            elif kind == Kind.SCOPE_SPANS:
                for span in _decode.scope_spans(payload).spans:
                    self._print(span)
        except (ValueError, OSError) as error:
            if is_interrupt(error):
                raise
            _state.warn_once("console", "A span could not be printed: %s", error)
            return False
        return True

    @staticmethod
    def _print(span: _decode.Span) -> None:
        shown = " ".join(f"{key}={value!r}" for key, value in span.attributes.items() if not key.startswith("thread."))
        seconds = (span.end_ns - span.start_ns) / 1e9
        stream = sys.stderr
        if stream is None:  # print() would take standard output instead
            raise OSError("there is no standard error")
        print(f"[{span.trace_id.hex()[:8]}] {span.name} {seconds:.6f}s {shown}", file=stream)

    def append(self, kind: int, payload: bytes) -> bool:
        """Prints the span in ``payload``."""
        return self.append_record(pack_record(kind, payload))
