"""What steps are made of: the phases of the driver's lane with percentiles, and what the first step took on top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor import lanes
from raytrace_rl.monitor.tables import percentile

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import SpanRow
    from raytrace_rl.monitor.tree import Tree

_NS: Final = 1e9
#: Later steps without which the first can be compared with nothing.
_LEAST: Final = 3
#: The first step stands out when it takes this many times the median of the later ones.
_SLOWER: Final = 1.5


def phases(tree: Tree) -> list[dict[str, Any]]:
    """Returns seconds a step by the name of the spans directly below it in its own lane, the longest first.

    A step in which a phase does not come counts as 0: what happens at every tenth step is no tenth of each. The time of
    a step under none of them is an entry without a name.
    """
    spent: dict[str | None, dict[int, int]] = {}
    for number, step in enumerate(tree.steps):
        own = [(step.start_ns, step.until_ns)]
        below = tree.own_children(step)
        for row in below:
            length = lanes.total(lanes.intersection([(row.start_ns, row.until_ns)], own))
            by_step = spent.setdefault(row.name, {})
            by_step[number] = by_step.get(number, 0) + length
        covered = lanes.union((row.start_ns, row.until_ns) for row in below)
        rest = lanes.total(own) - lanes.total(lanes.intersection(covered, own))
        spent.setdefault(None, {})[number] = rest
    return phase_entries(tree.steps, spent)


def phase_entries(steps: Sequence[SpanRow], spent: Mapping[str | None, dict[int, int]]) -> list[dict[str, Any]]:
    """Returns what `phases` does, of the time (ns) by name and by number of the step."""
    whole = sum(step.until_ns - step.start_ns for step in steps)
    entries = [_phase(name, by_step, len(steps), whole) for name, by_step in spent.items()]
    return sorted(entries, key=lambda entry: (-entry["total_s"], entry["name"] or ""))


def _phase(name: str | None, by_step: dict[int, int], steps: int, whole: int) -> dict[str, Any]:
    ordered = sorted([*by_step.values(), *[0] * (steps - len(by_step))])
    total = sum(ordered)
    return {
        "name": name,
        "steps": len(by_step),
        "total_s": total / _NS,
        "part": total / whole if whole else 0.0,
        "mean_s": total / steps / _NS,
        "p50_s": percentile(ordered, 0.5) / _NS,
        "p95_s": percentile(ordered, 0.95) / _NS,
        "p99_s": percentile(ordered, 0.99) / _NS,
        "max_s": ordered[-1] / _NS,
    }


def first_step(tree: Tree, by_name: Callable[[SpanRow], dict[str, int]] | None = None) -> dict[str, Any] | None:
    """Returns what the first step of the last attempt took beyond the median of those after it, and in which spans.

    Compilation, warm-up and caches show here. None where fewer than three steps follow.

    Args:
        tree: The run.
        by_name: Gives for a step the time in spans of each name below it, of the process that spent most in them.
    """
    attempt = max((step.attempt for step in tree.steps), default=1)
    steps = [step for step in tree.steps if step.attempt == attempt]
    if len(steps) <= _LEAST:
        return None
    first, *later = steps
    own, others = first.until_ns - first.start_ns, [step.until_ns - step.start_ns for step in later]
    typical = median(others)
    return {
        "iteration": first.iteration,
        "duration_s": own / _NS,
        "later_p50_s": typical / _NS,
        "extra_s": (own - typical) / _NS,
        "stands_out": own > _SLOWER * typical and own > max(others),
        "spans": _extra(by_name or partial(_by_name, tree), first, later),
    }


def _extra(
    by_name: Callable[[SpanRow], dict[str, int]], first: SpanRow, later: Sequence[SpanRow]
) -> list[dict[str, Any]]:
    """The names whose slowest rank took longer in the first step than in the median of the later ones."""
    own = by_name(first)
    others: dict[str, list[int]] = {}
    for step in later:
        for name, length in by_name(step).items():
            others.setdefault(name, []).append(length)
    found = []
    for name, length in own.items():
        lengths = [*others.get(name, ()), *[0] * (len(later) - len(others.get(name, ())))]
        typical = median(lengths)
        if length > typical:
            entry = {"name": name, "duration_s": length / _NS, "later_p50_s": typical / _NS}
            found.append({**entry, "extra_s": (length - typical) / _NS})
    return sorted(found, key=lambda entry: (-float(entry["extra_s"]), str(entry["name"])))[:10]


def _by_name(tree: Tree, step: SpanRow) -> dict[str, int]:
    """Time in spans of each name below a step, of the process that spent most in them."""
    sums: dict[tuple[str, str], int] = {}
    for row in tree.below(step):
        key = row.name, row.process.key
        sums[key] = sums.get(key, 0) + row.until_ns - row.start_ns
    longest: dict[str, int] = {}
    for (name, _), length in sums.items():
        longest[name] = max(longest.get(name, 0), length)
    return longest
