"""Draws a report as plain text: the summary on one screen, the report at length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from raytrace_rl.monitor.drawing import ROWS, cut, more, percent, seconds, table
from raytrace_rl.monitor.text_flow import queueing_lines, trajectory_lines
from raytrace_rl.monitor.text_skew import skew_beside, skew_lines
from raytrace_rl.monitor.text_why import bubble_lines, finding_lines, path_lines, phase_lines, straggler_lines

WIDTH: Final = 80
HEIGHT: Final = 24
_BAR: Final = 20
_LABELS: Final = (
    ("productive_s", "productive"),
    ("overhead_s", "overhead"),
    ("idle_s", "idle"),
    ("wasted_s", "wasted"),
    ("recovery_s", "recovery"),
    ("unattributed_s", "unattributed"),
)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bars(view: Mapping[str, Any], whole: float) -> list[str]:
    lines = []
    for key, label in _LABELS:
        value = view.get(key)
        if value is None or (key == "recovery_s" and not value):
            continue
        part = value / whole if whole > 0 else 0.0
        bar = "#" * round(part * _BAR)
        lines.append(f"  {label:<13} {seconds(value):>9} {percent(part):>7}  {bar}".rstrip())
    return lines


def _beside(view: Mapping[str, Any], skew: str) -> str:
    lost = f"{_count(view['dropped'], 'span')} dropped, {view['truncated']} truncated"
    return f"  coverage {percent(view['coverage'])}, {lost}{skew and ', '}{skew}"


def _job(view: Mapping[str, Any] | None, skew: str) -> list[str]:
    if view is None:
        return ["Job: no driver and no job span in this run"]
    left_out = f", {seconds(view['excluded_s'])} left out" if view["excluded_s"] else ""
    clock = f"driver's lane, {seconds(view['wall_s'])} of wall clock{left_out}"
    head = f"Job ({clock}): goodput {_goodput(view)}"
    return [head, *_bars(view, view["wall_s"]), _beside(view, skew)]


def _goodput(view: Mapping[str, Any]) -> str:
    return percent(view["goodput"]) if view["no_goodput"] is None else f"n/a: {view['no_goodput']}"


def _windows(windows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not windows:
        return []
    begin = windows[0]["start_ns"]
    lines = ["Goodput by window, since the job began"]
    for window in windows:
        since, until = ((window[key] - begin) / 1e9 for key in ("start_ns", "end_ns"))
        told = "left out" if window["goodput"] is None else f"{percent(window['goodput']):>7}"
        bar = "#" * round((window["goodput"] or 0.0) * _BAR)
        lines.append(f"  {seconds(since):>9} to {seconds(until):>9} {told}  {bar}".rstrip())
    return lines


def _fleet_unit(view: Mapping[str, Any]) -> str:
    return _count(view["units"], "GPU" if view["unit"] == "gpu" else "worker lane")


def _fleet(view: Mapping[str, Any] | None, skew: str) -> list[str]:
    if view is None:
        return ["Fleet: no worker and no GPU in this run"]
    unit = "GPU" if view["unit"] == "gpu" else "lane"
    head = f"Fleet ({_fleet_unit(view)}, {seconds(view['gpu_s'])} of {unit} time): goodput {_goodput(view)}"
    return [head, *_bars(view, view["gpu_s"]), _beside(view, skew)]


def _sum(view: Mapping[str, Any], skew: str) -> list[str]:
    whole = sum(view[key] for key, _ in _LABELS[:4])
    head = f"Sum of bucketed spans: {seconds(whole)}, of which {seconds(view['overlap_s'])} overlap within their lanes"
    return [head, *_bars(view, whole), _beside(view, skew)]


def _where(span: Mapping[str, Any]) -> str:
    return f"{cut(span['name'], 34)} on {cut(span['process']['label'], 60)} after {seconds(span['duration_s'])}"


def _head(report: Mapping[str, Any]) -> str:
    run = report["run"]
    loss = report["loss"]
    processes = f"{run['processes']} process{'' if run['processes'] == 1 else 'es'}"
    traces = _count(report["traces"]["traces"], "trace")
    return f"Run {cut(run['id'], 40)}: {_count(loss['spans'], 'span')}, {processes}, {traces}"


def render_summary(report: Mapping[str, Any]) -> str:
    """Returns the summary of a report on at most 24 lines of 80 columns."""
    steps = report["steps"]
    goodput = report["goodput"]
    lines = [_head(report), *_job(goodput["job"], "")]
    fleet = goodput["fleet"]
    if fleet is not None:
        parts = ", ".join(
            f"{label} {percent(fleet[key] / fleet['gpu_s'] if fleet['gpu_s'] else 0.0)}" for key, label in _LABELS[1:4]
        )
        lines.append(f"Fleet ({_fleet_unit(fleet)}): goodput {percent(fleet['goodput'])}, {parts}")
        lines.append(_beside(fleet, ""))
    skew = skew_beside(report["skew"])
    if skew:
        lines.append(f"  {skew}")
    total = goodput["sum"]
    lines.append(
        f"Sum: productive {seconds(total['productive_s'])}, overhead {seconds(total['overhead_s'])}, "
        f"idle {seconds(total['idle_s'])}, overlap {seconds(total['overlap_s'])}"
    )
    if steps["count"]:
        lines.append(
            f"Steps: {steps['count']}, mean {seconds(steps['mean_s'])}, p50 {seconds(steps['p50_s'])}, "
            f"p95 {seconds(steps['p95_s'])}" + (f", {steps['incomplete']} incomplete" if steps["incomplete"] else "")
        )
    lines += _loss_lines(report, named=3)
    traces = report["traces"]
    if traces["missing_parent"]:
        missing = _count(traces["missing_parent"], "span")
        lines.append(f"Traces: {missing} whose parent is missing, {_count(traces['roots'], 'root')}")
    # The command is there to be copied: it alone may run over.
    lines = [cut(line, WIDTH) for line in lines[: HEIGHT - 1]] + [f"More: raytrace-rl report {report['run']['path']}"]
    return "\n".join(lines) + "\n"


def _loss_lines(report: Mapping[str, Any], named: int) -> list[str]:
    loss = report["loss"]
    lost = f"{loss['damaged_records']} damaged records, {loss['unreachable_segments']} unreachable files"
    lines = [f"Loss: {loss['truncated']} truncated, {loss['dropped']} dropped, {lost}"]
    lines += [f"  truncated: {_where(span)}" for span in loss["truncated_spans"][:named]]
    if loss["truncated"] > named:
        lines.append(f"  and {loss['truncated'] - named} more truncated")
    if loss["open"]:
        lines.append(f"  {_count(loss['open'], 'span')} still open (their processes live, or cannot be asked)")
    return [*lines, *_out_of_reach(loss), *report["relay"]["summary"]]


def _out_of_reach(loss: Mapping[str, Any]) -> list[str]:
    """A line on processes whose files were in the memory of a node that is not this one, or is gone."""
    stems: dict[str, set[str]] = {}
    for damage in loss["damage"]:
        if damage["kind"] == "unreachable":
            path = PurePath(damage["path"])
            stems.setdefault(path.parent.name, set()).add(path.name.partition(".")[0])
    if not stems:
        return []
    told = [f"{len(of)} process{'' if len(of) == 1 else 'es'} on {cut(node, 40)}" for node, of in stems.items()]
    more_nodes = f" and {len(told) - 2} more nodes" if len(told) > 2 else ""
    return [f"  out of reach: files of {', '.join(told[:2])}{more_nodes} (in its memory, or lost)"]


def render(report: Mapping[str, Any]) -> str:
    """Returns the report at length, for a terminal or a pipe."""
    goodput = report["goodput"]
    skew = skew_beside(report["skew"])
    sections = [
        [_head(report)],
        finding_lines(report["findings"]),
        _job(goodput["job"], skew),
        _windows(goodput["windows"]),
        _fleet(goodput["fleet"], skew),
        _sum(goodput["sum"], skew),
        _steps(report["steps"]),
        phase_lines(report["steps"]["phases"], report["steps"]["first"]),
        path_lines(report["critical_path"]),
        straggler_lines(report["stragglers"]),
        bubble_lines(report["bubbles"]),
        trajectory_lines(report["trajectories"]),
        queueing_lines(report["queueing"]),
        _names(report["span_names"]),
        _processes(report["processes"]),
        skew_lines(report["skew"]),
        _loss(report),
        _traces(report["traces"]),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _steps(steps: Mapping[str, Any]) -> list[str]:
    if not steps["list"]:
        return ["Steps: none"]
    head = f"Steps: {steps['count']} complete"
    if steps["count"]:
        head += f", mean {seconds(steps['mean_s'])}, p50 {seconds(steps['p50_s'])}, p95 {seconds(steps['p95_s'])}"
    rows = [
        (
            "-" if step["iteration"] is None else step["iteration"],
            step["name"],
            seconds(step["duration_s"]),
            "" if step["complete"] else "incomplete",
        )
        for step in steps["list"][-ROWS:]
    ]
    earlier = len(steps["list"]) - len(rows)
    drawn = table(("step", "span", "took", ""), rows, (-8, 40, -9, 10))
    return [head, *([f"  (the last {len(rows)}; {earlier} earlier ones in --json)"] if earlier > 0 else []), *drawn]


def _names(names: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            entry["name"],
            entry["bucket"] or "-",
            entry["count"],
            seconds(entry["total_s"]),
            seconds(entry["p50_s"]),
            seconds(entry["p95_s"]),
            entry["errors"] or "",
        )
        for entry in names[:ROWS]
    ]
    heads = ("span", "bucket", "count", "total", "p50", "p95", "errors")
    return ["Spans by name:", *table(heads, rows, (30, 10, -7, -8, -8, -8, -6)), *more(len(rows), len(names))]


def _processes(processes: Sequence[Mapping[str, Any]]) -> list[str]:
    ordered = sorted(processes, key=lambda p: not (p["truncated"] or p["drops"] or p["state"] in ("dead", "unknown")))
    rows = [
        (
            p["label"].removesuffix(f" pid {p['pid']}"),  # a column of its own: of a long name it would be cut off
            p["pid"] or "",
            p["state"],
            p["spans"],
            p["open"],
            p["truncated"],
            p["drops"].get("spans", 0),
        )
        for p in ordered[: 2 * ROWS]
    ]
    heads = ("process", "pid", "state", "spans", "open", "trunc.", "dropped")
    return ["Processes:", *table(heads, rows, (30, -7, 8, -8, -5, -6, -7)), *more(len(rows), len(processes))]


def _loss(report: Mapping[str, Any]) -> list[str]:
    loss = report["loss"]
    lines = _loss_lines(report, named=ROWS)
    others = ", ".join(f"{count} {kind}" for kind, count in loss["drops"].items() if kind != "spans")
    if others:
        lines.append(f"  also dropped: {others}")
    if loss["lost_records"]:
        lines.append(f"  {loss['lost_records']} records of sealed segments cannot be read")
    for damage in loss["damage"][:ROWS]:
        where = f"{damage['path']} at {damage['offset']}"
        lines.append(f"  {where}: {damage['reason']} ({damage['skipped']} bytes skipped)")
    return [*lines, *more(min(ROWS, len(loss["damage"])), len(loss["damage"]))]


def _traces(traces: Mapping[str, Any]) -> list[str]:
    lines = [
        (
            f"Traces: {traces['traces']}, {_count(traces['roots'], 'root')}, "
            f"{_count(traces['missing_parent'], 'span')} whose parent is missing"
        )
    ]
    for title, key in (("root", "root_names"), ("parent missing", "missing_parent_names")):
        lines += [f"  {title}: {cut(name, 60)} ({count} x)" for name, count in list(traces[key].items())[:5]]
    return lines
