"""One mapped file of the spool: made, filled by single slice assignments, unmapped."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from typing import Final

from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.spool.format import DROPPED_OFFSET, HEARTBEAT_OFFSET, Header, pack_header

_U64: Final = struct.Struct("<Q")
_ZEROS: Final = bytes(1 << 16)


class Segment:
    """A spool file being written.

    Appending is inlined in `_span` and `writer`, and is exactly::

        start = segment.position
        segment.position = stop = start + len(record)
        segment.buffer[start:stop] = record

    CPython looks for signals and switches threads at calls, function entries and backward jumps, and there is none of
    these between the three lines: no other thread and no signal handler can see or take the same place. A record
    that does not fit is refused by the buffer (IndexError, or ValueError once it is closed), with ``position``
    beyond the end, so that nothing can be placed behind it.

    Attributes:
        buffer: The mapping.
        position: Offset of the next record; beyond ``capacity`` once the segment is full.
        capacity: Size of the file in bytes.
        end: Offset behind the last record of a full segment.
        path: Where the file lies.
        link: The name under which readers find it; differs from ``path`` while the file lies in a tmpfs.
    """

    __slots__ = ("buffer", "capacity", "end", "link", "number", "path", "position")

    def __init__(self, buffer: mmap.mmap | memoryview, number: int, path: str, link: str, position: int) -> None:
        self.buffer = buffer
        self.number = number
        self.path = path
        self.link = link
        self.position = position
        self.capacity = len(buffer)
        self.end = self.capacity

    def beat(self, now_ns: int, dropped_spans: int) -> None:
        """Rewrites the sign of life, and the count of dropped spans, in the header. Raises ValueError once closed."""
        self.buffer[HEARTBEAT_OFFSET : HEARTBEAT_OFFSET + 8] = _U64.pack(now_ns)
        self.buffer[DROPPED_OFFSET : DROPPED_OFFSET + 8] = _U64.pack(dropped_spans)

    def stop(self) -> int:
        """Refuses later appends. Returns the offset behind the last record."""
        start = self.position
        self.position = self.capacity + 1
        if start <= self.capacity:
            self.end = min(self.end, start)
        return self.end

    def close(self) -> int:
        """Unmaps the file; later appends are refused. Returns the offset behind the last record."""
        end = self.stop()
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()
        return end


def no_segment() -> Segment:
    """Returns a segment that refuses every record: what a process has before its spool is open."""
    return Segment(memoryview(bytearray(0)), -1, "", "", 1)


def create_mapping(path: str, size: int, head: bytes) -> mmap.mmap:
    """Makes a file of ``size`` bytes that begins with ``head``, and maps it.

    The blocks are allocated before they are mapped, so that a full disk is an OSError here and never a SIGBUS later.
    The file gets its name only when its head is in place: a reader never meets a file without one.

    Raises:
        OSError: No room, no permission, no directory, or a file system that cannot do it.
    """
    temporary = path + ".new"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        _allocate(fd, size)
        try:
            mapping = mmap.mmap(fd, size)
        except ValueError as error:
            if is_interrupt(error):
                raise
            raise OSError(errno.EINVAL, f"cannot map {path}: {error}") from error
        mapping[: len(head)] = head
        os.rename(temporary, path)
    except BaseException:  # out of a signal handler too: a mapped file that nobody knows of stays in memory for good
        _unlink(temporary, path)
        raise
    finally:
        os.close(fd)
    return mapping


def _unlink(*paths: str) -> None:
    for n, path in enumerate(paths):
        try:
            os.unlink(path)
        except OSError as error:
            if is_interrupt(error):
                _unlink(*paths[n + 1 :])
                raise


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        for offset in range(0, size, len(_ZEROS)):  # a file system without fallocate: the blocks by hand
            os.pwrite(fd, _ZEROS[: size - offset], offset)


def create_segment(path: str, link: str, size: int, header: Header) -> Segment:
    """Makes a segment file, maps it, and gives it its name in the run directory.

    Raises:
        OSError: As `create_mapping`; or the name in the run directory cannot be made.
    """
    head = pack_header(header)
    mapping = create_mapping(path, max(size, len(head) + 4096), head)
    try:
        if link != path:
            os.symlink(path, link)
        return Segment(mapping, header.number, path, link, len(head))
    except BaseException:
        mapping.close()
        _unlink(link, path)
        raise
