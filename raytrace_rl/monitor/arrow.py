"""A run that has been read as Arrow tables, with the columns of the SQL tables (docs/sql.md). Needs pyarrow.

Of a run that is too large to have as rows, `raytrace_rl.monitor.store.Store` makes the same tables without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from raytrace_rl.monitor.columns import as_table

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run

#: Of the process of each span, in the order and at the places of the SQL table.
_OF_PROCESS: Final = (
    "worker_group",
    "rank",
    "node_id",
    "actor_id",
    "actor_class",
    "incarnation",
    "attempt",
    "pid",
)
_SPANS: Final = (
    *("trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns", "duration_ns", "status"),
    *("status_message", "span_group", "bucket", "iteration", *_OF_PROCESS, "thread", "thread_id", "lane", "queued_ns"),
    *("truncated", "scope", "attributes", "events", "links", "resource"),
)


def arrow(run: Run, table: str) -> Any:
    """Returns one of the tables ``spans``, ``metrics``, ``logs``, ``stacks``, ``processes`` and ``runs``.

    Raises:
        KeyError: There is no such table.
    """
    if table == "spans":
        return _spans(run)
    if table == "processes":
        return _processes(run)
    if table == "runs":
        return _runs(run)
    rows: dict[str, Any] = {"metrics": run.metrics, "logs": run.logs, "stacks": run.stacks}
    return as_table(table, rows[table])


def _spans(run: Run) -> Any:
    own = as_table("spans", run.spans)
    places = {process.key: number for number, process in enumerate(run.processes)}
    of_process = _processes(run).take(pa.array([places[row.process.key] for row in run.spans], pa.int64()))
    columns = {name: own.column(name) for name in own.column_names}
    columns.update({name: of_process.column(name) for name in (*_OF_PROCESS, "resource")})
    columns["duration_ns"] = pa.array([row.duration_ns for row in run.spans], pa.int64())
    return pa.table({name: columns[name] for name in _SPANS})


def _processes(run: Run) -> Any:
    damaged = sum(damage.count for damage in run.damage)  # said of the first
    return as_table("processes", [(process, 0 if number else damaged) for number, process in enumerate(run.processes)])


def _runs(run: Run) -> Any:
    values = {
        "path": run.path,
        "run_id": run.run_id,
        "attempts": len({process.attempt for process in run.processes}),
        "processes": len(run.processes),
        "spans": len(run.spans),
        "start_ns": min((row.start_ns for row in run.spans), default=None),
        "end_ns": max((row.end_ns or row.start_ns for row in run.spans), default=None),
        "damaged_records": sum(damage.count for damage in run.damage),
    }
    kinds = {name: pa.string() if name in {"path", "run_id"} else pa.int64() for name in values}
    return pa.table({name: pa.array([value], kinds[name]) for name, value in values.items()})
