"""What the HTML report is drawn from: the report, the timeline, step by step what took how long, ranks by step."""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor.report import report
from raytrace_rl.monitor.text_skew import skew_beside, skew_lines
from raytrace_rl.monitor.timeline import timeline
from raytrace_rl.monitor.tree import lane_of
from raytrace_rl.monitor.why import Steps

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run, SpanRow

#: Steps that charts show one by one; of more, as many groups of neighbours.
STEPS: Final = 400
#: Columns, and rows, of a heat map.
HEAT_COLUMNS: Final = 120
HEAT_ROWS: Final = 2048
#: Phases that the step chart tells apart.
PHASES: Final = 8
#: Stretches of the critical path that are drawn.
SEGMENTS: Final = 40_000
#: Entries of the report's longest lists.
ENTRIES: Final = 500


def document(run: Run) -> dict[str, Any]:
    """Returns all that the page needs, as plain JSON values."""
    steps = Steps(run)
    return assembled(report(run, steps), timeline(run), steps)


def assembled(told: dict[str, Any], drawn: dict[str, Any], steps: Steps) -> dict[str, Any]:
    """Returns the same of the report, the timeline, and what is known of the steps."""
    return {
        "report": _shorten(told),
        "clocks": {"beside": skew_beside(told["skew"]), "lines": skew_lines(told["skew"])},
        "timeline": drawn,
        "steps": _steps(steps),
        "path": _path(steps, told["run"]["start_ns"] or 0),
        "heat": _heat(steps),
    }


def _shorten(value: Any, name: str = "") -> Any:
    """Cuts lists to what a person reads (counts beside them are exact), and leaves out what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _shorten(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        if name == "windows":  # bounded by themselves, and a chart is drawn of all
            return [_shorten(inner) for inner in value]
        return [_shorten(inner) for inner in (value[-ENTRIES:] if name == "list" else value[:ENTRIES])]
    return None if isinstance(value, float) and not isfinite(value) else value


def _chunks(count: int, most: int) -> list[range]:
    """The numbers up to ``count`` in at most ``most`` groups of neighbours."""
    size = max(1, -(-count // most))
    return [range(at, min(count, at + size)) for at in range(0, count, size)]


def _steps(steps: Steps) -> dict[str, Any]:
    """Seconds by step, or by group of neighbours, and by phase."""
    tree = steps.tree
    own: list[dict[str, int]] = []
    for step in tree.steps:
        spent: dict[str, int] = {}
        for row in tree.own_children(step):
            spent[row.name] = spent.get(row.name, 0) + row.until_ns - row.start_ns
        own.append(spent)
    totals: dict[str, int] = {}
    for spent in own:
        for name, length in spent.items():
            totals[name] = totals.get(name, 0) + length
    names = sorted(totals, key=lambda name: -totals[name])[:PHASES]
    buckets = {row.name: row.bucket for step in tree.steps[:50] for row in tree.own_children(step)}
    bars = []
    for chunk in _chunks(len(tree.steps), STEPS):
        some = [tree.steps[n] for n in chunk]
        size = len(some)
        bars.append(
            {
                "first": some[0].iteration,
                "last": some[-1].iteration,
                "attempt": some[0].attempt,
                "start_us": some[0].start_ns // 1000,
                "total_s": sum(step.until_ns - step.start_ns for step in some) / size / 1e9,
                "max_s": max(step.until_ns - step.start_ns for step in some) / 1e9,
                "phases_s": [round(sum(own[n].get(name, 0) for n in chunk) / size / 1e9, 6) for name in names],
            }
        )
    return {"phases": [{"name": name, "bucket": buckets.get(name)} for name in names], "bars": bars}


def _path(steps: Steps, start: int) -> dict[str, Any]:
    """The critical path of the last steps, as slices for the timeline (us): start, length, name, lane."""
    names: dict[str, int] = {}
    labels: dict[str, int] = {}
    slices: list[list[int]] = []
    count = 0
    for segments in reversed(steps.paths):
        if count + len(segments) > SEGMENTS:
            break
        count += len(segments)
        for segment in reversed(segments):
            begin = (segment.start_ns - start) // 1000
            length = (segment.end_ns - start) // 1000 - begin
            name = names.setdefault(segment.row.name, len(names))
            label = labels.setdefault(str(lane_of(segment.row.process)), len(labels))
            slices.append([begin, length, name, label, _bucket(segment.row)])
    slices.reverse()
    return {"names": list(names), "lanes": list(labels), "slices": slices}


def _bucket(row: SpanRow) -> int:
    return {"productive": 1, "overhead": 2, "wasted": 3, "idle": 4}.get(row.bucket or "", 0)


def _heat(steps: Steps) -> list[dict[str, Any]]:
    """By worker group, rank and step: how much longer than the median rank it was at work, waiting left out (ms)."""
    chunks = _chunks(len(steps.tree.steps), HEAT_COLUMNS)
    groups: dict[str, dict[int, list[float]]] = {}
    for number, spent in enumerate(steps.at_work()):
        for group, own in spent.items():
            typical = median(own.values())
            for rank, value in own.items():
                columns = groups.setdefault(group, {}).setdefault(rank, [0.0] * len(chunks))
                at = number // max(1, len(chunks[0]))
                columns[at] += (value - typical) / len(chunks[at])
    typical_step = median([step.until_ns - step.start_ns for step in steps.tree.steps] or [0]) / 1e6
    return [
        {
            "group": group,
            "ranks": sorted(ranks)[:HEAT_ROWS],
            "columns": [[steps.tree.steps[c[0]].iteration, steps.tree.steps[c[-1]].iteration] for c in chunks],
            # Differences of less than this part of a step are drawn pale: every map has its largest value, noise too.
            "least_ms": 0.05 * typical_step,
            "values_ms": [[round(value, 2) for value in ranks[rank]] for rank in sorted(ranks)[:HEAT_ROWS]],
        }
        for group, ranks in sorted(groups.items())
        if len(ranks) > 1
    ]
