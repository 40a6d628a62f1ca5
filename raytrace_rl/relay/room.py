"""Keeps a node inside the bound of its spools by removing what is acknowledged, before writers drop what is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from raytrace_rl.spool import seal
from raytrace_rl.spool.exclusive import alone
from raytrace_rl.spool.listing import node_processes

#: Beyond this share of the bound acknowledged segments go: writers need room until the relay looks again.
_SHARE: Final = 0.75
_PATIENCE_S: Final = 0.5


class Freed(NamedTuple):
    """What was removed: it is at the receiver, and no longer in the run directory."""

    spans: int
    bytes: int


def free(
    node_dir: str | os.PathLike[str],
    bound_bytes: int,
    acknowledged: Callable[[str, int], bool],
    removing: Callable[[Mapping[str, tuple[int, int]]], None] | None = None,
) -> Freed:
    """Removes the oldest acknowledged segments, as many as the bound asks for.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        bound_bytes: What all spools of the node may take together.
        acknowledged: Whether every destination has all of a segment, by its process's stem and its number.
        removing: Called before any is removed, with the spans and bytes of each by its file name.
    """
    total = 0
    candidates: list[tuple[int, str, int]] = []
    try:
        processes = node_processes(node_dir)
    except OSError:
        return Freed(0, 0)
    for files in processes:
        for number, path in files.segments.items():
            try:
                found = Path(path).stat()
            except OSError:
                continue
            total += found.st_size
            # The last segment stays: it says who the process was, and what it had to drop.
            if number != max(files.segments) and not Path(path).is_symlink() and acknowledged(files.stem, number):
                candidates.append((found.st_mtime_ns, path, found.st_size))
    excess = total - int(bound_bytes * _SHARE)
    if excess <= 0 or not candidates:
        return Freed(0, 0)
    with alone(os.fspath(node_dir), _PATIENCE_S) as sole:
        going = _oldest(sorted(candidates), excess) if sole else {}
        if going and removing is not None:
            removing({Path(path).name: (freed.spans, freed.bytes) for path, freed in going.items()})
        gone = [freed for path, freed in going.items() if seal.unlink(path)]
    return Freed(sum(one.spans for one in gone), sum(one.bytes for one in gone))


def _oldest(candidates: list[tuple[int, str, int]], excess: int) -> dict[str, Freed]:
    """Returns the first sealed ones that make up ``excess`` bytes."""
    found: dict[str, Freed] = {}
    for _, path, length in candidates:
        if excess <= 0:
            break
        try:
            header = seal.read_header(path)
        except (OSError, ValueError):
            continue
        if header.sealed:
            found[path] = Freed(header.span_count, length)
            excess -= length
    return found
