"""What is kept at home of other nodes, within bounds: one a node and one for all. Beyond them the oldest segments go,
those first that a collector has acknowledged.

What goes is counted in the node's `HomeNote` before it goes. Segments that are still being written, and journals of
open spans, which have a bound of their own, stay.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from raytrace_rl import _state
from raytrace_rl.relay.cursors import Cursors, noted
from raytrace_rl.relay.home_note import HomeNote
from raytrace_rl.spool import seal
from raytrace_rl.spool.bound import default_bound
from raytrace_rl.spool.liveness import COPY

_SEGMENT: Final = re.compile(r"(?P<stem>\d{1,10}-\d{1,20})\.(?P<number>\d{1,9})\.rts")
#: All other nodes together may take this share of what the file system has for them.
_SHARE: Final = 0.5
#: And this much (bytes), however full it is when they begin: then what has no room stays with them.
_LEAST: Final = 64 << 20
#: Where a bound is exceeded, this share of it is made free at once: looking through many files takes time.
_SLACK: Final = 0.1
_ALL: Final = ""


class _Segment(NamedTuple):
    unsent: bool  # what a collector has goes first
    written_ns: int
    node: str
    stem: str
    number: int
    path: str
    size: int


class HomeBound:
    """Keeps the spools of other nodes inside their bounds.

    Args:
        spool: ``RUN_DIR/spool`` at home.
        over: Whether a process of a node, by its stem, writes no more.
        total_bytes: What all nodes may take together; None for half of what the file system has for them.
    """

    def __init__(self, spool: Path, over: Callable[[str, str], bool], total_bytes: int | None = None) -> None:
        self._spool = spool
        self._over = over
        self._total_bytes = total_bytes
        self._notes: dict[str, HomeNote] = {}
        self._bounds: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        #: Of each node, and of all under no name: how much may be stored before it is looked for what can go.
        self._limits: dict[str, int] = {}

    def begin(self, node: str, bound_bytes: int | None) -> None:
        """A node is about to bring its spools.

        Args:
            node: Its name.
            bound_bytes: What they may take at home; None for the default of a node in such a place.
        """
        note = self.note(node)
        note.save()  # while there is room: what says that there is none any more has its place then
        bound = bound_bytes if bound_bytes is not None else default_bound(str(self._spool))
        self._bounds[node] = self._limits[node] = bound
        for name in note.dropped():  # noted by one that was killed before they were gone
            seal.unlink(str(self._spool / node / name))
        self._measure(self._segments([node]), [node])
        if _ALL not in self._bounds:
            self._measure_all()
            self._bounds[_ALL] = self._limits[_ALL] = self._for_all()

    def has(self, node: str) -> bool:
        """Whether the node has begun."""
        return node in self._bounds

    def note(self, node: str) -> HomeNote:
        """Returns the note on a node."""
        note = self._notes.get(node)
        if note is None:
            note = self._notes[node] = HomeNote(self._spool / node)
        return note

    def added(self, node: str, size: int) -> None:
        """``size`` more bytes are stored of a node, which has begun: drops what is beyond the bounds."""
        for key in (node, _ALL):
            self._stored[key] += size
            if self._stored[key] > self._limits[key]:
                if key == _ALL:  # a disk that was full at the start has room now, perhaps
                    self._bounds[_ALL] = max(self._bounds[_ALL], self._for_all())
                bound = self._bounds[key]
                if self._stored[key] > bound:
                    nodes = [one for one in self._stored if one != _ALL] if key == _ALL else [node]
                    self._shrink(nodes, int(bound * (1 - _SLACK)))
                # What is still being written stays: then no look, for a while, would find more.
                self._limits[key] = max(bound, self._stored[key] + int(bound * _SLACK))

    def _for_all(self) -> int:
        if self._total_bytes is not None:
            return self._total_bytes
        found = os.statvfs(self._spool)
        return max(_LEAST, int((found.f_bavail * found.f_frsize + self._stored[_ALL]) * _SHARE))

    def _measure_all(self) -> None:
        others = {path.parent.parent.name for path in self._spool.glob(f"*/{COPY}")}
        self._measure(self._segments(others), others)

    def _measure(self, segments: Iterable[_Segment], nodes: Iterable[str]) -> None:
        self._stored.update(dict.fromkeys(nodes, 0))
        for one in segments:
            self._stored[one.node] += one.size
        self._stored[_ALL] = sum(size for node, size in self._stored.items() if node != _ALL)

    def _segments(self, nodes: Iterable[str]) -> Iterator[_Segment]:
        for node in nodes:
            try:
                entries = list(os.scandir(self._spool / node))
            except OSError:
                continue
            there = self._spool / node
            ways = [Cursors(there, one.signal, one.destination) for one in noted(there) if one.current]
            for entry in entries:
                member = _SEGMENT.fullmatch(entry.name)
                if member is None:
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                stem, number = member["stem"], int(member["number"])
                unsent = not ways or not all(way.is_done(stem, number) for way in ways)
                yield _Segment(unsent, found.st_mtime_ns, node, stem, number, entry.path, found.st_size)

    def _shrink(self, nodes: list[str], bound: int) -> None:
        segments = sorted(self._segments(nodes))
        self._measure(segments, nodes)
        left = Counter((one.node, one.stem) for one in segments)
        excess = sum(self._stored[node] for node in nodes) - bound
        going = []
        for one in segments:
            if excess <= 0:
                break
            left[one.node, one.stem] -= 1
            spans = self._spans(one, last=not left[one.node, one.stem])
            if spans is None:
                left[one.node, one.stem] += 1
                continue
            self.note(one.node).drop(one.stem, one.number, spans, one.size)
            going.append(one)
            excess -= one.size
        self._drop(going)

    def _drop(self, going: list[_Segment]) -> None:
        notes = {one.node: self.note(one.node) for one in going}
        saved = [note.save() for note in notes.values()]
        for one in going:
            seal.unlink(one.path)
            self._stored[one.node] -= one.size
            self._stored[_ALL] -= one.size
        if not all(saved):  # there is room now, perhaps
            for note in notes.values():
                note.save()
        if going:
            _state.warn_once(
                "home-bound",
                "What other nodes bring to %s has reached its bound: the oldest spans are dropped and counted. "
                "Raise RAYTRACE_RL_SPOOL_MAX_MIB, or give the run directory more room, to keep more.",
                self._spool.parent,
            )

    def _spans(self, one: _Segment, *, last: bool) -> int | None:
        """Returns how many spans are lost with a segment; None if it is still being written."""
        over = self._over(one.node, one.stem)
        try:
            header = seal.read_header(one.path)
            if not header.sealed and not over:
                return None
            spans = header.span_count
            if not header.sealed:
                spans = seal.count_spans(Path(one.path).read_bytes(), header.size)[0]
        except (OSError, ValueError):
            return 0 if over else None
        # With its last segment goes what the process itself had counted.
        return spans + (header.dropped_spans if last else 0)
