"""The spool of one process: its segments one after another, and what becomes of a record when there is no room."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from raytrace_rl import _clock, _state
from raytrace_rl.spool import seal
from raytrace_rl.spool.format import MAX_PAYLOAD, Header, Kind, pack_record
from raytrace_rl.spool.liveness import boot_id
from raytrace_rl.spool.place import Place
from raytrace_rl.spool.segment import Segment, create_segment, no_segment

FIRST_SIZE: Final = 1 << 20
LARGEST_SIZE: Final = 8 << 20
SMALLEST_SIZE: Final = 64 << 10
#: After a failure to make a segment, the next try waits this long (seconds); records meanwhile are dropped, counted.
RETRY_S: Final = 1.0


class SpoolWriter:
    """Owns the segments of this process.

    Appending to the current segment needs no lock (`Segment`); rolling over takes a re-entrant one, since a signal
    handler may end a span in the midst of it.

    Attributes:
        place: Where the files lie.
        stem: ``<pid>-<start>``, the process's name in every file name.
        resource: OTLP Resource of the process, for the header of the next segment.
    """

    def __init__(self, place: Place, resource: bytes, *, bound_bytes: int) -> None:
        """Opens the first segment.

        Args:
            place: Where the files lie.
            resource: OTLP Resource bytes.
            bound_bytes: What all spools of the node may take together.

        Raises:
            OSError: The first segment cannot be made.
        """
        self.place = place
        self.start_ns = _clock.now_ns()
        self.pid = os.getpid()
        self.stem = f"{self.pid}-{self.start_ns}"
        self.resource = resource
        self.bound_bytes = bound_bytes
        #: Called from the append path, maybe inside a signal handler: wakes the heartbeat. Never blocks.
        self.wake: Callable[[], None] = _nothing
        self._lock = threading.RLock()
        self._next: Segment | None = None
        self._full: list[Segment] = []
        self._number = 0
        self._retry_at = 0.0
        self._closed = False
        self.segment: Segment = no_segment()
        self.segment = self._create()

    def header(self, number: int) -> Header:
        """Returns the header of this process's file ``number``."""
        return Header(
            size=0,
            heartbeat_ns=_clock.now_ns(),
            span_count=0,
            dropped_spans=_state.drops["spans"],
            sealed=False,
            pid=self.pid,
            number=number,
            start_ns=self.start_ns,
            wall_anchor_ns=_clock.ANCHOR.wall_ns,
            monotonic_anchor_ns=_clock.ANCHOR.monotonic_ns,
            boot_id=boot_id(),
            resource=self.resource,
        )

    def paths(self, suffix: str) -> tuple[str, str]:
        """Returns where this process's file with ``suffix`` is mapped, and its name in the run directory."""
        name = self.stem + suffix
        return os.path.join(self.place.active, name), os.path.join(self.place.directory, name)

    def append(self, kind: int, payload: bytes) -> bool:
        """Places one record. False if it is dropped, which the caller counts in its own unit."""
        if len(payload) > MAX_PAYLOAD:
            return False
        return self.append_record(pack_record(kind, payload))

    def append_record(self, record: bytes) -> bool:
        """Places a complete record, opening the next segment if the current one is full. False if it is dropped."""
        while True:
            segment = self.segment
            start = segment.position
            segment.position = stop = start + len(record)
            try:
                segment.buffer[start:stop] = record
            except (IndexError, ValueError):
                if not self._roll(segment, start, len(record)):
                    return False
            else:
                return True

    def _roll(self, full: Segment, start: int, needed: int) -> bool:
        """Makes the next segment current in place of ``full``. False if none can be had."""
        with self._lock:
            full.end = min(full.end, start)
            if self.segment is not full:
                return True  # another thread, or a handler inside this very call, was here before
            if self._closed or monotonic() < self._retry_at:
                return False
            new = self._take_next(needed)
            if new is None:
                try:
                    new = self._create(needed)
                except OSError as error:
                    self._retry_at = monotonic() + RETRY_S
                    _state.warn_once(
                        "spool-roll",
                        "The spool in %s cannot grow (%s): spans are dropped and counted until it can.",
                        self.place.directory,
                        error,
                    )
                    return False
            # a handler may have rolled meanwhile: the new segment then stays empty
            self._full.append(full if self._replace(full, new) else new)
        self.wake()
        return True

    def _replace(self, full: Segment, new: Segment) -> bool:
        if self.segment is not full:
            return False
        self.segment = new
        if _state.writer is self:
            _state.segment = new
        return True

    def _take_next(self, needed: int) -> Segment | None:
        prepared, self._next = self._next, None
        if prepared is not None and prepared.capacity - prepared.position < needed:
            self._full.append(prepared)
            return None
        return prepared

    def _create(self, needed: int = 0) -> Segment:
        with self._lock:
            number = self._number
            self._number += 1
        size = min(FIRST_SIZE << number, LARGEST_SIZE, max(self.bound_bytes // 8, SMALLEST_SIZE))
        header = self.header(number)
        path, link = self.paths(f".{number}.rts")
        return create_segment(path, link, max(size, needed + 4096 + len(header.resource)), header)

    # -- called by the heartbeat, off the hot path --------------------------------------------------------------

    def prepare_next(self) -> None:
        """Makes the next segment ahead of need, once the current one is half full."""
        segment = self.segment
        if self._wants_next() and segment.position > segment.capacity // 2:
            try:
                prepared = self._create()
            except OSError:
                return  # the append path will meet it, warn and count
            with self._lock:
                if self._wants_next():
                    self._next = prepared
                else:
                    self._full.append(prepared)

    def _wants_next(self) -> bool:
        return self._next is None and not self._closed

    def beat(self) -> None:
        """Rewrites the sign of life in the current segment's header."""
        try:
            self.segment.beat(_clock.now_ns(), _state.drops["spans"])
        except (ValueError, IndexError):
            pass  # rolled or closed just now

    def seal_full(self) -> None:
        """Seals the segments that are full, then keeps the node inside its bound."""
        while self._full:
            self._seal(self._full.pop())
            seal.enforce_bound(self.place, self.bound_bytes)

    def _seal(self, segment: Segment) -> None:
        end = segment.close()
        try:
            seal.seal_file(segment.path, segment.link, end)
        except (OSError, ValueError) as error:
            _state.warn_once(
                "spool-seal",
                "Spool file %s stays where it is, unsealed but readable: %s",
                segment.path,
                error,
            )

    def close(self) -> None:
        """Places the close record and seals everything. Later records are refused."""
        self.append(Kind.CLOSE, _clock.now_ns().to_bytes(8, "little"))
        self.beat()
        with self._lock:
            self._closed = True
            last, self.segment = self.segment, no_segment()
            prepared, self._next = self._next, None
        if prepared is not None:
            self._full.append(prepared)
        self._full.append(last)
        self.seal_full()


def _nothing() -> None:
    """Wakes nobody: there is no heartbeat yet."""
