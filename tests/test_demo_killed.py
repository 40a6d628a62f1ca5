"""A generation worker of the demo dies in the middle of a generation: what the run and its trace make of it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.report import report, text
from tests.demo_runs import Demo, assert_one_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: Enough for a killed worker to be restarted, which takes as long as importing torch beside a busy run.
KILLED_STEPS = 40


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Iterator[tuple[Demo, int, set[str], set[str]]]:
    """A run one of whose generation workers got SIGKILL in the middle of a generation.

    Yields:
        The demo after its end, the worker's pid, and the ids of the spans that it had ended and had open when killed.
    """
    # With the log bridge: what workers say is then part of a run that has something to say.
    demo = Demo(tmp_path_factory.mktemp("killed") / "run", "--steps", str(KILLED_STEPS), logs_enabled="1")
    try:
        pid, ended, opened = _kill_while_generating(demo)
        yield demo.wait(), pid, ended, opened
    finally:
        demo.stop()


def _kill_while_generating(demo: Demo, timeout_s: float = 120) -> tuple[int, set[str], set[str]]:
    """Stops a generation worker again and again until it stands inside a generation, and kills it there."""
    deadline = time.monotonic() + timeout_s
    while not any(line.startswith("step   3/") for line in demo.lines):
        assert time.monotonic() < deadline, demo.output
        assert demo.process.poll() is None, demo.output
        time.sleep(0.05)
    pid = next(p.pid for p in load_run(demo.run_dir).processes if p.worker_group == "generation" and p.rank == 1)
    while time.monotonic() < deadline:
        os.kill(pid, signal.SIGSTOP)
        try:
            rows = [row for row in load_run(demo.run_dir).spans if row.pid == pid]
            opened = {row.span_id for row in rows if row.end_ns is None}
            if {row.name for row in rows if row.span_id in opened} == {"rl.grpo.generation"}:
                os.kill(pid, signal.SIGKILL)
                return pid, {row.span_id for row in rows} - opened, opened
        except BaseException:
            os.kill(pid, signal.SIGCONT)
            raise
        os.kill(pid, signal.SIGCONT)
        # Out of step with the worker's own rhythm: it idles, generates and takes weights for some 10 to 40 ms each.
        time.sleep(0.013)
    raise AssertionError(f"the worker was never caught generating\n{demo.output}")


def test_run_survives_a_killed_generation_worker(killed):
    """Catches a collector or refit that a lost worker takes down with it, and one that hangs."""
    demo, _, _, _ = killed
    summary = demo.summary
    assert len(summary["rewards"]) == KILLED_STEPS
    assert summary["collector"]["retried"] >= 1
    assert summary["rewards"][-1] > 0.5


def test_report_names_the_truncated_span_and_nothing_else_is_lost(killed):
    """Catches a span that vanishes with its process, one counted twice, or ended ones that were not in the spool."""
    demo, pid, ended, opened = killed
    run = load_run(demo.run_dir)
    of_worker = [row for row in run.spans if row.pid == pid]
    assert {row.span_id for row in of_worker} == ended | opened
    assert len(of_worker) == len(ended) + len(opened)
    (process,) = (process for process in run.processes if process.pid == pid)
    assert process.state == "dead"
    told = report(run)
    loss = told["loss"]
    assert {span["span_id"] for span in loss["truncated_spans"]} == opened
    assert [(span["name"], span["process"]["pid"]) for span in loss["truncated_spans"]] == [("rl.grpo.generation", pid)]
    assert loss["truncated"] == 1
    kinds = ("open", "dropped", "damaged_records", "lost_records", "unreachable_segments")
    assert {kind: loss[kind] for kind in kinds} == dict.fromkeys(kinds, 0)
    lines = text(run).splitlines()
    assert any("truncated: " in line and "rl.grpo.generation" in line for line in lines)


def test_trace_with_a_killed_worker_is_still_one_tree(killed):
    """Catches a restarted worker whose constructor starts a trace of its own, and orphans of the dead one's spans."""
    demo, pid, _, _ = killed
    run = load_run(demo.run_dir)
    assert_one_tree(run)
    again = [p for p in run.processes if p.worker_group == "generation" and p.rank == 1 and p.pid != pid]
    assert [process.incarnation for process in again] == [1]
    assert {"rl.setup.generation_model", "rl.grpo.generation", "rl.grpo.weight_sync"} <= {
        row.name for row in run.spans if row.process is again[0]
    }


def test_logs_of_workers_stand_at_their_spans(killed):
    """Catches a bridge that is off in the workers, and records that have lost the span in which they were logged."""
    demo, pid, _, _ = killed
    spans = {row.span_id: row for row in load_run(demo.run_dir).spans}
    found = load_run(demo.run_dir).logs
    versions = [row for row in found if row.logger == "examples.async_grpo.generation"]
    assert {row.severity_text for row in versions} == {"INFO"}
    assert {spans[row.span_id or ""].name for row in versions} == {"rl.grpo.weight_sync"}
    assert all(spans[row.span_id or ""].process.key == row.process.key for row in versions)
    assert {row.process.pid for row in versions} > {pid}
    lost = [row for row in found if row.severity_text == "WARNING" and " lost batch " in str(row.body)]
    assert len(lost) == demo.summary["collector"]["retried"]
    assert {spans[row.span_id or ""].name for row in lost} == {"rl.grpo.rollout"}
