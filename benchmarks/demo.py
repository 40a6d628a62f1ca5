"""What everything together costs a run: the demo's step time with all span groups, metrics and logs on, against off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.rounds import ratio
from benchmarks.table import Row

ROUNDS: Final = 7
STEPS: Final = 100
#: Timer key of a whole step.
STEP: Final = "total_step_time"


def _step_s(run_dir: str, *, telemetry: bool) -> float:
    """Runs the demo; returns the seconds of a step."""
    command = [sys.executable, "-m", "examples.async_grpo", "--steps", str(STEPS), "--run-dir", run_dir]
    environment = {
        **os.environ,
        "RAYTRACE_RL_SPAN_GROUPS": "all",
        "RAYTRACE_RL_LOGS_ENABLED": "1",
    }
    if not telemetry:
        command.append("--no-telemetry")
    subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=150, check=True, env=environment
    )
    summary = json.loads(Path(run_dir, "summary.json").read_text(encoding="utf-8"))
    seconds: float = summary["seconds"][STEP]
    return seconds / STEPS


def rows() -> list[Row]:
    """Runs the demo with and without, in turn."""
    on: list[float] = []
    off: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(ROUNDS):
            on.append(_step_s(f"{directory}/on-{turn}", telemetry=True))
            off.append(_step_s(f"{directory}/off-{turn}", telemetry=False))
    return [ratio("demo step time, everything on / telemetry off", on, off, bar=1.02, aim=1.005)]
