"""Skew between real processes that have wall clocks of their own: a library before libc gives them another time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from raytrace_rl import _carrier, accepts_trace_context, iteration_scope, managed_span, umbrella_span
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.align import align
from raytrace_rl.monitor.report import text
from raytrace_rl.monitor.skew import skew
from tests import wrong_clock
from tests.clock_runs import MS
from tests.running import running
from tests.spooling import SECOND


def test_the_senders_node_stands_on_the_first_span_of_a_call_from_another_node_alone(tmp_path):
    """Catches a delay of two clocks that does not say whose, one of one clock that does, and a name on every span."""

    @accepts_trace_context
    def work(name: str) -> None:
        by_hand = {"rl.queued_from": "mine"} if name == "own" else {}
        outer = managed_span("generation", name, **by_hand)
        with iteration_scope(3), outer, managed_span("generation", f"{name} inside"):
            pass

    with running(tmp_path / "run") as telemetry:
        with umbrella_span("job", "job"):
            here = _carrier.sent()
            for name, carrier in (
                ("near", here),
                ("far", {**here, "raytrace": here["raytrace"].replace(_carrier.NODE, "elsewhere-1234abcd")}),
                ("own", {**here, "raytrace": here["raytrace"].replace(_carrier.NODE, "elsewhere-1234abcd")}),
                ("kept", {"traceparent": here["traceparent"]}),
            ):
                work(name, _otel_carrier=carrier)  # type: ignore[call-arg]
        run = telemetry.run()
    assert {row.process.node for row in run.spans} == {_carrier.NODE}, "readers find the node by this name"
    found = {row.name: (row.queued_ns is not None, row.attributes.get("rl.queued_from")) for row in run.spans}
    assert found == {
        "job": (False, None),
        "job.started": (False, None),
        "near": (True, None),
        "far": (True, "elsewhere-1234abcd"),
        "own": (True, "elsewhere-1234abcd"),
        "kept": (False, None),
        **{f"{name} inside": (False, None) for name in ("near", "far", "own", "kept")},
    }


_PEER = """
import sys, json
from time import monotonic_ns
from raytrace_rl import accepts_trace_context, init_telemetry_driver, init_telemetry_worker, shutdown_telemetry
from raytrace_rl import _carrier, _process
from raytrace_rl.instrumentation import managed_span, umbrella_span

(init_telemetry_driver if sys.argv[1] == "driver" else init_telemetry_worker)()

@accepts_trace_context
def work():
    with managed_span("generation", "work"):
        answer({"carrier": _carrier.sent()})

def answer(what):
    print(json.dumps(what), flush=True)

with umbrella_span("job", "job"):
    for line in sys.stdin:
        asked = json.loads(line)
        if asked == "send":
            answer({"carrier": _carrier.sent()})
        elif asked == "beat":
            _process.current._heartbeat.beat()
            answer("beaten")
        else:
            work(_otel_carrier=asked["carrier"])
shutdown_telemetry()
"""


class Peer:
    """A process that has a host name and a wall clock of its own, and passes carriers on."""

    def __init__(self, role: str, host: str, clock: wrong_clock.WrongClock, run_dir: str) -> None:
        settings = {
            "RAYTRACE_RL_ENABLED": "1",
            "RAYTRACE_RL_RUN_DIR": run_dir,
            "RAYTRACE_RL_RUN_ID": "skewed",
            "RAYTRACE_RL_SPAN_GROUPS": "per_step",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_PEER), role],
            env={**os.environ, **settings, **clock.environment(host)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: Any) -> Any:
        """Sends it a message; returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """Ends it, and waits for that."""
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@pytest.fixture(name="peers")
def _peers(tmp_path):
    """A driver whose clock is right, and a worker on another host whose clock is 5 s ahead."""
    if reason := wrong_clock.missing():
        pytest.skip(reason)
    clocks = []
    for name, ahead_ns in (("right", 0), ("ahead", 5 * SECOND)):
        (tmp_path / name).mkdir()
        clocks.append(wrong_clock.WrongClock(tmp_path / name, ahead_ns))
    made = [
        Peer(role, host, clock, str(tmp_path / "run"))
        for role, host, clock in zip(("driver", "worker"), ("host-a", "host-b"), clocks, strict=True)
    ]
    yield [*made, clocks[1]]
    for peer in made:
        peer._process.kill()
        peer._process.wait(60)


def _to_and_fro(driver: Peer, worker: Peer, times: int) -> None:
    """Has a call go to the worker and one back, again and again."""
    for _ in range(times):
        carrier = driver.ask("send")
        for peer in (worker, driver):
            carrier = peer.ask(carrier)


def test_processes_with_clocks_of_their_own(peers, tmp_path):
    """Catches an estimate that fits spans made by hand, and not what two processes under two clocks write."""
    driver, worker, _ = peers
    _to_and_fro(driver, worker, 20)
    driver.end()
    worker.end()
    run = load_run(tmp_path / "run")
    found = skew(run)
    assert [(node.node.rpartition("-")[0], node.method, node.interval.messages) for node in found.nodes] == [
        ("host-a", "reference", 40),
        ("host-b", "both_ways", 40),
    ]
    low, high = found.nodes[1].left_ns or (0, 0)
    assert low <= 5 * SECOND <= high
    assert high - low < SECOND
    assert found.early > 0  # driver's calls of the worker's calls of the driver
    assert skew(load_run(tmp_path / "run")).as_json() == found.as_json()
    at_most = align(run).at_most_ns
    assert at_most is not None
    assert at_most < SECOND
    assert "(aligned)" in text(run)


def test_a_clock_that_is_set_while_processes_run(peers, tmp_path):
    """Catches bounds that a set clock spoils, and a heartbeat's note of it that no reader reads."""
    driver, worker, clock = peers
    _to_and_fro(driver, worker, 5)
    clock.set(-2 * SECOND)
    worker.ask("beat")
    _to_and_fro(driver, worker, 5)
    driver.end()
    worker.end()
    run = load_run(tmp_path / "run")
    found = skew(run)
    ((step, before),) = zip(found.steps, [7 * SECOND], strict=True)
    assert step.node.startswith("host-b-")
    assert step.by_ns == pytest.approx(-before, abs=MS)
    assert found.contradictions == []
    low, high = found.nodes[1].left_ns or (0, 0)
    assert low <= 5 * SECOND <= high
    assert high - low < SECOND
    assert "was set back by 7.00s" in text(run)
