"""Draws why steps take as long as they do: findings, phases, the first step, critical path, stragglers, bubbles."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from raytrace_rl.monitor.drawing import ROWS, cut, more, percent, seconds, table

#: What is less than this part of the steps is left to the JSON.
_SHOWN: Final = 0.005
_LANES: Final = 12
_SENTENCE: Final = 300


def finding_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what is wrong, a line each; nothing if nothing is."""
    if not found:
        return []
    lines = ["Findings:"]
    for one in found[:ROWS]:
        sentence = cut(one["text"], _SENTENCE)
        # Paths and names stay whole: they are there to be copied.
        wrapped = textwrap.wrap(sentence, 96, break_long_words=False, break_on_hyphens=False)
        lines += [f"  - {wrapped[0]}", *(f"    {line}" for line in wrapped[1:])]
    return [*lines, *more(ROWS, len(found))]


def phase_lines(phases: Sequence[Mapping[str, Any]], first: Mapping[str, Any] | None) -> list[str]:
    """Returns the table of phases, and a line on the first step where that stands out."""
    if not phases:
        return []
    rows = [
        (
            "(no span)" if one["name"] is None else one["name"],
            percent(one["part"]),
            *(seconds(one[key]) for key in ("mean_s", "p50_s", "p95_s", "p99_s", "max_s")),
        )
        for one in phases[:ROWS]
        if one["part"] >= _SHOWN or one["name"] is not None
    ]
    heads = ("phase of the step", "part", "mean", "p50", "p95", "p99", "max")
    lines = ["Phases (seconds a step, in the driver's lane):", *table(heads, rows, (34, -6, -8, -8, -8, -8, -8))]
    if first is not None and first["stands_out"]:
        took = f"took {seconds(first['duration_s'])}, later ones {seconds(first['later_p50_s'])} (median)"
        lines.append(f"  The first step {took}; longest on top:")
        lines += [f"    {cut(one['name'], 50)} +{seconds(one['extra_s'])}" for one in first["spans"][:3]]
    return lines


def path_lines(view: Mapping[str, Any] | None) -> list[str]:
    """Returns the section on the critical path; nothing for a run without steps."""
    if view is None:
        return []
    shown = [one for one in view["spans"][:ROWS] if one["part"] >= _SHOWN]
    rows = [
        (
            one["name"],
            one["lane"],
            one["bucket"] or "-",
            percent(one["part"]),
            seconds(one["p50_s"]),
            seconds(one["p95_s"]),
            one["steps"],
        )
        for one in shown
    ]
    heads = ("span", "lane", "bucket", "part", "p50", "p95", "steps")
    lines = [f"Critical path ({view['steps']} steps, {seconds(view['total_s'])}): what each step waited for"]
    return [*lines, *table(heads, rows, (34, 20, 10, -6, -8, -8, -6)), *more(len(shown), len(view["spans"]))]


def straggler_lines(view: Mapping[str, Any]) -> list[str]:
    """Returns the section on stragglers; nothing for a run without ranks to compare."""
    if not view["compared"]:
        return []
    found = [one for one in view["ranks"] if one["straggler"]]
    lines = [f"Stragglers: {len(found) or 'none'} ({view['compared']} ranks compared)"]
    for one in found[:ROWS]:
        where = f"{cut(one['worker_group'], 40)}[{one['rank']}] on {cut(', '.join(one['nodes']), 60)}"
        part = one["part_of_step"]
        cost = f": {seconds(one['excess_s'])} a step, {percent(part)} of it" if part and one["excess_s"] else ""
        lines.append(f"  {where}{cost}")
        lines += [f"    {_excess(span)}" for span in one["spans"] if span["straggler"]]
    lines += more(min(len(found), ROWS), len(found))
    lines += [
        f"  node {cut(one['node'], 60)}: {one['stragglers']} of its {one['ranks']} ranks"
        for one in view["nodes"]
        if one["straggler"]
    ]
    return lines


def _excess(span: Mapping[str, Any]) -> str:
    name = cut(span["name"], 60)
    often = f"in {percent(span['often'])} of {span['count']} {'steps' if span['in_steps'] else 'spans'}"
    if span["kind"] == "late":
        return f"comes last into {name}, by {seconds(span['excess_s'])} {often}"
    ratio = "" if span["ratio"] is None else f" ({span['ratio']:.1f} x the others)"
    return f"is slow in {name}, by {seconds(span['excess_s'])}{ratio} {often}"


def bubble_lines(view: Mapping[str, Any] | None) -> list[str]:
    """Returns the section on idle lanes; nothing for a run without steps or workers."""
    if view is None or not view["lanes"]:
        return []
    heads = ("worker group", "idle", "part", "while")
    shown = [one for one in view["waits"] if one["part"] >= 0.01][:_LANES]
    rows = [
        (
            one["worker_group"],
            seconds(one["idle_s"]),
            percent(one["part"]),
            one["name"] if one["kind"] == "span" else f"the step was in {one['name']} of {one['of']}",
        )
        for one in shown
    ]
    if not rows:
        return []
    return ["Bubbles (idle inside steps, and what for):", *table(heads, rows, (20, -8, -6, 60))]
