"""Draws what is known of the clocks of a run's nodes: a phrase beside each figure, a section, lines for the doctor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Final

from raytrace_rl.monitor.drawing import ROWS, cut, more, seconds, table

#: A clock that is off, or was set, by this much (s) puts spans of a run into another order.
_FAR_S: Final = 0.1
_HOW: Final = {
    "reference": "the driver's",
    "one_kernel": "the same host",
    "both_ways": "both ways",
    "one_way": "one way only",
    "none": "no message",
    "moved": "it moved",
}


def skew_beside(skew: Mapping[str, Any]) -> str:
    """Returns how far times of two nodes may be apart, in a few words; empty where there is one node."""
    if skew["count"] < 2:
        return ""
    between = f"between {skew['count']} nodes"
    if skew["at_most_s"] is None:
        return f"clock skew not bounded {between}"
    return f"clock skew <= {seconds(skew['at_most_s'])} {between}{' (aligned)' if skew['aligned'] else ''}"


def skew_lines(skew: Mapping[str, Any]) -> list[str]:
    """Returns the section; nothing for one node whose clock nobody set."""
    said = [*(line for _, line in _moved(skew)), *_early(skew)]
    if skew["count"] < 2 and not said:
        return []
    drawn = []
    if skew["count"] > 1:
        shown = skew["nodes"][:ROWS]
        rows = [(node["node"], _HOW[node["method"]], _ahead(node), f"{node['messages']:,}") for node in shown]
        heads = ("node", "known by", "its clock is ahead by", "messages")
        drawn = [*table(heads, rows, (28, 16, 22, -9)), *more(len(rows), skew["count"])]
    head = f"Clocks: {skew_beside(skew).removeprefix('clock ') or 'one node'}"
    return [head, f"  {_done(skew)}", *drawn, *(f"  {line}" for line in said)]


def _ahead(node: Mapping[str, Any]) -> str:
    """By how much a node's clock is ahead of the reference's, as far as it is known."""
    if node["estimate_s"] is not None:
        return f"{_signed(node['estimate_s'])} +- {seconds(node['bound_s'])}"
    if node["lower_s"] is not None:
        return f"{_signed(node['lower_s'])} or more"
    return "not known" if node["upper_s"] is None else f"{_signed(node['upper_s'])} or less"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{seconds(value)}"


def _done(skew: Mapping[str, Any]) -> str:
    """What was done with the times of the run: always said."""
    if not skew["aligned"]:
        return "times are as each node's clock had them (--align shifts them)"
    left = [node["node"] for node in skew["nodes"] if not node["aligned"]]
    text = f"times are shifted to the clock of {cut(skew['reference'], 40)}, each node's by what it is ahead"
    return f"{text}, but for {_named(left)}, of which that is not known" if left else text


def _named(nodes: list[str]) -> str:
    shown = ", ".join(cut(node, 40) for node in nodes[:3])
    return f"{shown} and {len(nodes) - 3} more" if len(nodes) > 3 else shown


def _moved(skew: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Yields by how much (s) a clock moved, and a line."""
    for step in skew["steps"][:ROWS]:
        text = f"the wall clock of {cut(step['node'], 40)} was set {'forward' if step['by_s'] > 0 else 'back'} by "
        yield abs(step["by_s"]), f"{text}{seconds(abs(step['by_s']))}{_at(step['at_ns'])}"
    for one in skew["contradictions"][:ROWS]:
        text = f"the clocks of {_named(one['nodes'])} moved against each other by {seconds(one['moved_s'])} or more"
        yield one["moved_s"], f"{text} during the run (drift, or one was set): they have no single skew"
    for kind in ("steps", "contradictions"):
        yield from ((0.0, line.strip()) for line in more(ROWS, len(skew[kind])))


def _at(time_ns: int) -> str:
    try:
        return f" at {datetime.fromtimestamp(time_ns / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # a file may say anything
        return ""


def _early(skew: Mapping[str, Any]) -> Iterator[str]:
    early = skew["early_children"]
    if early["count"]:
        one = early["count"] == 1
        what = "span starts before its parent" if one else "spans start before their parents"
        text = f"{early['count']:,} {what} on another node, by up to {seconds(early['worst_s'])}"
        yield f"{text}: order between nodes is not to be trusted to that"


def skew_checks(skew: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields what the doctor says of a run's clocks: whether that is a problem, and a line."""
    if skew["count"] > 1:
        far = [node["node"] for node in skew["nodes"] if _surely_off(node) >= _FAR_S]
        yield bool(far), skew_beside(skew) + (f": far off is {_named(far)}" if far else "")
        one_way = [node["node"] for node in skew["nodes"] if node["method"] in ("one_way", "none")]
        if one_way:
            yield False, f"not bounded both ways: {_named(one_way)}; no call came back from there"
    yield from ((by_s >= _FAR_S, line) for by_s, line in _moved(skew))
    yield from ((False, line) for line in _early(skew))


def _surely_off(node: Mapping[str, Any]) -> float:
    """Returns by how much (s) a node's clock is off for certain."""
    low, high = node["lower_s"], node["upper_s"]
    return max(0.0, low if low is not None else 0.0, -high if high is not None else 0.0)
