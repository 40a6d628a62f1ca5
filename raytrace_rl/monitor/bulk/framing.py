"""Finds the records of a segment file, a piece at a time; whatever is out of order is left to `spool.reader.Cursor`."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from raytrace_rl.monitor.bulk.arrays import Bytes, Ints
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.reader import Cursor, Damage, UnreadableFileError, open_regular

_PIECE: Final = 16 << 20
_HEAD: Final = fmt.RECORD_HEADER.size
_RECORD_MAX: Final = _HEAD + fmt.MAX_PAYLOAD
#: Zeros behind a piece: records are looked at eight bytes at a time.
PADDING: Final = 8
#: Records of the rest of a file that are handed on at once.
_REST: Final = 20_000


class Frames(NamedTuple):
    """Valid records: ``data`` (padded), and of each its kind, where its payload is in there, and its place in the file.

    ``kind``, ``begin``, ``size`` and ``offset`` are of the same length, in the order of the file.
    """

    data: Bytes
    kind: Ints
    begin: Ints
    size: Ints
    offset: Ints

    def payload(self, at: int) -> bytes:
        """Returns the payload of the record number ``at``."""
        begin = int(self.begin[at])
        return self.data[begin : begin + int(self.size[at])].tobytes()


class SegmentFile:
    """One segment, read once.

    Args:
        path: The file.
        final: Nobody writes to it any more.

    Attributes:
        header: Its header, None where there is none to be read.
        damage: What was passed over.
        last_offset: Where the last valid record begins, -1 without any.
    """

    def __init__(self, path: str, *, final: bool) -> None:
        self.path = path
        self.final = final
        self.header: fmt.Header | None = None
        self.damage: list[Damage] = []
        self.last_offset = -1

    def frames(self) -> Iterator[Frames]:
        """Yields the valid records."""
        at = 0
        for following, frames in self._regular():
            at = following
            if len(frames.kind):
                self.last_offset = int(frames.offset[-1])
                yield frames
        with Cursor(self.path, offset=at) as cursor:
            held = []
            for record in cursor.poll(final=self.final):
                self.last_offset = record.offset
                held.append(record)
                if len(held) >= _REST:
                    yield _gathered([(r.kind, r.payload, r.offset) for r in held])
                    held.clear()
            if held:
                yield _gathered([(r.kind, r.payload, r.offset) for r in held])
            self.header = cursor.header
            self.damage = list(cursor.damage)

    def _regular(self) -> Iterator[tuple[int, Frames]]:
        """Yields records as long as one follows the other, with the offset of what comes next."""
        try:
            fd = open_regular(self.path)
        except UnreadableFileError:
            return
        with contextlib.suppress(OSError, ValueError):
            try:
                at = fmt.parse_header(os.pread(fd, fmt.MAX_HEADER_SIZE, 0)).size
                while True:
                    data = np.zeros(_PIECE + PADDING, np.uint8)
                    count = os.preadv(fd, [data.data[:_PIECE]], at)
                    frames, stop = _framed(data, count, at)
                    yield at + stop, frames
                    at += stop
                    if count < _PIECE or not stop or count - stop >= _RECORD_MAX:
                        return
            finally:
                os.close(fd)


def _framed(data: Bytes, count: int, base: int) -> tuple[Frames, int]:
    """The records at the beginning of a piece, and where what is none begins."""
    unpack = fmt.RECORD_HEADER.unpack_from
    crc32 = zlib.crc32
    sync_word = fmt.SYNC
    view = data.data
    pos = 0
    words: list[int] = []
    while count - pos >= _HEAD:
        sync, word, crc = unpack(view, pos)
        stop = pos + _HEAD + (word >> 8)
        if sync != sync_word or not word & 0xFF or stop > count or stop - pos > _RECORD_MAX:
            break
        if crc32(view[pos + _HEAD : stop], word) != crc:
            break
        words.append(word)
        pos = stop
    word_array = np.array(words, np.int64)
    size = word_array >> 8
    begin = np.cumsum(size + _HEAD) - size
    return Frames(data, word_array & 0xFF, begin, size, begin - _HEAD + base), pos


def _gathered(records: list[tuple[int, bytes, int]]) -> Frames:
    size = np.array([len(payload) for _, payload, _ in records], np.int64)
    joined = b"".join(payload for _, payload, _ in records) + bytes(PADDING)
    return Frames(
        np.frombuffer(joined, np.uint8),
        np.array([kind for kind, _, _ in records], np.int64),
        np.cumsum(size) - size,
        size,
        np.array([offset for _, _, offset in records], np.int64),
    )
