"""What home has done with the spools of one other node, in a file in the node's directory: what it dropped of them.

The file is also what tells that the directory is a copy, whose writers live elsewhere (`spool.liveness.COPY`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from typing import Any, Final

from raytrace_rl.relay import notes
from raytrace_rl.spool.liveness import COPY

VERSION: Final = 1


@dataclass(slots=True)
class Dropped:
    """What was dropped of one process.

    Attributes:
        below: Every segment with a smaller number.
        numbers: Segments behind that.
        spans: What they held.
    """

    below: int = 0
    numbers: set[int] = field(default_factory=set)
    spans: int = 0

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.numbers

    def add(self, number: int, spans: int) -> None:
        """Adds a segment."""
        self.spans += spans
        self.numbers.add(number)
        while self.below in self.numbers:
            self.numbers.remove(self.below)
            self.below += 1


class HomeNote:
    """The note on one node.

    Args:
        directory: ``RUN_DIR/spool/<node>``, at home.

    Attributes:
        processes: What was dropped, by process.
        segments, spans, bytes: The same in all.
        refused: Writes for which there was no room.
        failure: What keeps anything from being written just now; empty if nothing does.
        last_error: What last did.
        last_error_ns: When, ns since the epoch.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / COPY
        self.processes: dict[str, Dropped] = {}
        self.segments = self.spans = self.bytes = self.refused = 0
        self.failure = self.last_error = ""
        self.last_error_ns = 0
        self._load()

    def is_dropped(self, stem: str, number: int) -> bool:
        """Whether a segment was dropped: then nothing of it is taken again."""
        dropped = self.processes.get(stem)
        return dropped is not None and number in dropped

    def dropped(self) -> Iterator[str]:
        """Yields the names of the segments that were dropped."""
        for stem, one in self.processes.items():
            for number in (*range(one.below), *one.numbers):
                yield f"{stem}.{number}.rts"

    def drop(self, stem: str, number: int, spans: int, size: int) -> None:
        """Counts a segment that is dropped; `save` is left to the caller."""
        self.processes.setdefault(stem, Dropped()).add(number, spans)
        self.segments += 1
        self.spans += spans
        self.bytes += size

    def refuse(self, message: str) -> None:
        """Counts a write that failed."""
        self.refused += 1
        self.failure = self.last_error = message
        self.last_error_ns = time_ns()
        self.save()

    def accept(self) -> None:
        """A write has succeeded."""
        if self.failure:
            self.failure = ""
            self.save()

    def save(self) -> bool:
        """Writes the file; False if that cannot be done."""
        processes = {
            stem: {"below": one.below, "numbers": sorted(one.numbers), "spans": one.spans}
            for stem, one in self.processes.items()
        }
        dropped = {"segments": self.segments, "spans": self.spans, "bytes": self.bytes, "processes": processes}
        found = {
            "version": VERSION,
            "refused": self.refused,
            "failure": self.failure,
            "last_error": self.last_error,
            "last_error_ns": self.last_error_ns,
            "dropped": dropped,
        }
        return notes.replace_somehow(self.path, found)

    def _load(self) -> None:
        found = notes.read(self.path, VERSION)
        try:
            dropped: dict[str, Any] = found.get("dropped", {})
            self.processes = {
                str(stem): Dropped(int(one["below"]), {int(n) for n in one["numbers"]}, int(one["spans"]))
                for stem, one in dropped.get("processes", {}).items()
            }
            self.segments, self.spans, self.bytes = (int(dropped.get(key, 0)) for key in ("segments", "spans", "bytes"))
            self.refused = int(found.get("refused", 0))
            self.failure, self.last_error = str(found.get("failure", "")), str(found.get("last_error", ""))
            self.last_error_ns = int(found.get("last_error_ns", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            self.processes = {}


def read(node_dir: str | os.PathLike[str]) -> HomeNote | None:
    """Returns the note on a node; None where the directory is no copy."""
    directory = Path(node_dir)
    return HomeNote(directory) if (directory / COPY).exists() else None
