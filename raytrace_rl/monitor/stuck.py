"""`stuck`: the open spans by the thread or task that stands in them, the deepest first, and who waits for whom.

Pure: a run in, plain JSON values out (schema 1, docs/stuck.md). *Who waits* is told by parentage alone: a thread whose
deepest open span has an open child elsewhere waits for that child. Which thread holds a lock, nobody tells.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from raytrace_rl.monitor.frames import Section, sections
from raytrace_rl.monitor.model import Process, Run, SpanRow
from raytrace_rl.monitor.tables import identity

SCHEMA: Final = 1
_NS: Final = 1e9
#: A live process is late when its last heartbeat is this old (ns): in that time it missed ten at the default interval.
LATE_NS: Final = 10_000_000_000
#: Processes that ended within this of the last sign of life of a run ended with it, and not before.
_TOGETHER_NS: Final = 30_000_000_000

Key = tuple[str, str]


@dataclass(slots=True)
class _Stand:
    """A thread or task that has spans open; they all share its stack.

    Attributes:
        rows: Its open spans, the deepest first.
        depth: Open spans above the deepest, in any process.
        stack: Its frames and those of the tasks that it waits for.
        stack_ns: When they were taken, 0 where that is not known.
    """

    process: Process
    rows: list[SpanRow]
    depth: int
    stack: list[Section]
    stack_ns: int = 0
    waits: list[dict[str, Any]] = field(default_factory=list)


def stuck(
    run: Run,
    *,
    after_s: float = 0,
    now_ns: int | None = None,
    hung: Mapping[str, Sequence[Section]] | None = None,
    stopped: Container[str] = (),
) -> dict[str, Any]:
    """Returns what is open in a run.

    Args:
        run: As `raytrace_rl.monitor.open_spans.load_open` reads it.
        after_s: Threads and tasks alone that have stood in their deepest open span for this long, seconds; of a run
            that is over, all.
        now_ns: The present, ns since the epoch.
        hung: Stacks of processes whose heartbeat did not come, by lane (`open_spans.hung_threads`).
        stopped: Lanes whose processes are stopped (`open_spans.stopped_lanes`).
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    attempt = max((process.attempt for process in run.processes), default=1)
    processes = [process for process in run.processes if process.attempt == attempt]
    living = [process for process in processes if process.state in {"alive", "unknown"}]
    last_ns = max((process.last_ns for process in processes), default=0)
    rows, left_behind = _open(run, processes, living, last_ns)
    stands = _stands(run, rows, hung or {})
    if living:
        stands = [stand for stand in stands if _age_ns(stand.rows[0], now_ns) >= after_s * _NS]
    _relate(stands)
    index = {id(row): n for n, stand in enumerate(stands, 1) for row in stand.rows}
    return {
        "schema": SCHEMA,
        "run": {
            "id": run.run_id,
            "path": run.path,
            "attempt": attempt,
            "state": "live" if any(p.state == "alive" for p in living) else "unknown" if living else "over",
            "now_ns": now_ns,
            "last_ns": last_ns or None,
            "processes": len(processes),
        },
        "open": sum(len(stand.rows) for stand in stands),
        "left_behind": left_behind,
        "stands": [_stand_json(n, stand, now_ns, index) for n, stand in enumerate(stands, 1)],
        "late": [
            {
                **identity(process),
                "last_heartbeat_ns": process.heartbeat_ns,
                "late_s": (now_ns - process.heartbeat_ns) / _NS,
                "holds_gil": process.key in (hung or {}),
                "stopped": process.key in stopped,
            }
            for process in living
            if _is_late(process, now_ns) or process.key in stopped
        ],
        "threads": _threads_json(stands),
    }


def _age_ns(row: SpanRow, now_ns: int) -> int:
    return (row.until_ns if row.process.state in {"dead", "closed"} else max(now_ns, row.start_ns)) - row.start_ns


def _is_late(process: Process, now_ns: int) -> bool:
    return process.state == "alive" and 0 < process.heartbeat_ns < now_ns - LATE_NS


def _open(run: Run, processes: Sequence[Process], living: Sequence[Process], last_ns: int) -> tuple[list[SpanRow], int]:
    """The spans that count as open, and how many others their processes left behind while the run went on."""
    keys = {process.key for process in processes}
    with_end = {
        process.key
        for process in processes
        if process in living or (not living and process.last_ns >= last_ns - _TOGETHER_NS)
    }
    candidates = [row for row in run.spans if (row.end_ns is None or row.truncated) and row.process.key in keys]
    counted: dict[Key, SpanRow] = {}
    left = 0
    # A worker that died alone matters while somebody waits for it: its span's parent is open. (Parents start first.)
    for row in sorted(candidates, key=lambda row: row.start_ns):
        if row.process.key in with_end or (row.trace_id, row.parent_span_id or "") in counted:
            counted[row.trace_id, row.span_id] = row
        else:
            left += 1
    return list(counted.values()), left


def _stands(run: Run, rows: Sequence[SpanRow], hung: Mapping[str, Sequence[Section]]) -> list[_Stand]:
    depths = _depths(rows)
    noted = {(stack.trace_id, stack.span_id): stack for stack in run.stacks}
    grouped: dict[tuple[str, int | None, str], list[SpanRow]] = {}
    for row in rows:
        stack = noted.get((row.trace_id, row.span_id))
        title = stack.text.partition("\n")[0] if stack is not None and stack.text[:1] != " " else ""
        grouped.setdefault((row.process.key, row.thread_id, title), []).append(row)
    stands = []
    for (lane, ident, _), members in grouped.items():
        members.sort(key=lambda row: (-depths[row.trace_id, row.span_id], -row.start_ns))
        stand = _Stand(members[0].process, members, depths[members[0].trace_id, members[0].span_id], [])
        latest = max((noted.get((row.trace_id, row.span_id)) for row in members), key=lambda s: s.time_ns if s else 0)
        if latest is not None:
            stand.stack, stand.stack_ns = sections(latest.text), latest.time_ns
        # Of a process that hangs in C with the GIL held, what its heartbeat noted before is older.
        of_hang = [section for section in hung.get(lane, ()) if section.ident == ident]
        if of_hang:
            stand.stack, stand.stack_ns = of_hang, 0
        stands.append(stand)
    return sorted(stands, key=lambda stand: (-stand.depth, stand.rows[0].start_ns))


def _depths(rows: Sequence[SpanRow]) -> dict[Key, int]:
    """How many open spans are above each."""
    by_key = {(row.trace_id, row.span_id): row for row in rows}
    depths: dict[Key, int] = {}
    for row in rows:
        path: list[Key] = []
        at: Key | None = (row.trace_id, row.span_id)
        while at in by_key and at not in depths and at not in path:
            path.append(at)
            at = at[0], by_key[at].parent_span_id or ""
        depth = depths.get(at, -1) if at is not None else -1
        for key in reversed(path):
            depth += 1
            depths[key] = depth
    return depths


def _relate(stands: Sequence[_Stand]) -> None:
    """Notes for whom each waits: open children elsewhere of its deepest open span."""
    fronts = {(stand.rows[0].trace_id, stand.rows[0].span_id): stand for stand in stands}
    for n, stand in enumerate(stands, 1):
        for row in stand.rows:
            waiting = fronts.get((row.trace_id, row.parent_span_id or ""))
            if waiting is None or waiting is stand:
                continue
            died = stand.process.state == "dead" and waiting.process.state != "dead"
            waiting.waits.append(
                {
                    "stand": n,
                    "process": stand.process.label,
                    "thread": row.thread,
                    "span": row.name,
                    "died": died,
                }
            )


def _stand_json(n: int, stand: _Stand, now_ns: int, index: Mapping[int, int]) -> dict[str, Any]:
    front = stand.rows[0]
    return {
        "stand": n,
        "depth": stand.depth,
        "age_s": _age_ns(front, now_ns) / _NS,
        "process": {**identity(stand.process), "state": stand.process.state},
        "thread": front.thread,
        "thread_id": front.thread_id,
        "spans": [
            {
                "name": row.name,
                "trace_id": row.trace_id,
                "span_id": row.span_id,
                "parent_span_id": row.parent_span_id,
                "span_group": row.span_group,
                "iteration": row.iteration,
                "start_ns": row.start_ns,
                "age_s": _age_ns(row, now_ns) / _NS,
            }
            for row in stand.rows
            if id(row) in index
        ],
        "stack_ns": stand.stack_ns or None,
        "stack": [_section_json(section) for section in stand.stack],
        "waits_for": stand.waits,
    }


def _section_json(section: Section) -> dict[str, Any]:
    return {"title": section.title, "frames": [asdict(frame) for frame in section.frames]}


def _threads_json(stands: Sequence[_Stand]) -> list[dict[str, Any]]:
    """The threads without an open span, of processes that have any open: one of them may hold what the others want."""
    processes = {stand.process.key: stand.process for stand in stands}.values()
    return [
        {
            "process": identity(process),
            "thread": section.title,
            "thread_id": section.ident,
            "stack_ns": process.threads.time_ns,
            "stack": [_section_json(section)],
        }
        for process in processes
        if process.threads is not None
        for section in sections(process.threads.text)
    ]
