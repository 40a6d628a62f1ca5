"""``python -m examples.async_grpo``: the telemetry session and the job span around one run."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import ray

from examples.async_grpo.config import Arguments, parse_arguments
from examples.async_grpo.driver import Driver
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import telemetry_session, umbrella_span


def run(arguments: Arguments) -> Path:
    """Runs the job; returns its run directory, which holds trace, checkpoints, metrics and ``summary.json``."""
    started = time.monotonic()
    settings: dict[str, object] = {"enabled": arguments.telemetry}
    if arguments.run_dir is not None:
        settings["run_dir"] = str(arguments.run_dir)
    with telemetry_session(settings, algorithm="grpo") as session:
        # Without telemetry the session has no run directory of its own.
        run_dir = Path(session.run_dir or arguments.run_dir or f"raytrace_runs/plain-{time.time_ns()}").absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        with umbrella_span(G.U_JOB, "rl.grpo.job"):
            driver = Driver(arguments.config, run_dir)
            try:
                driver.set_up(
                    partial(session.init_ray, num_cpus=2, include_dashboard=False, logging_level=logging.WARNING)
                )
                driver.train()
            finally:
                driver.take_down()
    ray.shutdown()
    driver.results.total_s = time.monotonic() - started
    driver.results.write(run_dir / "summary.json", arguments.config)
    print(driver.results.describe())
    return run_dir


if __name__ == "__main__":
    print(f"run directory: {run(parse_arguments())}")
