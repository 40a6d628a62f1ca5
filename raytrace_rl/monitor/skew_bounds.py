"""What messages between nodes say of their clocks: each node's skew as an interval. No span and no file in here.

A message that is sent on a and arrives on b takes ``delay = arrival by b's clock - sending by a's clock``, which is the
time that it truly took plus ``skew(b) - skew(a)``. It took no less than nothing, so ``skew(b) - skew(a) <= delay``, and
the smallest delay of all that went that way is the tightest bound. A message back bounds the other side. Such
differences add up along paths: the tightest bound between any two nodes is the shortest path between them.

Nothing is taken for symmetric and nothing is averaged. Where the bounds cannot all be true, the clocks have moved
against each other while the run went on, and no single skew exists: that is said, with by how much at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Message(NamedTuple):
    """One message, or the smallest delay of several.

    Attributes:
        sender, receiver: The nodes that it went from and to.
        delay_ns: The receiver's clock when it arrived minus the sender's when it was sent, ns; at least the skew of the
            two. Often below zero, where the receiver's clock is behind.
        number: How many messages it stands for.
    """

    sender: str
    receiver: str
    delay_ns: int
    number: int = 1


class Contradiction(NamedTuple):
    """Clocks that moved against each other.

    Attributes:
        nodes: Whose clocks, two or more; which of them it was is not known.
        moved_ns: By how much at least, ns.
    """

    nodes: tuple[str, ...]
    moved_ns: int


@dataclass(slots=True)
class Interval:
    """Where a node's clock stands against the reference's: ``lower_ns <= its clock - the reference's <= upper_ns``.

    Attributes:
        lower_ns, upper_ns: None where no message, on whatever way, bounds that side.
        messages: Messages of this node with other nodes.
        contradiction: Its clock was found to have moved: there are no bounds then.
    """

    lower_ns: int | None = None
    upper_ns: int | None = None
    messages: int = 0
    contradiction: Contradiction | None = None


@dataclass(slots=True)
class Solution:
    """The intervals by node, and what contradicts itself, the largest movement first."""

    intervals: dict[str, Interval]
    contradictions: list[Contradiction] = field(default_factory=list)


#: The smallest delay from one node to another.
_Edges = dict[tuple[str, str], int]


def tightest(messages: Iterable[Message]) -> list[Message]:
    """Returns one message for each two nodes and direction: the smallest delay, and of how many."""
    found: dict[tuple[str, str], list[int]] = {}
    for sender, receiver, delay_ns, number in messages:
        known = found.get((sender, receiver))
        if known is None:
            found[sender, receiver] = [delay_ns, number]
        else:
            known[0] = min(known[0], delay_ns)
            known[1] += number
    return [Message(*ends, delay_ns, number) for ends, (delay_ns, number) in found.items()]


def solve(messages: Iterable[Message], reference: str, nodes: Iterable[str] = ()) -> Solution:
    """Returns the interval of each node's skew against the reference's.

    Args:
        messages: In any order and number; those from a node to itself say nothing.
        reference: The node whose skew is 0.
        nodes: Further nodes, which may have no message.
    """
    best = [one for one in tightest(messages) if one.sender != one.receiver]
    intervals = {node: Interval() for node in (reference, *nodes)}
    edges: _Edges = {}
    for sender, receiver, delay_ns, number in best:
        edges[sender, receiver] = delay_ns
        for node in (sender, receiver):
            intervals.setdefault(node, Interval()).messages += number
    contradictions: list[Contradiction] = []
    for node, contradiction in _moved(edges, reference, contradictions).items():
        intervals[node].contradiction = contradiction
    above = _distances(edges, reference)
    below = _distances({(receiver, sender): delay_ns for (sender, receiver), delay_ns in edges.items()}, reference)
    for node, interval in intervals.items():
        interval.upper_ns = above.get(node)
        lower = below.get(node)
        interval.lower_ns = None if lower is None else -lower
    return Solution(intervals, sorted(contradictions, key=lambda one: (-one.moved_ns, one.nodes)))


def _moved(edges: _Edges, reference: str, found: list[Contradiction]) -> dict[str, Contradiction]:
    """Takes out of ``edges`` the nodes whose clocks moved, until what is left can all be true.

    Of two that contradict each other, the one is taken that contradicts more of the others; the reference never is.

    Args:
        edges: Emptied of what is not to be believed.
        reference: The node whose skew is 0.
        found: Gets every contradiction.

    Returns:
        Those nodes, each with its largest movement.
    """
    moved: dict[str, Contradiction] = {}
    while True:
        clashes = [
            Contradiction((a, b), -(there + back))
            for (a, b), there in edges.items()
            if a < b and (back := edges.get((b, a))) is not None and there + back < 0
        ]
        if clashes:
            degree = Counter(node for clash in clashes for node in clash.nodes if node != reference)
            most = max(degree.values())
            blamed = {node for node, count in degree.items() if count == most}
        else:
            cycle = _negative_cycle(edges)
            if not cycle:
                return moved
            by_ns = -sum(edges[pair] for pair in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
            clashes = [Contradiction(tuple(sorted(cycle)), by_ns)]
            blamed = set(cycle) - {reference}
        for clash in sorted(clashes, key=lambda one: -one.moved_ns):
            for node in blamed.intersection(clash.nodes):
                moved.setdefault(node, clash)
            found += [clash] if blamed.intersection(clash.nodes) else []
        for pair in [pair for pair in edges if not blamed.isdisjoint(pair)]:
            del edges[pair]


def _negative_cycle(edges: _Edges) -> tuple[str, ...]:
    """Returns nodes round which the delays sum up to less than nothing, in the order of the messages; empty if none."""
    distance = {node: 0 for pair in edges for node in pair}
    before: dict[str, str] = {}
    changed: str | None = None
    for _ in distance:
        changed = None
        for (sender, receiver), delay_ns in edges.items():
            if distance[sender] + delay_ns < distance[receiver]:
                distance[receiver] = distance[sender] + delay_ns
                before[receiver] = sender
                changed = receiver
        if changed is None:
            break
    if changed is None:
        return ()
    # Still shorter after as many rounds as there are nodes: going back so many steps ends up inside a cycle.
    at = changed
    for _ in distance:
        at = before[at]
    cycle = [at]
    while (at := before[at]) != cycle[0]:
        cycle.append(at)
    return tuple(reversed(cycle))


def _distances(edges: _Edges, start: str) -> dict[str, int]:
    """Returns the shortest way from ``start`` to each node that can be reached; there is no negative cycle."""
    onward: dict[str, list[tuple[str, int]]] = {}
    for (sender, receiver), delay_ns in edges.items():
        onward.setdefault(sender, []).append((receiver, delay_ns))
    distance = {start: 0}
    ahead = [start]
    while ahead:
        improved: dict[str, None] = {}
        for node in ahead:
            for receiver, delay_ns in onward.get(node, ()):
                reached = distance[node] + delay_ns
                if receiver not in distance or reached < distance[receiver]:
                    distance[receiver] = reached
                    improved[receiver] = None
        ahead = list(improved)
    return distance
