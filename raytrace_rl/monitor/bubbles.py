"""What idle lanes waited for: the idle time of each worker lane inside steps, named.

Time that a span of bucket idle owns bears that span's name. A gap between spans bears the name of what the step itself
waited for at that moment: where its critical path was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from raytrace_rl import semconv
from raytrace_rl.monitor import families, lanes
from raytrace_rl.monitor.tables import MAX_LISTED
from raytrace_rl.monitor.tree import Lane, Tree

if TYPE_CHECKING:
    from raytrace_rl.monitor.critical_path import Segment
    from raytrace_rl.monitor.lanes import Interval
    from raytrace_rl.monitor.model import Process, SpanRow

_NS: Final = 1e9

T = TypeVar("T")


class Wait(NamedTuple):
    """A reason to be idle: a span that says so itself, or what the step was waiting for."""

    kind: str
    name: str
    of: str


def bubbles(tree: Tree, paths: Sequence[Sequence[Segment]]) -> dict[str, Any] | None:
    """Returns the idle time of worker lanes inside steps, by what they waited for; None without steps.

    Args:
        tree: The run.
        paths: `critical_path.path` of each of its steps.
    """
    if not tree.steps:
        return None
    windows, segments = waited_for(tree.steps, paths)
    starts = [start for start, _, _ in segments]
    by_process: dict[str, tuple[Process, list[SpanRow]]] = {}
    heads = families.heads(tree.run.processes, tree.run.spans)
    for row in tree.run.spans:
        # What a worker has started, such as an engine's processes, is idle or not with it.
        if row.process.role != semconv.ROLE_DRIVER and heads.get(row.process.key) is row.process:
            by_process.setdefault(row.process.key, (row.process, []))[1].append(row)
    listed: dict[Lane, dict[Wait, int]] = {}
    wall: dict[Lane, int] = {}
    for process, rows in by_process.values():
        lane = tree.lane(process)
        life = [(min(process.start_ns or rows[0].start_ns, rows[0].start_ns), process.last_ns)]
        inside = lanes.intersection(windows, life)
        wall[lane] = wall.get(lane, 0) + lanes.total(inside)
        waits = listed.setdefault(lane, {})
        for wait, length in _waits(tree, rows, inside, (starts, segments)):
            waits[wait] = waits.get(wait, 0) + length
    return entries(listed, wall)


def waited_for(
    steps: Sequence[SpanRow], paths: Sequence[Sequence[Segment]]
) -> tuple[list[Interval], list[tuple[int, int, SpanRow]]]:
    """Returns when there were steps, and where the critical path was meanwhile."""
    windows = lanes.union((step.start_ns, step.until_ns) for step in steps)
    named = [(segment.start_ns, segment.end_ns, segment.row) for of_step in paths for segment in of_step]
    named.sort(key=lambda segment: segment[0])
    # Steps that overlap have paths side by side: of those, the one that began last says what was waited for.
    side_by_side = any(one[1] > following[0] for one, following in pairwise(named))
    return windows, list(overlaps(windows, named)) if side_by_side else named


def entries(listed: dict[Lane, dict[Wait, int]], wall: dict[Lane, int]) -> dict[str, Any]:
    """Returns the section, of the idle time (ns) of each lane by what it waited for, and its wall clock in steps."""
    of_lanes = [_lane_entry(lane, waits, wall[lane]) for lane, waits in sorted(listed.items(), key=_order)]
    return {"lanes": of_lanes[:MAX_LISTED], "waits": _by_group(listed, wall)}


def _order(item: tuple[Lane, dict[Wait, int]]) -> tuple[str, int]:
    lane = item[0]
    return lane.group, -1 if lane.rank is None else lane.rank


def _waits(
    tree: Tree,
    rows: Sequence[SpanRow],
    inside: Sequence[Interval],
    path: tuple[Sequence[int], Sequence[tuple[int, int, SpanRow]]],
) -> Iterator[tuple[Wait, int]]:
    owned = lanes.timeline(rows)
    idle = lanes.intersection([(start, end) for start, end, bucket in owned if bucket == "idle"], inside)
    said = sorted((row for row in rows if row.bucket == "idle"), key=lambda row: row.start_ns)
    for start, end, row in overlaps(idle, [(row.start_ns, row.until_ns, row) for row in said]):
        yield Wait("span", row.name, ""), end - start
    taken = lanes.union((start, end) for start, end, _ in owned)
    starts, segments = path
    for gap_start, gap_end in lanes.complement(taken, inside):
        for at in range(max(0, bisect_right(starts, gap_start) - 1), len(segments)):
            start, end, row = segments[at]
            if start >= gap_end:
                break
            length = min(end, gap_end) - max(start, gap_start)
            if length > 0:
                yield Wait("step", row.name, str(tree.lane(row.process))), length


def overlaps(parts: Iterable[Interval], named: Sequence[tuple[int, int, T]]) -> Iterator[tuple[int, int, T]]:
    """Yields what named intervals cover of ``parts``, once: where several do, the one that started last.

    Args:
        parts: Disjoint, in order.
        named: In the order of their start.
    """
    opened: list[tuple[int, int]] = []
    following = 0
    for start, end in parts:
        at = start
        while at < end:
            while following < len(named) and named[following][0] <= at:
                heappush(opened, (-named[following][0], following))
                following += 1
            while opened and named[opened[0][1]][1] <= at:
                heappop(opened)
            until = min(end, named[following][0]) if following < len(named) else end
            if opened:
                _, stop, row = named[opened[0][1]]
                until = min(until, stop)
                yield at, until, row
            at = until


def _lane_entry(lane: Lane, waits: dict[Wait, int], wall: int) -> dict[str, Any]:
    idle = sum(waits.values())
    return {
        "lane": str(lane),
        "worker_group": lane.group,
        "rank": lane.rank,
        "idle_s": idle / _NS,
        "part": idle / wall if wall else 0.0,
        "waits": [
            {"kind": wait.kind, "name": wait.name, "of": wait.of, "idle_s": length / _NS}
            for wait, length in sorted(waits.items(), key=lambda item: (-item[1], item[0]))[:10]
        ],
    }


def _by_group(listed: dict[Lane, dict[Wait, int]], wall: dict[Lane, int]) -> list[dict[str, Any]]:
    """The same for whole worker groups, of which there may be thousands of ranks."""
    groups: dict[str, int] = {}
    sums: dict[tuple[str, Wait], int] = {}
    for lane, waits in listed.items():
        groups[lane.group] = groups.get(lane.group, 0) + wall[lane]
        for wait, length in waits.items():
            # Which rank the step was at when others waited differs from step to step: the group says it.
            key = lane.group, wait._replace(of=wait.of.partition("[")[0])
            sums[key] = sums.get(key, 0) + length
    found: list[dict[str, Any]] = [
        {
            "worker_group": group,
            "kind": wait.kind,
            "name": wait.name,
            "of": wait.of,
            "idle_s": length / _NS,
            "part": length / groups[group] if groups[group] else 0.0,
        }
        for (group, wait), length in sums.items()
    ]
    order = ("worker_group", "name", "kind", "of")
    return sorted(found, key=lambda entry: (-entry["idle_s"], *(entry[key] for key in order)))[:MAX_LISTED]
