"""Kill -9 of the relay's actor, workers' actors and drivers on real Ray, in random order, round after round in one run.

Counted by another channel: each process notes its spans in a file of its own (`tests.relay.chaos_driver`).
``CHAOS_ROUNDS`` and ``CHAOS_SEED`` in the environment make more of it, or other rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import ray

from raytrace_rl.cli import main
from raytrace_rl.relay import actor
from raytrace_rl.relay.lane import MAX_RECORDS
from raytrace_rl.relay.lock import NodeLock
from tests.conftest import start_cluster
from tests.relay.otlp_server import receiver
from tests.running import attributes, wait_for

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "5"))
SEED = 20_261_101
RUN_ID = "chaos-ray"
ROOT = Path(__file__).parent.parent.parent


class Run:
    """A run whose processes are killed.

    Attributes:
        kills: How many of each role were killed.
        killed: Their process ids.
        writers: Processes that wrote, as their notes have it.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self.run_dir = directory / "run"
        self.noted = directory / "noted"
        self.noted.mkdir()
        self.kills: Counter[str] = Counter()
        self.killed: set[int] = set()
        self._log = directory / "drivers.log"
        self._env = {
            "NOTED": str(self.noted),
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_METRICS_EXPORTER": "none",
            "RAYTRACE_RL_ENABLED": "1",
            "RAYTRACE_RL_EXPORTER": "otlp",
            "RAYTRACE_RL_RUN_DIR": str(self.run_dir),
            "RAYTRACE_RL_RUN_ID": RUN_ID,
            "RAYTRACE_RL_SPAN_GROUPS": "all",
            "RAYTRACE_RL_HEARTBEAT_S": "0.1",
            "RAYTRACE_RL_SPOOL_MAX_MIB": "1024",
        }

    def drive(self, name: str, workers: int, *address: str) -> tuple[subprocess.Popen[str], list[int]]:
        """Starts a driver; returns it, and the process ids of its actors, when all of them write."""
        command = [sys.executable, "-m", "tests.relay.chaos_driver", name, str(workers), *address]
        env = {**os.environ, **self._env}  # as it is now: with the token of the cluster that was started meanwhile
        with self._log.open("ab") as log:
            driver = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line, self._log.read_text(errors="replace")[-4000:]
        wait_for(lambda: len([one for one in self._files(name) if one.stat().st_size]) > workers, "all write", 60)
        return driver, json.loads(line)

    def _files(self, name: str) -> list[Path]:
        return list(self.noted.glob(f"{name}-*"))

    def kill(self, role: str, pid: int) -> None:
        """Kills a process, if it is still there and was not killed before."""
        if pid not in self.killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.add(pid)
                self.kills[role] += 1

    def ended(self) -> set[str]:
        """What the processes have noted; a line cut off by a kill counts not."""
        return {line for path in self.noted.iterdir() for line in path.read_text().split("\n")[:-1]}

    @property
    def writers(self) -> set[str]:
        return {path.name for path in self.noted.iterdir()}


def relay_pids() -> list[int]:
    """The process ids of the run's relays that answer now."""
    found = []
    for one in actor.relays(RUN_ID):
        try:
            found.append(ray.get(one.status.remote(), timeout=10)["pid"])
        except ray.exceptions.RayError:
            continue  # killed, or on its way out or back
    return found


def one_round(run: Run, server, chosen: random.Random, name: str, address: str) -> None:
    """A driver and its actors on the cluster, killed one after the other, and the relay among them."""
    driver, workers = run.drive(name, chosen.randint(1, 3), address)
    try:
        victims = [("worker", pid) for pid in chosen.sample(workers, chosen.randint(1, len(workers)))]
        victims += [("driver", driver.pid)] * (chosen.random() < 0.7)
        # What it has sent tells that there is a relay; now and then it is killed before it has begun.
        if chosen.random() < 0.8:
            goal = len(server.attempts) + chosen.randint(1, 4)
            server.wait(lambda: len(server.attempts) >= goal, "it sends", 60)
        if chosen.random() < 0.7:
            victims += [("relay", pid) for pid in wait_for(relay_pids, "there is a relay", 90)]
        chosen.shuffle(victims)
        for role, pid in victims:
            time.sleep(chosen.uniform(0, 0.2))  # no wait for anything: the moment is random on purpose
            run.kill(role, pid)
    finally:
        run.kill("driver", driver.pid)
        driver.wait(30)


def check(run: Run, spans) -> str:
    """Every span that was noted has arrived, each under one id, with one content; and no ended one as truncated.

    Returns:
        What there was, for a person.
    """
    ids = defaultdict(list)
    for one in spans:
        ids[one.trace_id + one.span_id].append(one)
    for copies in ids.values():
        assert len({one.SerializeToString() for one in copies}) == 1, "all copies of a span are one"
    once = Counter(copies[0].name for copies in ids.values() if not copies[0].name.endswith(".started"))
    assert set(once.values()) == {1}
    noted = run.ended()
    assert noted <= set(once), sorted(noted - set(once))[:10]
    truncated = {copies[0].name for copies in ids.values() if attributes(copies[0]).get("rl.truncated")}
    # Ray ends the actors of a dead driver in order: what is open then is cut short, just before it would have ended.
    cut = Counter(name.partition(" ")[0] for name in truncated & noted)
    assert all(n == 1 and int(name.rpartition("-")[2]) not in run.killed for name, n in cut.items()), cut
    jobs = {name for name in once if name.endswith(" job")}
    assert jobs == {f"{name} job" for name in run.writers}
    unnoted = set(once) - noted - jobs
    assert len(unnoted) <= len(run.writers), "ended, and killed before it was noted: at most one a process"
    twice = len(spans) - len(ids)
    assert twice <= run.kills["relay"] * MAX_RECORDS, "a killed relay sends its last batch again, no more"
    return (
        f"{len(noted)} spans noted by {len(run.writers)} processes, {len(ids)} arrived, {twice} of them twice, "
        f"kills: {dict(run.kills)}"
    )


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def settle(run: Run, server, monkeypatch, capsys) -> None:
    """Once nobody writes any more, what they have left is sent; then everything is there."""
    pids = [int(name.rpartition("-")[2]) for name in run.writers]
    wait_for(lambda: not any(map(_is_there, pids)), "they are gone", 60)
    locks = [NodeLock(node_dir) for node_dir in (run.run_dir / "spool").iterdir()]
    # A relay whose cluster is gone follows it; one that lives leaves once it is idle.
    wait_for(lambda: not any(lock.is_held() for lock in locks), "the relays are gone", 120)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert main(["push", str(run.run_dir)]) == 0, capsys.readouterr()
    found = check(run, server.spans())
    with capsys.disabled():
        print(f"\n{found}")


@pytest.fixture
def chosen():
    """What is random on purpose, and comes back with its seed."""
    return random.Random(int(os.environ.get("CHAOS_SEED", SEED)))


@pytest.mark.timeout(1800)
def test_every_finished_span_arrives_whoever_is_killed(tmp_path, chosen, capsys, monkeypatch):
    """Catches an order of deaths on a real cluster that loses a finished span, or sends it under two ids."""
    with receiver() as server:
        run = Run(tmp_path, server.url)
        address = start_cluster(num_cpus=8).address_info["gcs_address"]
        try:
            for number in range(ROUNDS):
                one_round(run, server, chosen, f"{number}", address)
        finally:
            ray.shutdown()
        settle(run, server, monkeypatch, capsys)
    assert run.kills["driver"] == ROUNDS
    assert run.kills["worker"]
    assert run.kills["relay"] >= ROUNDS // 3


@pytest.mark.timeout(1800)
def test_a_driver_that_is_killed_takes_its_cluster_and_no_span_with_it(tmp_path, chosen, capsys, monkeypatch):
    """Catches spans that only a cluster that is gone could have sent, and a push that does not find them."""
    with receiver() as server:
        run = Run(tmp_path, server.url)
        for number in range(max(1, ROUNDS // 5)):
            driver, workers = run.drive(f"{number}", chosen.randint(1, 2))
            if chosen.random() < 0.5:
                server.wait(lambda: server.received, "it sends", 60)
            for pid in chosen.sample(workers, chosen.randint(0, len(workers))):
                run.kill("worker", pid)
            run.kill("driver", driver.pid)
            run.kills["relay"] += 1  # which goes with the cluster
            driver.wait(30)
        settle(run, server, monkeypatch, capsys)
