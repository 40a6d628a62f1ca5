"""Sends what a run left behind: whatever lies beyond the cursors of its relays, node by node."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from raytrace_rl.relay.lock import NodeLock
from raytrace_rl.relay.relay import Relay
from raytrace_rl.relay.writers import Writers
from raytrace_rl.spool import seal

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Settings


@dataclass
class Pushed:
    """What became of one node's spools.

    Attributes:
        node: Name of the node's directory.
        sent: Records by signal, of this push alone.
        dropped, rejected: What the receiver has refused, by signal, so far; see `tally.Counts`.
        complete: Everything that can be read is acknowledged, and nothing of it was refused.
        busy: A relay is at it: nothing was done.
        unusable: The directory cannot be written, and so no cursor be moved: nothing was done.
        writers: Processes of this host still write there.
        failures: What kept a signal from being sent, by signal.
    """

    node: str
    sent: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    busy: bool = False
    unusable: bool = False
    writers: bool = False
    failures: dict[str, str] = field(default_factory=dict)


def nodes(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Returns the directories of the nodes that a run has spools of."""
    try:
        return sorted(path for path in (Path(run_dir) / "spool").iterdir() if path.is_dir())
    except OSError:
        return []


def push(node_dir: Path, settings: Settings, *, deadline: float, again: bool = False) -> Pushed:
    """Sends what is left of one node.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        settings: Where to.
        deadline: `time.monotonic` moment to be done by.
        again: Send everything anew, also what was acknowledged.

    Raises:
        ImportError: grpcio is needed and not installed.
    """
    relay = Relay(node_dir, settings)
    found = Pushed(node_dir.name, writers=Writers(node_dir).any())
    if not relay.acquire(min(1.0, max(0.0, deadline - monotonic()))):
        found.busy = NodeLock(node_dir).is_held()
        found.unusable = not found.busy
        return found
    try:
        seal.adopt_orphans(str(node_dir))  # what killed processes of this host left in its memory
        if again:
            for lane in relay.lanes:
                lane.cursors.clear()
        found.complete = relay.finish(deadline)
        for lane in relay.lanes:
            name = lane.signal.name
            found.sent[name] = lane.counts.sent
            total = lane.cursors.tally.total()
            found.dropped[name], found.rejected[name] = total["dropped"], total["rejected"]
            found.complete = found.complete and not total["dropped"] and not total["rejected"]
            if lane.failure:
                found.failures[name] = lane.failure
    finally:
        relay.stop()
    return found
