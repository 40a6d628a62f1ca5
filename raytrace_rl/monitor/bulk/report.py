"""The report of a large run: the same dictionary as `raytrace_rl.monitor.report.report` returns, from columns."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raytrace_rl.monitor import report as rows
from raytrace_rl.monitor.bulk import bubbles, clocks, goodput, tables
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.goodput import Timelines
from raytrace_rl.monitor.bulk.steps import Steps
from raytrace_rl.monitor.bulk.timeline import timeline
from raytrace_rl.monitor.bulk.tree import ColumnTree
from raytrace_rl.monitor.critical_path import critical_path
from raytrace_rl.monitor.findings import findings
from raytrace_rl.monitor.html_data import assembled
from raytrace_rl.monitor.html_report import page
from raytrace_rl.monitor.trajectories import trajectories

# The sections that walk from span to span take a tree of columns for a tree of rows: it answers the same questions.


def report(columns: Columns) -> dict[str, Any]:
    """Returns the report of a run."""
    with _uncollected():
        steps = Steps(ColumnTree(columns))
        return _report(columns, steps, Timelines(columns))


def html(columns: Columns) -> str:
    """Returns the page of a run."""
    return page(document(columns))


def document(columns: Columns) -> dict[str, Any]:
    """Returns all that the page needs, as `html_data.document` does."""
    with _uncollected():
        steps = Steps(ColumnTree(columns))
        timelines = Timelines(columns)
        told = _report(columns, steps, timelines)
        seen: Any = steps  # it answers what the page asks of the steps of rows
        return assembled(told, timeline(columns, timelines), seen)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps the garbage collector from going through the stretches of critical paths, millions, again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _report(columns: Columns, steps: Steps, timelines: Timelines) -> dict[str, Any]:
    return rows.whole(rows.base(columns.run, _sections(columns, steps, timelines)), _why(steps, timelines))


def _sections(columns: Columns, steps: Steps, timelines: Timelines) -> dict[str, Any]:
    tree: Any = steps.tree
    return {
        "start_ns": int(columns.start.min()) if len(columns) else None,
        "end_ns": int(columns.until.max()) if len(columns) else None,
        "goodput": goodput.of_columns(columns, timelines),
        "steps": tables.steps(columns),
        "span_names": tables.span_names(columns),
        "processes": tables.processes(columns),
        "loss": tables.loss(columns),
        "traces": tables.traces(columns),
        "trajectories": trajectories(columns.run, tree),
        "queueing": clocks.queueing_of(columns),
        "skew": clocks.of_columns(columns).as_json(),
    }


def _why(steps: Steps, timelines: Timelines) -> dict[str, Any]:
    tree: Any = steps.tree
    stragglers = steps.stragglers()
    return {
        "findings": findings(tree, steps.paths, stragglers),
        "phases": steps.phases(),
        "first_step": steps.first_step(),
        "critical_path": critical_path(tree, steps.paths),
        "stragglers": stragglers,
        "bubbles": bubbles.of_steps(steps, timelines),
    }
