"""Kill -9 of relay, driver and workers in random order, round after round in one run; counted by another channel.

Every process notes each span in a file of its own once the span has ended: one ``write``, which a kill does not undo.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from raytrace_rl.cli import main
from raytrace_rl.relay import lane
from tests.relay.otlp_server import receiver
from tests.running import attributes, wait_for

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = [pytest.mark.slow]

ROUNDS = 50
SEED = 20_260_801
BATCH = 300

#: A process that has imported everything, and forks one that is killed for each line it reads: a name, and its role.
NURSERY = """
import os, signal, sys, threading, time
import grpc
from raytrace_rl import _env_otlp, setup
from raytrace_rl.instrumentation import managed_span, umbrella_span
from raytrace_rl.relay import lane
from raytrace_rl.relay.relay import Relay

def write(name, role):
    setup.init_telemetry_driver() if role == "driver" else setup.init_telemetry_worker()
    noted = os.open(os.path.join(os.environ["NOTED"], name), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    with umbrella_span("job", f"{name} job"):
        n = 0
        while True:
            with managed_span("generation", f"{name} {n}", n=n):
                pass
            os.write(noted, f"{name} {n}\\n".encode())
            n += 1
            time.sleep(0.0005)  # a pace that a relay keeps up with

def relay(node_dir):
    lane.MAX_RECORDS, lane.INTERVAL_S = int(os.environ["BATCH"]), 0.02
    running = Relay(node_dir, _env_otlp.settings())
    assert running.acquire(30)
    running.start()
    threading.Event().wait()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    name, what = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            relay(what) if name == "relay" else write(name, what)
        finally:
            os._exit(1)
    print(pid, flush=True)
"""


class Run:
    """A run whose processes are killed."""

    def __init__(self, directory: Path, url: str) -> None:
        self.run_dir = directory / "run"
        self.noted = directory / "noted"
        self.noted.mkdir()
        self.env = {
            **os.environ,
            "NOTED": str(self.noted),
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "BATCH": str(BATCH),
            "RAYTRACE_RL_ENABLED": "1",
            "RAYTRACE_RL_RUN_DIR": str(self.run_dir),
            "RAYTRACE_RL_RUN_ID": "chaos",
            "RAYTRACE_RL_SPAN_GROUPS": "all",
            "RAYTRACE_RL_HEARTBEAT_S": "0.05",
            "RAYTRACE_RL_SPOOL_MAX_MIB": "1024",
        }
        self.kills: Counter[str] = Counter()
        self._alive: dict[str, int] = {}
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY], env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, name: str, what: str) -> None:
        """Starts a writer in a role, or the relay of a node's directory."""
        stdin, stdout = self._nursery.stdin, self._nursery.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{name} {what}\n")
        stdin.flush()
        self._alive[name] = int(stdout.readline())

    def start_relay(self) -> None:
        """Starts the relay of the one node there is."""
        node_dir = wait_for(lambda: next(iter((self.run_dir / "spool").glob("*")), None), "there is a node")
        self.start("relay", str(node_dir))

    def relays(self) -> bool:
        """Whether the relay lives."""
        return "relay" in self._alive

    def writes(self, name: str) -> bool:
        """Whether a writer has noted a span."""
        path = self.noted / name
        return path.exists() and path.stat().st_size > 0

    def kill(self, name: str) -> None:
        """Kills a process, and waits until it is gone."""
        pid = self._alive.pop(name, None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)  # an error if it has ended by itself
            wait_for(lambda: not Path(f"/proc/{pid}").exists(), "it is gone")
            self.kills["relay" if name == "relay" else "writer"] += 1

    def close(self) -> None:
        """Starts nothing more."""
        self._nursery.kill()
        self._nursery.wait(30)

    def kill_all(self, chosen: random.Random) -> None:
        """Kills what lives, in any order."""
        names = list(self._alive)
        chosen.shuffle(names)
        for name in names:
            self.kill(name)

    def ended(self) -> set[str]:
        """What the processes have noted; a line cut off by a kill counts not."""
        return {line for path in self.noted.iterdir() for line in path.read_text().split("\n")[:-1]}


def test_every_finished_span_arrives_and_once_when_told_apart_by_its_id(tmp_path, capsys, monkeypatch):
    """Catches any order of deaths that loses a span, sends one under two ids, or ends one that goes on."""
    chosen = random.Random(SEED)
    with receiver() as server:
        run = Run(tmp_path, server.url)
        try:
            for number in range(ROUNDS):
                names = [f"{number}-driver", f"{number}-a", f"{number}-b"][: chosen.randint(2, 3)]
                for name in names:
                    run.start(name, name.partition("-")[2])
                if not run.relays():
                    run.start_relay()
                for name in names:
                    wait_for(lambda name=name: run.writes(name), "it writes")  # type: ignore[misc]
                if chosen.random() < 0.5:
                    goal = len(server.attempts) + chosen.randint(1, 40)
                    server.wait(lambda goal=goal: len(server.attempts) >= goal, "it sends")  # type: ignore[misc]
                for name in chosen.sample([*names, "relay"], chosen.randint(0, 2)):
                    time.sleep(chosen.uniform(0, 0.05))  # no wait for anything: the moment is random on purpose
                    run.kill(name)
                    if name == "relay" and chosen.random() < 0.7:
                        run.start_relay()
                time.sleep(chosen.uniform(0, 0.05))
                if chosen.random() < 0.4:
                    run.kill_all(chosen)
                else:
                    for name in names:
                        run.kill(name)
        finally:
            run.kill_all(chosen)
            run.close()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        assert main(["push", str(run.run_dir)]) == 0, capsys.readouterr()
        spans = server.spans()
    ids = defaultdict(list)
    for one in spans:
        ids[one.trace_id + one.span_id].append(one)
    for copies in ids.values():
        assert len({one.SerializeToString() for one in copies}) == 1, "all copies of a span are one"
    once = Counter(copies[0].name for copies in ids.values())
    assert set(once.values()) == {1}
    noted = run.ended()
    assert noted <= set(once), sorted(noted - set(once))[:10]
    truncated = {copies[0].name for copies in ids.values() if attributes(copies[0]).get("rl.truncated")}
    assert not truncated & noted
    jobs = {name for name in once if name.endswith(" job")}
    assert jobs <= truncated
    assert len(jobs) == run.kills["writer"]
    unnoted = {name for name in once if not name.endswith("job.started")} - noted - truncated
    assert len(unnoted) <= run.kills["writer"], "ended, and killed before it was noted: at most one a process"
    assert len(truncated - jobs) <= run.kills["writer"]
    assert len(spans) - len(ids) <= run.kills["relay"] * BATCH, "a killed relay sends its last batch again, no more"
    print(f"{len(noted)} spans noted, {len(ids)} arrived, {len(spans) - len(ids)} twice, kills: {dict(run.kills)}")
    assert run.kills["relay"] >= 10
    assert lane.MAX_RECORDS > BATCH
