"""Reads one spool file, whatever its bytes: a cursor that follows it while it grows and says what it skipped.

Files are read in pieces and never mapped: a mapped file that shrinks under its reader kills it with SIGBUS. Only a
record's CRC is believed. Where it does not hold, the next sync word with a valid record behind it is found, and what
lies between is reported; at the end of a file that may still grow it means "try again".
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from raytrace_rl.spool import format as fmt

if TYPE_CHECKING:
    from typing_extensions import Self

#: One piece; must hold the longest record several times over.
_PIECE: Final = 4 * fmt.MAX_PAYLOAD
_RECORD_MAX: Final = fmt.RECORD_HEADER.size + fmt.MAX_PAYLOAD
#: The first look from a place on is small: where damage follows damage, each costs a look.
_FIRST_PIECE: Final = 64 << 10
#: A sync word with a kind and a length that are allowed (the length's top byte is at most 0x10). There is no kind 0: a
#: sync word with only zeros behind it, which is what a record torn after four bytes looks like, would else be one.
_CANDIDATE: Final = re.compile(re.escape(fmt.SYNC_BYTES) + b"[^\\x00].{2}[\\x00-\\x10]", re.DOTALL)
#: CRC work spent on candidates that fail may be this many times the bytes read, so that a file made of overlapping
#: record headers costs its length and not its square.
_CRC_FREE: Final = 64 << 20
_CRC_FACTOR: Final = 16
#: Longer than any segment; see ``Cursor._data``.
_TRUSTED_SIZE: Final = 1 << 30
#: Damages listed one by one for a file; more are summed into the last.
MAX_DAMAGES: Final = 1000


class Record(NamedTuple):
    """One record: its kind (a ``format.Kind``, or a number of a later version), its payload, where it starts."""

    kind: int
    payload: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that could not be read.

    Attributes:
        path: The file.
        offset: Where in it the damage starts, bytes.
        skipped: Bytes passed over (0 where a whole file is out of reach), zeros at the end of a file not counted.
        reason: One line for a person.
        kind: ``record``, ``header``, ``payload`` (a valid record whose content is rubbish), ``count`` (a sealed
            segment holds fewer spans than it says), ``unreachable`` (a link to another node's memory, or lost with
            it) or ``vanished``.
        count: How many damages this entry stands for.
    """

    path: str
    offset: int
    skipped: int
    reason: str
    kind: str = "record"
    count: int = 1


class UnreadableFileError(Exception):
    """A file that cannot be opened; ``kind`` is that of its `Damage`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def open_regular(path: str) -> int:
    """Opens a regular file, never a pipe or a device, on which a reader would hang; returns its descriptor.

    Raises:
        UnreadableFileError: It is gone, out of reach, or no regular file.
    """
    for attempt in range(3):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except FileNotFoundError:
            if not Path(path).is_symlink():
                if attempt < 2 and Path(path).exists():
                    continue  # sealed just now: the link has become a regular file
                raise UnreadableFileError("vanished", "file is gone") from None
            if attempt == 2:
                raise UnreadableFileError("unreachable", f"lies elsewhere or is lost ({_target(path)})") from None
        except (OSError, ValueError) as error:
            raise UnreadableFileError("unreachable", f"cannot be opened: {error}") from None
        else:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
            raise UnreadableFileError("unreachable", "not a regular file")
    raise UnreadableFileError("unreachable", "changes while it is opened")


def _target(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return path


def read_whole(path: str, limit: int) -> bytes:
    """Returns the first ``limit`` bytes of a file.

    Raises:
        UnreadableFileError: It is gone, out of reach, or no regular file.
    """
    fd = open_regular(path)
    try:
        return os.pread(fd, limit, 0)
    except OSError as error:
        raise UnreadableFileError("unreachable", f"cannot be read: {error}") from None
    finally:
        os.close(fd)


class Cursor:
    """A place in one spool file.

    ``poll`` yields the records that have come since the last call. Breaking out of it loses nothing: the next call
    goes on behind the last record yielded. A segment that moves from memory to disk meanwhile is followed.

    Args:
        path: A ``.rts`` file, or a link to one; it need not exist yet.
        gap_grace_s: Seconds for which a gap in front of a valid record is waited for, since another thread may be
            about to fill it. 0 passes over it at once, which is right for reading a file once.
        offset: Where the next record is expected, if not at the beginning.

    Attributes:
        header: The header as of the last poll, None as long as there is no readable one.
        offset: Where the next record is expected, bytes.
        damage: What was passed over so far.
    """

    def __init__(self, path: str | os.PathLike[str], *, gap_grace_s: float = 0.0, offset: int = 0) -> None:
        self.path = os.fspath(path)
        self.header: fmt.Header | None = None
        self.offset = offset
        self.damage: list[Damage] = []
        self._grace_s = gap_grace_s
        self._gap: tuple[int, float] | None = None
        self._fd = -1
        self._started = offset > 0
        self._crc_spent = 0
        self._header_error = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. A later poll opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def sealed(self) -> bool:
        """Whether the writer has said that nothing more will be appended."""
        return self.header is not None and self.header.sealed

    def poll(self, *, final: bool = False) -> Iterator[Record]:
        """Yields the records appended since the last call, in their order.

        Args:
            final: Nobody writes to the file any more, so a torn record at its end is damage.
        """
        try:
            if not self._refresh():
                return
            settled = final or self.sealed
            if not self._started and not self._start(settled):
                return
            yield from self._records(settled)
        except UnreadableFileError as error:
            if final or error.kind != "vanished":
                self._note(Damage(self.path, self.offset, 0, str(error), error.kind))
        except OSError as error:
            self._note(Damage(self.path, self.offset, 0, f"cannot be read: {error}", "unreachable"))

    def _note(self, damage: Damage) -> None:
        if damage in self.damage[-1:]:
            return  # the same as at the last poll
        if len(self.damage) < MAX_DAMAGES:
            self.damage.append(damage)
        else:
            last = self.damage[-1]
            self.damage[-1] = replace(
                last, skipped=last.skipped + damage.skipped, reason="more damage", count=last.count + 1
            )

    def _refresh(self) -> bool:
        """Opens the file, or opens it anew where the name leads to another one by now, and reads its header."""
        if self._fd >= 0:
            here = os.fstat(self._fd)
            try:
                there = Path(self.path).stat()
            except OSError:
                there = here  # the name is gone; what is open can still be read
            if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                self.close()
        if self._fd < 0:
            self._fd = open_regular(self.path)
        head = os.pread(self._fd, fmt.MIN_HEADER_SIZE, 0)
        if not head.strip(b"\0"):
            return False  # prepared ahead of need, or not written yet
        size = int.from_bytes(head[12:16], "little")
        if len(head) == fmt.MIN_HEADER_SIZE and head.startswith(fmt.MAGIC) and size <= fmt.MAX_HEADER_SIZE:
            head += os.pread(self._fd, max(0, size - len(head)), len(head))
        try:
            self.header = fmt.parse_header(head)
        except ValueError as error:
            self._header_error = str(error)
        return True

    def _start(self, settled: bool) -> bool:
        """Settles where the first record is; without a readable header it is searched for."""
        if self.header is not None:
            self.offset = self.header.size
        else:
            first = self._find(0, None)
            if first is None and not settled:
                return False
            skipped = self._end_of_data(0) if first is None else first
            self._note(Damage(self.path, 0, skipped, self._header_error, "header"))
            self.offset = os.fstat(self._fd).st_size if first is None else first
        self._started = True
        return True

    def _records(self, settled: bool) -> Iterator[Record]:
        unpack = fmt.RECORD_HEADER.unpack_from
        head = fmt.RECORD_HEADER.size
        crc32 = zlib.crc32
        piece = _FIRST_PIECE
        while True:
            base = self.offset
            data = os.pread(self._fd, piece, base)
            size = len(data)
            pos = 0
            while size - pos >= head:
                sync, word, crc = unpack(data, pos)
                stop = pos + head + (word >> 8)
                if sync != fmt.SYNC or not word & 0xFF or stop > size or stop - pos > _RECORD_MAX:
                    break
                payload = data[pos + head : stop]
                if crc32(payload, word) != crc:
                    break
                self.offset = base + stop
                yield Record(word & 0xFF, payload, base + pos)
                pos = stop
            if size == piece and goes_on(data, pos):
                piece = _PIECE
            elif pos == size or not self._pass_over(data, pos, settled):
                return
            else:
                piece = _FIRST_PIECE

    def _pass_over(self, data: bytes, pos: int, settled: bool) -> bool:
        """Moves to the next valid record, noting what lies between. Returns False to stop here, for now or for good."""
        at = self.offset
        waiting = self._grace_s > 0 and not settled
        found = self._find(at + 1, at + _PIECE if waiting else None)
        # A live file changes while it is read: what follows was written after this record, so look at it once more.
        if not settled and self._is_record(at):
            return True
        if found is None:
            if not settled:
                return False
            end = self._end_of_data(at)
            if end > at:
                self._note(Damage(self.path, at, end - at, _reason(data, pos)))
            self.offset = os.fstat(self._fd).st_size
            return False
        if waiting:
            now = time.monotonic()
            if self._gap is None or self._gap[0] != at:
                self._gap = at, now
            if now - self._gap[1] < self._grace_s:
                return False
        self._note(Damage(self.path, at, found - at, _reason(data, pos)))
        self.offset = found
        return True

    def _is_record(self, at: int) -> bool:
        data = os.pread(self._fd, fmt.RECORD_HEADER.size, at)
        if len(data) == fmt.RECORD_HEADER.size and _CANDIDATE.match(data):
            data += os.pread(self._fd, _length(data, 0), at + len(data))
        return self._valid(data, 0, at)

    def _end_of_data(self, at: int) -> int:
        """The offset behind the last byte that is not zero, ``at`` if only zeros follow: room allocated, never used."""
        end = at
        while (at := self._data(at)) >= 0 and (data := os.pread(self._fd, _PIECE, at)):
            if used := data.rstrip(b"\0"):
                end = at + len(used)
            at += len(data)
        return end

    def _data(self, at: int) -> int:
        """The first offset from ``at`` on that may hold data, -1 if there is none.

        Only files far longer than a writer makes are asked for their holes: some file systems have told wrong ones
        (OpenZFS issue 15526), and a sparse file of terabytes must not hold a reader up.
        """
        size = os.fstat(self._fd).st_size
        if at >= size:
            return -1
        if size <= _TRUSTED_SIZE or not hasattr(os, "SEEK_DATA"):
            return at
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA)
        except OSError as error:
            return -1 if error.errno == errno.ENXIO else at

    def _find(self, start: int, limit: int | None) -> int | None:
        """The offset of the first valid record from ``start`` on, looked for up to ``limit``."""
        at = start
        piece = _FIRST_PIECE
        while (limit is None or at < limit) and (at := self._data(at)) >= 0:
            data = os.pread(self._fd, piece, at)
            last = len(data) < piece
            step = len(data) - fmt.RECORD_HEADER.size + 1
            for match in _CANDIDATE.finditer(data):
                pos = match.start()
                if self._valid(data, pos, at):
                    return at + pos
                if not last and pos < step and goes_on(data, pos) and self._may_try(_length(data, pos), at + pos):
                    step = pos  # the next look has all of it
                    break
            if last:
                return None
            at += step
            piece = _PIECE
        return None

    def _valid(self, data: bytes, pos: int, base: int) -> bool:
        if len(data) - pos < fmt.RECORD_HEADER.size or not _CANDIDATE.match(data, pos):
            return False
        _, word, crc = fmt.RECORD_HEADER.unpack_from(data, pos)
        begin = pos + fmt.RECORD_HEADER.size
        length = word >> 8
        if begin + length > len(data) or not self._may_try(length, base + pos):
            return False
        if zlib.crc32(data[begin : begin + length], word) == crc:
            return True
        self._crc_spent += length
        return False

    def _may_try(self, length: int, at: int) -> bool:
        """Whether a record may be as long, and there is CRC work left for one that far into the file."""
        longest = _RECORD_MAX - fmt.RECORD_HEADER.size
        return length <= longest and self._crc_spent + length <= _CRC_FREE + _CRC_FACTOR * at


def _length(data: bytes, pos: int) -> int:
    """How long the payload of the record at ``pos`` is, as its header says."""
    word: int = fmt.RECORD_HEADER.unpack_from(data, pos)[1]
    return word >> 8


def goes_on(data: bytes, pos: int) -> bool:
    """Whether what is at ``pos`` may be a record that does not end within ``data``."""
    if len(data) - pos < fmt.RECORD_HEADER.size:
        return True
    sync, word, _ = fmt.RECORD_HEADER.unpack_from(data, pos)
    size = fmt.RECORD_HEADER.size + (word >> 8)
    return bool(sync == fmt.SYNC and word & 0xFF and size <= _RECORD_MAX and pos + size > len(data))


def _reason(data: bytes, pos: int) -> str:
    left = len(data) - pos
    if not data[pos : pos + fmt.RECORD_HEADER.size].strip(b"\0"):
        return "hole (no record was placed here)"
    if left < fmt.RECORD_HEADER.size:
        return "record is cut short"
    sync, word, _ = fmt.RECORD_HEADER.unpack_from(data, pos)
    if sync != fmt.SYNC:
        return "no record starts here"
    if not word & 0xFF:
        return "record is cut short"
    if word >> 8 > fmt.MAX_PAYLOAD:
        return f"record length {word >> 8} is beyond the limit"
    if fmt.RECORD_HEADER.size + (word >> 8) > left:
        return "record is cut short"
    return "record is damaged (CRC)"
