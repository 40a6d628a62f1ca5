"""Whether anybody still writes on a node: asked of the liveness files, whatever a relay is busy with."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path
from time import time_ns
from typing import Final

from raytrace_rl.spool import liveness
from raytrace_rl.spool.format import MAX_HEADER_SIZE, parse_header
from raytrace_rl.spool.reader import UnreadableFileError, read_whole

#: A heart that has not beaten for so long (ns), of a process of which nothing proves that it lives, has stopped.
_BEATS_NS: Final = 60_000_000_000


class Writers:
    """The processes that write on one node.

    Args:
        node_dir: ``RUN_DIR/spool/<node>`` of this node.
    """

    def __init__(self, node_dir: str | os.PathLike[str]) -> None:
        self._node_dir = Path(node_dir)
        self._over: set[str] = set()

    def any(self, but: Container[str] = ()) -> bool:
        """Whether one lives; one of which that cannot be told counts for as long as its heart beats.

        Args:
            but: Process names that do not count.
        """
        try:
            paths = [
                path for path in self._node_dir.glob("*.live") if path.name not in self._over and path.stem not in but
            ]
        except OSError:
            return False
        for path in paths:
            state = liveness.state(path, liveness.boot_id())
            if state == "alive" or (state == "unknown" and _beats(path)):
                return True
            if state == "dead":
                self._over.add(path.name)  # a pid comes again, but never with the same moment of start
        return False


def _beats(live: Path) -> bool:
    for segment in live.parent.glob(f"{live.stem}.*.rts"):
        try:
            if time_ns() - parse_header(read_whole(str(segment), MAX_HEADER_SIZE)).heartbeat_ns < _BEATS_NS:
                return True
        except (UnreadableFileError, ValueError):
            continue
    return False
