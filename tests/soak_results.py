"""What a soak is to do, what was seen of it, and what of that must not be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tests.soak_processes import OPEN

#: What docs/relay.md states, and `make bench` holds the relay to.
RELAY_MIB: Final = 200
#: A bound of their own that journals of open spans have, each; a file and the one that takes its place.
_JOURNAL_MIB: Final = 2 * 8
#: Rollouts that may be between two spans, or new within a heartbeat, when it is looked.
_BETWEEN: Final = 128
#: Share of the bound that a spool may be above it for a moment: who needs a segment at once makes room afterwards.
_ON_THE_WAY: Final = 0.125


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes:
        writers: Processes, besides the collector.
        rate: Spans a second that each of them ends.
        seconds: How long.
        spool_max_mib: The node's bound.
        relays: A relay forwards what is written; without one, everything beyond the bound has to be dropped.
    """

    writers: int = 64
    rate: float = 50.0
    seconds: float = 600.0
    spool_max_mib: int = 256
    relays: bool = True


@dataclass
class Seen:
    """The largest values that were seen (MiB, spans), and what came of the spans."""

    spool_mib: float = 0.0
    journals_mib: float = 0.0
    shm_mib: float = 0.0
    relay_mib: float = 0.0
    behind: int = 0
    samples: int = 0
    open_spans: int = 0
    open_lost: int = 0
    ended: int = 0
    received: int = 0
    twice: int = 0
    cut: int = 0
    kept: int = 0
    dropped: int = 0
    lost: int = 0
    unnoted: int = 0
    killed: int = 0
    failures: list[str] = field(default_factory=list)


def judge(plan: Plan, seen: Seen) -> list[str]:
    """Returns what is not as it must be, a line each."""
    found: list[str] = []
    most = plan.spool_max_mib * (1 + _ON_THE_WAY)
    if seen.spool_mib > most:
        found.append(f"the spool took {seen.spool_mib:.1f} MiB of {plan.spool_max_mib}")
    if seen.shm_mib > most + seen.journals_mib:
        found.append(f"the tmpfs took {seen.shm_mib:.1f} MiB")
    if seen.journals_mib > _JOURNAL_MIB * (plan.writers + 1):
        found.append(f"the journals took {seen.journals_mib:.1f} MiB")
    if seen.relay_mib > RELAY_MIB:
        found.append(f"the relay took {seen.relay_mib:.1f} MiB")
    # A kill may come between the end of a span and its note: one a process.
    if seen.unnoted > seen.killed:
        found.append(f"{seen.unnoted} spans are there that nobody has noted")
    if plan.relays:
        if seen.twice:
            found.append(f"{seen.twice} spans were sent twice, though nothing was killed that sends")
        if seen.open_lost or seen.open_spans < OPEN - _BETWEEN:
            found.append(f"{seen.open_lost} of {seen.open_spans} spans that were open have not arrived")
        if seen.lost > seen.dropped:
            found.append(f"{seen.lost} spans are lost, {seen.dropped} are counted")
    elif not seen.lost <= seen.dropped <= seen.lost + seen.killed:
        found.append(f"{seen.lost} spans are lost, {seen.dropped} are counted")
    return found
