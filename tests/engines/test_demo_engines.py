"""The demo with real engines, held to its word: it learns, and one trace shows where its time went."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.vllm_megatron_grpo.config import EnginesConfig
from raytrace_rl.integrations.vllm import STEP_SERIES
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.report import report

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("megatron") is None,
        reason="no vLLM and Megatron here: make test-engines",
    ),
]

CONFIG = EnginesConfig()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one run, as ``make demo-engines`` does it."""
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "examples.vllm_megatron_grpo", "--run-dir", str(run_dir)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert "goodput" in done.stdout
    return run_dir


@pytest.fixture(scope="module")
def run(demo) -> Run:
    """Its trace."""
    return load_run(demo)


def test_the_policy_learns(demo):
    """Catches a refit, an update or log-probabilities that have come loose between the engines."""
    rewards = json.loads((demo / "summary.json").read_text())["rewards"]
    assert len(rewards) == CONFIG.steps
    assert sum(rewards[-10:]) > 2 * sum(rewards[:10])


def test_one_tree_without_loss(run):
    """Catches a part of the run that starts a trace of its own, or spans that were lost."""
    found = report(run)
    assert len({span.trace_id for span in run.spans}) == 1
    assert found["traces"]["missing_parent"] == 0
    loss = found["loss"]
    assert (loss["truncated"], loss["dropped"], loss["damaged_records"]) == (0, 0, 0)


def test_generation_refit_log_probs_and_training_are_there(run):
    """Catches a phase that no span shows, or that counts as what it is not."""
    spans = Counter((span.name, span.bucket) for span in run.spans)
    refits, steps, ranks = CONFIG.steps + 1, CONFIG.steps, CONFIG.num_training_ranks
    assert spans["rl.vllm.busy", "productive"] >= steps * CONFIG.batches_per_step
    assert spans["rl.vllm.refit", "overhead"] == refits
    assert spans["rl.megatron.weight_export", "overhead"] == refits * ranks
    assert spans["rl.megatron.log_probs", "overhead"] == steps * ranks
    assert spans["rl.megatron.forward_backward", "productive"] == steps * ranks * CONFIG.epochs
    assert spans["rl.megatron.optimizer", "productive"] == steps * ranks * CONFIG.epochs
    assert spans["rl.idle.refit_bubble", "idle"] == refits


def test_each_step_logs_what_the_engines_generated(run):
    """Catches series of the engines that the driver's tee does not know."""
    names = {row.name for row in run.metrics}
    assert {row.name for row in STEP_SERIES} <= names
