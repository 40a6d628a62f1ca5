"""The memory of a relay: a few requests, whatever waits in the spools and whatever becomes of the requests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.relay.cursors import noted
from tests.relay.otlp_server import receiver
from tests.relay.stepping import collectors
from tests.running import wait_for
from tests.spooling import Spool, ended, span

pytest_plugins = ["tests.telemetry_fixtures"]

#: What a relay takes beyond its modules, at most: requests of three signals, what is read for them, what gRPC holds.
MOST_MIB = 60
SEGMENTS = 12

RELAY = """
import re, sys, threading
from pathlib import Path
from raytrace_rl import _env_otlp
from raytrace_rl.relay import relay, retry
from raytrace_rl.relay.home import HomeFiles

retry.FIRST_S, retry.LONGEST_S, relay._TEND_S = 0.05, 0.1, 0.05
node_dir, url, home = sys.argv[1:]
settings = _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "300"})
running = relay.Relay(node_dir, settings if url else None, home=HomeFiles(home) if home else None)
assert running.acquire(10)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1], flush=True)
running.start()
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    """A node with a backlog of some 100 MiB, of one process that lives."""
    found = Spool(tmp_path_factory.mktemp("backlog") / "run")
    found.live = found.alive(1)
    note = "x" * 900
    records = ended(*[span(n, 0, 1, note=note) for n in range(1, 8001)])
    for number in range(SEGMENTS):
        found.segment(1, records, number, sealed=True, span_count=8000)
    yield found
    found.live.release()


def growth_mib(spool, url, home, done):
    """The most that a relay in a process of its own takes beyond what it starts with, by the time it is done."""
    command = [sys.executable, "-c", RELAY, str(spool.node_dir), url, home]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            before = int(process.stdout.readline())
            wait_for(done, "it has tried", timeout_s=120)
            (after,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        finally:
            process.kill()
    return (int(after) - before) / 1024


def count(spool, url, name):
    """What a relay has counted of the spans it sends to an address."""
    return sum(one.tally[name] for one in noted(spool.node_dir) if (one.signal, one.destination) == ("traces", url))


@pytest.mark.parametrize("kind", ["dead", "black hole"])
def test_a_backlog_stays_on_disk_when_nothing_can_be_sent(spool, kind):
    """Catches a relay that reads ahead of a collector which is down, until the node has no memory left."""
    with collectors() as urls:
        assert growth_mib(spool, urls[kind], "", lambda: count(spool, urls[kind], "retries") >= 5) < MOST_MIB


@pytest.mark.parametrize("limit", [4 << 20, 200_000])
def test_a_backlog_passes_through_in_requests(spool, limit, monkeypatch):
    """Catches a relay that keeps what it has sent, or grows with each request that it has to divide."""
    with receiver(options=[("grpc.max_receive_message_length", limit)]) as server:
        monkeypatch.setattr(server, "handle", lambda *_: b"")
        done = lambda: count(spool, server.url, "sent") == SEGMENTS * 8000  # noqa: E731
        assert growth_mib(spool, server.url, "", done) < MOST_MIB


def test_a_backlog_comes_home_in_pieces(spool, tmp_path):
    """Catches a relay that takes a node's spools into its memory to bring them home."""
    there = tmp_path / "spool" / spool.node_dir.name
    done = lambda: len(list(there.glob("*.rts"))) == SEGMENTS and there.joinpath("relay/status.json").exists()  # noqa: E731
    assert growth_mib(spool, "", str(tmp_path), done) < MOST_MIB
    assert len(load_run(tmp_path).spans) == 8000, "each segment has the same spans here"
