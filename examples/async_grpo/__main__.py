"""``python -m examples.async_grpo``: the telemetry session and the job span around one run."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import ray

from examples.async_grpo.config import Arguments, DemoConfig, parse_arguments
from examples.async_grpo.driver import Driver
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import semconv, telemetry_session, umbrella_span


def run(arguments: Arguments) -> Path:
    """Runs the job; returns its run directory, which holds trace, checkpoints, metrics and ``summary.json``."""
    started = time.monotonic()
    settings: dict[str, object] = {"enabled": arguments.telemetry}
    if arguments.run_dir is not None:
        settings["run_dir"] = str(arguments.run_dir)
    with telemetry_session(settings, algorithm="grpo", resource_attributes=_of_run(arguments.config)) as session:
        # Without telemetry the session has no run directory of its own.
        run_dir = Path(session.run_dir or arguments.run_dir or f"raytrace_runs/plain-{time.time_ns()}").absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        with umbrella_span(G.U_JOB, "rl.grpo.job"):
            driver = Driver(arguments.config, run_dir)
            try:
                # Logical CPUs: one is reserved for each training rank, one is for the others to be placed on.
                cpus = arguments.config.num_training_ranks + 1
                driver.set_up(
                    partial(session.init_ray, num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
                )
                driver.train()
            finally:
                driver.take_down()
    ray.shutdown()
    driver.results.total_s = time.monotonic() - started
    driver.results.write(run_dir / "summary.json", arguments.config)
    print(driver.results.describe())
    return run_dir


def _of_run(config: DemoConfig) -> dict[str, object]:
    """What every process of the run says of it; sizes are those of a training step."""
    prompts = config.num_prompts * config.batches_per_step
    return {
        semconv.RL_MODEL: "digit-transformer",
        semconv.RL_BACKEND: "torch",
        semconv.RL_GENERATION_BACKEND: "torch",
        semconv.RL_REWARD: "sorted_digits",
        semconv.RL_NUM_PROMPT_GROUPS: prompts,
        semconv.RL_NUM_GENERATIONS_PER_PROMPT: config.num_generations,
        semconv.RL_NUM_ROLLOUTS: prompts * config.num_generations,
    }


if __name__ == "__main__":
    print(f"run directory: {run(parse_arguments())}")
