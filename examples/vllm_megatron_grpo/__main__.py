"""``python -m examples.vllm_megatron_grpo``: the telemetry session and the job span around one run."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from pathlib import Path

import ray

from examples.vllm_megatron_grpo.config import Arguments, parse_arguments
from examples.vllm_megatron_grpo.driver import Driver, summary
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import telemetry_session, umbrella_span


def run(arguments: Arguments) -> Path:
    """Runs the job; returns its run directory, which holds trace, model, metrics and ``summary.json``."""
    started = time.monotonic()
    settings: dict[str, object] = {"span_groups": arguments.span_groups}
    if arguments.run_dir is not None:
        settings["run_dir"] = str(arguments.run_dir)
    about = {"rl.model": "random Llama", "rl.backend": "megatron", "rl.generation.backend": "vllm"}
    with telemetry_session(settings, algorithm="grpo", resource_attributes=about) as session:
        run_dir = Path(session.run_dir or arguments.run_dir or f"raytrace_runs/plain-{time.time_ns()}").absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        with umbrella_span(G.U_JOB, "rl.grpo.job"):
            driver = Driver(arguments.config, run_dir)
            try:
                # Logical CPUs: a bundle of the worker group takes one for each rank, whatever the machine has.
                cpus = max(8, 2 * arguments.config.num_training_ranks + 4)
                quiet = {"env_vars": {"PYTHONWARNINGS": "ignore"}}
                start = partial(session.init_ray, num_cpus=cpus, include_dashboard=False, runtime_env=quiet)
                driver.set_up(partial(start, logging_level=logging.WARNING))
                driver.train()
            finally:
                driver.take_down()
    ray.shutdown()
    (run_dir / "summary.json").write_text(json.dumps({"rewards": driver.rewards}) + "\n")
    print(summary(driver.rewards, started))
    return run_dir


if __name__ == "__main__":
    print(f"run directory: {run(parse_arguments())}")
