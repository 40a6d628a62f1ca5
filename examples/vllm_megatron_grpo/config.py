"""The settings of a run with real engines, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from examples.async_grpo.config import DemoConfig
from examples.vllm_megatron_grpo.model import ModelConfig

#: Settings of `DemoConfig` that mean nothing here: this run neither validates nor writes checkpoints.
_NO_FLAGS: Final = {"validation_every", "validation_prompts", "checkpoint_every"}


def _flag(default: float, description: str, least: float = 1) -> Any:
    return field(default=default, metadata={"help": f"{description} (default {default:g})", "least": least})


@dataclass(frozen=True)
class EnginesConfig(DemoConfig):
    """The settings of `DemoConfig`, with defaults for a CPU, and the sizes of the engines."""

    steps: int = _flag(40, "training steps; each makes one weight version")
    lr: float = _flag(2e-3, "learning rate of Adam", least=0)
    num_generations: int = _flag(8, "responses to a prompt: the group within which advantages are relative", least=2)
    batches_per_step: int = _flag(2, "rollout batches that a training step consumes")
    epochs: int = _flag(2, "passes over them in a step")
    num_generators: int = _flag(1, "vLLM engines, each in an actor of its own")
    num_training_ranks: int = _flag(2, "Megatron ranks: tensor parallel times data parallel")
    tensor_parallel: int = _flag(2, "Megatron ranks that share a layer")
    engine_tensor_parallel: int = _flag(1, "tensor parallel size of a vLLM engine")
    layers: int = _flag(2, "transformer layers")
    heads: int = _flag(2, "attention heads of 64 dimensions")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_training_ranks % self.tensor_parallel or self.heads % self.tensor_parallel:
            raise ValueError(
                f"{self.num_training_ranks} training ranks and {self.heads} heads cannot be split into shares of "
                f"{self.tensor_parallel} (tensor_parallel)"
            )
        if self.heads % self.engine_tensor_parallel:
            raise ValueError(
                f"{self.heads} heads cannot be split into shares of {self.engine_tensor_parallel} "
                "(engine_tensor_parallel)"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs that the run takes, if there are as many: one for each rank of every engine and of the trainer."""
        return self.num_generators * self.engine_tensor_parallel + self.num_training_ranks

    @property
    def data_parallel(self) -> int:
        """Replicas of the trained model."""
        return self.num_training_ranks // self.tensor_parallel

    @property
    def model(self) -> ModelConfig:
        """The model that both engines run."""
        return ModelConfig(layers=self.layers, heads=self.heads, context=max(64, 2 * self.prompt_length + 8))


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        config: The run's settings.
        run_dir: Where trace, model and summary go; None leaves the choice to raytrace_rl.
        span_groups: Which spans are recorded.
    """

    config: EnginesConfig
    run_dir: Path | None
    span_groups: str


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parses ``argv`` (the process's own by default); leaves with a usage error on a bad value."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.vllm_megatron_grpo",
        description="Asynchronous GRPO on local Ray with a vLLM engine and Megatron-core, seen as one trace.",
    )
    settings = [setting for setting in fields(EnginesConfig) if setting.name not in _NO_FLAGS]
    for setting in settings:
        flag, kind = "--" + setting.name.replace("_", "-"), type(setting.default)
        parser.add_argument(flag, type=kind, default=setting.default, metavar="N", help=setting.metadata["help"])
    parser.add_argument("--run-dir", type=Path, help="directory for trace, model and summary")
    parser.add_argument("--span-groups", default="per_step", help="spans to record; 'all' has each request's")
    parsed = parser.parse_args(argv)
    try:
        config = EnginesConfig(**{setting.name: getattr(parsed, setting.name) for setting in settings})
    except ValueError as error:
        parser.error(str(error))
    return Arguments(config, parsed.run_dir, parsed.span_groups)
