"""What a run measured, as it leaves it behind: ``summary.json`` in the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from examples.async_grpo.collector import CollectorReport
from examples.async_grpo.config import DemoConfig


@dataclass
class Results:
    """What the run measured, step by step.

    Attributes:
        rewards: Mean reward of each step's rollouts.
        losses: Loss of each step's last epoch.
        validation: Step to share of held-out prompts sorted without a fault, decoded greedily.
        staleness: Weight versions behind, of every batch that was trained on.
        refused: Batches that the staleness limit refused.
        missed_refits: Refits that a generation worker missed.
        seconds: The driver's wall clock by Timer key. Some keys hold others, so that they do not add up.
        total_s: Wall clock of the whole run.
        collector: The collector's own counts; None where it could not be asked.
    """

    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    refused: int = 0
    missed_refits: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    collector: CollectorReport | None = None

    def add_seconds(self, spent: Mapping[str, float]) -> None:
        """Adds seconds by Timer key."""
        for key, seconds in spent.items():
            self.seconds[key] = self.seconds.get(key, 0.0) + seconds

    def write(self, path: Path, config: DemoConfig) -> None:
        """Writes the results and the settings behind them to ``path``."""
        path.write_text(json.dumps({"config": asdict(config), **asdict(self)}, indent=2) + "\n")

    def describe(self) -> str:
        """Returns the learning curve and what became of the batches, in two lines."""
        tenth = max(len(self.rewards) // 10, 1)
        first, last = (sum(part) / tenth for part in (self.rewards[:tenth], self.rewards[-tenth:]))
        return (
            f"mean reward {first:.3f} in the first {tenth} steps, {last:.3f} in the last {tenth}; "
            f"{self.total_s:.0f} s in all\n"
            f"{len(self.staleness)} rollout batches trained on, {sum(1 for s in self.staleness if s)} of them stale; "
            f"{self.refused} refused as too stale"
        )
