"""What happens to spool files that are no longer written: they are sealed, by their writer or for one that is dead."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from typing import IO, Final

from raytrace_rl.spool import liveness
from raytrace_rl.spool.exclusive import alone
from raytrace_rl.spool.format import (
    MAX_HEADER_SIZE,
    MIN_HEADER_SIZE,
    RECORD_HEADER,
    SEALED_OFFSET,
    SPAN_COUNT_OFFSET,
    SYNC,
    SYNC_BYTES,
    Header,
    Kind,
    parse_header,
)
from raytrace_rl.spool.place import Place

_MEMBER: Final = re.compile(r"^(?P<stem>\d+-\d+)(?P<suffix>\.\d+\.rts|\.open\.\d+\.rts|\.open|\.live|\.hang)$")
_SEGMENT: Final = re.compile(r"^(?P<stem>\d+-\d+)\.\d+\.rts$")
#: A file in a node's directories, or one in the making (by ``create_mapping``, or by the process that seals it).
_LEFTOVER: Final = re.compile(
    r"^(?P<pid>\d+)-(?P<start>\d+)(\.\d+\.rts|\.open\.\d+\.rts|\.open|\.hang)(?P<new>(\.(?P<by>\d+))?\.new)?$"
)
_COPY: Final = 1 << 20
#: Seconds for which a sibling's look through the directory is waited for.
_PATIENCE_S: Final = 2.0
_SPAN_KINDS: Final = frozenset({Kind.SPAN, Kind.SCOPE_SPANS})


def read_header(path: str) -> Header:
    """Returns the header of a spool file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no valid header.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would hang
        head = file.read(MIN_HEADER_SIZE)
        if len(head) == MIN_HEADER_SIZE:
            size = int.from_bytes(head[12:16], "little")
            if size <= MAX_HEADER_SIZE:
                head += file.read(max(0, size - MIN_HEADER_SIZE))
    return parse_header(head)


def seal_file(path: str, link: str, end: int | None = None) -> None:
    """Turns an active file into a sealed one under its name in the run directory.

    Args:
        path: Where it was mapped.
        link: Its name in the run directory (a symbolic link to ``path``, or ``path`` itself).
        end: Offset behind its last record; None looks for it.

    Raises:
        OSError: It cannot be read or written; it then stays as it was.
        ValueError: It has no valid header.
    """
    header = read_header(path)
    with open(path, "rb") as source:
        data = source.read() if end is None else source.read(end)
    count, last = count_spans(data, header.size) if end is not None else _found(path, header.size)
    if end is None:
        end = last  # a record that was torn off goes: its span had not ended, and is among the open ones
    if last == header.size and header.number > 0:
        unlink(link)  # prepared ahead of need, and never needed
        unlink(path)
    elif path == link:
        with open(path, "r+b", buffering=0) as file:
            _mark_sealed(file, count)
            file.truncate(end)
    else:
        _bring_home(data[:end], link, count)
        unlink(path)


def bring_home(data: bytes, link: str) -> None:
    """Puts the contents of a segment whose file is gone in the place of its name in the run directory, sealed.

    Raises:
        OSError: It cannot be written.
    """
    _bring_home(data, link, count_spans(data, header_size(data))[0])


def header_size(data: bytes) -> int:
    """Returns where the first record is in a segment that we wrote ourselves."""
    return int.from_bytes(data[12:16], "little")


def _mark_sealed(file: IO[bytes], span_count: int) -> None:
    file.seek(SPAN_COUNT_OFFSET)
    file.write(struct.pack("<Q", span_count))
    file.seek(SEALED_OFFSET)
    file.write(struct.pack("<I", 1))


def _bring_home(data: bytes, link: str, span_count: int | None = None) -> None:
    """Puts ``data`` in the place of the symbolic link ``link``; readers see the one or the other, never half."""
    temporary = f"{link}.{os.getpid()}.new"
    try:
        # Buffered, hence written whole or an error: a raw write to a disk that is almost full is cut short in silence.
        with open(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as target:
            target.writelines(data[offset : offset + _COPY] for offset in range(0, len(data), _COPY))
            if span_count is not None:
                _mark_sealed(target, span_count)
        os.replace(temporary, link)
    except OSError:
        unlink(temporary)
        raise


def count_spans(data: bytes, start: int) -> tuple[int, int]:
    """Returns how many ended spans follow offset ``start``, and the offset behind the last whole record.

    Args:
        data: The file, in which its own writer has placed every record whole.
        start: Offset of the first record.
    """
    count = 0
    last = start
    position = start
    size = len(data)
    while position + RECORD_HEADER.size <= size:
        sync, word, _ = RECORD_HEADER.unpack_from(data, position)
        following = position + RECORD_HEADER.size + (word >> 8)
        if sync != SYNC or following > size:
            position = data.find(SYNC_BYTES, position + 1)
            if position < 0:
                break
            continue
        if word & 0xFF in _SPAN_KINDS:
            count += 1
        position = last = following
    return count, last


def _found(path: str, start: int) -> tuple[int, int]:
    """As `count_spans`, of a file that somebody else wrote, who may have been killed at it: as any reader finds it."""
    from raytrace_rl.spool.reader import Cursor  # no worker needs it for its own files

    count, last = 0, start
    with Cursor(path) as cursor:
        for record in cursor.poll(final=True):
            count += record.kind in _SPAN_KINDS
            last = record.offset + RECORD_HEADER.size + len(record.payload)
    return count, last


def unlink(path: str) -> bool:
    """Removes a file; False if it is not there, or does not go."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def adopt_orphans(directory: str, *, locked: bool = False) -> int:
    """Seals what dead writers of this host left behind in ``directory`` (``RUN_DIR/spool/<node>``).

    Segments and journals that still lie in a tmpfs move to the run directory, so that they survive a reboot; segments
    that were mapped there lose the room that they had allocated. Files whose writer lives, or may live, are left alone.

    Args:
        directory: The node's directory.
        locked: The caller is `exclusive.alone` in it.

    Returns:
        How many files were sealed.
    """
    with contextlib.nullcontext() if locked else alone(directory, _PATIENCE_S):
        return _adopt(directory)


def _adopt(directory: str) -> int:
    sealed = 0
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return 0
    stems: dict[str, list[str]] = {}
    for name in names:
        member = _MEMBER.match(name)
        if member is not None:
            stems.setdefault(member["stem"], []).append(name)
    for stem, members in stems.items():
        unsealed = [name for name in members if _is_unsealed(os.path.join(directory, name))]
        if not unsealed or not _is_dead(directory, stem, members):
            continue
        for name in unsealed:
            link = os.path.join(directory, name)
            path = os.path.realpath(link) if os.path.islink(link) else link
            try:
                if name.endswith(".rts"):
                    seal_file(path, link)
                elif path != link:
                    with open(path, "rb") as source:
                        _bring_home(source.read(), link)
                    unlink(path)
                sealed += 1
            except (OSError, ValueError):
                continue  # it stays readable where it is
    return sealed


def _is_unsealed(link: str) -> bool:
    if os.path.islink(link):
        return True
    if not _SEGMENT.match(os.path.basename(link)):
        return False
    try:
        return not read_header(link).sealed
    except (OSError, ValueError):
        return False


def remove_leftovers(place: Place) -> None:
    """Removes what processes left that were killed while they made or sealed a file, then the directory if it is empty.

    Such a file has no name yet that a reader would find, and nothing in it; or what it held is home already. Liveness
    files stay: one that is not locked yet looks like a dead process's.
    """
    for directory in {place.active, place.directory}:
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            found = _LEFTOVER.match(name)
            if found is None or (found["by"] and found["by"] != found["pid"]):
                continue
            if not found["new"] and (
                directory == place.directory or os.path.islink(os.path.join(place.directory, name))
            ):
                continue  # it is in use
            live = f"{found['pid']}-{found['start']}.live"
            states = {liveness.state(os.path.join(one, live), liveness.boot_id()) for one in place}
            if states <= {"dead", "closed"}:
                unlink(os.path.join(directory, name))
    if place.active != place.directory:
        with contextlib.suppress(OSError):
            os.rmdir(place.active)


def _is_dead(directory: str, stem: str, members: list[str]) -> bool:
    for name in members:
        if name.endswith(".rts"):
            try:
                header = read_header(os.path.join(directory, name))
            except (OSError, ValueError):
                continue
            return liveness.state(os.path.join(directory, stem + ".live"), header.boot_id) in ("dead", "closed")
    return False
