"""Shifts the times of a run so that all are by one clock, as far as the skew between its nodes is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrace_rl import semconv
from raytrace_rl.monitor.believed import believed_ns
from raytrace_rl.monitor.skew import early, parents_of, skew
from raytrace_rl.monitor.skew_messages import Clocks, message

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, Run, SpanRow
    from raytrace_rl.monitor.skew import Skew


def align(run: Run) -> Skew:
    """Shifts the times of a run, in place, to the clock of the driver's node.

    Times of a node whose skew is bounded on both sides are shifted by the estimate, and are then off by its bound at
    most; those of other nodes stay. Processes of one node that started before and after its wall clock was set are
    brought together exactly. Spans with their events, stacks, logs, metrics and signs of life move. The delays
    ``queued_ns`` between two such nodes are corrected; attributes stay as they were measured. A second time changes
    nothing.

    Returns:
        What was found, and of which nodes the times were shifted; it is in ``run.skew`` from now on.
    """
    found = skew(run)
    if found.aligned:
        return found
    clocks = Clocks(run.processes)
    parents = parents_of(run)
    ahead_ns = {node.node: estimate for node in found.nodes if (estimate := node.estimate_ns) is not None}
    shifts = {
        process.key: clocks.own_ns(process) - ahead_ns.get(process.node, 0) for process in run.processes if process.node
    }
    for row in run.spans:
        _correct_delay(row, parents, clocks, ahead_ns)
        _shift(row, shifts.get(row.process.key, 0))
    _shift_rest(run, shifts)
    for process in run.processes:
        shift_process(process, shifts.get(process.key, 0))
    run.spans.sort(key=lambda row: row.start_ns)
    for node in found.nodes:
        node.aligned = node.node in ahead_ns
    found.aligned = True
    found.early, found.early_ns = early(run, parents)
    run.skew = found
    return found


def _correct_delay(row: SpanRow, parents: dict[str, SpanRow], clocks: Clocks, ahead_ns: dict[str, int]) -> None:
    """Takes the skew out of the delay of a call from another node."""
    name = row.attributes.get(semconv.RL_QUEUED_FROM)
    queued_ns = believed_ns(row.queued_ns)
    if name is None or queued_ns is None:
        return
    parent = parents.get(row.trace_id + (row.parent_span_id or ""))
    sent = message(queued_ns, name, row.process, parent.process if parent else None, clocks)
    if sent is not None and sent.sender in ahead_ns and sent.receiver in ahead_ns:
        row.queued_ns = sent.delay_ns - (ahead_ns[sent.receiver] - ahead_ns[sent.sender])


def _shift(row: SpanRow, by_ns: int) -> None:
    if by_ns:
        row.start_ns += by_ns
        if row.end_ns is not None:
            row.end_ns += by_ns
        if row.events:
            row.events = [event._replace(time_ns=event.time_ns + by_ns) for event in row.events]


def _shift_rest(run: Run, shifts: dict[str, int]) -> None:
    for metric in run.metrics:
        by_ns = shifts.get(metric.process.key, 0)
        metric.time_ns += by_ns
        metric.start_ns += by_ns if metric.start_ns else 0
    for log in run.logs:
        log.time_ns += shifts.get(log.process.key, 0)
    if run.stacks:
        owners = {(row.trace_id, row.span_id): row.process.key for row in run.spans}
        for number, stack in enumerate(run.stacks):
            by_ns = shifts.get(owners.get((stack.trace_id, stack.span_id), ""), 0)
            run.stacks[number] = stack._replace(time_ns=stack.time_ns + by_ns)
    run.metrics.sort(key=lambda row: row.time_ns)
    run.logs.sort(key=lambda row: row.time_ns)


def shift_process(process: Process, by_ns: int) -> None:
    """Shifts what is known of a process's life."""
    process.start_ns += by_ns if process.start_ns else 0
    process.heartbeat_ns += by_ns if process.heartbeat_ns else 0
    process.last_ns += by_ns if process.last_ns else 0
    if process.threads is not None:
        process.threads = process.threads._replace(time_ns=process.threads.time_ns + by_ns)
