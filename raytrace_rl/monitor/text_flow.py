"""Draws what a report says of the flow between processes: trajectories, and calls that waited for their callee."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raytrace_rl.monitor.drawing import ROWS, more, seconds, table


def _range(spread: Mapping[str, Any] | None, draw: Callable[[Any], str]) -> str:
    if spread is None:
        return "not known"
    return f"{draw(spread['min'])} to {draw(spread['max'])} (median {draw(spread['median'])})"


def _skewed(view: Mapping[str, Any], what: str, *, unknown: int = 0, corrected: int = 0) -> list[str]:
    """What must be said beside times that are the difference of two processes' clocks."""
    lines = [f"  {corrected:,} between two nodes: corrected by the clock skew estimated"] if corrected else []
    between = view["other_node"] - corrected + unknown
    if between:
        known = f"{view['other_node'] - corrected:,} between two nodes"
        also = f", {unknown:,} from a node that is not known" if unknown else ""
        lines.append(f"  {known}{also}: not corrected for clock skew between nodes")
    if view["below_zero"]:
        lines.append(f"  {view['below_zero']:,} {what} came out below zero, and count as 0: two clocks disagree")
    return lines


def trajectory_lines(view: Mapping[str, Any]) -> list[str]:
    """Returns the section on trajectories; nothing for a run that links none."""
    if not view["count"]:
        return []
    head = [f"Trajectories: {view['count']:,} trained on, age {_range(view['age_s'], seconds)}"]
    if view["lag"] is not None:
        head.append(f"  weight versions behind: {_range(view['lag'], str)}")
    rows = [
        (
            "-" if step["iteration"] is None else step["iteration"],
            step["count"],
            *(seconds(step["age_s"][key]) if step["age_s"] else "-" for key in ("min", "median", "max")),
            *(step["lag"][key] if step["lag"] else "-" for key in ("min", "median", "max")),
            " ".join(f"{version}:{n}" for version, n in step["weight_versions"].items()),
        )
        for step in view["steps"][-ROWS:]
    ]
    heads = ("step", "count", "age min", "median", "max", "lag min", "median", "max", "weight version:count")
    drawn = table(heads, rows, (-6, -6, -8, -8, -8, -7, -7, -4, 30))
    earlier = len(view["steps"]) - len(rows)
    shown = [f"  (the last {len(rows)} steps; {earlier} earlier ones in --json)"] if earlier > 0 else []
    return [*head, *shown, *drawn, *_skewed(view, "ages")]


def queueing_lines(view: Mapping[str, Any]) -> list[str]:
    """Returns the section on queueing; nothing for a run without dispatched calls."""
    if not view["calls"]:
        return []
    rows = [
        (
            entry["callee"],
            "-" if entry["rank"] is None else entry["rank"],
            entry["calls"],
            *(seconds(entry[key]) for key in ("median_s", "p95_s", "max_s")),
        )
        for entry in view["ranks"][:ROWS]
    ]
    head = "Queueing, from dispatch to the callee (waiting for arguments and for its creation included):"
    drawn = table(("callee", "rank", "calls", "median", "p95", "max"), rows, (30, -5, -8, -8, -8, -8))
    return [
        head,
        *drawn,
        *more(len(rows), len(view["ranks"])),
        *_skewed(view, "delays", unknown=view["unknown_node"], corrected=view["corrected"]),
    ]
