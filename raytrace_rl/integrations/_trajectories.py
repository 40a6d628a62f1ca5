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
#: Arrays of lists of arrays: so many of them inside one another are opened.
_DEEPEST: Final = 4


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
        number = _whole(weight_version)
        version = "" if number is None else f"{_VERSION}{number}"
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
        trajectories: Each a carrier itself, or a mapping or an object that has one, or several of them, as a batch
            does: in a list, any other iterable (which is read), an object array. A mapping is one batch, and so is
            what has a ``non_tensor_batch``, as verl's ``DataProto`` does. Those without any are left out; if that is
            all, or if something else than carriers is there, there is one warning.
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
        trained = _whole(weight_version)
        links = [_link(origin, count, now, trained) for origin, count in _few(ordered)]
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
    if isinstance(trajectories, Mapping) or _columns(trajectories) is not None:
        trajectories = [trajectories]  # one batch, and not its keys
    seen = missing = 0
    for trajectory in trajectories:
        seen += 1
        try:
            found = _kept(trajectory, where)
            origins = None if found is None else [origin for each in _each(found) if (origin := read_origin(each))]
        except Exception as error:  # one that fails costs itself, and not the others
            if is_interrupt(error):
                raise
            _state.warn_once("rollout-links-one", "A trajectory could not be linked to its rollout: %r", error)
            continue
        missing += origins is None
        yield from origins or ()
    if seen and missing == seen:
        _state.warn_once(
            "rollout-links-none",
            "None of %d trajectories has a carrier under %r: none is linked to its rollout.",
            seen,
            where,
        )


def _kept(trajectory: Any, where: str | Callable[[Any], Any]) -> Any:
    """Returns what a trajectory has for a carrier, or a batch for carriers; None if nothing."""
    if isinstance(trajectory, Mapping) and "traceparent" in trajectory:
        return trajectory
    if not isinstance(where, str):
        return where(trajectory)
    columns = trajectory if isinstance(trajectory, Mapping) else _columns(trajectory)
    if columns is not None and (found := columns.get(where)) is not None:
        return found
    return None if isinstance(trajectory, Mapping) else getattr(trajectory, where, None)


def _columns(batch: Any) -> Mapping[str, Any] | None:
    """Returns the columns that are no tensors of verl's ``DataProto``, or of one row of it; None of anything else."""
    columns = getattr(batch, "non_tensor_batch", None)
    return columns if isinstance(columns, Mapping) else None


def _each(found: Any, depth: int = 0) -> Iterator[Any]:
    """Yields the carriers in what a trajectory or a batch has for them, however they are packed."""
    if isinstance(found, Mapping) or found is None:
        yield found
        return
    dtype = getattr(found, "dtype", None)
    packed = dtype is None or getattr(dtype, "hasobject", False)  # tensors and arrays of numbers hold none
    if packed and depth < _DEEPEST and not isinstance(found, (str, bytes)):
        # Object arrays, and what TensorDict keeps beside its tensors, whose iterators hand out wrappers.
        inner = found.tolist() if hasattr(type(found), "tolist") else found
        if isinstance(inner, Mapping):
            yield inner
            return
        if isinstance(inner, Iterable):
            for each in inner:
                yield from _each(each, depth + 1)
            return
    _state.warn_once(
        f"rollout-links:{type(found).__name__}",
        "A %s stands where carriers of trajectories should: what it stands for is not linked to its rollout.",
        type(found).__name__,
    )


def _whole(version: Any) -> int | None:
    """Returns a weight version as a number; one that is none costs itself, and not the carrier or the links."""
    try:
        return None if version is None else int(version)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("weight-version", "A weight version is no whole number: %r", error)
        return None


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
            attributes[RL_TRAJECTORY_LAG_ATTR] = weight_version - origin.weight_version
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
