"""Where the threads of another node's processes stand, as `stuck` tells it at home: before and after their death."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap

import pytest

from raytrace_rl import cli
from raytrace_rl.monitor import open_spans
from raytrace_rl.monitor.stuck import stuck
from raytrace_rl.relay.carry import Carrier
from raytrace_rl.spool.format import NO_SPAN, Kind, pack_record
from tests import spooling
from tests.running import wait_for
from tests.spooling import T0, span, span_id

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.home_fixtures"]

#: Stands in C with the GIL held, or in a lock, as it is told.
STANDING = """
import ctypes, sys, threading
from raytrace_rl import setup
from raytrace_rl.instrumentation import managed_span

setup.init_telemetry_driver(
    {"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "heartbeat_s": 0.02, "stack_after_s": 0.1}
)

def holds_the_gil():
    ctypes.PyDLL(None).sleep(600)

def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

with managed_span("generation", "standing"):
    print("ready", flush=True)
    globals()[sys.argv[2]]()
"""


@contextlib.contextmanager
def standing(run_dir, how):
    """A process on the node; yields it and its node's directory."""
    command = [sys.executable, "-c", textwrap.dedent(STANDING), str(run_dir), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            (node_dir,) = (run_dir / "spool").iterdir()
            yield process, node_dir
        finally:
            process.kill()


def stands(run_dir):
    """The innermost function of the open span's stack, as `stuck` finds it; None where there is no stack."""
    (stand,) = stuck(open_spans.load_open(run_dir), hung=open_spans.hung_threads(run_dir))["stands"]
    return stand["stack"][0]["frames"][-1]["function"] if stand["stack"] else None


@pytest.mark.parametrize("how", ["holds_the_gil", "waits_for_a_lock"])
def test_stacks_come_home_and_outlive_their_process(tmp_path, home, how, capsys):
    """Catches a job that hangs on another node, of which the head knows the open span and not where it stands: while
    it lives, or after ``kill -9``, when its journal is gone.
    """
    far_dir, home_dir = tmp_path / "far", tmp_path / "home"
    with standing(far_dir, how) as (process, node_dir):
        carrier = Carrier(node_dir, home)
        wait_for(lambda: stands(far_dir) == how, "the stack is known on the node")
        assert wait_for(lambda: carrier.round() and stands(home_dir), "the stack comes home") == how
        assert cli.main(["stuck", str(home_dir)]) == cli.FINDINGS
        assert f"in {how}" in capsys.readouterr().out
        process.kill()
        process.wait(30)
        assert carrier.round()
    assert stands(home_dir) == how
    assert cli.main(["stuck", str(home_dir)]) == cli.FINDINGS
    told = capsys.readouterr().out
    assert f"in {how}" in told
    assert ("its process held the GIL, then died" in told) is (how == "holds_the_gil")
    assert Carrier(node_dir, home).round()
    assert stands(home_dir) == how, "and a relay that starts anew leaves it there"


def test_a_hang_that_is_over_is_over_at_home(tmp_path, far, home):
    """Catches stacks of a hang that is over, shown as where the process is now; the second of two equal ones lost."""
    live = far.alive(1)
    far.segment(1, spooling.ended(span(1, 0, 1)))
    far.slots(1, [span(2, 0, None)])
    (stem,) = {path.name.partition(".")[0] for path in far.node_dir.iterdir()}
    hang = far.node_dir / f"{stem}.hang"
    at_home = tmp_path / "home" / "spool" / far.node_dir.name / hang.name
    carrier = Carrier(far.node_dir, home)
    for _ in range(2):
        hang.write_text('Thread 0x0000000000000001 (most recent call first):\n  File "a.py", line 1 in f\n')
        assert carrier.round()
        assert at_home.read_bytes() == hang.read_bytes()
        hang.write_text("")  # the next beat
        assert carrier.round()
        assert not at_home.exists()
    hang.write_text("x" * (5 << 20))  # of no use, and too much to carry
    assert carrier.round()
    assert not at_home.exists()
    live.release()


def test_the_last_stack_of_each_open_span_comes_home(tmp_path, far, home):
    """Catches stacks of spans that have ended, or older ones, in what is closed at home for a process that died."""

    def stack(ids, seconds, text):
        return pack_record(Kind.STACK, ids + (T0 + seconds).to_bytes(8, "little") + text.encode())

    ended, left = spooling.TRACE + span_id(2), spooling.TRACE + span_id(3)
    records = [pack_record(Kind.OPEN_SPAN, span(3, 0, None, name="left"))]
    records += [stack(ended, 1, "ended"), stack(left, 1, "older"), stack(left, 2, "last"), stack(NO_SPAN, 2, "threads")]
    far.segment(1, spooling.ended(span(1, 0, 1), span(2, 0, 1)))
    far.journal(1, b"".join(records))
    far.live_file(1)
    assert Carrier(far.node_dir, home).round()
    run = open_spans.load_open(tmp_path / "home")
    assert {row.text for row in run.stacks} == {"last"}
    (process,) = run.processes
    assert (process.state, process.threads and process.threads.text) == ("closed", "threads")
    assert not run.damage
