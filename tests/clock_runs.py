"""Runs made by hand whose clocks are known: nodes with a skew, wall clocks that are set, calls that take a time."""

from __future__ import annotations

from typing import Any

from raytrace_rl import _decode
from raytrace_rl.monitor.model import Process, Run, SpanRow
from tests import spooling
from tests.spooling import SECOND, T0, attributes

MS = SECOND // 1000


class Clockwork:
    """A run under construction. Every time that goes in is the true one, ns from T0.

    Args:
        ahead_ns: By how much each node's wall clock is ahead of true time, at first.
    """

    def __init__(self, **ahead_ns: int) -> None:
        self._ahead = {node: [(0, ahead)] for node, ahead in ahead_ns.items()}
        self._epochs = {node: (number + 1) * 1000 * SECOND for number, node in enumerate(ahead_ns)}
        self.processes: list[Process] = []
        self.rows: list[SpanRow] = []
        self.began: dict[str, int] = {}

    def wall_ns(self, node: str, at_ns: int) -> int:
        """What a node's wall clock shows."""
        return T0 + at_ns + next(ahead for since, ahead in reversed(self._ahead[node]) if since <= at_ns)

    def set_clock(self, node: str, at_ns: int, by_ns: int, *, noticed: bool = True) -> None:
        """Sets a node's wall clock; later than any time before. What runs there notices at its next heartbeat."""
        self._ahead[node].append((at_ns, self._ahead[node][-1][1] + by_ns))
        for process in self.processes:
            if process.node == node and noticed:
                beat = at_ns + SECOND
                process.anchors.append((self.wall_ns(node, beat), self._epochs[node] + beat))

    def process(self, node: str, at_ns: int = 0, **resource: Any) -> Process:
        """Starts a process; keywords are resource attributes, ``rl__role`` for ``rl.role``."""
        values = {key.replace("__", "."): value for key, value in resource.items()}
        key = f"{node}/{len(self.processes)}"
        process = Process(key, node, pid=100 + len(self.processes), resource=values)
        process.start_ns = process.last_ns = self.wall_ns(node, at_ns)
        process.boot_id = f"{self._epochs[node]:032x}"
        process.anchors = [(process.start_ns, self._epochs[node] + at_ns)]
        self.began[key] = process.start_ns - at_ns
        self.processes.append(process)
        return process

    def span(self, process: Process, at_ns: int, end_ns: int, parent: SpanRow | None = None, **values: Any) -> SpanRow:
        """Adds a span, in terms of its process's clock; keywords are attributes, ``rl__bucket`` for ``rl.bucket``."""
        shown = self.began[process.key]
        message = spooling.Span.FromString(spooling.span(len(self.rows) + 1, 0, 1, **values))
        message.start_time_unix_nano, message.end_time_unix_nano = shown + at_ns, shown + end_ns
        message.parent_span_id = bytes.fromhex(parent.span_id) if parent is not None else b""
        row = SpanRow(_decode.span(message.SerializeToString()), process)
        self.rows.append(row)
        process.last_ns = max(process.last_ns, shown + end_ns)
        return row

    def call(
        self,
        sender: Process,
        receiver: Process,
        at_ns: int,
        took_ns: int,
        *,
        opened_ns: int = 0,
        parent: SpanRow | None = None,
        **values: Any,
    ) -> SpanRow:
        """Adds a call and its first span, opened ``opened_ns`` after it arrived; ``parent`` is a span of the sender."""
        arrived = at_ns + took_ns
        queued = self.wall_ns(receiver.node, arrived) - self.wall_ns(sender.node, at_ns)
        if sender.node != receiver.node:
            values["rl__queued_from"] = sender.node
        parent = parent or self.span(sender, at_ns, arrived + opened_ns)
        return self.span(receiver, arrived + opened_ns, arrived + opened_ns + 1, parent, rl__queued_ns=queued, **values)

    def trajectory(self, maker: Process, trainer: Process, made_ns: int, age_ns: int) -> SpanRow:
        """Adds a span that trains on a trajectory of another process."""
        at_ns = made_ns + age_ns
        age = (self.wall_ns(trainer.node, at_ns) - self.wall_ns(maker.node, made_ns)) / SECOND
        row = self.span(trainer, at_ns, at_ns + MS)
        said = {"rl.trajectory.count": 1, "rl.trajectory.age_s": age, "rl.trajectory.node": maker.node}
        link = spooling.Span(links=[spooling.Span.Link(trace_id=spooling.TRACE, attributes=attributes(said))])
        row.links = _decode.span(link.SerializeToString()).links
        return row

    def true_ns(self, row: SpanRow) -> int:
        """How far a span's time is ahead of the truth, before anything was shifted."""
        return self.began[row.process.key] - T0

    def run(self) -> Run:
        """The run as a reader would have it."""
        rows = sorted(self.rows, key=lambda row: row.start_ns)
        return Run("made", "made", rows, sorted(self.processes, key=lambda process: process.start_ns))


def both_ways(clockwork: Clockwork, a: Process, b: Process, *, at_ns: int = SECOND, took_ns: int = 2 * MS) -> None:
    """Adds a call each way."""
    clockwork.call(a, b, at_ns, took_ns)
    clockwork.call(b, a, at_ns + took_ns, took_ns)


def troubled() -> Run:
    """A run with everything that is to be said of clocks: one that was set, two that moved, children before parents."""
    clockwork = Clockwork(a=0, b=5 * SECOND, c=-3 * SECOND)
    driver = clockwork.process("a", rl__role="driver")
    b, c = clockwork.process("b"), clockwork.process("c")
    both_ways(clockwork, driver, b)
    both_ways(clockwork, driver, c)
    clockwork.set_clock("b", 10 * SECOND, SECOND)
    clockwork.set_clock("c", 10 * SECOND, SECOND, noticed=False)
    for process in (b, c):
        both_ways(clockwork, driver, process, at_ns=20 * SECOND)
    return clockwork.run()
