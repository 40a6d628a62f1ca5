"""What a node's spools may take: beyond it the oldest sealed segments go, and what they held is counted."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Final

from raytrace_rl import _state
from raytrace_rl.spool import liveness
from raytrace_rl.spool.exclusive import alone
from raytrace_rl.spool.place import Place
from raytrace_rl.spool.seal import adopt_orphans, count_spans, header_size, read_header, unlink

#: Not the journals of open spans (``.open.<n>.rts``), which have a bound of their own: they neither count nor go.
_SEGMENT: Final = re.compile(r"^(?P<stem>\d+-\d+)\.\d+\.rts$")
_DEFAULT: Final = 4 << 30
_DEFAULT_LEAST: Final = 64 << 20
#: Seconds for which a sibling's look through the directory is waited for.
_PATIENCE_S: Final = 0.5


def default_bound(directory: str) -> int:
    """Returns what the spools of one node may take in a directory where nobody has said: bytes.

    Raises:
        OSError: The directory cannot be asked for its free room.
    """
    found = os.statvfs(directory)
    return min(_DEFAULT, max(found.f_bavail * found.f_frsize // 20, _DEFAULT_LEAST))


def largest_segment(place: Place, bound_bytes: int) -> int:
    """Returns what a segment may take (bytes), so that what the node's writers have not sealed yet fits the bound.

    Each has up to three of them: one being written, the next, made ahead of need, and one that is being sealed.
    """
    try:
        names = os.listdir(place.directory)
    except OSError:
        names = []
    living = sum(
        liveness.state(os.path.join(place.directory, name), liveness.boot_id()) not in ("dead", "closed")
        for name in names
        if name.endswith(".live")
    )
    return bound_bytes // max(8, 4 * living)


def enforce_bound(place: Place, bound_bytes: int) -> int:
    """Deletes the node's oldest sealed segments until its spools fit ``bound_bytes``; what they held is counted.

    Journals of open spans have a bound of their own: they neither count nor go.

    Returns:
        Bytes by which the spools are still too large: their writers live, and have not sealed them yet.
    """
    with alone(place.directory, _PATIENCE_S) as sole:
        if not sole:
            return 0  # a sibling is at it all the time
        excess = _drop_oldest(place.directory, bound_bytes)
        if excess > 0 and adopt_orphans(place.directory, locked=True):  # what the dead left unsealed can go now
            excess = _drop_oldest(place.directory, bound_bytes)
        return excess


def _drop_oldest(directory: str, bound_bytes: int) -> int:
    total = 0
    candidates: list[tuple[int, str, str, int]] = []
    left: Counter[str] = Counter()
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return 0
    for entry in entries:
        member = _SEGMENT.match(entry.name)
        if member is None:
            continue
        try:
            found = os.stat(entry.path)
        except OSError:
            continue
        total += found.st_size
        left[member["stem"]] += 1
        if not entry.is_symlink():
            candidates.append((found.st_mtime_ns, entry.path, member["stem"], found.st_size))
    for _, path, stem, size in sorted(candidates):
        if total <= bound_bytes:
            break
        try:
            header = read_header(path)
        except (OSError, ValueError):
            continue
        if not header.sealed:
            continue
        total -= size
        left[stem] -= 1
        if unlink(path):  # else a sibling was here before, and has counted it
            _count_dropped(header.span_count, size)
            if not left[stem]:  # nothing is left of the process: its own count goes on in ours
                _state.count_drop("spans", header.dropped_spans)
    return total - bound_bytes


def _count_dropped(spans: int, size: int) -> None:
    _state.count_drop("spans", spans)
    _state.count_drop("bytes", size)
    _state.warn_once(
        "spool-bound",
        "The node's spools reached spool_max_mib: the oldest spans are dropped and counted. "
        "Raise RAYTRACE_RL_SPOOL_MAX_MIB to keep more.",
    )


def drop_unsealed(path: str, link: str) -> int:
    """Deletes a full segment that cannot be sealed, and counts what it held; returns its size in bytes."""
    try:
        header = read_header(path)
        with open(path, "rb") as source:
            data = source.read()
        size = os.path.getsize(path)
    except (OSError, ValueError):
        return 0
    unlink(link)
    unlink(path)
    _count_dropped(count_spans(data, header.size)[0], size)
    return size


def count_lost(data: bytes) -> None:
    """Counts the spans in ``data``, the contents of a segment whose file somebody deleted."""
    _state.count_drop("spans", count_spans(data, header_size(data))[0])
    _state.count_drop("bytes", len(data))
