"""`diff`: what got slower from one run to another, by span name, rank and bucket, with a verdict that knows the noise.

Plain JSON values (schema 1, docs/diff.md). A verdict compares medians: the difference must be a twentieth of the first
run's, and stand out of the noise that both runs have within themselves. Whether the machine was busier, no trace tells.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from raytrace_rl.monitor import noise
from raytrace_rl.monitor.goodput import Goodput, goodput
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


class Sample(NamedTuple):
    """What a comparison needs of durations (ns): how many, their median, the median deviation from it, their sum."""

    size: int
    middle: float | None
    deviation: float
    total: int


class Side(NamedTuple):
    """What a comparison needs of a run, so that not both have to be in memory.

    ``lengths`` are those of its complete steps, ``names`` and ``ranks`` those of its ended spans by name, and by
    worker group, rank and name.
    """

    run_id: str
    path: str
    spans: int
    lengths: Sample
    names: Mapping[str, Sample]
    ranks: Mapping[tuple[str, int, str], Sample]
    goodput: Goodput


_NOTHING: Final = Sample(0, None, 0.0, 0)


def diff(a: Run, b: Run) -> dict[str, Any]:
    """Returns how run ``b`` differs from run ``a``."""
    return of_sides(side(a), side(b))


def of_sides(a: Side, b: Side) -> dict[str, Any]:
    """Returns what `diff` does."""
    count = max(1, a.lengths.size), max(1, b.lengths.size)
    return {
        "schema": SCHEMA,
        "a": {"id": a.run_id, "path": a.path, "spans": a.spans, "steps": a.lengths.size},
        "b": {"id": b.run_id, "path": b.path, "spans": b.spans, "steps": b.lengths.size},
        "steps": _entry(a.lengths, b.lengths, count, 1),
        "span_names": _table(a.names, b.names, count, lambda name: {"name": name}),
        "ranks": _table(a.ranks, b.ranks, count, lambda key: {"worker_group": key[0], "rank": key[1], "name": key[2]}),
        "buckets": _buckets(a.goodput, b.goodput),
    }


def side(run: Run) -> Side:
    """Returns what is compared of a run."""
    names: dict[str, list[int]] = {}
    ranks: dict[tuple[str, int, str], list[int]] = {}
    for row in run.spans:
        if row.end_ns is None or row.truncated:
            continue
        names.setdefault(row.name, []).append(_ns(row))
        lane = lane_of(row.process)
        if lane.rank is not None:
            ranks.setdefault((lane.group, lane.rank, row.name), []).append(_ns(row))
    lengths = sample([_ns(row) for row in Tree(run).steps])
    by_name = {name: sample(of_one) for name, of_one in names.items()}
    by_rank = {key: sample(of_one) for key, of_one in ranks.items()}
    return Side(run.run_id, run.path, len(run.spans), lengths, by_name, by_rank, goodput(run))


def sample(lengths: Sequence[int]) -> Sample:
    """Returns what is compared of durations."""
    if not lengths:
        return _NOTHING
    middle = median(lengths)
    return Sample(len(lengths), middle, median(abs(length - middle) for length in lengths), sum(lengths))


def _ns(row: SpanRow) -> int:
    return row.until_ns - row.start_ns


def _table(a: Mapping[K, Sample], b: Mapping[K, Sample], steps: tuple[int, int], about: Any) -> list[dict[str, Any]]:
    keys = sorted({*a, *b}, key=str)
    entries = [{**about(key), **_entry(a.get(key, _NOTHING), b.get(key, _NOTHING), steps, len(keys))} for key in keys]
    entries.sort(key=lambda entry: (entry["verdict"] in {"same", "unclear"}, -abs(entry["step_change_s"])))
    return entries[:MAX_LISTED]


def _entry(a: Sample, b: Sample, steps: tuple[int, int], comparisons: int) -> dict[str, Any]:
    """Compares durations (ns) of the two runs; per step is the sum over all of them, over the run's steps."""
    per_step = a.total / steps[0] / _NS, b.total / steps[1] / _NS
    verdict, score = _verdict(a, b, comparisons)
    return {
        "verdict": verdict,
        "a_count": a.size,
        "b_count": b.size,
        "a_p50_s": None if a.middle is None else a.middle / _NS,
        "b_p50_s": None if b.middle is None else b.middle / _NS,
        "ratio": b.middle / a.middle if a.middle and b.middle is not None else None,
        "score": None if score is None else max(-1e6, min(score, 1e6)),
        "a_step_s": per_step[0],
        "b_step_s": per_step[1],
        "step_change_s": per_step[1] - per_step[0],
    }


def _verdict(a: Sample, b: Sample, comparisons: int) -> tuple[str, float | None]:
    """``slower``, ``faster``, ``same``, ``unclear`` (too few, or noise hides it), ``new``, ``gone``; and the score."""
    if a.middle is None or b.middle is None:
        return ("same" if a.middle is b.middle else "new" if a.middle is None else "gone"), None
    of_a, of_b = noise.of_deviation(a.deviation, a.size), noise.of_deviation(b.deviation, b.size)
    spread = (of_a**2 + of_b**2) ** 0.5
    score = noise.score(b.middle - a.middle, spread)
    limit = noise.threshold(comparisons)
    if a.size < LEAST or b.size < LEAST:
        return "unclear", score
    if abs(b.middle - a.middle) >= CHANGE * a.middle and abs(score) >= limit:
        return ("slower" if score > 0 else "faster"), score
    # A difference of this size would have been seen.
    return ("same" if limit * spread <= CHANGE * a.middle or a.middle == b.middle else "unclear"), score


def _buckets(a: Goodput, b: Goodput) -> list[dict[str, Any]]:
    """Parts of the job's wall clock, and of the fleet's time, by bucket."""
    entries: list[dict[str, Any]] = []
    pairs = (("job", a.job, b.job, "wall_ns"), ("fleet", a.fleet, b.fleet, "gpu_ns"))
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
