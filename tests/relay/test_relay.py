from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import grpc
import pytest

from raytrace_rl import _env_otlp
from raytrace_rl.relay import relay as module
from raytrace_rl.relay.lock import NodeLock
from raytrace_rl.relay.relay import Relay
from raytrace_rl.spool.format import Kind, pack_record
from tests import writers
from tests.relay.otlp_server import Refusal
from tests.relay.reading import tallies
from tests.running import wait_for
from tests.spooling import Spool, ended, span

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.relay_fixtures"]


@pytest.fixture(autouse=True)
def _quick(quick_retries, monkeypatch):
    """Waits of a fraction of what they are."""
    monkeypatch.setattr(module, "_TEND_S", 0.02)


@pytest.fixture
def spool(tmp_path):
    """A run directory with one node, and in it one living process with ten spans, a metric and a log."""
    found = Spool(tmp_path / "run")
    found.live = found.alive(1)
    others = pack_record(Kind.METRICS, b"\x12\x00") + pack_record(Kind.LOGS, b"\x12\x00")
    found.segment(1, ended(*[span(n, 0, 1) for n in range(10)]) + others, pad=1000)
    return found


def settings(url, **variables):
    """Settings as the environment describes them."""
    return _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url, **variables})


@contextmanager
def relaying(node_dir, url, **options):
    """A relay that works in threads."""
    relay = Relay(node_dir, settings(url), **options)
    assert relay.acquire()
    relay.start(options.get("ended"))
    try:
        yield relay
    finally:
        relay.stop()


def test_all_three_signals_arrive(server, spool):
    """Catches a signal that no lane carries."""
    with relaying(spool.node_dir, server.url) as relay:
        assert relay.drain(20)
        assert Counter(name for name, _ in server.received) == {
            "TraceService": 1,
            "MetricsService": 1,
            "LogsService": 1,
        }
        assert server.numbers() == list(range(10))


def test_draining_waits_for_what_was_there_at_the_call(server, spool):
    """Catches a driver that ends the cluster while the last batch is on its way."""
    with relaying(spool.node_dir, server.url) as relay:
        for number in range(1, 6):
            spool.segment(1, ended(*[span(number * 1000 + n, 0, 1) for n in range(500)]), number, pad=100)
            assert relay.drain(20)
            assert len(server.spans()) == 10 + number * 500


def test_draining_does_not_wait_for_a_receiver_that_fails(spool):
    """Catches an exit that is held up by a collector which is not there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with relaying(spool.node_dir, f"http://127.0.0.1:{port}") as relay:
        wait_for(lambda: all(one.failure for one in relay.lanes), "it has failed")
        begun = time.monotonic()
        assert not relay.drain(20)
        assert time.monotonic() - begun < 5


def test_draining_keeps_its_deadline_before_a_black_hole(spool):
    """Catches an exit that is held up by a collector which accepts and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        relaying(spool.node_dir, f"http://127.0.0.1:{listener.getsockname()[1]}") as relay,
    ):
        begun = time.monotonic()
        assert not relay.drain(0.5)
        relay.stop()
        assert time.monotonic() - begun < 1.5


def test_a_failing_signal_holds_up_no_other(server, spool):
    """Catches metrics that wait for a receiver of traces which is down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    relay = Relay(spool.node_dir, settings(server.url, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=dead))
    assert relay.acquire()
    relay.start()
    server.wait(lambda: len(server.received) == 2, "metrics and logs arrive")
    relay.stop()
    assert {name for name, _ in server.received} == {"MetricsService", "LogsService"}


def test_a_node_has_one_relay(server, spool):
    """Catches two relays that send everything twice."""
    with relaying(spool.node_dir, server.url):
        other = Relay(spool.node_dir, settings(server.url))
        assert not other.acquire()
        assert NodeLock(spool.node_dir).is_held()
    assert not NodeLock(spool.node_dir).is_held()
    assert other.acquire(1)
    other.stop()


def test_a_relay_that_waited_knows_what_the_one_before_it_has_sent(server, spool):
    """Catches a handover after which everything is sent anew."""
    other = Relay(spool.node_dir, settings(server.url))
    with relaying(spool.node_dir, server.url) as relay:
        assert relay.drain(20)
    assert other.acquire(1)
    other.start()
    assert other.drain(20)
    other.stop()
    assert len(server.spans()) == 10


def test_a_forked_child_does_not_hold_the_lock_on(spool):
    """Catches a data loader's worker that outlives its parent and keeps every other relay from starting."""
    lock = NodeLock(spool.node_dir)
    assert lock.acquire()
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    os.close(lock._fd)  # as if this process had been killed: no unlocking
    lock._fd = -1
    assert not NodeLock(spool.node_dir).is_held()
    os.write(go[1], b"x")
    os.waitpid(pid, 0)


def test_it_ends_when_there_is_nothing_to_do(server, spool):
    """Catches a relay that keeps an autoscaled node alive for ever, or leaves while somebody writes."""
    over = threading.Event()
    relay = Relay(spool.node_dir, settings(server.url), idle_s=0.3)
    assert relay.acquire()
    relay.start(over.set)
    assert relay.drain(20)
    assert not over.wait(0.6), "its process lives"
    spool.live.release()
    assert over.wait(20)
    assert not NodeLock(spool.node_dir).is_held()
    assert len(server.spans()) == 10


def test_it_ends_where_the_run_directory_was_deleted(server, spool):
    """Catches an actor that stays on its node for ever, since a look into the directory fails each time."""
    ended_itself = threading.Event()
    relay = Relay(spool.node_dir, settings(server.url), idle_s=0.2)
    assert relay.acquire()
    relay.start(ended_itself.set)
    assert relay.drain(20)
    shutil.rmtree(spool.run_dir)
    assert ended_itself.wait(30)
    relay.stop()


def test_it_stays_for_what_is_unsent_but_not_for_ever(spool, monkeypatch):
    """Catches both: leaving with spans unsent, and a dead collector that keeps a node alive."""
    monkeypatch.setattr(module, "_PATIENCE", 4)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    over = threading.Event()
    relay = Relay(spool.node_dir, settings(f"http://127.0.0.1:{port}"), idle_s=0.3)
    assert relay.acquire()
    relay.start(over.set)
    wait_for(lambda: all(one.failure for one in relay.lanes), "it has failed")
    spool.live.release()
    begun = time.monotonic()
    assert over.wait(20)
    assert 0.6 <= time.monotonic() - begun <= 5


def test_what_dead_processes_leave_in_memory_comes_home(server, tmp_path):
    """Catches spans of a killed process that are lost with the node although a relay was there."""
    with writers.worker(tmp_path / "run") as worker:
        worker.tell("write 20")
        worker.tell("open")
        (node_dir,) = (tmp_path / "run" / "spool").iterdir()
        with relaying(node_dir, server.url):
            worker.kill()
            wait_for(lambda: not [one for one in node_dir.iterdir() if one.is_symlink()], "it is home")
            server.wait(lambda: len(server.spans()) == 21, "all are sent")


def test_counts_are_on_disk_and_summed_over_relays(server, spool):
    """Catches counts that begin anew with each relay, or that nobody can read once it is gone."""
    server.answers.append(Refusal(grpc.StatusCode.UNAVAILABLE))
    for number in (1, 2):
        spool.segment(1, ended(*[span(number * 100 + n, 0, 1) for n in range(10)]), number, pad=100)
        with relaying(spool.node_dir, server.url) as relay:
            assert wait_for(lambda: relay.drain(20), "it is sent")
    found = tallies(spool.node_dir)
    assert found["traces"]["sent"] == 30
    assert sum(one["retries"] for one in found.values()) == 1
    assert found["traces"]["failure"] == ""


def test_a_relay_killed_at_any_moment_sends_at_most_its_last_batch_again(server, spool, tmp_path):
    """Catches a cursor that is saved late: everything since would be sent twice, or early: it would be lost."""
    spool.segment(1, ended(*[span(n, 0, 1) for n in range(10, 60_000)]), 1, pad=100)
    code = """
import sys, threading
from raytrace_rl import _env_otlp
from raytrace_rl.relay import lane
from raytrace_rl.relay.relay import Relay

lane.MAX_RECORDS = 500
relay = Relay(sys.argv[1], _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": sys.argv[2]}))
assert relay.acquire(10)
relay.start()
threading.Event().wait()
"""
    kills = 0
    while len(set(server.numbers())) < 60_000:
        process = subprocess.Popen([sys.executable, "-c", code, str(spool.node_dir), server.url])
        goal = min(60_000, len(set(server.numbers())) + 5_000)
        server.wait(lambda goal=goal: len(set(server.numbers())) >= goal, "it sends")
        process.kill()
        process.wait(30)
        kills += 1
    times = Counter(server.numbers())
    assert kills >= 3, "how many depends on how fast they come"
    assert set(times) == set(range(60_000))
    assert sum(n - 1 for n in times.values()) <= kills * 500


def test_an_endpoint_without_grpc_is_an_import_error(spool, monkeypatch):
    """Catches a missing extra that shows as something else."""
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ImportError):
        Relay(spool.node_dir, settings("http://127.0.0.1:1"))
