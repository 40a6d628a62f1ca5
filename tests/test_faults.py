"""Faults planted in the demo, where telemetry cannot see them: the report names the true cause, and no other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.open_spans import load_open
from raytrace_rl.monitor.report import report, text
from tests.demo_runs import Demo, run_demo
from tests.running import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

STEPS = "16"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs the demo with a fault; returns what the report finds, which the text must say too."""

    def run(fault: str, *flags: str, **telemetry: str) -> list[dict[str, Any]]:
        monkeypatch.setenv("DEMO_FAULT", fault)
        faults = str(Path(__file__).parent / "faults")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([faults, os.environ["PYTHONPATH"]]))
        demo = run_demo(tmp_path / "run", "--steps", STEPS, *flags, **telemetry)
        return _findings(demo.run_dir)

    return run


def _findings(run_dir: Path) -> list[dict[str, Any]]:
    run = load_run(run_dir)
    found: list[dict[str, Any]] = report(run)["findings"]
    shown = text(run)
    assert ("Findings:" in shown) == bool(found)
    assert all(one["text"] in " ".join(shown.split()) for one in found), (found, shown)
    return found


def test_without_fault_none_is_named(planted):
    """Catches a report that cries wolf on a healthy run."""
    assert planted("") == []


def test_slow_rank(planted):
    """Catches a slow rank that goes unnamed, or is mistaken for a slow collective or for the rank that waits."""
    (found,) = planted("slow_rank")
    assert (found["kind"], found["worker_group"], found["rank"]) == ("slow_rank", "training", 1)
    assert found["evidence"]["span"] == "rl.grpo.policy_training"
    assert found["part"] > 0.3


def test_starved_trainer(planted):
    """Catches slow generation that shows as an idle trainer, without a word on what it waits for."""
    (found,) = planted("starved_trainer")
    assert (found["kind"], found["worker_group"]) == ("starved_trainer", "generation")
    assert found["evidence"] == {"span": "rl.idle.buffer_starvation", "waits_for": "rl.grpo.generation"}


def test_refit_bubble(planted):
    """Catches steps that wait for weights to reach the workers, blamed on training or on starvation."""
    (found,) = planted("refit_bubble")
    assert (found["kind"], found["worker_group"]) == ("refit_bubble", "generation")
    assert found["evidence"]["waits_for"] == "rl.grpo.weight_sync"
    assert found["part"] > 0.3


def test_stuck_collector_thread(planted):
    """Catches a thread that hangs while the run goes on around it: nobody waits for it, so no step shows it."""
    (found,) = planted("stuck_thread", stack_after_s="2")
    assert (found["kind"], found["worker_group"]) == ("stuck_thread", "collector")
    assert found["evidence"]["thread"] == "rollout-9"
    assert found["evidence"]["span"] == "rl.grpo.reward"
    assert "threading.Event().wait()" in found["evidence"]["at"], "and on which line, although the process has ended"


def test_restart(tmp_path):
    """Catches a worker that died and came back, whose gap is put down to generation, or to a refit."""
    demo = Demo(tmp_path / "run", "--steps", STEPS)
    try:
        wait_for(lambda: any(line.startswith("step   4") for line in demo.lines), "four steps", timeout_s=120)
        workers = [process for process in load_open(demo.run_dir).processes if process.worker_group == "generation"]
        (victim,) = [process for process in workers if process.rank == 1]
        os.kill(victim.pid, signal.SIGKILL)
        demo.wait()
    finally:
        demo.stop()
    (found,) = _findings(demo.run_dir)
    assert (found["kind"], found["worker_group"], found["rank"]) == ("restart", "generation", 1)
    assert found["evidence"]["pid"] == victim.pid
    assert 0 < found["evidence"]["gap_s"] < 60
