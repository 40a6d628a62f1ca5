"""The SLURM script, as it is, on three hosts: Ray's nodes, the driver, a host that is cut off, preemption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.drawing import seconds
from raytrace_rl.monitor.report import report, text
from raytrace_rl.monitor.skew import skew
from tests import wrong_clock
from tests.hosts import hosts, permitted
from tests.running import wait_for

if TYPE_CHECKING:
    from tests.hosts import Host

SCRIPT = Path(__file__).parent.parent / "cluster_configs" / "slurm" / "train.sbatch"
DRIVER = Path(__file__).with_name("slurm_driver.py")
BEHIND_NS = 300_000_000

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(permitted()), reason=permitted()),
]


def submit(root: Path, run_dir: Path, how: str) -> subprocess.Popen[bytes]:
    """Starts the script as SLURM would on the first node."""
    environ = {
        **os.environ,
        "PATH": os.pathsep.join([str(root / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "grpo",
        "SLURM_JOB_NODELIST": "host[1-3]",
        "SLURM_SUBMIT_DIR": str(root),
        "RUN_DIR": str(run_dir),
        "TRAIN": f"python {DRIVER} {root} {how}",
        "GPUS": "1",
        "RAY_OPTIONS": "--num-cpus=2 --object-store-memory=80000000 --disable-usage-stats",
        "RAY_AUTH_MODE": "disabled",
        "GRACE_S": "60",
        "RAYTRACE_RL_HEARTBEAT_S": "0.2",
    }
    log = (root / "log").open("w")
    return subprocess.Popen(
        ["bash", str(SCRIPT)], env=environ, cwd=root, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def ended(root: Path, batch: subprocess.Popen[bytes], timeout_s: float = 200) -> int:
    """Waits for the script; what it wrote is shown where it does not end."""
    try:
        return batch.wait(timeout_s)
    except subprocess.TimeoutExpired:
        batch.kill()
        pytest.fail((root / "log").read_text()[-4000:])


def test_three_hosts_are_one_trace(tmp_path):
    """The script does not bring Ray up on several nodes; the report of a shared run directory has one of them, or is
    wrong about their clocks, of which the third host's is 300 ms behind: no worker calls anyone, all that comes the
    other way are the answers at the end.
    """
    run_dir = tmp_path / "shared" / "run"
    with hosts(tmp_path, 3) as (_, _, third):
        if not wrong_clock.missing():
            third.set_environment(wrong_clock.WrongClock(tmp_path, -BEHIND_NS).environment())
        code = ended(tmp_path, submit(tmp_path, run_dir, "once"))
    log = (tmp_path / "log").read_text()
    assert code == 0, log[-4000:]
    assert "3 nodes" in log
    assert "trained" in log
    assert "Run run:" in log  # the summary, in the job's own log
    run = load_run(run_dir)
    told = report(run)
    assert {process.node.rpartition("-")[0] for process in run.processes} == {"host1", "host2", "host3"}
    assert told["traces"]["traces"] == 1
    assert told["traces"]["missing_parent"] == 0
    assert list(told["traces"]["root_names"]) == ["rl.run.job"]
    steps = [span for span in run.spans if span.name == "ray.call.Rank.step"]
    assert len(steps) == 15
    assert len({span.process.node for span in steps}) == 3
    assert not (tmp_path / "requeued").exists()
    if wrong_clock.missing():
        return
    first, second, behind = skew(run).nodes
    # One kernel has one clock, which the first two hosts see; a library before libc makes the third host's another one.
    assert (first.method, second.method, behind.method) == ("reference", "one_kernel", "both_ways")
    low, high = behind.left_ns or (0, 0)
    assert low <= -BEHIND_NS <= high
    shown = text(run)
    assert shown.count(f"clock skew <= {seconds(told['skew']['at_most_s'])} between 3 nodes") == 3
    aligned = load_run(run_dir, align=True)
    shown = text(aligned)
    assert f"clock skew <= {seconds(report(aligned)['skew']['at_most_s'])} between 3 nodes (aligned)" in shown
    assert f"times are shifted to the clock of {first.node}" in shown


def test_a_host_that_is_cut_off_and_a_job_that_is_preempted(tmp_path):
    """A lost node's spans vanish without a word, or SLURM's signal kills the driver instead of telling it."""
    run_dir = tmp_path / "shared" / "run"
    with hosts(tmp_path, 3) as (_, _, third):
        batch = submit(tmp_path, run_dir, "stay")
        try:
            for n in (1, 2, 3):
                wait_for((tmp_path / f"at-10.77.0.{n}").exists, f"host{n} at work", 200)
            _cut_off(third, tmp_path)
            os.kill(batch.pid, signal.SIGUSR1)
            code = ended(tmp_path, batch)
        finally:
            batch.kill()
    assert code == signal.SIGTERM  # the driver's own: Ray exits with the number of the signal
    assert (tmp_path / "requeued").read_text() == "77\n"
    assert "nothing comes home from host3" in (tmp_path / "log").read_text()
    run = load_run(run_dir)
    (job,) = [span for span in run.spans if span.name == "rl.run.job"]
    assert not job.truncated
    stayed = [span for span in run.spans if span.name == "ray.call.Rank.stay"]
    assert {span.process.node.rpartition("-")[0] for span in stayed} == {"host1", "host2"}
    # Killed, or unwound by an exception, as Ray pleases.
    assert all(span.truncated or span.status == "ERROR" for span in stayed), [
        (span.status, span.end_ns, span.process.state) for span in stayed
    ]
    # The third host's active files lay in its own memory: they are gone, and the report says of which process.
    (lost,) = [process for process in run.processes if process.node.startswith("host3-")]
    assert (lost.state, [span for span in run.spans if span.process is lost]) == ("unknown", [])
    told = report(run)["loss"]
    assert told["unreachable_segments"] > 0
    assert all("/host3-" in damage["path"] for damage in told["damage"])
    shown = text(run)
    assert f"out of reach: files of 1 process on {lost.node} (in its memory, or lost)" in shown
    assert "between 2 nodes" in shown  # of the third no time is left that a clock could have put in the wrong place


def _cut_off(host: Host, root: Path) -> None:
    host.cut_off()
    wait_for((root / "gone").exists, "the driver to learn of it", 200)
