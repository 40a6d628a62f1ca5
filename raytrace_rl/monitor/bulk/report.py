"""The report of a large run: the same dictionary as `raytrace_rl.monitor.report.report` returns, from columns."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from raytrace_rl.monitor import report as rows
from raytrace_rl.monitor.bulk import along_paths, bubbles, clocks, goodput, tables, trajectories
from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.goodput import Timelines
from raytrace_rl.monitor.bulk.steps import Steps
from raytrace_rl.monitor.bulk.timeline import timeline
from raytrace_rl.monitor.bulk.tree import ColumnTree
from raytrace_rl.monitor.findings import found
from raytrace_rl.monitor.html_data import assembled
from raytrace_rl.monitor.html_report import page

# The sections that walk from span to span take a tree of columns for a tree of rows: it answers the same questions.


def report(columns: Columns) -> dict[str, Any]:
    """Returns the report of a run."""
    with _uncollected():
        return _told(columns, [Timelines(columns), Steps(ColumnTree(columns))])


def html(columns: Columns) -> str:
    """Returns the page of a run."""
    return page(document(columns))


def document(columns: Columns) -> dict[str, Any]:
    """Returns all that the page needs, as `html_data.document` does."""
    with _uncollected():
        timelines = Timelines(columns)
        steps = Steps(ColumnTree(columns))
        told = _told(columns, [timelines, steps])
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


def _told(columns: Columns, known: list[Any]) -> dict[str, Any]:
    """The report, of what is known: `Timelines` and `Steps`, which are let go of before the long lists are made."""
    timelines, steps = known
    known.clear()
    why = _why(steps, timelines)
    told: dict[str, Any] = {"goodput": goodput.of_columns(columns, timelines)}
    del steps, timelines
    return rows.whole(rows.base(columns.run, {**told, **_sections(columns)}), why)


def _sections(columns: Columns) -> dict[str, Any]:
    return {
        "start_ns": int(columns.start.min()) if len(columns) else None,
        "end_ns": int(columns.until.max()) if len(columns) else None,
        "span_names": tables.span_names(columns),
        "processes": tables.processes(columns),
        "loss": tables.loss(columns),
        "traces": tables.traces(columns),
        "queueing": clocks.queueing_of(columns),
        "skew": clocks.of_columns(columns).as_json(),
        "trajectories": trajectories.trajectories(columns),
        "steps": tables.steps(columns),
    }


def _why(steps: Steps, timelines: Timelines) -> dict[str, Any]:
    tree: Any = steps.tree
    stragglers = steps.stragglers()
    return {
        "findings": found(tree, stragglers, partial(along_paths.in_phases, steps)),
        "phases": steps.phases(),
        "first_step": steps.first_step(),
        "critical_path": along_paths.of_paths(steps),
        "stragglers": stragglers,
        "bubbles": bubbles.of_steps(steps, timelines),
    }
