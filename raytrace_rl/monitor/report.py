"""`report`: everything about a run as one JSON-able dictionary (schema 1, docs/report.md)."""

from __future__ import annotations

from typing import Any, Final

from raytrace_rl.monitor import tables
from raytrace_rl.monitor.goodput import Beside, FleetView, Goodput, JobView, SumView, goodput
from raytrace_rl.monitor.model import BUCKETS, Run
from raytrace_rl.monitor.queueing import queueing
from raytrace_rl.monitor.relay_counters import relay_counters
from raytrace_rl.monitor.skew import skew
from raytrace_rl.monitor.text import render, render_summary
from raytrace_rl.monitor.trajectories import trajectories
from raytrace_rl.monitor.tree import Tree
from raytrace_rl.monitor.why import Steps, why

SCHEMA: Final = 1
_NS: Final = 1e9


def report(run: Run, steps: Steps | None = None) -> dict[str, Any]:
    """Returns the report of a run: plain JSON values, described in docs/report.md.

    Args:
        run: The run.
        steps: What is known of its steps, where that has been found out already.
    """
    steps = steps or Steps(run)
    return whole(base(run, sections(run, steps.tree)), why(steps))


def whole(about: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Returns the report, of what `base` and what `why.why` return."""
    table = {**about["steps"], "phases": told.pop("phases"), "first": told.pop("first_step")}
    return {**about, "steps": table, **told}


def sections(run: Run, tree: Tree) -> dict[str, Any]:
    """Returns the sections that are about the spans, but for those that say why; and when the run was."""
    return {
        "start_ns": min((row.start_ns for row in run.spans), default=None),
        "end_ns": max((row.until_ns for row in run.spans), default=None),
        "goodput": goodput(run),
        "steps": tables.steps(run),
        "span_names": tables.span_names(run),
        "processes": tables.processes(run),
        "loss": tables.loss(run),
        "traces": tables.traces(run),
        "trajectories": trajectories(run, tree),
        "queueing": queueing(run),
        "skew": skew(run).as_json(),
    }


def base(run: Run, told: dict[str, Any]) -> dict[str, Any]:
    """Returns all of the report but what says why.

    Args:
        run: The run; its spans are not looked at.
        told: What `sections` returns.
    """
    views: Goodput = told["goodput"]
    return {
        "schema": SCHEMA,
        "run": {
            "id": run.run_id,
            "path": run.path,
            "processes": len(run.processes),
            "attempts": len({process.attempt for process in run.processes}),
            "start_ns": told["start_ns"],
            "end_ns": told["end_ns"],
        },
        "goodput": _goodput(views),
        "steps": told["steps"],
        "span_names": told["span_names"],
        "processes": told["processes"],
        "loss": told["loss"],
        "relay": relay_counters(run.path),
        "traces": told["traces"],
        "trajectories": told["trajectories"],
        "queueing": told["queueing"],
        "skew": told["skew"],
        "coverage": {
            "sum": views.sum.beside.coverage,
            "job": views.job.beside.coverage if views.job else None,
            "fleet": views.fleet.beside.coverage if views.fleet else None,
        },
    }


def _goodput(views: Goodput) -> dict[str, Any]:
    windows = [{"start_ns": start, "end_ns": end, **_parts(view)} for (start, end), view in views.windows]
    return {"sum": _sum(views.sum), "job": _job(views.job), "fleet": _fleet(views.fleet), "windows": windows}


def _buckets(buckets: dict[str, int]) -> dict[str, float]:
    return {f"{bucket}_s": buckets[bucket] / _NS for bucket in BUCKETS}


def _beside(beside: Beside) -> dict[str, Any]:
    return {"coverage": beside.coverage, "dropped": beside.dropped, "truncated": beside.truncated}


def _sum(view: SumView) -> dict[str, Any]:
    return {**_buckets(view.buckets), "overlap_s": view.overlap_ns / _NS, **_beside(view.beside)}


def _job(view: JobView | None) -> dict[str, Any] | None:
    return None if view is None else {**_parts(view), **_beside(view.beside)}


def _parts(view: JobView) -> dict[str, Any]:
    return {
        **_buckets(view.buckets),
        "unattributed_s": view.unattributed_ns / _NS,
        "recovery_s": view.recovery_ns / _NS,
        "wall_s": view.wall_ns / _NS,
        "excluded_s": view.excluded_ns / _NS,
        "goodput": view.goodput,
        "no_goodput": view.no_goodput,
    }


def _fleet(view: FleetView | None) -> dict[str, Any] | None:
    if view is None:
        return None
    return {
        **_buckets(view.buckets),
        "unattributed_s": view.unattributed_ns / _NS,
        "gpu_s": view.gpu_ns / _NS,
        "excluded_s": view.excluded_ns / _NS,
        "unit": view.unit,
        "units": view.units,
        "goodput": view.goodput,
        "no_goodput": view.no_goodput,
        **_beside(view.beside),
    }


def text(run: Run) -> str:
    """Returns the whole report for a terminal or a pipe."""
    return render(report(run))


def summary(run: Run) -> str:
    """Returns the goodput summary of a run: plain text that fits a screen of 80 columns and 24 lines."""
    return render_summary(base(run, sections(run, Tree(run))))
