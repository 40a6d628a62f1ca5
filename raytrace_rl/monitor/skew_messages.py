"""Which messages of a run went from one node's clock to another's, read off its spans; and how each clock was set.

A node's times are those of its kernel's monotonic clock, put on the wall clock as its first process read it. Each
process does the same at its own start, and keeps it: where the wall clock was set in between, two processes of one node
disagree by exactly that, which their anchors tell. Delays are differences of wall clocks as they were at the moment;
they are brought to the nodes' times here, with the room that a clock needs that was set meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from raytrace_rl import semconv
from raytrace_rl.integrations._trajectories import RL_TRAJECTORY_AGE_ATTR, RL_TRAJECTORY_NODE_ATTR
from raytrace_rl.monitor.believed import believed_ns, believed_s
from raytrace_rl.monitor.skew_bounds import Message

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, SpanRow

#: From here on (ns) a clock has been set. Two readings of a clock that was not are nearer to each other.
SET_NS: Final = 1_000_000
#: What no name of a node's directory has.
_UNWRITTEN: Final = re.compile(r"[^A-Za-z0-9.-]")


class ClockSet(NamedTuple):
    """A wall clock that was set while the run went on.

    Attributes:
        node: Whose.
        at_ns: When a process noticed, or the first started that had it so; by the node's times, ns since the epoch.
        by_ns: How far, forward or (below zero) back.
    """

    node: str
    at_ns: int
    by_ns: int


class Clocks:
    """The clocks of a run's processes.

    Args:
        processes: All of them; those whose node is not known have no place here.

    Attributes:
        nodes: Each node with its processes, in the order of their start.
        steps: Wall clocks that were set, in the order of time.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self.nodes: dict[str, list[Process]] = {}
        for process in processes:
            if process.node:
                self.nodes.setdefault(process.node, []).append(process)
        self._offsets: dict[str, int] = {}
        self._highest: dict[str, int] = {}
        self.steps: list[ClockSet] = []
        for node, of_node in self.nodes.items():
            self._history(node, of_node)
            self._highest[node] = max(map(self.highest_ns, of_node))
        self.steps.sort(key=lambda step: step.at_ns)
        self._kernels: dict[str, str] = {}
        boots: dict[str, list[str]] = {}
        for node, offset in self._offsets.items():
            boot = next(process.boot_id for process in self.nodes[node] if process.anchors)
            firsts = boots.setdefault(boot, [])
            alike = [first for first in firsts if abs(self._offsets[first] - offset) < SET_NS]
            self._kernels[node] = alike[0] if alike else node
            firsts += [] if alike else [node]
        self._names: dict[str, str | None] = {}
        for node in self.nodes:
            name = _UNWRITTEN.sub("_", node)
            self._names[name] = None if name in self._names else node

    def _history(self, node: str, processes: list[Process]) -> None:
        """Settles a node's times, and finds out when its wall clock was set: its processes have one monotonic clock."""
        readings = sorted((monotonic, wall - monotonic) for process in processes for wall, monotonic in process.anchors)
        if not readings:
            return
        self._offsets[node] = before = readings[0][1]
        for monotonic, offset in readings:
            if abs(offset - before) >= SET_NS:
                self.steps.append(ClockSet(node, monotonic + self._offsets[node], offset - before))
                before = offset

    def named(self, name: str) -> str | None:
        """Returns the node that a carrier calls so: by its directory in the spool, in an OTLP file by its host name."""
        return self._names[name] if name in self._names else self._names.get(name.rpartition("-")[0])

    def own_ns(self, process: Process) -> int:
        """Returns what has to be added to a process's times to make them its node's."""
        if not process.anchors:
            return 0
        wall, monotonic = process.anchors[0]
        return self._offsets[process.node] - (wall - monotonic)

    def highest_ns(self, process: Process) -> int:
        """Returns the most by which a process's wall clock was ahead of its node's times."""
        return max(self._ahead(process), default=0)

    def lowest_ns(self, process: Process) -> int:
        """Returns the least by which a process's wall clock was ahead of its node's times."""
        return min(self._ahead(process), default=0)

    def highest_of_node_ns(self, node: str) -> int:
        """Returns the most by which any process's wall clock was ahead of the node's times."""
        return self._highest[node]

    def _ahead(self, process: Process) -> list[int]:
        return [wall - monotonic - self._offsets[process.node] for wall, monotonic in process.anchors]

    def kernel(self, node: str) -> str:
        """Returns a name for the clock that a node has: containers of one host share its kernel, and have one.

        A kernel has one wall and one monotonic clock. Where it shows two containers the same of both (no time namespace
        stands between), what their processes read at their starts differs by the error of reading alone.
        """
        return self._kernels.get(node, node)

    def shared(self) -> Iterator[Message]:
        """Yields messages, one each way, between nodes with one clock."""
        for node, other in self._kernels.items():
            if node != other:
                apart = abs(self._offsets[node] - self._offsets[other])
                yield Message(node, other, apart, 0)
                yield Message(other, node, apart, 0)


def messages(rows: Iterable[SpanRow], parents: dict[str, SpanRow], clocks: Clocks) -> Iterator[Message]:
    """Yields what went from one node to another: dispatched calls, and trajectories to whoever trained on them.

    Nothing is concluded from a span that lies inside another one: a call's caller need not have waited for it, and a
    span may have been written down after the fact.

    Args:
        rows: The spans.
        parents: Spans by trace id and span id, at least every parent of ``rows``.
        clocks: Of the run.
    """
    for row in rows:
        name = row.attributes.get(semconv.RL_QUEUED_FROM)
        if name is not None and (queued_ns := believed_ns(row.queued_ns)) is not None:
            parent = parents.get(row.trace_id + (row.parent_span_id or ""))
            sent = message(queued_ns, name, row.process, parent.process if parent else None, clocks)
            if sent is not None:
                yield sent
        for link in row.links:
            name = link.attributes.get(RL_TRAJECTORY_NODE_ATTR)
            age_s = believed_s(link.attributes.get(RL_TRAJECTORY_AGE_ATTR))
            if name is not None and age_s is not None:
                sent = message(ceil(age_s * 1e9), name, row.process, None, clocks)
                if sent is not None:
                    yield sent


def answers(processes: Iterable[Process], clocks: Clocks) -> Iterator[Message]:
    """Yields what nodes answered when a process asked for their time."""
    for process in processes:
        for name, delay_ns in process.peers.items():
            if (believed := believed_ns(delay_ns)) is not None:
                sent = message(believed, name, process, None, clocks)
                if sent is not None:
                    yield sent


def message(delay_ns: int, name: object, receiver: Process, parent: Process | None, clocks: Clocks) -> Message | None:
    """Returns a delay of two wall clocks as one of two nodes' times; None if it is not known to be between two nodes.

    Args:
        delay_ns: The receiver's wall clock minus the sender's.
        name: What the carrier calls the sender's node.
        receiver: The process that read it.
        parent: That of the parent span. It was current at the dispatch, so the sender is this process, unless a call
            was handed on without a span of its own: then the parent is on another node, or may be.
        clocks: Of the run.
    """
    sender = clocks.named(name) if isinstance(name, str) else None
    if sender is None or not receiver.node or sender == receiver.node:
        return None
    known = parent is not None and parent.node == sender
    ahead_ns = clocks.highest_ns(parent) if known and parent else clocks.highest_of_node_ns(sender)
    return Message(sender, receiver.node, delay_ns + ahead_ns - clocks.lowest_ns(receiver))
