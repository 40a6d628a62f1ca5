"""Spans in which the ranks of a group wait for each other: collectives, barriers. Told from their times alone.

A rank that comes early into an all-reduce is in it for long, and one that comes late is not: durations accuse the wrong
one. So a span without children that every rank of a group enters equally often, all at once, whose ends lie closer
together than its starts, is a meeting; who holds it up is who comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import SpanRow
    from raytrace_rl.monitor.tree import Tree

#: One entry of each rank, by rank.
Meeting = dict[int, "SpanRow"]
#: Spans of one name of one worker group.
Name = tuple[str, str]

_LEAST: Final = 3
#: Ends this much closer together than starts make a meeting; and the part of the entries that have to overlap.
_CLOSER: Final = 0.5
_AT_ONCE: Final = 0.9


def ranked(tree: Tree, step: SpanRow) -> dict[Name, dict[int, list[SpanRow]]]:
    """Returns the spans of ranks below a step, by worker group and name, each rank's in the order of their start."""
    found: dict[Name, dict[int, list[SpanRow]]] = {}
    for row in tree.below(step):
        process = row.process
        group, rank = process.worker_group, process.rank
        if group is not None and rank is not None and row.end_ns is not None:
            found.setdefault((group, row.name), {}).setdefault(rank, []).append(row)
    for by_rank in found.values():
        for rows in by_rank.values():
            rows.sort(key=lambda row: (row.start_ns, row.until_ns, row.span_id))
    return found


def meetings(tree: Tree, steps: Iterable[dict[Name, dict[int, list[SpanRow]]]]) -> dict[Name, list[list[Meeting]]]:
    """Returns the meetings, by worker group and name, of each step that had any.

    Args:
        tree: The run.
        steps: What `ranked` returns for each step.
    """
    candidates: dict[Name, list[list[Meeting]]] = {}
    refused: set[Name] = set()
    for step in steps:
        for name, by_rank in step.items():
            if len(by_rank) < 2 or name in refused:
                continue
            entries = list(by_rank.values())
            if len({len(rows) for rows in entries}) > 1 or any(tree.children(row) for rows in entries for row in rows):
                refused.add(name)
                continue
            rounds = [dict(zip(by_rank, rows, strict=True)) for rows in zip(*entries, strict=True)]
            candidates.setdefault(name, []).append(rounds)
    return {name: steps for name, steps in candidates.items() if name not in refused and _meet(steps)}


def _meet(steps: Sequence[Sequence[Meeting]]) -> bool:
    rounds = [list(one.values()) for step in steps for one in step]
    starts = [[row.start_ns for row in rows] for rows in rounds]
    ends = [[row.until_ns for row in rows] for rows in rounds]
    at_once = sum(max(start) <= min(end) for start, end in zip(starts, ends, strict=True))
    return are_meetings(list(map(_spread, starts)), list(map(_spread, ends)), at_once)


def are_meetings(starts: Sequence[int], ends: Sequence[int], at_once: int) -> bool:
    """Tells meetings by their times.

    Args:
        starts: How far the starts of each lie apart (ns).
        ends: How far the ends of each lie apart.
        at_once: In how many of them all ranks were at once.
    """
    if len(starts) < _LEAST:
        return False
    return median(ends) < _CLOSER * median(starts) and at_once >= _AT_ONCE * len(starts)


def _spread(times: Sequence[int]) -> int:
    return max(times) - min(times)


def last_to_come(found: dict[Name, list[list[Meeting]]]) -> Callable[[SpanRow], SpanRow | None]:
    """Returns what gives for a span of a meeting the one that came into it last, and None for any other."""
    last: dict[int, SpanRow] = {}
    for steps in found.values():
        for step in steps:
            for meeting in step:
                late = max(meeting.items(), key=lambda item: (item[1].start_ns, item[0]))[1]
                last.update((id(row), late) for row in meeting.values())
    return lambda row: last.get(id(row))
