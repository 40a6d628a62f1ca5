"""Follows one segment from an offset on and takes out whole payloads, as bytes: the fast half of a relay's reading.

Where records follow each other without a flaw, which is almost always, one loop takes them; where they do not, the
tolerant `spool.reader.Cursor` finds out what is damage and what is still being written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from enum import Enum
from typing import Final

from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.reader import Cursor, UnreadableFileError, goes_on, open_regular

#: The first look at what has come is small: a segment has megabytes of zeros allocated ahead, and is looked at often.
_FIRST_PIECE: Final = 64 << 10
_PIECE: Final = fmt.RECORD_HEADER.size + fmt.MAX_PAYLOAD
#: What a record costs in a request besides its payload: a tag and a length, at most.
FRAME: Final = 5
#: Seconds for which another thread may take to fill a gap in front of a valid record.
_GAP_GRACE_S: Final = 2.0


class Reading(Enum):
    """How a look at a segment ended."""

    FULL = "full"  #: there is no room for what follows, or no time to look at more now
    WAITING = "waiting"  #: nothing more for now
    DONE = "done"  #: nothing more, ever


class Basket:
    """What is taken out for one request, within its room.

    Attributes:
        room: Bytes that still fit.
        count: Records that still fit.
        sight: Bytes that may still be looked at: where few records are wanted, a long way may lie between two of them.
        taken: Records taken so far.
    """

    __slots__ = ("count", "room", "sight", "taken")

    def __init__(self, room: int, count: int, sight: int = 1 << 62) -> None:
        self.room = room
        self.count = count
        self.sight = sight
        self.taken = 0

    def fits(self, length: int) -> bool:
        """Whether a payload of ``length`` bytes has room; the first one always has."""
        return not self.taken or (self.count > 0 and self.room >= length + FRAME)

    def take(self, length: int) -> None:
        """Counts a payload of ``length`` bytes."""
        self.room -= length + FRAME
        self.count -= 1
        self.taken += 1


class Follower:
    """A place in one segment.

    Attributes:
        path: The segment's name in the node's directory.
        offset: Behind the last record taken or passed over.
        header: Its header; None as long as there is no readable one.
        damaged: Damages passed over.
    """

    __slots__ = ("_sealed", "_slow", "_started", "_stuck_at", "damaged", "header", "offset", "path")

    def __init__(self, path: str, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.header: fmt.Header | None = None
        self.damaged = 0
        self._slow: Cursor | None = None
        self._stuck_at = -1
        self._sealed = False
        #: Where the first record is has been settled: by the header, or by looking for it.
        self._started = offset > 0

    def close(self) -> None:
        """Closes what the slow half may have open."""
        if self._slow is not None:
            self._slow.close()
            self._slow = None

    def resource(self) -> bytes | None:
        """Returns the OTLP ``Resource`` as of this place: what the header says, unless a record before it says more."""
        try:
            fd = open_regular(self.path)
        except UnreadableFileError:
            return None
        try:
            header = self._read_header(fd)
            if header is None:
                return None
            known: dict[int, list[bytes]] = {fmt.Kind.RESOURCE: [header.resource]}
            earlier = Follower(self.path, header.size)
            earlier.header = header
            while earlier.offset < self.offset:
                before = earlier.offset
                data = os.pread(fd, min(_PIECE, self.offset - before), before)
                earlier.offset += _scan(data, known, Basket(1 << 62, 1 << 62))[0]
                del known[fmt.Kind.RESOURCE][:-1]
                if earlier.offset == before:
                    break  # damage: what was noted before it has to do
        except OSError:
            return None
        finally:
            os.close(fd)
        return known[fmt.Kind.RESOURCE][-1]

    def read(self, into: dict[int, list[bytes]], basket: Basket, *, final: bool = False) -> Reading:
        """Takes what has come since, as far as there is room.

        Args:
            into: A list for each kind that is wanted; other records are passed over.
            basket: The room.
            final: The writer is proven dead, so that nothing more is coming.
        """
        try:
            fd = open_regular(self.path)
        except UnreadableFileError as error:
            if error.kind != "vanished" and not final:
                return Reading.WAITING
            self.damaged += error.kind != "vanished"
            return Reading.DONE
        try:
            self._read_header(fd)
            settled = final or self._sealed
            return self._read(fd, into, basket, settled)
        except OSError:
            return Reading.WAITING
        finally:
            os.close(fd)

    def _read_header(self, fd: int) -> fmt.Header | None:
        """Reads the header once, and later only what of it is rewritten in place."""
        if self.header is None:
            head = os.pread(fd, fmt.MIN_HEADER_SIZE, 0)
            size = int.from_bytes(head[12:16], "little")
            if head.startswith(fmt.MAGIC) and size <= fmt.MAX_HEADER_SIZE:
                head += os.pread(fd, max(0, size - len(head)), len(head))
            try:
                self.header = fmt.parse_header(head)
            except ValueError:
                return None
            if not self._started:
                self.offset = self.header.size
                self._started = True
            self._sealed = self.header.sealed
        elif not self._sealed:
            self._sealed = os.pread(fd, 4, fmt.SEALED_OFFSET) == b"\1\0\0\0"
        return self.header

    def _read(self, fd: int, into: dict[int, list[bytes]], basket: Basket, settled: bool) -> Reading:
        piece = _FIRST_PIECE
        while True:
            data = os.pread(fd, piece, self.offset) if self._started else b""
            pos, full = _scan(data, into, basket)
            self.offset += pos
            basket.sight -= pos
            if full or basket.sight < 0:
                return Reading.FULL
            head = data[pos : pos + fmt.RECORD_HEADER.size]
            if not settled and self._started and not head.strip(b"\0") and pos < piece:
                return Reading.WAITING  # the zeros that were allocated ahead, and not where only this piece ends
            if len(data) == piece and goes_on(data, pos):
                piece = _PIECE  # there is more, or a long record
                continue
            if not head and self._started:
                return Reading.DONE  # settled, and at its end
            if not self._find_next(settled):
                return Reading.DONE if settled else Reading.WAITING
            piece = _FIRST_PIECE

    def _find_next(self, settled: bool) -> bool:
        """Lets the tolerant reader find the next record, and moves there. False if there is none, or none yet."""
        if self._slow is None:
            if not settled and self._stuck_at != self.offset:
                self._stuck_at = self.offset  # most likely it is being placed this very moment
                return False
            self._slow = Cursor(self.path, gap_grace_s=_GAP_GRACE_S, offset=self.offset)
        slow = self._slow
        record = next(slow.poll(final=settled), None)
        if record is not None or settled:
            self._started = True
            self.offset = max(self.offset, slow.offset if record is None else record.offset)
            self.damaged += sum(damage.count for damage in slow.damage)
            self.close()
        return record is not None


def _scan(data: bytes, into: dict[int, list[bytes]], basket: Basket) -> tuple[int, bool]:
    """Takes the records that follow each other from the start of ``data`` on.

    Returns:
        The offset behind the last one, and whether the next one has no room.
    """
    unpack = fmt.RECORD_HEADER.unpack_from
    head = fmt.RECORD_HEADER.size
    crc32 = zlib.crc32
    wanted_of = into.get
    size = len(data)
    last = size - head
    room, count, taken = basket.room, basket.count, basket.taken
    pos = 0
    full = False
    while pos <= last:
        sync, word, crc = unpack(data, pos)
        begin = pos + head
        stop = begin + (word >> 8)
        kind = word & 0xFF
        if sync != fmt.SYNC or not kind or stop > size:
            break
        payload = data[begin:stop]
        if crc32(payload, word) != crc:
            break
        wanted = wanted_of(kind)
        if wanted is not None:
            length = stop - begin + FRAME
            if taken and (count <= 0 or room < length):
                full = True
                break
            room -= length
            count -= 1
            taken += 1
            wanted.append(payload)
        pos = stop
    basket.room, basket.count, basket.taken = room, count, taken
    return pos, full


def baskets(kinds: Iterable[int]) -> dict[int, list[bytes]]:
    """Returns an empty list for each kind."""
    return {kind: [] for kind in kinds}
