"""`diff`: what got slower from one run to another, by span name, rank and bucket, with a verdict that knows the noise.

Plain JSON values (schema 1, docs/diff.md). A verdict compares medians: the difference must be a twentieth of the first
run's, and stand out of the noise that both runs have within themselves. Whether the machine was busier, no trace tells.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raytrace_rl.monitor import noise
from raytrace_rl.monitor.goodput import goodput
from raytrace_rl.monitor.model import BUCKETS
from raytrace_rl.monitor.tables import MAX_LISTED
from raytrace_rl.monitor.tree import Tree, lane_of

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run, SpanRow

SCHEMA: Final = 1
_NS: Final = 1e9
#: Spans of a name that a verdict needs in each run; and the least change of the median that is one.
LEAST: Final = 5
CHANGE: Final = 0.05

K = TypeVar("K", bound=Hashable)


def diff(a: Run, b: Run) -> dict[str, Any]:
    """Returns how run ``b`` differs from run ``a``."""
    steps_a, steps_b = Tree(a).steps, Tree(b).steps
    count = max(1, len(steps_a)), max(1, len(steps_b))
    return {
        "schema": SCHEMA,
        "a": {"id": a.run_id, "path": a.path, "spans": len(a.spans), "steps": len(steps_a)},
        "b": {"id": b.run_id, "path": b.path, "spans": len(b.spans), "steps": len(steps_b)},
        "steps": _entry([_ns(row) for row in steps_a], [_ns(row) for row in steps_b], count, 1),
        "span_names": _table(_by_name(a), _by_name(b), count, lambda name: {"name": name}),
        "ranks": _table(
            _by_rank(a),
            _by_rank(b),
            count,
            lambda key: {"worker_group": key[0], "rank": key[1], "name": key[2]},
        ),
        "buckets": _buckets(a, b),
    }


def _ns(row: SpanRow) -> int:
    return row.until_ns - row.start_ns


def _ended(run: Run) -> list[SpanRow]:
    return [row for row in run.spans if row.end_ns is not None and not row.truncated]


def _by_name(run: Run) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in _ended(run):
        found.setdefault(row.name, []).append(_ns(row))
    return found


def _by_rank(run: Run) -> dict[tuple[str, int, str], list[int]]:
    found: dict[tuple[str, int, str], list[int]] = {}
    for row in _ended(run):
        lane = lane_of(row.process)
        if lane.rank is not None:
            found.setdefault((lane.group, lane.rank, row.name), []).append(_ns(row))
    return found


def _table(
    a: Mapping[K, list[int]], b: Mapping[K, list[int]], steps: tuple[int, int], about: Any
) -> list[dict[str, Any]]:
    keys = sorted({*a, *b}, key=str)
    entries = [{**about(key), **_entry(a.get(key, []), b.get(key, []), steps, len(keys))} for key in keys]
    entries.sort(key=lambda entry: (entry["verdict"] in {"same", "unclear"}, -abs(entry["step_change_s"])))
    return entries[:MAX_LISTED]


def _entry(a: Sequence[int], b: Sequence[int], steps: tuple[int, int], comparisons: int) -> dict[str, Any]:
    """Compares durations (ns) of the two runs; per step is the sum over all of them, over the run's steps."""
    p50 = median(a) if a else None, median(b) if b else None
    per_step = sum(a) / steps[0] / _NS, sum(b) / steps[1] / _NS
    ratio = p50[1] / p50[0] if p50[0] and p50[1] is not None else None
    verdict, score = _verdict(a, b, comparisons)
    return {
        "verdict": verdict,
        "a_count": len(a),
        "b_count": len(b),
        "a_p50_s": None if p50[0] is None else p50[0] / _NS,
        "b_p50_s": None if p50[1] is None else p50[1] / _NS,
        "ratio": ratio,
        "score": None if score is None else max(-1e6, min(score, 1e6)),
        "a_step_s": per_step[0],
        "b_step_s": per_step[1],
        "step_change_s": per_step[1] - per_step[0],
    }


def _verdict(a: Sequence[int], b: Sequence[int], comparisons: int) -> tuple[str, float | None]:
    """``slower``, ``faster``, ``same``, ``unclear`` (too few, or noise hides it), ``new``, ``gone``; and the score."""
    if not a or not b:
        return ("same" if not a and not b else "gone" if a else "new"), None
    middle_a, middle_b = median(a), median(b)
    spread = (noise.of_median(a, middle_a) ** 2 + noise.of_median(b, middle_b) ** 2) ** 0.5
    score = noise.score(middle_b - middle_a, spread)
    limit = noise.threshold(comparisons)
    if len(a) < LEAST or len(b) < LEAST:
        return "unclear", score
    if abs(middle_b - middle_a) >= CHANGE * middle_a and abs(score) >= limit:
        return ("slower" if score > 0 else "faster"), score
    # A difference of this size would have been seen.
    return ("same" if limit * spread <= CHANGE * middle_a or middle_a == middle_b else "unclear"), score


def _buckets(a: Run, b: Run) -> list[dict[str, Any]]:
    """Parts of the job's wall clock, and of the fleet's time, by bucket."""
    views_a, views_b = goodput(a), goodput(b)
    entries: list[dict[str, Any]] = []
    pairs = (("job", views_a.job, views_b.job, "wall_ns"), ("fleet", views_a.fleet, views_b.fleet, "gpu_ns"))
    for view, of_a, of_b, whole in pairs:
        if of_a is None or of_b is None:
            continue
        for bucket in (*BUCKETS, "unattributed"):
            entry: dict[str, Any] = {"view": view, "bucket": bucket}
            for side, one in (("a", of_a), ("b", of_b)):
                time_ns = one.buckets.get(bucket, one.unattributed_ns)
                total = getattr(one, whole)
                entry |= {f"{side}_s": time_ns / _NS, f"{side}_part": time_ns / total if total else 0.0}
            entries.append({**entry, "change": entry["b_part"] - entry["a_part"]})
    return entries
