"""Which processes are one worker: what a worker has started, such as an engine's processes, is a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from raytrace_rl import semconv

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, SpanRow


def heads(processes: Sequence[Process], spans: Iterable[SpanRow]) -> dict[str, Process]:
    """Returns, by key, the worker that each process is a part of: for most that is the process itself.

    A process names the one that started it (``process.parent_pid``). Where that one is not in the run, or is not named
    (the sender of a local OTLP receiver), and Ray has not started it, the first of its spans that hangs from an actor's
    on the same node tells. What a driver has started is a worker of its own: a driver is none.

    Args:
        processes: The run's processes.
        spans: The run's spans, in any order that is the same each time.
    """
    by_pid: dict[tuple[str, int], list[Process]] = {}
    for process in processes:
        pid = process.number(semconv.PROCESS_PID)
        if pid is not None and process.role == semconv.ROLE_WORKER:
            by_pid.setdefault((process.node, pid), []).append(process)
    parents: dict[str, Process] = {}
    strays: dict[str, Process] = {}
    for process in processes:
        if process.role == semconv.ROLE_DRIVER:
            continue
        pid = process.number(semconv.PROCESS_PARENT_PID)
        found = [one for one in by_pid.get((process.node, pid or 0), ()) if _met(one, process)]
        if found:
            parents[process.key] = found[0]
        elif process.text(semconv.RAY_WORKER_ID) is None and process.actor_id is None:
            strays[process.key] = process
    parents.update(_by_spans(strays, spans))
    return {process.key: _head(process, parents) for process in processes}


def _met(parent: Process, child: Process) -> bool:
    """True if they lived at the same time: pids are used again."""
    return parent is not child and parent.start_ns <= child.last_ns and parent.last_ns >= child.start_ns


def _head(process: Process, parents: dict[str, Process]) -> Process:
    seen = {process.key}
    while (parent := parents.get(process.key)) is not None and parent.key not in seen:
        process = parent
        seen.add(process.key)
    return process


def _by_spans(strays: dict[str, Process], spans: Iterable[SpanRow]) -> dict[str, Process]:
    if not strays:
        return {}
    rows = list(spans)
    wanted: dict[str, list[Process]] = {}
    for row in rows:
        if row.parent_span_id and row.process.key in strays:
            wanted.setdefault(row.trace_id + row.parent_span_id, []).append(row.process)
    found: dict[str, Process] = {}
    for row in rows:
        actor = row.process
        if actor.actor_id is None:
            continue
        for process in wanted.get(row.trace_id + row.span_id, ()):
            if actor.node_id == process.node_id or actor.node == process.node:
                found.setdefault(process.key, actor)
    return found
