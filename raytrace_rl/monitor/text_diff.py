"""Draws the difference of two runs as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from raytrace_rl.monitor.drawing import ROWS, cut, more, percent, seconds, table

_QUIET: Final = frozenset({"same", "unclear"})


def render(found: Mapping[str, Any]) -> str:
    """Returns the text of what `raytrace_rl.monitor.diff.diff` returns: what changed first."""
    sections = [
        [_run("A", found["a"]), _run("B", found["b"])],
        _steps(found["steps"]),
        _buckets(found["buckets"]),
        _names(found["span_names"]),
        _ranks(found["ranks"]),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _run(letter: str, run: Mapping[str, Any]) -> str:
    return f"{letter}: {cut(run['id'], 40)}, {run['spans']:,} spans, {run['steps']} steps ({cut(run['path'], 100)})"


def _time(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _ratio(entry: Mapping[str, Any]) -> str:
    return "" if entry["ratio"] is None else f"x{entry['ratio']:.2f}"


def _steps(entry: Mapping[str, Any]) -> list[str]:
    if not entry["a_count"] or not entry["b_count"]:
        return ["Steps: one of the runs has none"]
    change = f"{_time(entry['a_p50_s'])} -> {_time(entry['b_p50_s'])} (median, {_ratio(entry)})"
    return [f"Steps: {change}: {entry['verdict']}"]


def _buckets(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    if not entries:
        return []
    rows = [
        (
            entry["view"],
            entry["bucket"],
            percent(entry["a_part"]),
            percent(entry["b_part"]),
            f"{entry['change'] * 100:+.1f}",
        )
        for entry in entries
    ]
    return ["Goodput:", *table(("view", "bucket", "A", "B", "points"), rows, (6, 13, -7, -7, -7))]


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _time(entry["a_p50_s"]),
        _time(entry["b_p50_s"]),
        _ratio(entry),
        _time(entry["a_step_s"]),
        _time(entry["b_step_s"]),
        entry["verdict"],
    )


_HEADS: Final = ("A p50", "B p50", "ratio", "A step", "B step", "verdict")
_WIDTHS: Final = (-8, -8, -6, -8, -8, 8)


def _names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [(entry["name"], *_cells(entry)) for entry in entries[:ROWS]]
    drawn = table(("span", *_HEADS), rows, (40, *_WIDTHS))
    return ["Spans by name (p50 of one; summed time a step):", *drawn, *more(len(rows), len(entries))]


def _ranks(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    changed = [entry for entry in entries if entry["verdict"] not in _QUIET]
    if not changed:
        return []
    rows = [(f"{entry['worker_group']}[{entry['rank']}]", entry["name"], *_cells(entry)) for entry in changed[:ROWS]]
    drawn = table(("rank", "span", *_HEADS), rows, (18, 30, *_WIDTHS))
    return ["Ranks that changed:", *drawn, *more(len(rows), len(changed))]
