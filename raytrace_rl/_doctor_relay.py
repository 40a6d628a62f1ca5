"""What a run's relays have noted, checked: one finding a node and signal, and what was lost or refused beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from raytrace_rl._doctor import INFO, OK, PROBLEM, Check

_COUNTS: Final = (
    "sent", "retries", "timed_out", "too_large", "rejected", "dropped", "sampled_out", "damaged", "unsent",
)  # fmt: skip
_RECEIVED: Final = ("requests", "rejected", "invalid", "too_large", "unauthorised", "no_room", "dropped_spans")
_RECEIVED_LOST: Final = ("rejected", "invalid", "too_large", "dropped_spans")


def checks(section: Mapping[str, Any]) -> Iterator[Check]:
    """Yields the findings, none for a run without relays.

    Args:
        section: The ``relay`` section of a report.
    """
    for node in section["nodes"]:
        name = node["node"]
        if node["failure"] and not node["running"]:
            yield Check("relay", PROBLEM, f"{name}: none: {node['failure']}")
        for one in node["signals"]:
            if one["current"]:
                yield _signal(node, one)
        if node["freed"]["spans"]:
            yield Check("relay", INFO, f"{name}: {node['freed']['spans']} spans acknowledged and removed to make room")
        yield from _home(node)
        if node["receiver"] is not None:
            lost = any(node["receiver"][key] for key in _RECEIVED_LOST)
            yield Check("relay", PROBLEM if lost else OK, f"{name} receiver: {_told(node['receiver'], _RECEIVED)}")


def _signal(node: Mapping[str, Any], one: Mapping[str, Any]) -> Check:
    wrong = one["dropped"] or one["rejected"] or one["failure"] or (one["unsent"] and not node["running"])
    said = one["failure"] or (one["last_error"] if wrong else None)
    told = f"{node['node']} {one['signal']} -> {one['destination']}: {_told(one, _COUNTS)}"
    return Check("relay", PROBLEM if wrong else OK, f"{told}{f'; {said}' if said else ''}")


def _home(node: Mapping[str, Any]) -> Iterator[Check]:
    name, home, carried = node["node"], node["home"], node["carried"]
    if home is not None:
        lost = f"{home['spans']} spans of it dropped here, beyond its bound" if home["segments"] else "nothing dropped"
        refused = f", {home['refused']} writes without room" if home["refused"] else ""
        failure = f"; {home['failure']}" if home["failure"] else ""
        yield Check("relay", PROBLEM if home["segments"] or failure else OK, f"{name} home: {lost}{refused}{failure}")
    if carried is not None and carried["failure"]:
        text = f"{name}: up to {carried['behind_bytes'] >> 10} KiB not at home; {carried['failure']}"
        yield Check("relay", PROBLEM, text)


def _told(counts: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in names if counts[name]) or "nothing"
