"""Which rank, or node, holds the others up. Robust: medians, and the median absolute deviation (MAD) as the noise.

Within each step a rank is compared with the median of the others, in two ways. *Slow*: the time that it spends in spans
of one name, outside of spans below them. *Late*: how much later it comes into the spans in which ranks wait for each
other (`meetings`), where durations would accuse the others. Spans outside of steps (a generation worker's) are compared
by the medians of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor import noise
from raytrace_rl.monitor.tables import MAX_LISTED

if TYPE_CHECKING:
    from raytrace_rl.monitor.meetings import Meeting, Name
    from raytrace_rl.monitor.model import SpanRow
    from raytrace_rl.monitor.tree import Tree

_NS: Final = 1e9
#: Steps (or spans, outside of steps) that a rank must have been seen in.
LEAST: Final = 3
LEAST_SPANS: Final = 5
#: A straggler: the excess stands out of the noise (`noise.threshold`), comes up in this part of the steps, and is this
#: part of the others' time (slow), and of the step (in steps).
_OFTEN: Final = 0.75
_SLOWER: Final = 1.2
_PART: Final = 0.05
#: And so unlikely by chance (`noise.by_chance`), whichever rank it is: few steps are little evidence.
_CHANCE: Final = 0.025


@dataclass(slots=True)
class Excess:
    """How much more one rank takes than the others, in spans of one name.

    Attributes:
        name: Of the spans.
        kind: ``slow`` or ``late``.
        excess_ns: Median over the steps (or spans) of what it takes more, or comes later.
        others_ns: Median of what the others take; 0 where it is late.
        score: The excess in units of its noise.
        often: Part of the steps in which it is positive.
        count: Steps, or spans.
        in_steps: Whether it is inside of steps.
        slowest: How many of these it is among the slowest half, third, ... of ranks in (`noise.PARTS`).
        chance: At most how likely that is for any of equal ranks.
        flagged: Whether all that makes a straggler is there.
    """

    name: str
    kind: str
    excess_ns: float
    others_ns: float
    score: float
    often: float
    count: int
    in_steps: bool
    slowest: tuple[int, ...]
    chance: float = 1.0
    flagged: bool = False

    @property
    def ratio(self) -> float | None:
        """Its time over the others'; None where it is late, or they take none."""
        return (self.others_ns + self.excess_ns) / self.others_ns if self.others_ns > 0 else None


@dataclass(slots=True)
class _Rank:
    nodes: set[str] = field(default_factory=set)
    found: list[Excess] = field(default_factory=list)


class Ranks:
    """What the comparison of a run's ranks has found.

    Args:
        steps: The complete steps of the run.
    """

    def __init__(self, steps: Sequence[SpanRow]) -> None:
        self._step_ns = median(step.until_ns - step.start_ns for step in steps) if steps else 0
        self._ranks: dict[tuple[str, int], _Rank] = {}

    def note(self, group: str, rank: int, nodes: Iterable[str], excess: Excess, ranks: int) -> None:
        """Notes how one rank of ``ranks`` compares with the others, and decides whether it is a straggler."""
        excess.chance = noise.by_chance(excess.slowest, excess.count, ranks)
        excess.flagged = excess.score >= noise.threshold(ranks) and excess.often >= _OFTEN and excess.chance <= _CHANCE
        if excess.kind != "late":
            excess.flagged &= (
                (excess.ratio is None or excess.ratio >= _SLOWER)
                if excess.in_steps
                else ((excess.ratio or 0) >= _SLOWER)
            )
        if excess.in_steps:
            excess.flagged &= excess.excess_ns >= _PART * self._step_ns
        entry = self._ranks.setdefault((group, rank), _Rank())
        entry.nodes.update(nodes)
        entry.found.append(excess)

    def report(self) -> dict[str, Any]:
        """Returns the ranks that take longest, and the nodes, as plain values."""
        ranks = [self._entry(group, rank, one) for (group, rank), one in self._ranks.items()]
        ranks = [entry for entry in ranks if entry["spans"]]
        ranks.sort(key=lambda entry: (not entry["straggler"], -entry["excess_s"], entry["worker_group"], entry["rank"]))
        return {"compared": len(self._ranks), "ranks": ranks[:MAX_LISTED], "nodes": self._of_nodes()}

    def _entry(self, group: str, rank: int, one: _Rank) -> dict[str, Any]:
        found = sorted((excess for excess in one.found if excess.excess_ns > 0), key=_order)
        cost = _cost(found)
        return {
            "worker_group": group,
            "rank": rank,
            "nodes": sorted(one.nodes),
            "straggler": any(excess.flagged for excess in found),
            "excess_s": cost / _NS,
            "part_of_step": cost / self._step_ns if self._step_ns else None,
            "spans": [
                {
                    "name": excess.name,
                    "kind": excess.kind,
                    "straggler": excess.flagged,
                    "excess_s": excess.excess_ns / _NS,
                    "others_s": excess.others_ns / _NS,
                    "ratio": excess.ratio,
                    "score": min(excess.score, 1e6),
                    "often": excess.often,
                    "chance": excess.chance,
                    "count": excess.count,
                    "in_steps": excess.in_steps,
                }
                for excess in found[:20]
            ],
        }

    def _of_nodes(self) -> list[dict[str, Any]]:
        """Nodes whose ranks are stragglers while those of other nodes are none: it is the node, not the rank."""
        by_node: dict[str, list[bool]] = {}
        for one in self._ranks.values():
            flagged = any(excess.flagged for excess in one.found)
            for node in one.nodes:
                by_node.setdefault(node, []).append(flagged)
        if len(by_node) < 2:
            return []
        whole, bad = sum(map(len, by_node.values())), sum(map(sum, by_node.values()))
        return [
            {
                "node": node,
                "ranks": len(flags),
                "stragglers": sum(flags),
                "straggler": len(flags) > 1
                and sum(flags) >= _OFTEN * len(flags)
                and bad - sum(flags) <= (1 - _OFTEN) * (whole - len(flags)),
            }
            for node, flags in sorted(by_node.items())
        ]


class Stragglers(Ranks):
    """The comparison of a run's ranks.

    Args:
        tree: The run.
        steps: `meetings.ranked` of each of its steps.
        met: `meetings.meetings` of these.
    """

    def __init__(
        self,
        tree: Tree,
        steps: Sequence[dict[Name, dict[int, list[SpanRow]]]],
        met: dict[Name, list[list[Meeting]]],
    ) -> None:
        super().__init__(tree.steps)
        self._tree = tree
        self._in_steps(steps, met)
        self._outside(steps)

    def _in_steps(
        self, steps: Sequence[dict[Name, dict[int, list[SpanRow]]]], met: dict[Name, list[list[Meeting]]]
    ) -> None:
        spent: dict[Name, list[dict[int, float]]] = {}
        rows: dict[tuple[Name, int], list[SpanRow]] = {}
        for step in steps:
            for name, by_rank in step.items():
                if len(by_rank) > 1 and name not in met:
                    spent.setdefault(name, []).append({r: self._tree.self_ns(own) for r, own in by_rank.items()})
                for rank, own in by_rank.items():
                    rows.setdefault((name, rank), own)
        lateness = {name: [_lateness(rounds) for rounds in of_steps] for name, of_steps in met.items()}
        for kind, values in (("slow", spent), ("late", lateness)):
            for name, of_steps in values.items():
                ranks = sorted({rank for step in of_steps for rank in step})
                for rank in ranks:
                    excess = _paired(name[1], kind, rank, of_steps)
                    if excess is not None:
                        self.note(name[0], rank, _nodes(rows[name, rank]), excess, len(ranks))

    def _outside(self, steps: Sequence[dict[Name, dict[int, list[SpanRow]]]]) -> None:
        inside = {id(row) for step in steps for by_rank in step.values() for rows in by_rank.values() for row in rows}
        spans: dict[Name, dict[int, list[SpanRow]]] = {}
        for row in self._tree.run.spans:
            group, rank = row.process.worker_group, row.process.rank
            if group is None or rank is None or row.end_ns is None or row.truncated or id(row) in inside:
                continue
            spans.setdefault((group, row.name), {}).setdefault(rank, []).append(row)
        for (group, name), by_rank in spans.items():
            lengths = {rank: [row.until_ns - row.start_ns for row in rows] for rank, rows in by_rank.items()}
            medians = {rank: median(of_rank) for rank, of_rank in lengths.items()}
            for rank, rows in by_rank.items():
                excess = _unpaired(name, lengths[rank], [value for at, value in medians.items() if at != rank])
                if excess is not None:
                    self.note(group, rank, _nodes(rows), excess, len(by_rank))


def _order(excess: Excess) -> tuple[bool, float, str, str, bool]:
    return not excess.flagged, -excess.excess_ns, excess.name, excess.kind, excess.in_steps


def _cost(found: Sequence[Excess]) -> float:
    """What a rank costs a step: how late it comes to meetings, else how much longer its spans take."""
    late = [e.excess_ns for e in found if e.kind == "late" and e.flagged]
    slow = [e.excess_ns for e in found if e.kind == "slow" and e.flagged and e.in_steps]
    if late or slow:
        return max(sum(late), sum(slow))
    return max((e.excess_ns for e in found if e.in_steps), default=0.0)


def _nodes(rows: Iterable[SpanRow]) -> set[str]:
    return {row.process.node for row in rows}


def _lateness(rounds: Sequence[Meeting]) -> dict[int, float]:
    """How much later each rank came than the median of the others, summed over a step's meetings."""
    late: dict[int, float] = {}
    for meeting in rounds:
        first = min(row.start_ns for row in meeting.values())
        for rank, row in meeting.items():
            others = median(other.start_ns - first for at, other in meeting.items() if at != rank)
            late[rank] = late.get(rank, 0.0) + (row.start_ns - first - others)
    return late


def _paired(name: str, kind: str, rank: int, steps: Sequence[dict[int, float]]) -> Excess | None:
    """Compares a rank with the others of the same step, step by step."""
    excess: list[float] = []
    typical: list[float] = []
    slowest = [0] * len(noise.PARTS)
    for values in steps:
        others = [value for at, value in values.items() if at != rank]
        if rank not in values or not others:
            continue
        place = sum(value >= values[rank] for value in values.values())
        slowest = [n + (place * part <= len(values)) for n, part in zip(slowest, noise.PARTS, strict=True)]
        if kind == "late":
            excess.append(values[rank])  # it is relative to the others already
            continue
        typical.append(median(others))
        excess.append(values[rank] - typical[-1])
    if len(excess) < LEAST:
        return None
    middle, score = _score(excess)
    often = sum(value > 0 for value in excess) / len(excess)
    others_ns = median(typical) if typical else 0.0
    return Excess(name, kind, middle, others_ns, score, often, len(excess), in_steps=True, slowest=tuple(slowest))


def _unpaired(name: str, own: Sequence[int], medians: Sequence[float]) -> Excess | None:
    """Compares the durations of a rank's spans with the median of the other ranks' medians."""
    if not medians or len(own) < LEAST_SPANS:
        return None
    typical = median(medians)
    middle, score = _score([value - typical for value in own])
    longer = sum(value > typical for value in own)
    return Excess(name, "slow", middle, typical, score, longer / len(own), len(own), in_steps=False, slowest=(longer,))


def _score(values: Sequence[float]) -> tuple[float, float]:
    """The median, and how many times the noise of that median it is."""
    middle = median(values)
    return middle, noise.score(middle, noise.of_median(values, middle))
