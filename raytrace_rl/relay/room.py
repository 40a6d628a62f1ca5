"""Keeps a node inside the bound of its spools by removing what is acknowledged, before writers drop what is not."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def free(node_dir: str | os.PathLike[str], bound_bytes: int, acknowledged: Callable[[str, int], bool]) -> Freed:
    """Removes the oldest acknowledged segments, as many as the bound asks for.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        bound_bytes: What all spools of the node may take together.
        acknowledged: Whether every destination has all of a segment, by its process's stem and its number.
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
    spans = size = 0
    if excess > 0 and candidates:
        with alone(os.fspath(node_dir), _PATIENCE_S) as sole:
            for _, path, length in sorted(candidates) if sole else ():
                if size >= excess:
                    break
                try:
                    header = seal.read_header(path)
                except (OSError, ValueError):
                    continue
                if header.sealed and seal.unlink(path):
                    size += length
                    spans += header.span_count
    return Freed(spans, size)
