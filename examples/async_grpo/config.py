"""What a run of the demo is made of, and the command line that changes it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

#: A remote call that takes this long has failed: nothing here waits for ever. Seconds.
CALL_TIMEOUT_S: Final = 120.0


def _flag(default: float, description: str, least: float = 1) -> Any:
    return field(default=default, metadata={"help": f"{description} (default {default:g})", "least": least})


@dataclass(frozen=True)
class DemoConfig:
    """The settings of one run; each is a flag of the same name, described beside it."""

    steps: int = _flag(60, "training steps; each makes one weight version")
    seed: int = _flag(0, "seed of weights, prompts and sampling", least=0)
    lr: float = _flag(2e-3, "learning rate of Adam", least=0)
    prompt_length: int = _flag(4, "digits in a prompt")
    num_prompts: int = _flag(8, "prompts in a rollout batch")
    num_generations: int = _flag(16, "responses to a prompt: the group within which advantages are relative", least=2)
    batches_per_step: int = _flag(4, "rollout batches that a training step consumes")
    epochs: int = _flag(3, "passes over them in a step")
    clip: float = _flag(0.2, "PPO clip range of the probability ratio", least=0)
    kl_coefficient: float = _flag(0.01, "weight of the KL penalty towards the first policy", least=0)
    num_generators: int = _flag(2, "generation workers")
    num_training_ranks: int = _flag(2, "training ranks")
    max_inflight: int = _flag(2, "rollout batches under way at once, one thread each")
    buffer_batches: int = _flag(4, "rollout batches that the replay buffer holds before producers have to wait")
    max_staleness: int = _flag(1, "weight versions that a batch may lie behind the policy it trains", least=0)
    validation_every: int = _flag(10, "steps between validations")
    validation_prompts: int = _flag(128, "held-out prompts in a validation")
    checkpoint_every: int = _flag(25, "steps between checkpoints; the last step always writes one")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, least = getattr(self, setting.name), setting.metadata["least"]
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{setting.name} must be at least {least}, not {value}")
        if self.buffer_batches < self.batches_per_step:
            raise ValueError(
                f"buffer_batches ({self.buffer_batches}) must hold at least one step's "
                f"batches_per_step ({self.batches_per_step})"
            )
        if self.num_prompts * self.batches_per_step < self.num_training_ranks:
            raise ValueError(
                f"{self.num_prompts * self.batches_per_step} prompts a step cannot be shared by "
                f"{self.num_training_ranks} training ranks"
            )


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        config: The run's settings.
        run_dir: Where trace, checkpoints and summary go; None leaves the choice to raytrace_rl.
        telemetry: False runs the same job without any.
    """

    config: DemoConfig
    run_dir: Path | None
    telemetry: bool


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parses ``argv`` (the process's own by default); leaves with a usage error on a bad value."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.async_grpo",
        description="Asynchronous GRPO on local Ray: a tiny transformer learns to sort digits, seen as one trace.",
    )
    for setting in fields(DemoConfig):
        flag, kind = "--" + setting.name.replace("_", "-"), type(setting.default)
        parser.add_argument(flag, type=kind, default=setting.default, metavar="N", help=setting.metadata["help"])
    parser.add_argument("--run-dir", type=Path, help="directory for trace, checkpoints and summary.json")
    parser.add_argument("--no-telemetry", action="store_true", help="run the same job without telemetry")
    parsed = parser.parse_args(argv)
    settings = {setting.name: getattr(parsed, setting.name) for setting in fields(DemoConfig)}
    try:
        config = DemoConfig(**settings)
    except ValueError as error:
        parser.error(str(error))
    return Arguments(config, parsed.run_dir, telemetry=not parsed.no_telemetry)
