from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from raytrace_rl import cli
from raytrace_rl.monitor import open_spans
from tests.running import child, running, wait_for

HOLDER = """
import ctypes, sys
from raytrace_rl import setup
from raytrace_rl.instrumentation import managed_span

setup.init_telemetry_driver(
    {"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "heartbeat_s": 0.02, "stack_after_s": 0.2}
)

def holds_the_gil():
    ctypes.PyDLL(None).sleep(600)

with managed_span("generation", "held"):
    print("ready", flush=True)
    holds_the_gil()
"""


def test_stacks_of_a_process_that_holds_the_gil_are_told_after_its_death(tmp_path, capsys):
    """Catches a hang in C with the GIL held: no Python thread, hence no heartbeat, can say where it is."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            found = wait_for(lambda: open_spans.hung_threads(tmp_path / "run"), "the stacks")
            wait_for(lambda: open_spans.hung_threads(tmp_path / "run") == found, "the whole of them")
        finally:
            process.send_signal(signal.SIGKILL)
    found = open_spans.hung_threads(tmp_path / "run")
    run = open_spans.load_open(tmp_path / "run")
    (row,) = [row for row in run.spans if row.name == "held"]
    (section,) = [one for one in found[row.process.key] if one.ident == row.thread_id]
    assert [frame.function for frame in section.frames][-1] == "holds_the_gil"
    assert section.frames[-1].line == 11
    assert cli.main(["stuck", str(tmp_path / "run")]) == cli.FINDINGS
    assert "or more: its process held the GIL, then died" in capsys.readouterr().out, "0.0 s is no age of a hang"


def test_a_hang_that_is_over_leaves_nothing(tmp_path):
    """Catches stacks of an earlier hang that are shown as where the process is now."""
    with running(tmp_path / "run") as telemetry:
        from raytrace_rl import _process

        assert _process.current is not None
        heartbeat = _process.current._heartbeat
        assert heartbeat is not None
        assert heartbeat._watch is not None
        path = Path(heartbeat._watch.path)
        path.write_text("Thread 0x0000000000000001 (most recent call first):\n")
        assert open_spans.hung_threads(telemetry.run_dir)
        heartbeat.beat()
        assert path.read_text() == ""
        assert open_spans.hung_threads(telemetry.run_dir) == {}
    assert not path.exists(), "and a clean end takes the file away"


def test_forked_child_ends(tmp_path):
    """Catches a child that hangs at its exit, waiting for a timer thread of faulthandler's that only its parent has."""
    with running(tmp_path / "run"):
        from raytrace_rl import _process

        assert _process.current is not None
        assert _process.current._heartbeat is not None
        _process.current._heartbeat.beat()
        done = child(
            """
            import os, sys
            from raytrace_rl import _process, setup
            setup.init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1], "heartbeat_s": 0.01})
            for _ in range(20):
                _process.current._heartbeat.beat()
                pid = os.fork()
                if pid == 0:
                    sys.exit(0)
                os.waitpid(pid, 0)
            print("ended")
            """,
            tmp_path / "other",
        )
    assert done.stdout == "ended\n"


def test_a_program_that_uses_the_timer_itself_keeps_it(tmp_path):
    """Catches our beats putting off, or a shutdown cancelling, the watchdog that a program set for its own hangs."""
    done = child(
        """
        import faulthandler, sys, time
        from raytrace_rl import _process, setup
        setup.init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1], "heartbeat_s": 0.01})
        with open(sys.argv[2], "w") as file:
            faulthandler.dump_traceback_later(0.3, file=file)
            deadline = time.monotonic() + 30
            while not open(sys.argv[2]).read() and time.monotonic() < deadline:
                _process.current._heartbeat.beat()
                time.sleep(0.01)
        print("Thread" in open(sys.argv[2]).read())
        """,
        tmp_path / "run",
        tmp_path / "own",
    )
    assert done.stdout == "True\n"


def test_no_watch_where_its_file_cannot_be_made(tmp_path, monkeypatch):
    """Catches telemetry that does not start for want of a file that is only of use in a hang."""
    opened = os.open

    def refuse(path, *args, **kwargs):
        if str(path).endswith(".hang"):
            raise OSError(28, "No space left on device")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with running(tmp_path / "run") as telemetry:
        assert telemetry.handle.is_exporting
        from raytrace_rl import _process

        assert _process.current is not None
        assert _process.current._heartbeat is not None
        _process.current._heartbeat.beat()


def test_the_timer_is_pythons_own_until_it_is_needed():
    """Catches a module of the standard library that is changed by an import alone."""
    done = child("import faulthandler as f, raytrace_rl; print(f.dump_traceback_later.__module__)")
    assert done.stdout == "faulthandler\n"
    assert callable(faulthandler.dump_traceback_later)
