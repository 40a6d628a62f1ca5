"""What each step waited for, instant by instant: the chain of spans, across processes, that its length came from.

Walked backwards from the step's end. At each moment the path is in the child that ended last before it, and inside that
child likewise; where no child is open, it is in the span itself. Shortening a span off the path shortens no step.

A trainer that waits for trajectories has no child that makes them: they come from rollouts under the job. So inside an
idle span the path goes on through the rollouts that spans of the same step link to, as through children.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from raytrace_rl.monitor.tables import percentile
from raytrace_rl.monitor.tree import Lane, Tree

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import SpanRow

_NS: Final = 1e9
#: A child on another node may seem to end after its parent by as much as the two clocks disagree (ns).
SKEW_NS: Final = 5_000_000
#: Steps whose paths are listed one by one, and entries of each.
MAX_STEPS: Final = 1000
_MAX_ENTRIES: Final = 20


class Segment(NamedTuple):
    """A stretch of a step (ns since the epoch) in which the step waited for ``row`` itself, and nothing below it."""

    start_ns: int
    end_ns: int
    row: SpanRow

    @property
    def length_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


def path(tree: Tree, step: SpanRow, last_to_come: Callable[[SpanRow], SpanRow | None] | None = None) -> list[Segment]:
    """Returns the critical path of a complete step: segments in order that fill it from end to end.

    Args:
        tree: The run.
        step: The step.
        last_to_come: As `meetings.last_to_come` returns it: where ranks wait for each other the path changes over to
            the rank that came last.
    """
    return _Walk(tree, step, last_to_come or (lambda _: None)).segments()


def _producers(tree: Tree, step: SpanRow) -> list[SpanRow]:
    """The spans that spans of the step link to, in the order of their end."""
    linked = {
        id(target): target
        for row in tree.linking_below(step)
        for link in row.links
        if (target := tree.target(link)) is not None and target.end_ns is not None
    }
    return sorted(linked.values(), key=lambda row: (row.until_ns, row.start_ns, row.span_id))


@dataclass(slots=True)
class _Inside:
    """A span that the path is in.

    Attributes:
        row: The span.
        opened: Where the path leaves it (ns).
        ends: Ends of its children, in order.
        child: Gives the child of each.
        left: How many of them may still be on the path.
    """

    row: SpanRow
    opened: int
    ends: Sequence[int]
    child: Callable[[int], SpanRow]
    left: int


class _Walk:
    """One walk through a step, from its end to its start."""

    def __init__(self, tree: Tree, step: SpanRow, last_to_come: Callable[[SpanRow], SpanRow | None]) -> None:
        self._tree = tree
        self._last_to_come = last_to_come
        self._producers = _producers(tree, step)
        self._now = step.until_ns
        self._found: list[Segment] = []
        #: The spans that the path is in.
        self._stack: list[_Inside] = []
        self._on_path: set[int] = set()
        self._enter(step, step.start_ns)

    def segments(self) -> list[Segment]:
        """Walks; returns the segments in the order of time."""
        while self._stack:
            at = self._stack[-1]
            at.left = bisect_right(at.ends, self._now, 0, at.left)
            while at.left and id(at.child(at.left - 1)) in self._on_path:
                at.left -= 1
            end = int(at.ends[at.left - 1]) if at.left else at.opened
            if end <= at.opened:
                self._back_to(at.opened, at.row)
                self._leave()
                continue
            at.left -= 1
            child = at.child(at.left)
            self._back_to(end, at.row)
            last = self._last_to_come(child)
            if last is None or last is child or not self._change_over(child, last, at.opened):
                self._enter(child, max(at.opened, child.start_ns))
        self._found.reverse()
        return self._found

    def _back_to(self, time_ns: int, row: SpanRow) -> None:
        if self._now > time_ns:
            self._found.append(Segment(time_ns, self._now, row))
            self._now = time_ns

    def _enter(self, row: SpanRow, opened: int) -> None:
        ends, child = self._tree.children_by_end(row, _end, SKEW_NS)
        if row.bucket == "idle" and self._producers:
            every = [(int(end), child(n)) for n, end in enumerate(ends)]
            every += [(_end(producer, row), producer) for producer in self._producers]
            every.sort(key=lambda one: one[0])
            ends, child = [end for end, _ in every], lambda n: every[n][1]
        self._stack.append(_Inside(row, opened, ends, child, len(ends)))
        self._on_path.add(id(row))

    def _leave(self) -> None:
        self._on_path.discard(id(self._stack.pop().row))

    def _change_over(self, child: SpanRow, last: SpanRow, opened: int) -> bool:
        """Goes on with the rank that came last into the meeting ``child``; False where it cannot be reached."""
        if not max(opened, child.start_ns) < last.start_ns < self._now:
            return False
        chain: list[SpanRow] = []
        for above in self._tree.above(last):
            if id(above) in self._on_path:
                break
            chain.append(above)
        else:
            return False
        common = chain[-1] if chain else last
        common_parent = self._tree.parent(common)
        self._back_to(last.start_ns, child)
        while self._stack[-1].row is not common_parent:
            self._leave()
        for row in reversed(chain):
            self._enter(row, max(self._stack[-1].opened, row.start_ns))
        return True


def _end(child: SpanRow, parent: SpanRow) -> int:
    """When it ended, by the clock of its parent as far as that can be told."""
    end = child.until_ns
    limit = parent.until_ns
    if limit < end <= limit + SKEW_NS and child.process.node != parent.process.node:
        return limit
    return end


class Sum(NamedTuple):
    """Time (ns) on the path of one span name on one lane, one of its spans, and the time in each step that has any."""

    row: SpanRow
    lane: Lane
    lengths: Collection[int]


def critical_path(tree: Tree, paths: Sequence[Sequence[Segment]]) -> dict[str, Any] | None:
    """Returns what the steps waited for, the longest in sum first, and the same for each step; None without steps.

    Args:
        tree: The run.
        paths: The `path` of each of its steps.
    """
    if not tree.steps:
        return None
    rows: dict[tuple[str, Lane], SpanRow] = {}
    sums: dict[tuple[str, Lane], list[int]] = {}
    for segments in paths:
        for key, length in _by_span(tree, segments, rows).items():
            sums.setdefault(key, []).append(length)
    return section(tree, paths, [Sum(rows[key], key[1], lengths) for key, lengths in sums.items()])


def section(tree: Tree, paths: Sequence[Sequence[Segment]], sums: Sequence[Sum]) -> dict[str, Any]:
    """Returns what `critical_path` does, of the time in each span name and lane."""
    steps = []
    for number in range(max(0, len(tree.steps) - MAX_STEPS), len(tree.steps)):
        step, own = tree.steps[number], _by_span(tree, paths[number], {})
        steps.append(
            {
                "iteration": step.iteration,
                "attempt": step.attempt,
                "duration_s": (step.until_ns - step.start_ns) / _NS,
                "path": [
                    {"name": name, "lane": str(lane), "self_s": length / _NS}
                    for (name, lane), length in sorted(own.items(), key=lambda item: -item[1])[:_MAX_ENTRIES]
                ],
            }
        )
    whole = sum(step.until_ns - step.start_ns for step in tree.steps)
    return {
        "steps": len(tree.steps),
        "total_s": whole / _NS,
        "spans": [_entry(one, len(tree.steps), whole) for one in sorted(sums, key=_weight)],
        "list": steps,
    }


def _by_span(
    tree: Tree, segments: Sequence[Segment], rows: dict[tuple[str, Lane], SpanRow]
) -> dict[tuple[str, Lane], int]:
    """The time of a path by span name and lane; ``rows`` gets the first span of each."""
    own: dict[tuple[str, Lane], int] = {}
    for segment in segments:
        key = segment.row.name, tree.lane(segment.row.process)
        own[key] = own.get(key, 0) + segment.length_ns
        rows.setdefault(key, segment.row)
    return own


def _weight(one: Sum) -> tuple[int, str, str]:
    return -sum(one.lengths), one.row.name, str(one.lane)


def _entry(one: Sum, steps: int, whole: int) -> dict[str, Any]:
    total = sum(one.lengths)
    # Steps in which it was not on the path count: a span that is there once in ten steps is no tenth of each.
    ordered = sorted([*one.lengths, *[0] * (steps - len(one.lengths))])
    return {
        "name": one.row.name,
        "lane": str(one.lane),
        "worker_group": one.row.process.worker_group,
        "rank": one.row.process.rank,
        "span_group": one.row.span_group,
        "bucket": one.row.bucket,
        "total_s": total / _NS,
        "part": total / whole if whole else 0.0,
        "steps": len(one.lengths),
        "p50_s": percentile(ordered, 0.5) / _NS,
        "p95_s": percentile(ordered, 0.95) / _NS,
        "max_s": ordered[-1] / _NS,
    }
