"""Retuning a live run: what ``raytrace-rl groups`` writes, each process puts into force at its next heartbeat."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from raytrace_rl import _control, _state, cli, init_telemetry_driver, managed_span, shutdown_telemetry
from raytrace_rl.monitor import load_run
from tests.spooling import Spool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of this process, at the ``default`` groups, with quick heartbeats."""
    directory = tmp_path / "run"
    init_telemetry_driver({"enabled": True, "run_dir": str(directory), "heartbeat_s": 0.02})
    return directory


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for the thing itself."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited 20 s for {what}"
        time.sleep(0.005)


def recording(group: str) -> bool:
    """Whether a span of ``group`` records now."""
    with managed_span(group, f"try {group}") as span:
        return span is not None


def test_groups_go_up_and_down_again_without_a_restart(run_dir):
    """Catches a change that needs a restart, or that cannot be taken back."""
    assert recording("checkpoint")
    assert not recording("generation")
    assert cli.main(["groups", str(run_dir), "per_step,per_prompt"]) == 0
    until(lambda: recording("generation"), "the groups to go up")
    assert recording("per_prompt")
    assert cli.main(["groups", str(run_dir)]) == 0
    until(lambda: not recording("generation"), "the groups to come down")
    assert recording("checkpoint")


def test_a_change_for_a_time_ends_by_itself(run_dir):
    """Catches five minutes of detail that fill the disk all night."""
    assert cli.main(["groups", str(run_dir), "all", "--for", "0.3s"]) == 0
    until(lambda: recording("generation"), "the groups to go up")
    until(lambda: not recording("generation"), "the time to run out")


def test_telemetry_goes_off_and_on(run_dir):
    """Catches an off switch that leaves carriers travelling, or cannot be undone."""
    assert cli.main(["groups", str(run_dir), "none"]) == 0
    until(lambda: not _state.tracing, "telemetry to go off")
    assert not recording("checkpoint")
    assert cli.main(["groups", str(run_dir), "default"]) == 0
    until(lambda: recording("checkpoint"), "telemetry to come back")
    assert _state.tracing


def test_taking_the_file_away_is_taking_it_back(run_dir):
    """Catches a process that keeps the last word of a file that is gone."""
    file = _control.write(run_dir, "all")
    until(lambda: recording("generation"), "the groups to go up")
    file.unlink()
    until(lambda: not recording("generation"), "the groups to come down")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"schema": 1}', '{"schema": 2, "span_groups": "all"}', "\x00" * 99]
)
def test_rubbish_changes_nothing_and_is_warned_of_once(content, run_dir, caplog):
    """Catches a half-written or foreign file that stops the heartbeat, or the run."""
    (run_dir / "control.json").write_text(content)
    until(lambda: "control.json cannot be used" in caplog.text, "the warning")
    _control.write(run_dir, "all")
    until(lambda: recording("generation"), "the next good file")
    assert caplog.text.count("cannot be used") == 1


def test_a_shutdown_closes_the_gates_for_good(run_dir):
    """Catches a last heartbeat that puts a change into force after the end, so that spans go nowhere, uncounted."""
    for spec in ("all", "default") * 20:
        _control.write(run_dir, spec)
    shutdown_telemetry()
    assert not _state.tracing
    assert not _state.enabled
    assert not recording("checkpoint")


def test_an_ended_run_is_noted(run_dir, capsys):
    """Catches five minutes of waiting for spans of a run that nobody said had ended."""
    assert cli.main(["groups", str(run_dir), "all"]) == 0
    assert "alive" not in capsys.readouterr().err
    shutdown_telemetry()
    assert cli.main(["groups", str(run_dir), "all"]) == 0
    assert "no process of this run is alive" in capsys.readouterr().err
    assert (run_dir / "control.json").is_file()  # for the next attempt, all the same


def test_a_run_whose_processes_were_killed_is_noted(tmp_path, capsys):
    """Catches a killed run that passes for a live one, or one on another host that passes for ended."""
    spool = Spool(tmp_path / "run")
    spool.segment(10, b"")
    spool.live_file(10)
    assert cli.main(["groups", str(spool.run_dir), "all"]) == 0
    assert "no process of this run is alive" in capsys.readouterr().err
    spool.segment(11, b"", boot_id=bytes(range(16)))
    spool.live_file(11)  # nothing is proven of it
    assert cli.main(["groups", str(spool.run_dir), "all"]) == 0
    assert "alive" not in capsys.readouterr().err


def test_another_process_of_the_run_follows(tmp_path):
    """Catches a change that reaches only the process that made it."""
    run_dir = tmp_path / "run"
    code = """
import sys, time
from raytrace_rl import init_telemetry_driver, managed_span, shutdown_telemetry
init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1], "heartbeat_s": 0.02})
print("up", flush=True)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    with managed_span("generation", "wanted") as span:
        if span is not None:
            break
    time.sleep(0.005)
shutdown_telemetry()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert cli.main(["groups", str(run_dir), "per_step"]) == 0
        assert process.wait(timeout=40) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert [span.name for span in load_run(run_dir).spans] == ["wanted"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["groups", "nowhere", "all"], "no run directory"),
        (["groups", ".", "all", "--for", "soon"], "no length of time"),
        (["groups", ".", "all", "--for", "-5m"], ""),
        (["groups"], "RUN"),
        (["groups", "run", ""], "names no group"),
        (["groups", "run", " , "], "names no group"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_reason(argv, says, tmp_path, monkeypatch, capsys):
    """Catches a typing mistake that writes into some other directory, or fails with a traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "spool").mkdir(parents=True)
    assert cli.main(argv) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.rglob("control.json"))
