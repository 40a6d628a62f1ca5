"""What the relays of a node have done besides sending, in a small file beside their cursors: for reports and people.

Sections are `FREED`, `CARRIED` and `RECEIVER`; each has counts, summed over all relays that were there one after the
other, and what is so just now.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from raytrace_rl.relay import notes
from raytrace_rl.relay.cursors import DIRECTORY

VERSION: Final = 2
NAME: Final = "status.json"
#: Spans and bytes that were acknowledged and then removed, for want of room.
FREED: Final = "freed"
#: What was brought home, and how far behind home is.
CARRIED: Final = "carried"
#: What others sent to the node's receiver.
RECEIVER: Final = "receiver"


class Section(NamedTuple):
    """One section.

    Attributes:
        counts: Of this relay.
        now: What is so just now.
    """

    counts: Mapping[str, int]
    now: Mapping[str, Any] = {}


class Status:
    """The file of one node.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
    """

    def __init__(self, node_dir: str | os.PathLike[str]) -> None:
        self._node_dir = Path(node_dir)
        self._path = self._node_dir / DIRECTORY / NAME
        self._lock = threading.Lock()
        self._before: dict[str, dict[str, int]] | None = None
        self._sections: dict[str, dict[str, Any]] = {}
        self._freeing: dict[str, tuple[int, int]] = {}
        self._written: Any = None

    def write(self, sections: Mapping[str, Section]) -> None:
        """Writes what has changed of some sections. Never raises for a file that cannot be written."""
        with self._lock:
            self._take(sections)
            self._save()

    def removing(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Notes what is about to be removed, so that a kill in the midst of it loses no count.

        Args:
            files: Spans and bytes of each segment, by its name in the node's directory.
        """
        with self._lock:
            self._take({})
            self._freeing = dict(files)
            self._save()

    def removed(self, counts: Mapping[str, int]) -> None:
        """Writes what has been removed in all, instead of what was to be; nothing happens if nothing was."""
        with self._lock:
            if not self._freeing:
                return
            self._take({FREED: Section(counts)})
            self._freeing = {}
            self._save()

    def _take(self, sections: Mapping[str, Section]) -> None:
        if self._before is None:
            found = notes.read(self._path, VERSION)
            self._before = {name: _counts(one.get("counts")) for name, one in _sections(found).items()}
            self._before[FREED] = _with_removed(self._node_dir, found, self._before.get(FREED, {}))
            self._sections = {name: {"counts": counts, "now": {}} for name, counts in self._before.items() if counts}
        for name, section in sections.items():
            before = self._before.get(name, {})
            counts = {key: n + before.get(key, 0) for key, n in section.counts.items()}
            self._sections[name] = {"counts": counts, "now": dict(section.now)}

    def _save(self) -> None:
        found = {"sections": self._sections, "freeing": self._freeing}
        if found != self._written:
            about = {"version": VERSION, "pid": os.getpid(), "updated_ns": time.time_ns()}
            if notes.replace_somehow(self._path, {**about, **found}):
                self._written = {"sections": dict(self._sections), "freeing": dict(self._freeing)}


def read(node_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Returns counts, and what is so just now, of each section that a node's relays have noted."""
    found = notes.read(Path(node_dir) / DIRECTORY / NAME, VERSION)
    told = {}
    for name, one in _sections(found).items():
        now = one.get("now")
        told[name] = {**_counts(one.get("counts")), **(now if isinstance(now, dict) else {})}
    if freed := _with_removed(Path(node_dir), found, told.get(FREED, {})):
        told[FREED] = freed
    return told


def _sections(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections = found.get("sections")
    if not isinstance(sections, dict):
        return {}
    return {name: one for name, one in sections.items() if isinstance(one, dict)}


def _counts(found: Any) -> dict[str, int]:
    if not isinstance(found, dict):
        return {}
    return {key: n for key, n in found.items() if type(n) is int and n >= 0}


def _with_removed(node_dir: Path, found: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, int]:
    """Adds to ``counts`` what a relay has removed that was killed before it could say so."""
    freeing = found.get("freeing")
    added = dict(counts)
    for name, sizes in freeing.items() if isinstance(freeing, dict) else ():
        if isinstance(sizes, list) and len(sizes) == 2 and not os.path.lexists(node_dir / name):
            for key, n in _counts(dict(zip(("spans", "bytes"), sizes, strict=True))).items():
                added[key] = added.get(key, 0) + n
    return added
