"""Draws what a run's relays have done: one line where all is well, two where something is lost or unsent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Final

from raytrace_rl.monitor.drawing import cut

WIDTH: Final = 100
_REFUSED: Final = ("rejected", "invalid", "too_large")


def relay_lines(section: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Returns the lines, none where there was no relay, and whether something is wrong.

    Args:
        section: The ``relay`` section of a report, without its lines.
    """
    nodes = section["nodes"]
    pairs = [(node, one) for node in nodes for one in node["signals"] if one["current"]]
    current = [one for _, one in pairs]
    behind = section["unsent"]
    # Of a relay that is at work and hindered by nothing, what is unsent is on its way.
    stands = [one for node, one in pairs if one["unsent"] and not (node["running"] and not one["failure"])]
    hindrances = list(_hindrances(nodes))
    wrong = [*_losses(section), *(what for what, _ in hindrances)]
    if stands:
        size = sum(one["unsent_bytes"] for one in stands)
        wrong.insert(0, f"{sum(one['unsent'] for one in stands):,} records unsent ({_size(size)})")
    if wrong:
        said = [why for _, why in hindrances] + _said(section, current)
        help_ = "'raytrace-rl push' sends the rest" if stands else ""
        if section["dropped"] and not stands:
            help_ = "'raytrace-rl push --again' sends them"
        more = [cut(said[0], WIDTH - 4 - len(help_))] if said else []
        second = "; ".join([*more, *([help_] if help_ else [])])
        return [cut(f"Relay: {', '.join(wrong)}", WIDTH), *([f"  {second}"] if second else [])], True
    parts = []
    if current:
        acknowledged = max(one["acknowledged_ns"] or 0 for one in current)
        sent = f"{section['sent']:,}"
        whole = f"all {sent} records acknowledged" if section["sent"] else "nothing to send so far"
        parts.append(f"{sent} records acknowledged" if behind else whole)
        parts += [f"{behind:,} on their way"] if behind else []
        left_out = sum(one["sampled_out"] for one in current)
        parts += [f"{left_out:,} left out by the sampler"] if left_out else []
        parts += [f"last {_time(acknowledged)}"] if acknowledged else []
    copies = sum(node["copy"] for node in nodes)
    if copies:
        parts.append(f"spools of {copies} node{'' if copies == 1 else 's'} brought home")
    return [cut(f"Relay: {', '.join(parts)}", WIDTH)] if parts else [], False


def _losses(section: Mapping[str, Any]) -> list[str]:
    received = [node["receiver"] for node in section["nodes"] if node["receiver"] is not None]
    counts = {
        "records refused for good": section["dropped"],
        "items rejected by the receiver": section["rejected"],
        "spans of other nodes dropped here, beyond their bound": section["home_dropped"],
        "requests or items refused by the local receiver": sum(one[key] for one in received for key in _REFUSED),
        "spans dropped beyond the bound by the local receiver": sum(one["dropped_spans"] for one in received),
    }
    return [f"{n:,} {what}" for what, n in counts.items() if n]


def _hindrances(nodes: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields what keeps relays from their work besides receivers, and why."""
    for node in nodes:
        name = cut(node["node"], 30)
        carried, home = node["carried"], node["home"]
        if node["failure"] and not node["running"]:
            yield f"no relay on {name}", node["failure"]
        if home is not None and home["failure"]:
            yield f"no room here for what {name} has", home["failure"]
        elif carried is not None and carried["failure"]:
            yield f"{name} is up to {_size(carried['behind_bytes'])} behind", carried["failure"]


def _said(section: Mapping[str, Any], current: list[Mapping[str, Any]]) -> list[str]:
    """What a receiver has said last, where it has to do with what is wrong."""
    said = [one for one in current if one["last_error"]]
    if not said or not (section["unsent"] or section["dropped"] or section["rejected"]):
        return []
    last = max(said, key=lambda one: one["last_error_ns"] or 0)
    return [f"{last['signal']}: {last['last_error']}"]


def _size(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB" if size >= 1 << 20 else f"{size / 1024:,.1f} KiB"


def _time(moment_ns: int) -> str:
    return f"{datetime.fromtimestamp(moment_ns / 1e9, tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
