"""Runs made by hand, in memory: spans with a known answer to why their steps take as long as they do."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl import _decode
from raytrace_rl.monitor.model import Process, Run, SpanRow
from tests import spooling
from tests.spooling import SECOND, T0


class Made:
    """A run under construction; times are seconds from T0."""

    def __init__(self) -> None:
        self.rows: list[SpanRow] = []
        self.processes: dict[str, Process] = {}
        self.driver = self.process("driver", rl__role="driver")

    def process(self, key: str, node: str = "node-a", **values: Any) -> Process:
        """Adds a process; keywords are resource attributes, ``rl__role`` for ``rl.role``."""
        resource = {name.replace("__", "."): value for name, value in values.items()}
        process = self.processes[key] = Process(key, node, pid=100 + len(self.processes), resource=resource)
        return process

    def rank(self, rank: int, group: str = "training", node: str = "node-a") -> Process:
        """Adds a rank of a worker group."""
        identity = {"rl__role": "worker", "rl__worker_group": group, "nv__dl__rank": rank}
        return self.process(f"{group}-{rank}", node, **identity)

    def span(
        self,
        process: Process,
        name: str,
        start: float,
        end: float | None,
        parent: SpanRow | None = None,
        *,
        links: tuple[SpanRow, ...] = (),
        thread: int = 1,
        **values: Any,
    ) -> SpanRow:
        """Adds a span; ``group`` and ``bucket`` stand for ``rl.span_group`` and ``rl.bucket``."""
        for short, key in (("group", "rl__span_group"), ("bucket", "rl__bucket"), ("iteration", "rl__iteration")):
            if short in values:
                values[key] = values.pop(short)
        data = spooling.span(len(self.rows) + 1, start, end, name=name, thread__id=thread, **values)
        message = Span.FromString(data)
        if parent is not None:
            message.parent_span_id = bytes.fromhex(parent.span_id)
        for to in links:
            message.links.add(trace_id=spooling.TRACE, span_id=bytes.fromhex(to.span_id))
        row = SpanRow(_decode.span(message.SerializeToString()), process)
        self.rows.append(row)
        process.start_ns = min(process.start_ns or row.start_ns, row.start_ns)
        process.last_ns = max(process.last_ns, row.end_ns or row.start_ns)
        return row

    def step(self, start: float, end: float | None, iteration: int | None = None, **values: Any) -> SpanRow:
        """Adds a step of the driver."""
        number = iteration if iteration is not None else sum(row.span_group == "step" for row in self.rows) + 1
        return self.span(self.driver, "step", start, end, group="step", iteration=number, **values)

    def run(self) -> Run:
        """The run as a reader would have it."""
        rows = sorted(self.rows, key=lambda row: row.start_ns)
        return Run("made", "made", rows, list(self.processes.values()))


def seconds(time_ns: int) -> float:
    """A time of such a run in seconds from T0."""
    return (time_ns - T0) / SECOND


def data_parallel(made: Made, durations: list[list[float]], *, collective: bool = False, nodes: int = 1) -> None:
    """Adds steps of 10 s in which every rank of a group trains for as long as ``durations[step][rank]`` says.

    Args:
        made: The run.
        durations: Seconds.
        collective: Each rank then waits in an all-reduce for the last one.
        nodes: Ranks are spread over so many nodes, in blocks.
    """
    count = len(durations[0])
    ranks = [made.rank(rank, node=f"node-{rank * nodes // count}") for rank in range(count)]
    leaf = {"group": "policy_update", "bucket": "productive"}
    for number, of_ranks in enumerate(durations):
        begin = 10.0 * number
        slowest = begin + max(of_ranks)
        step = made.step(begin, slowest + 0.5)
        call = made.span(made.driver, "train", begin, slowest + 0.25, step, **leaf)
        for process, duration in zip(ranks, of_ranks, strict=True):
            end = slowest + 0.125 if collective else begin + duration
            work = made.span(process, "train", begin, end, call, **leaf)
            if collective:
                made.span(
                    process, "all_reduce", begin + duration, end, work, group="policy_update", bucket="productive"
                )
