"""How old trajectories were when they were trained on, and how many weight versions behind: read off span links.

A span that consumes trajectories links to the rollouts that they come from (`raytrace_rl.integrations.collector`,
``rollout_links``). What such a link does not say is taken from the rollout's span, where that is in the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
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
from raytrace_rl.monitor.tree import Tree

if TYPE_CHECKING:
    from raytrace_rl._decode import Attributes, Link
    from raytrace_rl.monitor.model import Run, SpanRow

#: Group of the spans that make trajectories.
ROLLOUT = "rollout"


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


def trajectories(run: Run, tree: Tree | None = None) -> dict[str, Any]:
    """Returns the ages (seconds) and weight versions of consumed trajectories: of the run, by step, and one by one.

    Args:
        run: The run.
        tree: Its spans as trees, where there are any already.
    """
    found = _consumed(tree or Tree(run))
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


def _consumed(tree: Tree) -> list[Consumed]:
    """What each step was trained on. Where several spans of a step link to the same trajectories they count once."""
    consumers = {
        id(row): (row, links)
        for row in tree.linking()
        if (links := [link for link in row.links if _is_trajectory(link, tree.target(link))])
    }
    kept: dict[tuple[Any, ...], Consumed] = {}
    for row, links in consumers.values():
        if any(id(above) in consumers for above in tree.above(row)):
            continue  # the span around it has said so already
        for link in links:
            each = _read(row, link, tree.target(link))
            same = (each.step[:2], each.trace_id, each.span_id, each.made_ns, each.weight_version)
            known = kept.get(same)
            if known is None or known.number < each.number:
                kept[same] = each
    return list(kept.values())


def _is_trajectory(link: Link, target: SpanRow | None) -> bool:
    return RL_TRAJECTORY_COUNT_ATTR in link.attributes or (target is not None and target.span_group == ROLLOUT)


def _read(row: SpanRow, link: Link, target: SpanRow | None) -> Consumed:
    attributes = link.attributes
    trace_id, span_id = link.trace_id.hex(), link.span_id.hex()
    age = believed_s(attributes.get(RL_TRAJECTORY_AGE_ATTR))
    if age is None and target is not None:
        age = believed_s((row.start_ns - target.until_ns) / 1e9)
    version = _integer(attributes, RL_WEIGHT_VERSION_ATTR)
    if version is None and target is not None:
        version = _integer(target.attributes, RL_WEIGHT_VERSION_ATTR)
    node = attributes.get(RL_TRAJECTORY_NODE_ATTR)
    if isinstance(node, str):
        here = re.sub(r"[^\w.-]", "_", row.process.text(semconv.HOST_NAME) or "")
        other_node = bool(here) and node not in (here, row.process.node)
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
