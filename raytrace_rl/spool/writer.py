"""The spool of one process: its segments one after another, and what becomes of a record when there is no room."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from raytrace_rl import _clock, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.spool import bound, seal
from raytrace_rl.spool.format import MAX_PAYLOAD, Header, Kind, pack_record
from raytrace_rl.spool.liveness import boot_id
from raytrace_rl.spool.place import Place, free_bytes, is_local
from raytrace_rl.spool.segment import Segment, create_segment, no_segment

FIRST_SIZE: Final = 1 << 20
LARGEST_SIZE: Final = 8 << 20
SMALLEST_SIZE: Final = 64 << 10
#: After a failure to make or seal a segment, the next try waits this long (seconds); records for which there is no
#: segment meanwhile are dropped, counted.
RETRY_S: Final = 1.0
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


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
        """Names the process; no file is made before `open`.

        Args:
            place: Where the files lie.
            resource: OTLP Resource bytes.
            bound_bytes: What all spools of the node may take together.
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
        self._seal_at = 0.0
        self._closed = False
        self._largest = bound_bytes // 8
        self.segment: Segment = no_segment()

    def open(self) -> None:
        """Opens the first segment.

        The liveness file comes before it: a segment without one looks like that of a process which has ended, and a
        sibling's `seal.adopt_orphans` would take it away.

        Raises:
            OSError: It cannot be made.
        """
        self._largest = bound.largest_segment(self.place, self.bound_bytes)
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
        length = len(record)  # here: a call between reading the position and moving it would let others take it too
        while True:
            segment = self.segment
            start = segment.position
            segment.position = stop = start + length
            try:
                segment.buffer[start:stop] = record
            except (IndexError, ValueError):
                if not self._roll(segment, start, length):
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
            failure = self._ready_next(needed)
            new = self._next
            # Straight-line, as appending is: an exception out of a handler loses no segment on its way. A handler may
            # have rolled meanwhile; the new one is then still the next.
            if failure is None and new is not None and self.segment is full:
                self._next = None
                self.segment = new
                if _state.writer is self:
                    _state.segment = new
                self._full.append(full)
        if failure is not None:
            # Outside the lock: a user's logging handler may wait for another thread, and that one for this lock.
            self.warn_of(failure)
            return False
        self.wake()
        return True

    def _ready_next(self, needed: int) -> OSError | None:
        """Sees to it that the next segment is there, with room for ``needed`` bytes; returns what prevents it."""
        prepared = self._next
        if prepared is not None and prepared.capacity - prepared.position < needed:
            self._next = None
            self._full.append(prepared)
        if self._next is None:
            try:
                self._next = self._create(needed)
            except OSError as error:
                if is_interrupt(error):  # TimeoutError, out of an alarm handler, is an OSError too
                    raise
                self._retry_at = monotonic() + RETRY_S
                return error
        return None

    def _usual_size(self, number: int) -> int:
        return max(SMALLEST_SIZE, min(FIRST_SIZE << min(number, 8), LARGEST_SIZE, self._largest))

    def _create(self, needed: int = 0) -> Segment:
        with self._lock:
            number = self._number
            self._number += 1
        header = self.header(number)
        path, link = self.paths(f".{number}.rts")
        least = max(SMALLEST_SIZE, needed + 4096 + len(header.resource))
        size = wanted = max(least, self._usual_size(number))
        while True:
            try:
                return create_segment(path, link, size, header)
            except OSError as error:
                if is_interrupt(error):
                    raise
                if isinstance(error, FileNotFoundError) and path != link and self._active_is_made_anew():
                    continue
                if error.errno not in _NO_ROOM:
                    raise
                if size > least:
                    free = free_bytes(os.path.dirname(path))
                    size = max(least, min(size // 2, free // 2))  # not all: the next one comes before this goes
                elif path != link and is_local(self.place.directory):
                    path, size = link, wanted  # a disk that may make us wait is better than losing spans
                else:
                    raise

    def _active_is_made_anew(self) -> bool:
        """Makes the tmpfs directory again if somebody has cleaned up there, as logging out may do (``RemoveIPC``)."""
        if os.path.isdir(self.place.active) or not os.path.isdir(self.place.directory):
            return False
        os.makedirs(self.place.active, mode=0o700, exist_ok=True)
        return True

    def warn_of(self, error: OSError | ValueError) -> None:
        """Warns that there is no room, or no directory, for the spool: once, whatever meets it first."""
        _state.warn_once(
            "spool-room",
            "The spool in %s cannot be written (%s): spans are dropped and counted until it can.",
            self.place.directory,
            error,
        )

    # -- called by the heartbeat, off the hot path --------------------------------------------------------------

    def prepare_next(self) -> None:
        """Makes the next segment ahead of need, once the current one is half full, and room for it in the bound."""
        segment = self.segment
        if self._wants_next() and segment.position > segment.capacity // 2:
            self._largest = bound.largest_segment(self.place, self.bound_bytes)
            bound.enforce_bound(self.place, self.bound_bytes - self._usual_size(self._number))
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

    def seal_full(self, *, at_once: bool = False) -> None:
        """Seals the segments that are full, then keeps the node inside its bound.

        Args:
            at_once: Do not wait after a failure before trying again.
        """
        if not self._full or (monotonic() < self._seal_at and not at_once):
            return
        for _ in range(len(self._full)):
            segment = self._take_full()
            if segment is None:
                break
            if not self._seal(segment):
                self._full.insert(0, segment)
                self._seal_at = monotonic() + RETRY_S  # the next ones would meet the same
                break
        excess = bound.enforce_bound(self.place, self.bound_bytes)
        while excess > 0 and (segment := self._take_full()) is not None:
            excess -= bound.drop_unsealed(segment.path, segment.link)
        self.beat()  # what was dropped goes into the header: this process may be killed before the next beat

    def _take_full(self) -> Segment | None:
        try:
            return self._full.pop(0)
        except IndexError:  # empty, or the closing thread has come between
            return None

    def _seal(self, segment: Segment) -> bool:
        """Seals one segment. False if it has to be tried again; it stays readable where it is."""
        end = segment.stop()
        path, link = segment.path, segment.link
        if path == link:
            gone = not os.path.exists(path)
        else:
            gone = not os.path.lexists(link) and not os.path.isdir(self.place.directory)
        try:
            if gone:
                # Somebody has deleted the run directory; nobody would ever look for the rest in the tmpfs.
                bound.count_lost(_contents(segment, end))
                seal.unlink(path)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), link)
            if path == link:
                segment.close()  # before it is cut: a late write beyond the end would be SIGBUS
            if path == link or os.path.exists(path):
                seal.seal_file(path, link, end)
            else:
                seal.bring_home(_contents(segment, end), link)  # somebody has cleaned up in the tmpfs
        except OSError as error:
            self.warn_of(error)
            if not gone:
                return False
        except ValueError as error:
            self.warn_of(error)
        segment.close()
        return True

    def settle(self) -> None:
        """Seals all but the current segment, before the last records say what was dropped in all."""
        with self._lock:
            prepared, self._next = self._next, None
            if prepared is not None:
                self._full.append(prepared)
        self.seal_full(at_once=True)

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
        while (segment := self._take_full()) is not None:
            self._seal(segment)


def _contents(segment: Segment, end: int) -> bytes:
    try:
        return bytes(segment.buffer[:end])
    except ValueError:  # a former try to seal it has closed the mapping
        return b""


def _nothing() -> None:
    """Wakes nobody: there is no heartbeat yet."""
