from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl import cli
from raytrace_rl.monitor import open_spans
from raytrace_rl.monitor.stuck import stuck
from raytrace_rl.monitor.text_stuck import render
from raytrace_rl.spool.format import Kind, pack_record
from tests.running import running, wait_for
from tests.spooling import SECOND, T0, TRACE, Spool, ended, resource, span, span_id

DEADLOCK = """
import asyncio, sys, threading
from raytrace_rl import setup
from raytrace_rl.instrumentation import iteration_scope, managed_span, umbrella_span
from raytrace_rl.threads import TracedThread

setup.init_telemetry_driver(
    {"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "heartbeat_s": 0.05, "stack_after_s": 0.2}
)
left, right = threading.Lock(), threading.Lock()
both = threading.Barrier(2)

def rollout():
    with umbrella_span("rollout", "rl.grpo.rollout"), left:
        both.wait()
        right.acquire()  # here stands the rollout

def generation():
    with managed_span("generation", "rl.grpo.generation"), right:
        both.wait()
        left.acquire()  # here stands the generation

async def sample():
    with managed_span("data_plane", "rl.grpo.buffer_sample"):
        await asyncio.Event().wait()  # here stands the sampling

def unseen():
    left.acquire()  # here stands a thread without a span

with umbrella_span("job", "rl.grpo.job"), iteration_scope(7), umbrella_span("step", "rl.grpo.step"):
    TracedThread(target=rollout, name="rollout-1").start()
    TracedThread(target=generation, name="generation-1").start()
    threading.Thread(target=unseen, daemon=True).start()
    loop = threading.Thread(target=asyncio.run, args=(sample(),), name="loop")
    loop.start()
    print("ready", flush=True)
    loop.join()  # here stands the driver
"""

PLACES = {
    "rl.grpo.rollout": "here stands the rollout",
    "rl.grpo.generation": "here stands the generation",
    "rl.grpo.buffer_sample": "here stands the sampling",
    "rl.grpo.step": "here stands the driver",
}


@contextmanager
def deadlocked(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of two threads that wait for each other's lock, a coroutine that nobody wakes, and their driver."""
    script = run_dir.with_name("train.py")
    script.write_text(textwrap.dedent(DEADLOCK))
    with subprocess.Popen([sys.executable, str(script), str(run_dir)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def seen(run_dir: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What ``stuck --json`` says; it must have found something."""
    assert cli.main(["stuck", str(run_dir), "--json", *options]) == cli.FINDINGS
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _lines(stand: dict[str, Any]) -> list[str]:
    return [frame["code"] for section in stand["stack"] for frame in section["frames"]]


def all_stand(found: dict[str, Any]) -> bool:
    """Whether every thread, and the coroutine, has got to its place, and its stack been taken there."""
    fronts = {stand["spans"][0]["name"]: _lines(stand) for stand in found["stands"]}
    return all(any(place in line for line in fronts.get(name, ())) for name, place in PLACES.items()) and bool(
        found["threads"]
    )


def _check_lines_of_code(text: str, script: Path) -> None:
    numbers = {line.partition("# ")[2]: n for n, line in enumerate(script.read_text().splitlines(), 1)}
    for place in [*PLACES.values(), "here stands a thread without a span"]:
        assert re.search(rf'File "{script}", line {numbers[place]}, in \S+\n.*{place}', text), place


def test_deadlocked_run_tells_where_each_thread_stands_alive_and_killed(tmp_path, capsys):
    """Catches a run that has stood for hours, or was killed for it, and cannot say on which line."""
    run_dir = tmp_path / "run"
    with deadlocked(run_dir) as process:
        wait_for(lambda: all_stand(seen(run_dir, capsys)), "every stack")
        assert cli.main(["stuck", str(run_dir)]) == cli.FINDINGS
        live = capsys.readouterr().out
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert "is live" in live
    _check_lines_of_code(live, tmp_path / "train.py")

    assert cli.main(["stuck", str(run_dir)]) == cli.FINDINGS
    dead = capsys.readouterr().out
    assert "is over" in dead
    assert "when its process died" in dead
    _check_lines_of_code(dead, tmp_path / "train.py")


def test_deepest_come_first_with_those_above_them_named(tmp_path, capsys):
    """Catches a list in which the job and the step, which are always open, hide what they wait for."""
    run_dir = tmp_path / "run"
    with deadlocked(run_dir):
        found = wait_for(lambda: all_stand(look := seen(run_dir, capsys)) and look, "every stack")
    names = [[one["name"] for one in stand["spans"]] for stand in found["stands"]]
    assert sorted(names[:2]) == [["rl.grpo.generation"], ["rl.grpo.rollout"]]
    assert ["rl.grpo.step", "rl.grpo.job"] in names
    assert found["stands"][0]["depth"] == 2
    (driver,) = [stand for stand in found["stands"] if stand["spans"][0]["name"] == "rl.grpo.step"]
    assert {one["span"] for one in driver["waits_for"]} == {"rl.grpo.generation", "rl.grpo.rollout"}
    assert driver["spans"][0]["iteration"] == 7
    assert driver["process"]["role"] == "driver"
    assert driver["thread"] == "MainThread"


def test_nothing_open_is_fine(tmp_path, capsys):
    """Catches a finished run that is said to be stuck, and an exit code that a watchdog script cannot use."""
    with running(tmp_path / "run") as telemetry:
        from raytrace_rl.instrumentation import managed_span

        with managed_span("generation", "done"):
            pass
        assert cli.main(["stuck", str(telemetry.run_dir)]) == cli.OK
        assert "Nothing is open" in capsys.readouterr().out
    assert cli.main(["stuck", str(tmp_path / "run")]) == cli.OK
    assert "is over" in capsys.readouterr().out


def test_unreadable_input_is_told_in_one_line(tmp_path, capsys):
    """Catches a traceback, or a healthy exit code, where there is no run at all."""
    assert cli.main(["stuck", str(tmp_path / "none")]) == cli.UNUSABLE
    assert cli.main(["stuck", str(tmp_path)]) == cli.UNUSABLE
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 2


def test_after_leaves_out_what_has_just_begun(tmp_path, capsys):
    """Catches a watchdog that calls a healthy run stuck, because some span is always open."""
    with running(tmp_path / "run") as telemetry:
        from raytrace_rl.instrumentation import managed_span

        with managed_span("generation", "young"):
            assert cli.main(["stuck", str(telemetry.run_dir), "--after", "1h"]) == cli.OK
            assert cli.main(["stuck", str(telemetry.run_dir)]) == cli.FINDINGS
            assert "no stack yet" in capsys.readouterr().out


def test_what_has_ended_is_not_read(tmp_path, monkeypatch):
    """Catches a look at a live run whose cost grows with the run: hours of spans to find the few that are open."""
    spool = Spool(tmp_path / "run")
    for number in range(20):
        spans = [span(1000 * number + n, number, number + 0.5) for n in range(1, 50)]
        spool.segment(7, ended(*spans), number, heartbeat_ns=T0 + number * 60 * SECOND, sealed=True, span_count=49)
    opened = [pack_record(Kind.OPEN_SPAN, span(n, 19, None)) for n in (1, 19_001, 19_900)]
    spool.journal(7, b"".join(opened), heartbeat_ns=T0 + 19 * 60 * SECOND)
    spool.live_file(7)
    read: list[str] = []
    original = open_spans._OpenReader._file

    def noting(self, path, number=None):
        read.append(path)
        original(self, path, number)

    monkeypatch.setattr(open_spans._OpenReader, "_file", noting)
    run = open_spans.load_open(tmp_path / "run")
    assert len(read) <= 3 + 1, "the journal, and the last segments"
    assert {row.span_id for row in run.spans if row.truncated} == {span_id(1).hex(), span_id(19_900).hex()}
    assert len(run.spans) == 3, "and of what had ended, what was noted as open alone"


def run_of(tmp_path: Path, *opened: bytes) -> Path:
    """A run of dead processes that left one open span each."""
    spool = Spool(tmp_path / "run")
    for pid, payload in enumerate(opened, 1):
        spool.journal(pid, pack_record(Kind.OPEN_SPAN, payload))
        spool.live_file(pid)
    return tmp_path / "run"


def test_a_dead_worker_that_somebody_waits_for_is_named(tmp_path):
    """Catches a driver that waits for ever for an actor that is gone, shown without the one fact that explains it."""
    spool = Spool(tmp_path / "run")
    spool.journal(1, pack_record(Kind.OPEN_SPAN, span(1, 0, None, name="step")), resource=resource(rl__role="driver"))
    worker = resource(rl__worker_group="generation", nv__dl__rank=1)
    dead = pack_record(Kind.OPEN_SPAN, span(2, 1, None, parent=1, name="generate"))
    spool.journal(2, dead, resource=worker, heartbeat_ns=T0 + 5 * SECOND)
    spool.live_file(2)
    earlier = pack_record(Kind.OPEN_SPAN, span(3, 1, None, parent=99, name="nobody waits"))
    spool.journal(3, earlier, resource=worker, heartbeat_ns=T0 + 5 * SECOND)
    spool.live_file(3)
    live = spool.alive(1)
    try:
        found = stuck(open_spans.load_open(tmp_path / "run"), now_ns=T0 + 3600 * SECOND)
    finally:
        live.release()
    assert [stand["spans"][0]["name"] for stand in found["stands"]] == ["generate", "step"]
    (waits,) = found["stands"][1]["waits_for"]
    assert (waits["stand"], waits["died"], waits["span"]) == (1, True, "generate")
    assert found["left_behind"] == 1
    text = render(found)
    assert "waits for 1. generate on generation[1] pid 2, whose process died" in text
    assert "died earlier" in text


def test_a_run_that_was_started_again_shows_its_last_attempt(tmp_path):
    """Catches spans of an attempt that was killed yesterday, as if they hung today."""
    spool = Spool(tmp_path / "run")
    for pid, attempt in ((1, 1), (2, 2)):
        payload = span(pid, 0, None, name=f"attempt {attempt}")
        spool.journal(pid, pack_record(Kind.OPEN_SPAN, payload), resource=resource(rl__attempt=attempt))
        spool.live_file(pid)
    found = stuck(open_spans.load_open(tmp_path / "run"), now_ns=T0)
    assert [stand["spans"][0]["name"] for stand in found["stands"]] == ["attempt 2"]


def test_a_process_without_a_heartbeat_is_a_finding_of_its_own(tmp_path):
    """Catches a worker that is stopped, or holds the GIL in C code, and has no span open that would tell."""
    spool = Spool(tmp_path / "run")
    spool.segment(4, ended(span(1, 0, 1)), heartbeat_ns=T0 + SECOND)
    live = spool.alive(4)
    try:
        run = open_spans.load_open(tmp_path / "run")
        assert stuck(run, now_ns=T0 + 2 * SECOND)["late"] == []
        (late,) = stuck(run, now_ns=T0 + 61 * SECOND)["late"]
        assert (late["pid"], late["late_s"], late["stopped"]) == (4, 60.0, False)
        found = stuck(run, now_ns=T0 + 61 * SECOND, stopped={late["lane"]})
    finally:
        live.release()
    assert "no sign of life for 1m00s: it is stopped" in render(found)


def test_a_stopped_process_is_recognised(tmp_path):
    """Catches a stopped worker that is taken for one that is busy in C code."""
    with deadlocked(tmp_path / "run") as process:
        os.kill(process.pid, signal.SIGSTOP)
        run = open_spans.load_open(tmp_path / "run")
        wait_for(lambda: open_spans.stopped_lanes(run) == {run.processes[0].key}, "the process being stopped")
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: not open_spans.stopped_lanes(run), "the process going on")


def test_parents_in_a_circle_are_shown(tmp_path):
    """Catches damaged parentage that sends the depth in circles."""
    run_dir = run_of(tmp_path, span(1, 0, None, parent=2), span(2, 0, None, parent=1), span(3, 0, None, parent=3))
    assert stuck(open_spans.load_open(run_dir), now_ns=T0)["open"] == 3


def test_control_characters_stay_out_of_the_terminal(tmp_path):
    """Catches a span or thread name, of whoever wrote the run, that clears or paints the reader's terminal."""
    payload = span(1, 0, None, name="a\x1b[2Jb", thread__name="t\nu")
    run_dir = run_of(tmp_path, payload)
    text = render(stuck(open_spans.load_open(run_dir), now_ns=T0))
    assert "\x1b" not in text
    assert "a?[2Jb" in text


def test_follow_in_a_pipe_shows_each_change_and_ends_with_the_run(tmp_path):
    """Catches a follower that stays after the run's end, repeats itself each second, or needs a terminal."""
    run_dir = tmp_path / "run"
    with deadlocked(run_dir) as process:
        command = [sys.executable, "-m", "raytrace_rl.cli", "stuck", str(run_dir), "--follow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            try:
                assert follower.stdout is not None
                assert "is live" in follower.stdout.readline()
                process.kill()
                process.wait(30)
                rest = follower.stdout.read()
                assert follower.wait(30) == cli.FINDINGS
            finally:
                follower.kill()
    assert "is over" in rest


@pytest.mark.parametrize("rich", [True, False])
def test_follow_on_a_terminal_draws_in_place(rich, tmp_path, monkeypatch, capsys):
    """Catches a display that needs the extra's rich, or leaves the terminal without what was open last."""
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.live", None)
    run_dir = run_of(tmp_path, span(1, 0, None, name="hangs"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["stuck", str(run_dir), "--follow"]) == cli.FINDINGS
    assert "1. hangs, open for" in capsys.readouterr().out


def test_json_has_a_version_and_all_that_the_documentation_names(tmp_path):
    """Catches a document that drifts from its description."""
    page = (Path(__file__).parent.parent / "docs" / "stuck.md").read_text()
    described = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    spool = Spool(tmp_path / "run")
    stack = TRACE + span_id(2) + T0.to_bytes(8, "little") + b'  File "a.py", line 1, in f\n    f()\n'
    others = bytes(24) + T0.to_bytes(8, "little") + b'Thread 5 x\n  File "a.py", line 1, in f\n'
    spool.journal(
        1,
        pack_record(Kind.OPEN_SPAN, span(1, 0, None, name="step"))
        + pack_record(Kind.OPEN_SPAN, span(2, 0, None, parent=1, thread__id=3))
        + pack_record(Kind.STACK, stack)
        + pack_record(Kind.STACK, others),
    )
    live = spool.alive(1)
    try:
        found = stuck(open_spans.load_open(tmp_path / "run"), now_ns=T0 + 60 * SECOND)
    finally:
        live.release()
    assert found["schema"] == 1

    def keys(value: Any, prefix: str) -> Iterator[str]:
        if prefix:
            yield prefix
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from keys(inner, f"{prefix}.{key}" if prefix else key)
        elif isinstance(value, list):
            for inner in value:
                for key in keys(inner, ""):
                    yield f"{prefix}[].{key}"

    assert set(keys(found, "")) == described
    json.dumps(found)
