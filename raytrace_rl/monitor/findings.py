"""What is wrong with a run, in a sentence each: a slow rank, starvation, refits, a thread that hangs, a restart.

Each rule looks at what the report has found already. Medians over the steps decide, so that one bad step is no verdict;
and what merely follows from another finding is not named a second time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import semconv
from raytrace_rl.monitor import lanes
from raytrace_rl.monitor.drawing import percent, seconds
from raytrace_rl.monitor.frames import sections
from raytrace_rl.monitor.successors import Successors
from raytrace_rl.monitor.tree import Lane, Tree, lane_of

if TYPE_CHECKING:
    from raytrace_rl.monitor.critical_path import Segment

_NS: Final = 1e9
#: Parts of the median step from which on something is worth a sentence.
_SLOW_RANK: Final = 0.1
_STARVED: Final = 0.2
_REFIT: Final = 0.15
#: A rank outside of steps is named when it takes this many times what the others take.
_SLOW_WORKER: Final = 1.5
#: A thread hangs when it has stood in a span this long (s), and this many times longer than the longest of its name.
_HANGS_S: Final = 10.0
_HANGS: Final = 10
_PEERS: Final = 3
#: A process has died early when the run went on without it for this long (s).
_EARLY_S: Final = 10.0

_REFIT_NAME: Final = re.compile(r"refit|weight_(?:sync|update|transfer)|(?:sync|update)_weights", re.IGNORECASE)

Finding = dict[str, Any]


def findings(tree: Tree, paths: Sequence[Sequence[Segment]], stragglers: Mapping[str, Any]) -> list[Finding]:
    """Returns what is wrong, the costliest first; plain JSON values, described in docs/report.md.

    Args:
        tree: The run.
        paths: The critical path of each of its steps.
        stragglers: The report's section.
    """
    return found(tree, stragglers, partial(_phases, tree, paths))


def found(
    tree: Tree, stragglers: Mapping[str, Any], phases: Callable[[Callable[[Any], bool]], Phases]
) -> list[Finding]:
    """Returns what `findings` does, of what ``phases`` says of those phases of which a function is true."""
    broken = [*_restarts(tree), *_hanging(tree)]
    slow = _slow(stragglers)
    waits = _waits(tree, phases)
    explained = {finding["worker_group"] for finding in (*broken, *slow)}
    waits = [one for one in waits if not explained & set(one["follows_from"])]
    for one in waits:
        del one["follows_from"]
    return sorted([*broken, *slow, *waits], key=lambda one: -(one["part"] or 1.0))


def _finding(kind: str, text: str, lane: Lane, part: float | None, **evidence: Any) -> Finding:
    return {
        "kind": kind,
        "text": text,
        "worker_group": lane.group,
        "rank": lane.rank,
        "part": part,
        "evidence": evidence,
    }


def _slow(stragglers: Mapping[str, Any]) -> list[Finding]:
    """Slow ranks; where all of a node are slow, the node."""
    found = []
    nodes = {one["node"] for one in stragglers["nodes"] if one["straggler"]}
    for node in sorted(nodes):
        ranks = [one for one in stragglers["ranks"] if one["straggler"] and node in one["nodes"]]
        worst = ranks[0]
        text = f"node {node} is slow: {len(ranks)} of its ranks hold the others up, the worst by "
        text += f"{seconds(worst['excess_s'])} a step"
        lane = Lane(worst["worker_group"], None)
        found.append(_finding("slow_node", text, lane, worst["part_of_step"], node=node, ranks=len(ranks)))
    for one in stragglers["ranks"]:
        if not one["straggler"] or nodes & set(one["nodes"]):
            continue
        lane = Lane(one["worker_group"], one["rank"])
        flagged = [span for span in one["spans"] if span["straggler"]]
        slow = [span for span in flagged if span["kind"] == "slow"]
        where = (slow or flagged)[0]
        what = f"takes {where['ratio']:.1f} times as long as the others" if where["ratio"] else "comes last"
        node = ", ".join(one["nodes"])
        if any(span["in_steps"] for span in flagged):
            part = one["part_of_step"]
            if part >= _SLOW_RANK:
                text = f"{lane} on {node} is slow: in {where['name']} it {what}, which costs a step "
                text += f"{seconds(one['excess_s'])} ({percent(part)} of it)"
                found.append(_finding("slow_rank", text, lane, part, span=where["name"], excess_s=one["excess_s"]))
        elif (where["ratio"] or 0) >= _SLOW_WORKER:
            text = f"{lane} on {node} is slow: in {where['name']} it {what}"
            found.append(_finding("slow_rank", text, lane, None, span=where["name"], excess_s=where["excess_s"]))
    return found


def _waits(tree: Tree, phases: Callable[[Callable[[Any], bool]], Phases]) -> list[Finding]:
    """Starvation and refits: what the driver's lane says it waits for, and what the path was in meanwhile."""
    if not tree.steps:
        return []
    starved = phases(lambda row: row.bucket == "idle" and not _REFIT_NAME.search(row.name))
    refit = phases(lambda row: _REFIT_NAME.search(row.name) is not None)
    found = []
    if starved.part >= _STARVED:
        name, lane = starved.longest()
        text = f"the trainer starves: {percent(starved.part)} of a step goes to {starved.name}"
        if lane != lane_of(tree.steps[0].process):
            text += f", in which it waits for {name} of {lane.group}"
        entry = _finding(
            "starved_trainer", text, Lane(lane.group, None), starved.part, span=starved.name, waits_for=name
        )
        found.append({**entry, "follows_from": starved.lanes()})
    # Workers that finish what they generate before they take weights make a refit long too: that is generation's time.
    busy = refit.part if not found else refit.busy_part
    if busy >= _REFIT:
        name, lane = refit.longest()
        text = f"refits hold the step up: {percent(refit.part)} of it goes to {refit.name}, most of that to {name} of "
        evidence = {"span": refit.name, "waits_for": name}
        entry = _finding("refit_bubble", f"{text}{lane.group}", Lane(lane.group, None), refit.part, **evidence)
        found.append({**entry, "follows_from": refit.lanes()})
    return found


@dataclass(slots=True)
class Phases:
    """The time of each step in phases of one kind, and what the critical path was in meanwhile.

    Attributes:
        parts, busy: Of each step the part in them, and that in which something was done on the path meanwhile.
        names: Time (ns) of the phases by their name, in the order in which they come up.
        sums: Time (ns) of the path in them by span name and lane, in that order too.
    """

    parts: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    sums: dict[tuple[str, Lane], int] = field(default_factory=dict)

    @property
    def part(self) -> float:
        """The part of a step in them."""
        return median(self.parts)

    @property
    def busy_part(self) -> float:
        """The part in which something was done on the path, other than to wait."""
        return median(self.busy)

    @property
    def name(self) -> str:
        """The name that most of their time has."""
        return max(self.names, key=self.names.__getitem__)

    def longest(self) -> tuple[str, Lane]:
        """The span name, and one of its lanes, that the path was in for longest."""
        by_name: dict[tuple[str, str], int] = {}
        for (name, lane), length in self.sums.items():
            by_name[name, lane.group] = by_name.get((name, lane.group), 0) + length
        name, group = max(by_name, key=by_name.__getitem__)
        return name, max((lane for n, lane in self.sums if (n, lane.group) == (name, group)), key=str)

    def lanes(self) -> list[str]:
        """The worker groups that the path was in for a good part of the time."""
        whole = sum(self.sums.values())
        by_group: dict[str, int] = {}
        for (_, lane), length in self.sums.items():
            by_group[lane.group] = by_group.get(lane.group, 0) + length
        return [group for group, length in by_group.items() if length >= 0.1 * whole]


def _phases(tree: Tree, paths: Sequence[Sequence[Segment]], chosen: Callable[[Any], bool]) -> Phases:
    told = Phases()
    for step, segments in zip(tree.steps, paths, strict=True):
        whole = step.until_ns - step.start_ns
        rows = tree.own_children(step, chosen)
        phases = lanes.union((row.start_ns, row.until_ns) for row in rows)
        phases = lanes.intersection(phases, [(step.start_ns, step.until_ns)])
        for row in rows:
            told.names[row.name] = told.names.get(row.name, 0) + row.until_ns - row.start_ns
        busy = 0
        # The path's segments are in order, as the phases are: each pair that overlaps is met once.
        at = 0
        for segment in segments if phases else ():
            while at < len(phases) and phases[at][1] <= segment.start_ns:
                at += 1
            length = 0
            for start, end in phases[at:]:
                if start >= segment.end_ns:
                    break
                length += min(end, segment.end_ns) - max(start, segment.start_ns)
            if length:
                key = segment.row.name, tree.lane(segment.row.process)
                told.sums[key] = told.sums.get(key, 0) + length
                busy += length if segment.row.bucket != "idle" else 0
        told.parts.append(lanes.total(phases) / whole if whole else 0.0)
        told.busy.append(busy / whole if whole else 0.0)
    return told


def _hanging(tree: Tree) -> list[Finding]:
    """Threads that stand in a span for far longer than ever before, in a process that lives, or until its end."""
    run = tree.run
    opened = tree.unended()
    if not opened:
        return []
    peers = tree.complete({row.name for row in opened})
    inner = {(row.trace_id, row.parent_span_id) for row in opened}
    stacks = {(stack.trace_id, stack.span_id): stack.text for stack in run.stacks}
    found = []
    for row in opened:
        others = peers.get(row.name)
        age = row.until_ns - row.start_ns
        if (row.trace_id, row.span_id) in inner or others is None or others.count < _PEERS:
            continue
        if age < _HANGS_S * _NS or age < _HANGS * others.longest:
            continue
        lane = lane_of(row.process)
        text = f"thread {row.thread or '?'} of {row.process.label} has stood in {row.name} for {seconds(age / _NS)}"
        text += f" (others took {seconds(others.median / _NS)})"
        where = _user_frame(stacks.get((row.trace_id, row.span_id), ""))
        if where:
            text += f", at {where}"
        evidence = {"span": row.name, "thread": row.thread, "age_s": age / _NS, "at": where}
        found.append(_finding("stuck_thread", text, lane, None, **evidence))
    return found


def _user_frame(text: str) -> str | None:
    """Where the user's code stands, of a STACK record."""
    for section in sections(text)[:1]:
        frames = [frame for frame in section.frames if not frame.is_library] or section.frames
        if frames:
            frame = frames[-1]
            return f'"{frame.file}", line {frame.line}, in {frame.function}' + (f": {frame.code}" if frame.code else "")
    return None


def _restarts(tree: Tree) -> list[Finding]:
    found = []
    run = tree.run
    attempts = sorted({process.attempt for process in run.processes})
    if len(attempts) > 1:
        driver = Lane(semconv.ROLE_DRIVER, None)
        text = f"the run was started {len(attempts)} times: what it did again counts as wasted"
        found.append(_finding("restart", text, driver, None, attempts=len(attempts)))
    end = max((process.last_ns for process in run.processes), default=0)
    successors = Successors(run.processes)
    for process in run.processes:
        if process.state != "dead" or process.attempt != attempts[-1] or process.role == semconv.ROLE_DRIVER:
            continue
        lane = lane_of(process)
        cut = tree.truncated(process)
        after = successors.of(process)
        died = f"{process.label} died, with {cut} span{'' if cut == 1 else 's'} open"
        if after is not None:
            gap = max(0, after.start_ns - process.last_ns) / _NS
            text = f"{died}, and was back as pid {after.pid} after {seconds(gap)}"
            found.append(_finding("restart", text, lane, None, pid=process.pid, gap_s=gap, truncated=cut))
        elif end - process.last_ns >= _EARLY_S * _NS:
            ago = (end - process.last_ns) / _NS
            text = f"{died}; the run went on without it for {seconds(ago)}"
            found.append(_finding("died", text, lane, None, pid=process.pid, gap_s=ago, truncated=cut))
    return found
