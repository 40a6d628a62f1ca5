"""The spans of a run as trees, and its complete steps: what every question of *why* starts from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from raytrace_rl.monitor import lanes

if TYPE_CHECKING:
    from raytrace_rl._decode import Link
    from raytrace_rl.monitor.model import Process, Run, SpanRow

_STEP = "step"


class Lane(NamedTuple):
    """A lane as people know it: its worker group (else actor class, else role), and its rank there."""

    group: str
    rank: int | None

    def __str__(self) -> str:
        return self.group if self.rank is None else f"{self.group}[{self.rank}]"


def lane_of(process: Process) -> Lane:
    """Returns who a process is for tables: a restarted actor goes on as the same lane in another process."""
    return Lane(process.worker_group or process.actor_class or process.role or "process", process.rank)


class Tree:
    """Parents and children across processes.

    Attributes:
        run: The run.
        steps: Its complete steps (ended, not truncated) in the order of their start; steps inside steps are no steps.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._rows: dict[str, SpanRow] = {}
        self._children: dict[str, list[SpanRow]] = {}
        self._lanes: dict[str, Lane] = {}
        self._below: dict[int, list[SpanRow]] = {}
        for row in run.spans:
            self._rows[row.trace_id + row.span_id] = row
            if row.parent_span_id:
                self._children.setdefault(row.trace_id + row.parent_span_id, []).append(row)
        self.steps = [
            row
            for row in run.spans
            if row.span_group == _STEP and row.end_ns is not None and not row.truncated and not self._inside_step(row)
        ]

    def parent(self, row: SpanRow) -> SpanRow | None:
        """Returns its parent, None for a root and where it is not in the run."""
        return self._rows.get(row.trace_id + row.parent_span_id) if row.parent_span_id else None

    def children(self, row: SpanRow) -> list[SpanRow]:
        """Returns its children in the order of their start."""
        return self._children.get(row.trace_id + row.span_id, [])

    def target(self, link: Link) -> SpanRow | None:
        """Returns the span that a link leads to, None where it is not in the run."""
        return self._rows.get(link.trace_id.hex() + link.span_id.hex())

    def lane(self, process: Process) -> Lane:
        """Returns `lane_of` a process of the run, remembered."""
        found = self._lanes.get(process.key)
        if found is None:
            found = self._lanes[process.key] = lane_of(process)
        return found

    def below(self, step: SpanRow) -> list[SpanRow]:
        """Returns all spans below a step, each once; remembered, for many ask."""
        found = self._below.get(id(step))
        if found is None:
            found = self._below[id(step)] = list(self._walk(step))
        return found

    def _walk(self, row: SpanRow) -> Iterator[SpanRow]:
        seen = {id(row)}
        ahead = list(self.children(row))
        while ahead:
            at = ahead.pop()
            if id(at) in seen:
                continue  # damaged parentage may run in a circle
            seen.add(id(at))
            yield at
            ahead += self.children(at)

    def above(self, row: SpanRow) -> Iterator[SpanRow]:
        """Yields its ancestors, the nearest first, each once."""
        seen = {id(row)}
        at = self.parent(row)
        while at is not None and id(at) not in seen:
            seen.add(id(at))
            yield at
            at = self.parent(at)

    def self_ns(self, rows: Iterable[SpanRow]) -> float:
        """Returns the time in ``rows`` outside of their children in the same process."""
        whole = 0
        for row in rows:
            own = [(row.start_ns, row.until_ns)]
            below = [(child.start_ns, child.until_ns) for child in self.children(row) if child.process is row.process]
            whole += lanes.total(own) - lanes.total(lanes.intersection(own, lanes.union(below)))
        return float(whole)

    def _inside_step(self, row: SpanRow) -> bool:
        return any(above.span_group == _STEP for above in self.above(row))
