"""The spans of a run as trees, and its complete steps: what every question of *why* starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

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


@dataclass(frozen=True, slots=True)
class Complete:
    """How many spans there are, the longest of them (ns), and their median."""

    count: int
    longest: int
    median: float


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

    def linking(self) -> list[SpanRow]:
        """Returns the spans that link to others, in the order of their start."""
        return [row for row in self.run.spans if row.links]

    def linking_below(self, step: SpanRow) -> Iterator[SpanRow]:
        """Yields the step and the spans below it, those of them that link to others."""
        return (row for row in (step, *self.below(step)) if row.links)

    def unended(self) -> list[SpanRow]:
        """Returns the spans that are open, or were when their process ended, in the order of their start."""
        return [row for row in self.run.spans if row.end_ns is None or row.truncated]

    def complete(self, names: set[str]) -> dict[str, Complete]:
        """Returns, by name, what is known of the spans of some names that ended by themselves."""
        found: dict[str, list[int]] = {}
        for row in self.run.spans:
            if row.name in names and row.end_ns is not None and not row.truncated:
                found.setdefault(row.name, []).append(row.until_ns - row.start_ns)
        return {name: Complete(len(times), max(times), median(times)) for name, times in found.items()}

    def truncated(self, process: Process) -> int:
        """Returns how many spans the end of a process has cut short."""
        return sum(row.truncated for row in self.run.spans if row.process is process)

    def own_children(self, step: SpanRow, chosen: Callable[[Any], bool] = lambda _: True) -> list[SpanRow]:
        """Returns the children in its own process whose name and bucket are the chosen ones."""
        return [row for row in self.children(step) if row.process is step.process and chosen(row)]

    def children_by_end(
        self, row: SpanRow, end_of: Callable[[SpanRow, SpanRow], int], slack: int
    ) -> tuple[Sequence[int], Callable[[int], SpanRow]]:
        """Returns the ends of its children that have a length, in order, and what gives the child of each.

        Args:
            row: The span.
            end_of: Gives the end of a child.
            slack: By how much (ns) that may be before the child's own.
        """
        del slack  # each is asked
        found = [(end_of(child, row), child) for child in self.children(row) if child.until_ns > child.start_ns]
        found.sort(key=lambda one: one[0])
        return [end for end, _ in found], lambda n: found[n][1]

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
