"""How long dispatched calls waited for their callee, by worker group and rank: ``rl.queued_ns`` of a call's first span.

A delay is the callee's clock minus the caller's. Between two nodes it is off by as much as their clocks disagree, which
is not known here: such delays are counted, and one that comes out below zero counts as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytrace_rl.monitor.believed import believed_ns
from raytrace_rl.monitor.tables import percentile

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, Run

_NS = 1e9


@dataclass(slots=True)
class _Rank:
    """The calls of one rank, whatever process it was in: a restarted actor goes on in another."""

    delays: list[int] = field(default_factory=list)
    below_zero: int = 0
    other_node: int = 0
    unknown_node: int = 0


def queueing(run: Run) -> dict[str, Any]:
    """Returns the delays by rank, the longest 95th percentile first, and how far they can be believed."""
    owners = {(row.trace_id, row.span_id): row.process for row in run.spans}
    ranks: dict[tuple[str, int | None], _Rank] = {}
    for row in run.spans:
        queued_ns = believed_ns(row.queued_ns)
        if queued_ns is None:
            continue
        process = row.process
        rank = ranks.setdefault((callee(process), process.rank), _Rank())
        rank.delays.append(max(0, queued_ns))
        rank.below_zero += queued_ns < 0
        # The parent of a call's first span is the span that was current at its dispatch.
        sender = owners.get((row.trace_id, row.parent_span_id or ""))
        if sender is None:
            rank.unknown_node += 1
        elif sender.node != process.node:
            rank.other_node += 1
    listed = [_entry(name, number, rank) for (name, number), rank in ranks.items()]
    listed.sort(key=lambda entry: (-entry["p95_s"], entry["callee"], -1 if entry["rank"] is None else entry["rank"]))
    return {
        "calls": sum(entry["calls"] for entry in listed),
        "below_zero": sum(entry["below_zero"] for entry in listed),
        "other_node": sum(entry["other_node"] for entry in listed),
        "unknown_node": sum(entry["unknown_node"] for entry in listed),
        "ranks": listed,
    }


def callee(process: Process) -> str:
    """Returns what a rank belongs to, for people: its worker group, else its actor's class."""
    return process.worker_group or process.actor_class or process.role or "process"


def _entry(name: str, number: int | None, rank: _Rank) -> dict[str, Any]:
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
    }
