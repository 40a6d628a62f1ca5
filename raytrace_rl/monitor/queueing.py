"""How long dispatched calls waited for their callee, by worker group and rank: ``rl.queued_ns`` of a call's first span.

A delay is the callee's clock minus the caller's. Between two nodes it is off by as much as their clocks disagree: such
delays are counted, and how many of them `raytrace_rl.monitor.align` has corrected; one that comes out below zero counts
as none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytrace_rl import semconv
from raytrace_rl.monitor.believed import believed_ns
from raytrace_rl.monitor.skew_messages import Clocks
from raytrace_rl.monitor.tables import percentile

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, Run

_NS = 1e9


@dataclass(slots=True)
class Rank:
    """The calls of one rank, whatever process it was in: a restarted actor goes on in another."""

    delays: list[int] = field(default_factory=list)
    below_zero: int = 0
    other_node: int = 0
    unknown_node: int = 0
    corrected: int = 0


def queueing(run: Run) -> dict[str, Any]:
    """Returns the delays by rank, the longest 95th percentile first, and how far they can be believed."""
    clocks, aligned = Clocks(run.processes), aligned_nodes(run)
    ranks: dict[tuple[str, int | None], Rank] = {}
    for row in run.spans:
        queued_ns = believed_ns(row.queued_ns)
        if queued_ns is None:
            continue
        process = row.process
        rank = ranks.setdefault((callee(process), process.rank), Rank())
        rank.delays.append(max(0, queued_ns))
        rank.below_zero += queued_ns < 0
        name = row.attributes.get(semconv.RL_QUEUED_FROM)
        if isinstance(name, str):  # else the call came from the callee's own node
            sender = clocks.named(name)
            rank.unknown_node += sender is None
            rank.other_node += sender not in (None, process.node)
            rank.corrected += sender != process.node and {sender, process.node} <= aligned
    return section(ranks)


def aligned_nodes(run: Run) -> set[str]:
    """Returns the nodes whose times have been shifted."""
    return {node.node for node in run.skew.nodes if node.aligned} if run.skew is not None else set()


def section(ranks: Mapping[tuple[str, int | None], Rank]) -> dict[str, Any]:
    """Returns the report's section, of the calls by callee and rank."""
    listed = [_entry(name, number, rank) for (name, number), rank in ranks.items()]
    listed.sort(key=lambda entry: (-entry["p95_s"], entry["callee"], -1 if entry["rank"] is None else entry["rank"]))
    counts = ("calls", "below_zero", "other_node", "unknown_node", "corrected")
    return {**{key: sum(entry[key] for entry in listed) for key in counts}, "ranks": listed}


def callee(process: Process) -> str:
    """Returns what a rank belongs to, for people: its worker group, else its actor's class."""
    return process.worker_group or process.actor_class or process.role or "process"


def _entry(name: str, number: int | None, rank: Rank) -> dict[str, Any]:
    ordered: Sequence[int] = sorted(rank.delays)
    return {
        "callee": name,
        "rank": number,
        "calls": len(ordered),
        "median_s": percentile(ordered, 0.5) / _NS,
        "p95_s": percentile(ordered, 0.95) / _NS,
        "max_s": ordered[-1] / _NS,
        "below_zero": rank.below_zero,
        "other_node": rank.other_node,
        "unknown_node": rank.unknown_node,
        "corrected": rank.corrected,
    }
