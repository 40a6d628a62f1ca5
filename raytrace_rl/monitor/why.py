"""Why steps take as long as they do, for the report: findings, critical path, stragglers, bubbles, phases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raytrace_rl.monitor.bubbles import bubbles
from raytrace_rl.monitor.critical_path import critical_path, path
from raytrace_rl.monitor.findings import findings
from raytrace_rl.monitor.meetings import last_to_come, meetings, ranked
from raytrace_rl.monitor.step_times import first_step, phases
from raytrace_rl.monitor.stragglers import Stragglers
from raytrace_rl.monitor.tree import Tree

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run


class Steps:
    """What is found out about a run's steps once, and asked by several sections.

    Attributes:
        tree: Parents and children; the complete steps.
        by_rank: `meetings.ranked` of each step.
        met: Where ranks wait for each other.
        paths: The critical path of each step.
    """

    def __init__(self, run: Run) -> None:
        self.tree = Tree(run)
        self.by_rank = [ranked(self.tree, step) for step in self.tree.steps]
        self.met = meetings(self.tree, self.by_rank)
        last = last_to_come(self.met)
        self.paths = [path(self.tree, step, last) for step in self.tree.steps]

    def at_work(self) -> Iterator[dict[str, dict[int, float]]]:
        """Yields for each step, by worker group and rank, how long (ms) it was at work, waiting left out."""
        for by_name in self.by_rank:
            spent: dict[str, dict[int, float]] = {}
            for (group, name), by_rank in by_name.items():
                if len(by_rank) > 1 and (group, name) not in self.met:
                    for rank, rows in by_rank.items():
                        own = spent.setdefault(group, {})
                        own[rank] = own.get(rank, 0.0) + self.tree.self_ns(rows) / 1e6
            yield spent


def why(steps: Steps) -> dict[str, Any]:
    """Returns the sections of the report that say why; plain JSON values, described in docs/report.md."""
    tree, paths = steps.tree, steps.paths
    stragglers = Stragglers(tree, steps.by_rank, steps.met).report()
    return {
        "findings": findings(tree, paths, stragglers),
        "phases": phases(tree),
        "first_step": first_step(tree),
        "critical_path": critical_path(tree, paths),
        "stragglers": stragglers,
        "bubbles": bubbles(tree, paths),
    }
