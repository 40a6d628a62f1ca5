"""Where a trajectory comes from: the carrier it takes along, and the links of the span that trains on it.

A trajectory outlives its rollout: it waits in a buffer, for steps, in another process. Its carrier names the rollout's
span, and says when it was made, on which node, and by which weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from time import time_ns
from typing import Any, Final, NamedTuple

from opentelemetry.trace import Link, SpanContext, get_current_span

from raytrace_rl import _carrier, _encode, _state
from raytrace_rl._interrupts import is_interrupt

#: Attributes of a link to a rollout. How many of the consumed trajectories it stands for.
RL_TRAJECTORY_COUNT_ATTR: Final = "rl.trajectory.count"
#: Seconds from when the trajectory was made to when it was consumed; below zero where the clocks of two nodes disagree.
RL_TRAJECTORY_AGE_ATTR: Final = "rl.trajectory.age_s"
#: When it was made, by its maker's clock: ns since the epoch.
RL_TRAJECTORY_MADE_ATTR: Final = "rl.trajectory.made_ns"
#: Host name of the node that made it.
RL_TRAJECTORY_NODE_ATTR: Final = "rl.trajectory.node"
#: Weight versions that lie between those that made it and those that are trained on it.
RL_TRAJECTORY_LAG_ATTR: Final = "rl.trajectory.lag"
#: Version of the weights that made it.
RL_WEIGHT_VERSION_ATTR: Final = "rl.weight_version"

_VERSION: Final = "w="


class Origin(NamedTuple):
    """What a trajectory's carrier says; all but ``traceparent`` may be missing."""

    traceparent: str
    tracestate: str | None
    made_ns: int | None
    node: str | None
    weight_version: int | None


def trajectory_carrier(weight_version: int | None = None) -> dict[str, str]:
    """Returns what a trajectory takes along inside the sample: the carrier of what is current, and when it was made.

    `current_trace_carrier`, with the time, the node and the weights besides: any reader of carriers reads it.

    Args:
        weight_version: Version of the weights that made it.

    Returns:
        Empty with no span current, or with telemetry off.
    """
    try:
        carrier = _carrier.current()
        if "traceparent" not in carrier:
            return {}
        version = "" if weight_version is None else f"{_VERSION}{int(weight_version)}"
        carrier["raytrace"] = f"{version}|{time_ns()},{_carrier.NODE}"
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("trajectory-carrier", "A trajectory takes no trace context along: %r", error)
        return {}
    return carrier


def rollout_links(
    trajectories: Iterable[Any],
    *,
    carrier: str | Callable[[Any], Any] = "trace_carrier",
    weight_version: int | None = None,
) -> list[Link]:
    """Returns links to the rollouts that trajectories come from, for the span that consumes them. Never raises.

    ``managed_span(G.POLICY_UPDATE, "rl.grpo.policy_training", links=rollout_links(batch, weight_version=7))``. Call it
    once a step, in the process that consumes: the age of a trajectory is counted up to this call.

    Args:
        trajectories: Each a carrier itself, or a mapping or an object that has one (or a list of them, as a batch
            does). Those without any are left out.
        carrier: The key or attribute under which a trajectory has it, or a function that finds it.
        weight_version: Version of the weights that are trained on them, before the update: gives each its lag.

    Returns:
        One link for each distinct carrier. Where that is more than a span may have (``OTEL_SPAN_LINK_COUNT_LIMIT``,
        128), trajectories of neighbouring age share the link of their oldest; the youngest keeps one of its own.
    """
    if not _state.tracing:
        return []
    try:
        now = time_ns()
        found = Counter(_origins(trajectories, carrier))
        ordered = sorted(found.items(), key=lambda item: (item[0].made_ns is None, -(item[0].made_ns or 0)))
        links = [_link(origin, count, now, weight_version) for origin, count in _few(ordered)]
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("rollout-links", "Trajectories could not be linked to their rollouts: %r", error)
        return []
    return [link for link in links if link is not None]


def read_origin(carrier: Any) -> Origin | None:
    """Returns what a carrier says of a trajectory; None if it names no span."""
    if not isinstance(carrier, Mapping) or not isinstance(header := carrier.get("traceparent"), str):
        return None
    made_ns = node = version = None
    ours = carrier.get("raytrace")
    if isinstance(ours, str) and len(ours) < _carrier.MAX_SCOPES:
        scopes, _, sender = ours.partition("|")
        made, _, node = sender.partition(",")
        made_ns = int(made) if made.isdecimal() and len(made) < 20 else None
        for part in scopes.split(";"):
            text = part.removeprefix(_VERSION)
            if text != part and text.lstrip("-").isdecimal() and len(text) < 19:
                version = int(text)
    state = carrier.get("tracestate")
    return Origin(header, state if isinstance(state, str) else None, made_ns, node or None, version)


def _origins(trajectories: Iterable[Any], where: str | Callable[[Any], Any]) -> Iterator[Origin]:
    if isinstance(trajectories, Mapping):
        trajectories = [trajectories]  # one batch, and not its keys
    for trajectory in trajectories:
        if isinstance(trajectory, Mapping) and "traceparent" in trajectory:
            found: Any = trajectory
        elif not isinstance(where, str):
            found = where(trajectory)
        elif isinstance(trajectory, Mapping):
            found = trajectory.get(where)
        else:
            found = getattr(trajectory, where, None)
        for each in found if isinstance(found, (list, tuple)) else (found,):
            if (origin := read_origin(each)) is not None:
                yield origin


def _few(ordered: list[tuple[Origin, int]]) -> list[tuple[Origin, int]]:
    """Merges neighbours, from the youngest to the oldest, until a span can hold them."""
    limit = max(1, _encode.link_count_limit)
    if len(ordered) <= limit:
        return ordered
    if limit == 1:
        return [(ordered[-1][0], sum(count for _, count in ordered))]
    youngest, rest = ordered[0], ordered[1:]
    cuts = [len(rest) * n // (limit - 1) for n in range(limit)]
    merged = [(rest[end - 1][0], sum(count for _, count in rest[start:end])) for start, end in pairwise(cuts)]
    return [youngest, *merged]


def _link(origin: Origin, count: int, now_ns: int, weight_version: int | None) -> Link | None:
    context = _span_context(origin)
    if context is None:
        return None
    attributes: dict[str, str | int | float] = {RL_TRAJECTORY_COUNT_ATTR: count}
    if origin.made_ns is not None:
        attributes[RL_TRAJECTORY_AGE_ATTR] = (now_ns - origin.made_ns) / 1e9
        attributes[RL_TRAJECTORY_MADE_ATTR] = origin.made_ns
    if origin.node is not None:
        attributes[RL_TRAJECTORY_NODE_ATTR] = origin.node
    if origin.weight_version is not None:
        attributes[RL_WEIGHT_VERSION_ATTR] = origin.weight_version
        if weight_version is not None:
            attributes[RL_TRAJECTORY_LAG_ATTR] = int(weight_version) - origin.weight_version
    return Link(context, attributes)


def _span_context(origin: Origin) -> SpanContext | None:
    carrier = {"traceparent": origin.traceparent}
    if origin.tracestate:
        carrier["tracestate"] = origin.tracestate
    attachment = _carrier.read(carrier, dispatched=False)
    if attachment is None:
        return None  # rubbish, of which there has been a warning
    context = get_current_span(attachment[0]).get_span_context()
    return context if context.is_valid else None
