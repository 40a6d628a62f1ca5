"""Whether a process elsewhere sees the same files: what one finds of a source, the other has to find as well."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from raytrace_rl import _version
from raytrace_rl.monitor.fragments import VERSION
from raytrace_rl.monitor.scratch import Scratch
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.reader import UnreadableFileError, read_whole

if TYPE_CHECKING:
    from raytrace_rl.spool.listing import ProcessFiles

#: Name, inode and size of each file, and a checksum of what its header says for good.
Seen = list[tuple[str, int, int, int]]


def version() -> str:
    """Returns what tells that the code is the same."""
    return f"{_version.VERSION} {VERSION}"


def seen(source: ProcessFiles | str) -> Seen:
    """Returns what is to be seen of a source from here."""
    if isinstance(source, str):
        return [_file(source)]
    paths = [*source.segments.values(), *source.journals.values(), *([source.slots] if source.slots else [])]
    return [_file(path) for path in paths]


def _file(path: str) -> tuple[str, int, int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116 - behind a link lies what is meant, and a path is all there is
        return path, found.st_ino, found.st_size, _content(read_whole(path, fmt.MAX_HEADER_SIZE))
    except (OSError, UnreadableFileError):
        return path, 0, 0, 0


def _content(data: bytes) -> int:
    try:
        header = fmt.parse_header(data)
    except ValueError:
        return zlib.crc32(data)
    told = (header.pid, header.number, header.start_ns, header.wall_anchor_ns, header.boot_id, header.resource)
    return zlib.crc32(repr(told).encode())


def same(scratch: str, token: str) -> bool:
    """Whether a scratch directory is the one that has this token."""
    try:
        return (Path(scratch) / Scratch.TOKEN).read_text() == token
    except OSError:
        return False
