"""The tables of a report: steps, totals by span name, processes, what was lost, whether the traces hang together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process, Run, SpanRow

_NS = 1e9
STEP = "step"
#: Entries of a list of single spans or damages in the JSON report; their number is always exact.
MAX_LISTED = 1000


def percentile(ordered: Sequence[int], part: float) -> float:
    """Returns the value below which ``part`` (0 to 1) of ``ordered`` lies, linearly interpolated."""
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def durations(rows: Iterable[SpanRow]) -> dict[str, Any]:
    """Returns count, total, mean, p50, p95 and maximum (seconds) of spans that have ended; rows must not be empty."""
    ordered = sorted(row.until_ns - row.start_ns for row in rows)
    return of_durations(ordered, sum(ordered))


def of_durations(ordered: Sequence[int], total: int) -> dict[str, Any]:
    """Returns what `durations` does, of durations (ns) in order that are not none, and their sum."""
    return {
        "count": len(ordered),
        "total_s": total / _NS,
        "mean_s": total / len(ordered) / _NS,
        "p50_s": percentile(ordered, 0.5) / _NS,
        "p95_s": percentile(ordered, 0.95) / _NS,
        "max_s": ordered[-1] / _NS,
    }


def steps(run: Run) -> dict[str, Any]:
    """Returns how long steps took, and each of them. Truncated and open steps are listed, not averaged."""
    return step_table([row for row in run.spans if row.span_group == STEP])


def step_table(rows: Sequence[SpanRow]) -> dict[str, Any]:
    """Returns what `steps` does, of the spans of that group in the order of their start."""
    complete = [row for row in rows if row.end_ns is not None and not row.truncated]
    summary = durations(complete) if complete else {"count": 0}
    listed = [
        {
            "iteration": row.iteration,
            "attempt": row.attempt,
            "name": row.name,
            "start_ns": row.start_ns,
            "duration_s": (row.until_ns - row.start_ns) / _NS,
            "complete": row.end_ns is not None and not row.truncated,
        }
        for row in rows
    ]
    return {**summary, "incomplete": len(rows) - len(complete), "list": listed}


def span_names(run: Run) -> list[dict[str, Any]]:
    """Returns totals by span name, the longest total first."""
    by_name: dict[str, list[SpanRow]] = {}
    for row in run.spans:
        if row.end_ns is not None:
            by_name.setdefault(row.name, []).append(row)
    table = []
    for name, rows in by_name.items():
        groups = Counter(row.span_group for row in rows)
        buckets = Counter(row.bucket for row in rows)
        errors = sum(row.status == "ERROR" for row in rows)
        table.append(name_entry(name, groups, buckets, durations(rows), errors))
    return sorted(table, key=by_total)


def name_entry(
    name: str, groups: Counter[str | None], buckets: Counter[str | None], times: dict[str, Any], errors: int
) -> dict[str, Any]:
    """Returns the entry of one span name: how often which group and bucket comes, its durations, and its errors."""
    group, bucket = _most_common(groups), _most_common(buckets)
    return {"name": name, "span_group": group, "bucket": bucket, **times, "errors": errors}


def by_total(entry: Mapping[str, Any]) -> tuple[float, str]:
    """The order of `span_names`."""
    return -entry["total_s"], entry["name"]


def _most_common(counts: Counter[str | None]) -> str | None:
    return min(counts, key=lambda value: (-counts[value], value or ""))


def identity(process: Process) -> dict[str, Any]:
    """Returns who a process is."""
    return {
        "label": process.label,
        "lane": process.key,
        "role": process.role,
        "worker_group": process.worker_group,
        "rank": process.rank,
        "actor_class": process.actor_class,
        "actor_id": process.actor_id,
        "incarnation": process.incarnation,
        "attempt": process.attempt,
        "node": process.node,
        "pid": process.pid or None,
    }


def processes(run: Run) -> list[dict[str, Any]]:
    """Returns each process with its state, its spans, and what it dropped."""
    spans = Counter(row.process.key for row in run.spans)
    truncated = Counter(row.process.key for row in run.spans if row.truncated)
    opened = Counter(row.process.key for row in run.spans if row.end_ns is None)
    return process_table(run, spans, truncated, opened)


def process_table(run: Run, spans: Counter[str], truncated: Counter[str], opened: Counter[str]) -> list[dict[str, Any]]:
    """Returns what `processes` does, of how many spans each has, by key."""
    return [
        {
            **identity(process),
            "state": process.state,
            "start_ns": process.start_ns or None,
            "last_heartbeat_ns": process.heartbeat_ns or None,
            "spans": spans[process.key],
            "open": opened[process.key],
            "truncated": truncated[process.key],
            "drops": {kind: count for kind, count in process.drops.items() if count},
        }
        for process in run.processes
    ]


def loss(run: Run) -> dict[str, Any]:
    """Returns what is missing from the run, and what was cut short, each by name."""
    truncated = [row for row in run.spans if row.truncated]
    opened = [row for row in run.spans if row.end_ns is None]
    return loss_table(run, len(run.spans), truncated, opened)


def loss_table(run: Run, spans: int, truncated: Sequence[SpanRow], opened: Sequence[SpanRow]) -> dict[str, Any]:
    """Returns what `loss` does, of how many spans there are, and those that are truncated, or open."""
    dropped: Counter[str] = Counter()
    for process in run.processes:
        dropped.update(process.drops)
    bytes_skipped = sum(damage.skipped for damage in run.damage if damage.kind != "payload")
    return {
        "spans": spans,
        "truncated": len(truncated),
        "truncated_spans": [_where(row) for row in truncated[:MAX_LISTED]],
        "open": len(opened),
        "open_spans": [_where(row) for row in opened[:MAX_LISTED]],
        "dropped": dropped["spans"],
        "drops": {kind: count for kind, count in dropped.items() if count},
        "damaged_records": sum(d.count for d in run.damage if d.kind in ("record", "payload", "header")),
        "skipped_bytes": bytes_skipped,
        "lost_records": sum(d.count for d in run.damage if d.kind == "count"),
        "unreachable_segments": sum(d.count for d in run.damage if d.kind in ("unreachable", "vanished")),
        "duplicates": run.duplicates,
        "damage": [
            {"path": d.path, "offset": d.offset, "skipped": d.skipped, "reason": d.reason, "kind": d.kind}
            for d in run.damage[:MAX_LISTED]
        ],
    }


def _where(row: SpanRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "trace_id": row.trace_id,
        "span_id": row.span_id,
        "span_group": row.span_group,
        "iteration": row.iteration,
        "start_ns": row.start_ns,
        "duration_s": (row.until_ns - row.start_ns) / _NS,
        "thread": row.thread,
        "process": identity(row.process),
    }


def traces(run: Run) -> dict[str, Any]:
    """Returns whether the spans hang together: traces, roots, and spans whose parent is missing."""
    known = {row.trace_id + row.span_id for row in run.spans}
    roots = [row for row in run.spans if row.parent_span_id is None]
    orphans = [
        row for row in run.spans if row.parent_span_id is not None and row.trace_id + row.parent_span_id not in known
    ]
    count = len({row.trace_id for row in run.spans})
    return trace_table(count, Counter(row.name for row in roots), Counter(row.name for row in orphans))


def trace_table(count: int, roots: Counter[str], orphans: Counter[str]) -> dict[str, Any]:
    """Returns what `traces` does, of how many there are, and of roots and of spans without their parent by name."""
    return {
        "traces": count,
        "roots": sum(roots.values()),
        "root_names": _commonest(roots),
        "missing_parent": sum(orphans.values()),
        "missing_parent_names": _commonest(orphans),
    }


def _commonest(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:20])
