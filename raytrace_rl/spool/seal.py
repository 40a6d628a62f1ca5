"""What happens to spool files that are no longer written: sealed to the run directory, kept inside the node's bound."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from typing import IO, Final

from raytrace_rl import _state
from raytrace_rl.spool import liveness
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

_MEMBER: Final = re.compile(r"^(?P<stem>\d+-\d+)(?P<suffix>\.\d+\.rts|\.open\.\d+\.rts|\.open|\.live)$")
_COPY: Final = 1 << 20
_SPAN_KINDS: Final = frozenset({Kind.SPAN, Kind.SCOPE_SPANS})


def read_header(path: str) -> Header:
    """Returns the header of a spool file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no valid header.
    """
    with open(path, "rb") as file:
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
    count, last = _count_spans(data, header.size)
    if end is None:
        end = last
    if last == header.size and header.number > 0:
        _unlink(link)  # prepared ahead of need, and never needed
        _unlink(path)
    elif path == link:
        with open(path, "r+b", buffering=0) as file:
            _mark_sealed(file, count)
            file.truncate(end)
    else:
        _bring_home(data[:end], link, count)
        _unlink(path)


def _mark_sealed(file: IO[bytes], span_count: int) -> None:
    file.seek(SPAN_COUNT_OFFSET)
    file.write(struct.pack("<Q", span_count))
    file.seek(SEALED_OFFSET)
    file.write(struct.pack("<I", 1))


def _bring_home(data: bytes, link: str, span_count: int | None = None) -> None:
    """Puts ``data`` in the place of the symbolic link ``link``; readers see the one or the other, never half."""
    temporary = f"{link}.{os.getpid()}.new"
    try:
        with open(
            os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb", buffering=0
        ) as target:
            target.writelines(data[offset : offset + _COPY] for offset in range(0, len(data), _COPY))
            if span_count is not None:
                _mark_sealed(target, span_count)
        os.replace(temporary, link)
    except OSError:
        _unlink(temporary)
        raise


def _count_spans(data: bytes, start: int) -> tuple[int, int]:
    """Returns how many ended spans follow offset ``start``, and the offset behind the last whole record."""
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


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def enforce_bound(place: Place, bound_bytes: int) -> None:
    """Deletes the node's oldest sealed segments until its spools fit ``bound_bytes``; what they held is counted."""
    try:
        entries = [entry for entry in os.scandir(place.directory) if entry.name.endswith(".rts")]
    except OSError:
        return
    sizes: list[tuple[int, int, str]] = []
    total = 0
    for entry in entries:
        try:
            found = os.stat(entry.path)
        except OSError:
            continue
        total += found.st_size
        if not entry.is_symlink():
            sizes.append((found.st_mtime_ns, found.st_size, entry.path))
    if total <= bound_bytes:
        return
    for _, size, path in sorted(sizes):
        try:
            header = read_header(path)
        except (OSError, ValueError):
            continue
        if not header.sealed:
            continue
        if _unlink(path):
            total -= size
            _state.count_drop("spans", header.span_count)
            _state.count_drop("bytes", size)
            _state.warn_once(
                "spool-bound",
                "The node's spools reached spool_max_mib: the oldest spans are dropped and counted. "
                "Raise RAYTRACE_RL_SPOOL_MAX_MIB to keep more.",
            )
        if total <= bound_bytes:
            return


def adopt_orphans(directory: str) -> int:
    """Seals what dead writers of this host left behind in ``directory`` (``RUN_DIR/spool/<node>``).

    Segments and journals that still lie in a tmpfs move to the run directory, so that they survive a reboot. Files
    whose writer lives, or may live, are left alone.

    Returns:
        How many files were sealed.
    """
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
        linked = [name for name in members if os.path.islink(os.path.join(directory, name))]
        if not linked or not _is_dead(directory, stem, members):
            continue
        for name in linked:
            link = os.path.join(directory, name)
            path = os.path.realpath(link)
            try:
                if name.endswith(".rts"):
                    seal_file(path, link)
                else:
                    with open(path, "rb") as source:
                        _bring_home(source.read(), link)
                    _unlink(path)
                sealed += 1
            except (OSError, ValueError):
                continue  # it stays readable where it is
    return sealed


def remove_if_empty(place: Place) -> None:
    """Removes the active directory of a run when nothing of it is left in the tmpfs."""
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
