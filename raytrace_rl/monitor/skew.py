"""How far the clocks of a run's nodes are apart, and how certain that is: from the run's own messages, both ways.

What bounds what is in `raytrace_rl.monitor.skew_bounds`, which takes any messages; where a run's messages come from in
`raytrace_rl.monitor.skew_messages`. `raytrace_rl.monitor.align` shifts a run's times by the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raytrace_rl import semconv
from raytrace_rl.monitor.skew_bounds import Contradiction, Interval, Message, solve
from raytrace_rl.monitor.skew_messages import Clocks, ClockSet, answers, messages
from raytrace_rl.monitor.tables import MAX_LISTED

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, Run, SpanRow

_NS = 1e9

#: How a node's skew is known: it is what the others are measured against; it has one kernel, so one clock, with that;
#: by messages both ways, one way, none; or its clock has moved against others' meanwhile, and there is no such number.
Method = Literal["reference", "one_kernel", "both_ways", "one_way", "none", "moved"]


@dataclass(slots=True)
class NodeSkew:
    """One node's clock against the reference's.

    Attributes:
        node: Its name.
        interval: Its bounds.
        method: How they are known.
        aligned: The run's times have been shifted by the estimate.
    """

    node: str
    interval: Interval
    method: Method
    aligned: bool = False

    @property
    def estimate_ns(self) -> int | None:
        """The middle of its bounds, how far its clock is ahead; None unless there are both."""
        low, high = self.interval.lower_ns, self.interval.upper_ns
        return None if low is None or high is None else (low + high) // 2

    @property
    def bound_ns(self) -> int | None:
        """How far off the estimate may be."""
        low, high = self.interval.lower_ns, self.interval.upper_ns
        return None if low is None or high is None else (high - low + 1) // 2

    @property
    def left_ns(self) -> tuple[int, int] | None:
        """Where its times may stand against the reference's, as they are in the run now."""
        low, high = self.interval.lower_ns, self.interval.upper_ns
        if low is None or high is None:
            return None
        shifted = (self.estimate_ns or 0) if self.aligned else 0
        return low - shifted, high - shifted


@dataclass(slots=True)
class Skew:
    """The clocks of a run.

    Attributes:
        reference: The driver's node; empty where no span says where it ran.
        nodes: Every node with spans, the reference first.
        steps: Wall clocks that were set while the run went on.
        contradictions: Clocks that moved against each other, though no process noted that one was set.
        early: Spans that start before their parent on another node, as the run's times are now.
        early_ns: The most of that.
        aligned: The times of the run have been shifted.
    """

    reference: str = ""
    nodes: list[NodeSkew] = field(default_factory=list)
    steps: list[ClockSet] = field(default_factory=list)
    contradictions: list[Contradiction] = field(default_factory=list)
    early: int = 0
    early_ns: int = 0
    aligned: bool = False

    @property
    def at_most_ns(self) -> int | None:
        """No two nodes' times in the run are further apart; None where that is not known of all."""
        left = [node.left_ns for node in self.nodes]
        known = sorted((each for each in left if each is not None), key=lambda each: -each[1])
        if len(known) < len(left):
            return None
        # Of each node the lowest, and of all others the highest that it can be.
        highest = [known[0][1] if number else known[1][1] for number in range(len(known))] if len(known) > 1 else []
        return max((high - low for high, (low, _) in zip(highest, known, strict=False)), default=0)

    def as_json(self) -> dict[str, Any]:
        """Returns the report's section, described in docs/report.md."""
        at_most_ns = self.at_most_ns
        return {
            "count": len(self.nodes),
            "reference": self.reference or None,
            "at_most_s": _seconds(at_most_ns),
            "aligned": self.aligned,
            "nodes": [
                {
                    "node": node.node,
                    "method": node.method,
                    "estimate_s": _seconds(node.estimate_ns),
                    "bound_s": _seconds(node.bound_ns),
                    "lower_s": _seconds(node.interval.lower_ns),
                    "upper_s": _seconds(node.interval.upper_ns),
                    "messages": node.interval.messages,
                    "aligned": node.aligned,
                }
                for node in self.nodes
            ],
            "steps": [
                {"node": step.node, "at_ns": step.at_ns, "by_s": step.by_ns / _NS} for step in self.steps[:MAX_LISTED]
            ],
            "contradictions": [
                {"nodes": list(one.nodes), "moved_s": one.moved_ns / _NS} for one in self.contradictions[:MAX_LISTED]
            ],
            "early_children": {"count": self.early, "worst_s": self.early_ns / _NS},
        }


def _seconds(value_ns: int | None) -> float | None:
    return None if value_ns is None else value_ns / _NS


def skew(run: Run) -> Skew:
    """Returns what is known of the clocks of a run; once its times have been shifted, what they were shifted by."""
    if run.skew is not None:
        return run.skew
    clocks = Clocks(run.processes)
    with_spans = {row.process.node: None for row in run.spans if row.process.node}
    if len(with_spans) < 2:
        return of_messages(run.processes, with_spans, clocks, ())
    parents = parents_of(run)
    found = of_messages(run.processes, with_spans, clocks, messages(run.spans, parents, clocks))
    found.early, found.early_ns = early(run, parents)
    return found


def of_messages(
    processes: Iterable[Process], with_spans: Collection[str], clocks: Clocks, found: Iterable[Message]
) -> Skew:
    """Returns what is known, but for which spans start early.

    Args:
        processes: Of the run, in the order of their start.
        with_spans: Nodes whose times are in the run; of others nothing is asked.
        clocks: Of these processes.
        found: What went between the nodes.
    """
    if not with_spans:
        return Skew(steps=clocks.steps)
    reference = _reference(processes, with_spans)
    solution = solve((*clocks.shared(), *answers(processes, clocks), *found), reference, with_spans)
    nodes = [
        NodeSkew(node, interval, _method(node, interval, reference, clocks))
        for node, interval in sorted(solution.intervals.items(), key=lambda item: (item[0] != reference, item[0]))
        if node in with_spans
    ]
    return Skew(reference, nodes, clocks.steps, solution.contradictions)


def _reference(processes: Iterable[Process], with_spans: Collection[str]) -> str:
    """Returns the node of the (first) driver, else that of the first process."""
    known = [process for process in processes if process.node in with_spans]
    return next((process for process in known if process.role == semconv.ROLE_DRIVER), known[0]).node


def _method(node: str, interval: Interval, reference: str, clocks: Clocks) -> Method:
    if node == reference:
        return "reference"
    if interval.contradiction is not None:
        return "moved"
    if clocks.kernel(node) == clocks.kernel(reference):
        return "one_kernel"
    sides = (interval.lower_ns is not None) + (interval.upper_ns is not None)
    return "both_ways" if sides == 2 else "one_way" if sides else "none"


def parents_of(run: Run) -> dict[str, SpanRow]:
    """Returns the spans that are parents, by trace id and span id."""
    wanted = {row.trace_id + row.parent_span_id for row in run.spans if row.parent_span_id}
    return {key: row for row in run.spans if (key := row.trace_id + row.span_id) in wanted}


def early(run: Run, parents: dict[str, SpanRow]) -> tuple[int, int]:
    """Returns how many spans start before their parent on another node, and by how much (ns) at most."""
    count = worst_ns = 0
    for row in run.spans:
        parent = parents.get(row.trace_id + (row.parent_span_id or ""))
        if parent is not None and row.start_ns < parent.start_ns and parent.process.node != row.process.node:
            count += 1
            worst_ns = max(worst_ns, parent.start_ns - row.start_ns)
    return count, worst_ns
