"""Lays the spans of a process out on tracks on which they only nest: one a thread, more where tasks overlap.

A viewer draws what is on one track as a stack of slices: two that overlap without nesting would be drawn wrongly, or
cut each other off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import SpanRow

#: The end of a span that is still open: nothing that starts later nests in anything else.
_OPEN: Final = 1 << 63


@dataclass(slots=True, eq=False)
class Track:
    """Spans that nest.

    Attributes:
        thread: Name of the thread that they ran in, empty where it is not known; with ``*`` where there were several,
            one after the other.
        thread_id: Its id, 0 where it is not known.
        number: 0 for the first track of the thread, 1 and up for those of tasks that overlap.
        rows: Its spans in the order of their start, an outer one before the inner ones.
    """

    thread: str
    thread_id: int
    number: int
    rows: list[SpanRow] = field(default_factory=list)
    #: Ends of the spans that are open at the last start.
    _ends: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What a person calls it."""
        name = self.thread or (f"thread {self.thread_id}" if self.thread_id else "spans")
        return f"{name} (overlapping)" if self.number else name

    def _takes(self, row: SpanRow, end: int) -> bool:
        while self._ends and self._ends[-1] <= row.start_ns:
            self._ends.pop()
        return not self._ends or end <= self._ends[-1]

    def _add(self, row: SpanRow, end: int) -> None:
        if row.thread and row.thread != self.thread:
            # The system gives the id of a thread that has ended to the next one: a pool's, a rollout's.
            self.thread = _common(self.thread, row.thread)
        self.rows.append(row)
        self._ends.append(end)


def _common(name: str, other: str) -> str:
    """What two names of threads have in common, with a ``*`` for the rest."""
    name = name.removesuffix("*")
    same = 0
    while same < min(len(name), len(other)) and name[same] == other[same]:
        same += 1
    return f"{name[:same]}*" if name else other


def tracks(rows: Iterable[SpanRow]) -> list[Track]:
    """Returns the tracks of one process.

    Args:
        rows: Its spans.

    Returns:
        Tracks by thread, in the order in which threads come up; each span is on exactly one. A span goes on its
        parent's, where it nests there, else on the first track of its thread on which it nests.
    """
    threads: dict[int, list[Track]] = {}
    of_span: dict[str, Track] = {}
    for row in sorted(rows, key=lambda row: (row.start_ns, -_end(row))):
        own = threads.setdefault(row.thread_id or 0, [])
        end = _end(row)
        chosen = of_span.get(row.trace_id + (row.parent_span_id or ""))
        if chosen is None or chosen not in own or not chosen._takes(row, end):
            chosen = next((track for track in own if track._takes(row, end)), None)
        if chosen is None:
            chosen = Track(row.thread or "", row.thread_id or 0, len(own))
            own.append(chosen)
        chosen._add(row, end)
        of_span[row.trace_id + row.span_id] = chosen
    return [track for own in threads.values() for track in own]


def depths(track: Track) -> Iterator[int]:
    """Yields how many spans of the track are around each of its spans, in their order."""
    ends: list[int] = []
    for row in track.rows:
        while ends and ends[-1] <= row.start_ns:
            ends.pop()
        yield len(ends)
        ends.append(_end(row))


def _end(row: SpanRow) -> int:
    return _OPEN if row.end_ns is None else max(row.end_ns, row.start_ns)
