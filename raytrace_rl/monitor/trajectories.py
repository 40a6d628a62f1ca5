"""How old trajectories were when they were trained on, and how many weight versions behind: read off span links.

A span that consumes trajectories links to the rollouts that they come from (`raytrace_rl.integrations.collector`,
``rollout_links``). What such a link does not say is taken from the rollout's span, where that is in the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raytrace_rl import semconv
from raytrace_rl.integrations._trajectories import (
    RL_TRAJECTORY_AGE_ATTR,
    RL_TRAJECTORY_COUNT_ATTR,
    RL_TRAJECTORY_LAG_ATTR,
    RL_TRAJECTORY_MADE_ATTR,
    RL_TRAJECTORY_NODE_ATTR,
    RL_WEIGHT_VERSION_ATTR,
)
from raytrace_rl.monitor.believed import believed_count, believed_s
from raytrace_rl.monitor.tables import MAX_LISTED

if TYPE_CHECKING:
    from raytrace_rl._decode import Attributes, Link
    from raytrace_rl.monitor.model import Run, SpanRow

_ROLLOUT = "rollout"


class Consumed(NamedTuple):
    """Trajectories of one rollout that one step was trained on; all of one age."""

    step: tuple[int, int | None, str]
    trace_id: str
    span_id: str
    made_ns: int | None
    number: int
    age_s: float | None
    weight_version: int | None
    lag: int | None
    other_node: bool


def trajectories(run: Run) -> dict[str, Any]:
    """Returns the ages (seconds) and weight versions of consumed trajectories: of the run, by step, and one by one."""
    found = _consumed(run)
    by_step: dict[tuple[int, int | None, str], list[Consumed]] = {}
    for each in found:
        by_step.setdefault(each.step, []).append(each)
    return {
        **_summary(found),
        "steps": [
            {
                "attempt": attempt,
                "iteration": iteration,
                "span": name,
                **_summary(each),
                "weight_versions": _versions(each),
            }
            for (attempt, iteration, name), each in by_step.items()
        ],
        "list": [
            {
                "attempt": each.step[0],
                "iteration": each.step[1],
                "trace_id": each.trace_id,
                "span_id": each.span_id,
                "count": each.number,
                "age_s": each.age_s,
                "weight_version": each.weight_version,
                "lag": each.lag,
            }
            for each in found[:MAX_LISTED]
        ],
    }


def _consumed(run: Run) -> list[Consumed]:
    """What each step was trained on. Where several spans of a step link to the same trajectories they count once."""
    rows = {(row.trace_id, row.span_id): row for row in run.spans}
    consumers = {
        (row.trace_id, row.span_id): links
        for row in run.spans
        if row.links and (links := [link for link in row.links if _is_trajectory(link, rows)])
    }
    kept: dict[tuple[Any, ...], Consumed] = {}
    for key, links in consumers.items():
        row = rows[key]
        if any(above in consumers for above in _ancestors(row, rows)):
            continue  # the span around it has said so already
        for link in links:
            each = _read(row, link, rows)
            same = (each.step[:2], each.trace_id, each.span_id, each.made_ns, each.weight_version)
            known = kept.get(same)
            if known is None or known.number < each.number:
                kept[same] = each
    return list(kept.values())


def _is_trajectory(link: Link, rows: dict[tuple[str, str], SpanRow]) -> bool:
    target = rows.get((link.trace_id.hex(), link.span_id.hex()))
    return RL_TRAJECTORY_COUNT_ATTR in link.attributes or (target is not None and target.span_group == _ROLLOUT)


def _ancestors(row: SpanRow, rows: dict[tuple[str, str], SpanRow]) -> Iterator[tuple[str, str]]:
    seen: set[tuple[str, str]] = set()
    above: SpanRow | None = row
    while above is not None and above.parent_span_id is not None:
        key = (above.trace_id, above.parent_span_id)
        if key in seen:
            return  # a damaged run may hold a circle
        seen.add(key)
        yield key
        above = rows.get(key)


def _read(row: SpanRow, link: Link, rows: dict[tuple[str, str], SpanRow]) -> Consumed:
    attributes = link.attributes
    trace_id, span_id = link.trace_id.hex(), link.span_id.hex()
    target = rows.get((trace_id, span_id))
    age = believed_s(attributes.get(RL_TRAJECTORY_AGE_ATTR))
    if age is None and target is not None:
        age = believed_s((row.start_ns - target.until_ns) / 1e9)
    version = _integer(attributes, RL_WEIGHT_VERSION_ATTR)
    if version is None and target is not None:
        version = _integer(target.attributes, RL_WEIGHT_VERSION_ATTR)
    node = attributes.get(RL_TRAJECTORY_NODE_ATTR)
    if isinstance(node, str):
        here = re.sub(r"[^\w.-]", "_", row.process.text(semconv.HOST_NAME) or "")
        other_node = bool(here) and node != here
    else:
        other_node = target is not None and target.process.node != row.process.node
    return Consumed(
        (row.attempt, row.iteration, row.name),
        trace_id,
        span_id,
        _integer(attributes, RL_TRAJECTORY_MADE_ATTR),
        believed_count(attributes.get(RL_TRAJECTORY_COUNT_ATTR)),
        age,
        version,
        _integer(attributes, RL_TRAJECTORY_LAG_ATTR),
        other_node,
    )


def _integer(attributes: Attributes, key: str) -> int | None:
    value = attributes.get(key)
    return value if type(value) is int else None


def _summary(found: Sequence[Consumed]) -> dict[str, Any]:
    ages = [(max(0.0, each.age_s), each.number) for each in found if each.age_s is not None]
    lags = [(each.lag, each.number) for each in found if each.lag is not None]
    return {
        "count": sum(each.number for each in found),
        "age_s": _spread(ages),
        "lag": _spread(lags),
        "below_zero": sum(each.number for each in found if each.age_s is not None and each.age_s < 0),
        "other_node": sum(each.number for each in found if each.other_node),
    }


def _spread(weighted: Sequence[tuple[float, int]]) -> dict[str, float] | None:
    """Minimum, median (the lower of two) and maximum of values that stand for several trajectories each."""
    if not weighted:
        return None
    ordered = sorted(weighted)
    half = sum(count for _, count in ordered) / 2
    passed = 0
    median = ordered[-1][0]
    for value, count in ordered:
        passed += count
        if passed >= half:
            median = value
            break
    return {"min": ordered[0][0], "median": median, "max": ordered[-1][0]}


def _versions(found: Sequence[Consumed]) -> dict[str, int]:
    """How many trajectories each weight version made, by version."""
    counts: Counter[int] = Counter()
    for each in found:
        if each.weight_version is not None:
            counts[each.weight_version] += each.number
    return {str(version): count for version, count in sorted(counts.items())}
