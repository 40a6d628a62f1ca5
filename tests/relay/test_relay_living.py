"""A writer that lives and gives no sign of it, one that ends cleanly and one that is killed, as everybody sees them.

Everybody: a reader, `stuck`, a relay that sends, one that brings home, a reader at home, and whoever adopts what the
dead leave.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest

from raytrace_rl import _env_otlp
from raytrace_rl.monitor import load_run, open_spans
from raytrace_rl.monitor.stuck import LATE_NS, stuck
from raytrace_rl.relay import tail
from raytrace_rl.relay.home import HomeFiles
from raytrace_rl.relay.relay import Relay
from raytrace_rl.spool import seal
from tests.running import attributes, wait_for

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.relay_fixtures"]

#: Ends twenty spans, opens one, and does as it is told: holds the GIL in C until a byte comes on the other pipe.
WRITER = """
import ctypes, os, sys
from raytrace_rl import setup
from raytrace_rl.instrumentation import managed_span

setup.init_telemetry_driver(
    {"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "heartbeat_s": 0.02, "stack_after_s": 0.1}
)
for n in range(20):
    with managed_span("generation", "ended"):
        pass
spans = [managed_span("generation", "open")]
spans[0].__enter__()
print("ready", flush=True)
for line in sys.stdin:
    if line == "hold\\n":
        print("holding", flush=True)
        ctypes.PyDLL(None).read(int(sys.argv[2]), ctypes.create_string_buffer(1), 1)
    elif line == "end the span\\n":
        spans[0].__exit__(None, None, None)
        spans = [managed_span("generation", "last")]
        spans[0].__enter__()
    elif line == "close\\n":
        setup.shutdown_telemetry()
    print("done", flush=True)
"""


class Writer:
    """The process; it is held still by one of the two ways, and let go."""

    def __init__(self, run_dir, how):
        self.how = how
        read_end, self.go = os.pipe()
        os.set_inheritable(read_end, True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(run_dir), str(read_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[read_end],
        )
        os.close(read_end)
        assert self.answer() == "ready"

    def answer(self):
        return self.process.stdout.readline().strip()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def do(self, line):
        self.tell(line)
        assert self.answer() == "done"

    def hold(self):
        if self.how == "stopped":
            os.kill(self.process.pid, signal.SIGSTOP)
        else:
            self.tell("hold")
            assert self.answer() == "holding"

    def let_go(self):
        if self.how == "stopped":
            os.kill(self.process.pid, signal.SIGCONT)
        else:
            os.write(self.go, b"x")
            assert self.answer() == "done"

    def end(self):
        self.process.kill()
        self.process.wait(30)
        os.close(self.go)


@pytest.fixture(params=["stopped", "gil"])
def writer(request, tmp_path):
    """A writer of a run, in a way to be held still."""
    running = Writer(tmp_path / "run", request.param)
    yield running
    running.end()


def stands(run_dir):
    """Whether there is no heartbeat of the one process for as long as fifteen of them."""
    before = load_run(run_dir).processes[0].heartbeat_ns
    time.sleep(0.3)
    return load_run(run_dir).processes[0].heartbeat_ns == before


@pytest.mark.parametrize("ends", ["cleanly", "killed"])
def test_a_writer_that_gives_no_sign_of_life_is_told_from_one_that_is_over(tmp_path, server, writer, monkeypatch, ends):
    """Catches a span closed as truncated while its writer lives, a killed writer that looks closed, or one that looks
    alive.
    """
    monkeypatch.setattr(tail, "_STATE_S", 0.0)
    run_dir, home_dir = tmp_path / "run", tmp_path / "home"
    (node_dir,) = (run_dir / "spool").iterdir()
    settings = _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": server.url})
    relay = Relay(node_dir, settings, home=HomeFiles(home_dir))
    assert relay.acquire()
    relay.start()
    try:
        writer.hold()
        wait_for(lambda: stands(run_dir), "it gives no sign of life")
        assert_alive(run_dir, writer)
        for _ in range(3):
            assert relay.drain(20), "what it had ended is sent, and home"
        assert names(server) == {"ended": 20}
        assert_alive(home_dir, writer, stuck_too=False)
        assert seal.adopt_orphans(str(node_dir)) == 0

        writer.let_go()
        writer.do("end the span")
        server.wait(lambda: names(server) == {"ended": 20, "open": 1}, "the span ends as spans do")
        assert truncated(server) == []

        if ends == "killed":
            writer.process.kill()
            writer.process.wait(30)
            wait_for(lambda: load_run(run_dir).processes[0].state == "dead", "the death is proven")
        else:
            writer.do("close")
            assert load_run(run_dir).processes[0].state == "closed"
        server.wait(lambda: names(server) == {"ended": 20, "open": 1, "last": 1}, "what it left open arrives once")
        assert truncated(server) == ["last"]
        assert relay.drain(20)
        for at in (run_dir, home_dir):
            run = load_run(at)
            assert [row.name for row in run.spans if row.truncated] == ["last"]
            assert Counter(row.name for row in run.spans) == {"ended": 20, "open": 1, "last": 1}
        assert load_run(home_dir).processes[0].state == "closed", "all that there ever will be is at home"
    finally:
        relay.stop()
    assert len(server.spans()) == 22


def assert_alive(run_dir, writer, *, stuck_too=True):
    """Its open span is open, it is alive, and `stuck` says that there is no heartbeat, and why."""
    run = load_run(run_dir)
    (process,) = run.processes
    assert process.state == "alive"
    assert [(row.name, row.truncated) for row in run.spans if row.end_ns is None] == [("open", False)]
    if stuck_too:
        if writer.how == "gil":
            wait_for(lambda: open_spans.hung_threads(run_dir), "its stacks")
        (late,) = stuck(
            open_spans.load_open(run_dir),
            now_ns=process.heartbeat_ns + 2 * LATE_NS,
            hung=open_spans.hung_threads(run_dir),
            stopped=open_spans.stopped_lanes(run),
        )["late"]
        assert (late["stopped"], late["holds_gil"]) == (writer.how == "stopped", writer.how == "gil")


def names(server):
    """How many spans of each name have arrived, each counted once; the job's own left out."""
    return Counter(name for _, name in {(span.span_id, span.name) for span in server.spans()})


def truncated(server):
    """Names of the spans that arrived as cut short."""
    return [span.name for span in server.spans() if attributes(span).get("rl.truncated")]
