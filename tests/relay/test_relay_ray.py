"""The relay as an actor of a real cluster: asked for, killed, idle, and drained at the end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from raytrace_rl import setup, telemetry_session
from raytrace_rl.monitor import load_run
from raytrace_rl.relay import actor, address, asking
from raytrace_rl.relay.lock import NodeLock
from tests.conftest import start_cluster
from tests.relay.reading import tallies
from tests.relay.relay_actors import Writer
from tests.running import wait_for

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.relay_fixtures"]

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@contextmanager
def driving(run_dir, server, monkeypatch, **config):
    """A driver with telemetry on a cluster of its own, sending to ``server``."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cret")
    monkeypatch.setattr(asking, "_LOOK_S", 0.5)
    settings = {"enabled": True, "span_groups": "all", "exporter": "otlp", "heartbeat_s": 0.1, **config}
    handle = setup.init_telemetry_driver({"run_dir": str(run_dir), **settings})
    assert handle is not None
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_HEADERS")  # a cluster that is up already has not inherited it
    try:
        start_cluster(num_cpus=4, runtime_env=setup.telemetry_runtime_env())
        setup.attach_to_cluster()
        yield handle
    finally:
        setup.shutdown_telemetry()
        ray.shutdown()


def names(server):
    """How many spans of each name have arrived, each counted once."""
    return Counter(name for _, name in {(span.span_id, span.name) for span in server.spans()})


def relay_pid(run_id):
    """The process id of the run's relay, once there is one."""

    def ask():
        try:
            return [ray.get(one.status.remote(), timeout=5)["pid"] for one in actor.relays(run_id)]
        except ray.exceptions.RayError:
            return []

    (pid,) = wait_for(ask, "there is a relay")
    return pid


def most_mib(pid):
    """The largest resident memory that a process has had."""
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found) / 1024


def test_one_relay_sends_for_all_and_comes_back_when_killed(server, tmp_path, monkeypatch):
    """Catches a relay a process, credentials in a worker's environment, and a run that goes dark with its relay."""
    with driving(tmp_path / "run", server, monkeypatch) as handle:
        (node_dir,) = (tmp_path / "run" / "spool").iterdir()
        workers = [ray.remote(Writer).options(num_cpus=0.5).remote() for _ in range(3)]
        assert len(set(ray.get([one.write.remote("first", 50) for one in workers]))) == 3
        server.wait(lambda: names(server)["first"] == 150, "they arrive")
        assert all(metadata.get("api-key") == "s3cret" for _, _, metadata in server.attempts)
        assert "s3cret" not in str(ray.get(workers[0].environment.remote()))
        first = relay_pid(handle.run_id)
        assert len(actor.relays(handle.run_id)) == 1
        assert most_mib(first) < 200

        os.kill(first, signal.SIGKILL)
        ray.get([one.write.remote("second", 50) for one in workers])
        server.wait(lambda: names(server)["second"] == 150, "Ray starts it anew")
        assert relay_pid(handle.run_id) != first

        for one in actor.relays(handle.run_id):
            ray.kill(one)
        wait_for(lambda: not NodeLock(node_dir).is_held(), "it is gone for good")
        ray.get([one.write.remote("third", 50) for one in workers])
        server.wait(lambda: names(server)["third"] == 150, "the node's processes ask for another")

        ray.get(workers[0].leave_open.remote())
        ray.kill(workers[0])
        server.wait(lambda: names(server)["open"] == 1, "what a killed actor left open arrives")
    assert names(server) == {"first": 150, "second": 150, "third": 150, "open": 1}
    assert len(server.spans()) <= 451 + 150, "and what was sent twice is the last batch of a killed relay"


def test_it_leaves_when_idle_and_is_back_when_needed(server, tmp_path, monkeypatch):
    """Catches a relay that keeps a node alive after the run, and a run that gets none since it has left."""
    with driving(tmp_path / "run", server, monkeypatch, relay_idle_s=1) as handle:
        pid = relay_pid(handle.run_id)
        (node_dir,) = (tmp_path / "run" / "spool").iterdir()
        time.sleep(2)
        assert relay_pid(handle.run_id) == pid, "the driver lives: it stays"
        setup.shutdown_telemetry()
        wait_for(lambda: not actor.relays(handle.run_id), "it leaves")
        assert not NodeLock(node_dir).is_held()
        worker = ray.remote(Writer).options(num_cpus=0.5).remote()
        ray.get(worker.write.remote("late", 10))
        server.wait(lambda: names(server)["late"] == 10, "a worker of the same run asks for one")


def test_the_session_ends_spans_then_drains_then_ends(server, tmp_path, monkeypatch):
    """Catches a driver whose last spans, and its actors', are still unsent when it takes the cluster down."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    try:
        config = {"run_dir": str(tmp_path / "run"), "exporter": "otlp", "span_groups": "all", "heartbeat_s": 0.1}
        with telemetry_session(config, summary=False) as session:
            session.init_ray(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
            worker = ray.remote(Writer).remote()
            session.register(worker)
            ray.get(worker.write.remote("work", 2000))
            ray.get(worker.leave_open.remote())
    finally:
        ray.shutdown()
    assert names(server) == {"work": 2000, "open": 1}


@pytest.mark.parametrize("attached", [True, False])
def test_a_driver_that_shuts_ray_down_first_sends_the_rest_itself(server, tmp_path, monkeypatch, attached):
    """Catches the commonest order (``ray.shutdown()``, and then the exit) losing what the relay had not sent."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    settings = {"enabled": True, "span_groups": "all", "exporter": "otlp", "run_dir": str(tmp_path / "run")}
    setup.init_telemetry_driver(settings)
    start_cluster(num_cpus=2, runtime_env=setup.telemetry_runtime_env())
    if attached:
        setup.attach_to_cluster()
    worker = ray.remote(Writer).remote()
    ray.get(worker.write.remote("work", 3000))
    ray.get(worker.leave_open.remote())
    ray.shutdown()
    setup.shutdown_telemetry()
    (node_dir,) = (tmp_path / "run" / "spool").iterdir()
    assert names(server) == {"work": 3000, "open": 1}
    assert tallies(node_dir)["traces"]["failure"] == ""


def test_a_node_listens_for_others_when_asked(tmp_path, monkeypatch):
    """Catches a receiver that nobody starts unless something is sent, or that a worker of the run cannot reach."""
    settings = {"enabled": True, "span_groups": "all", "otlp_receiver": True, "heartbeat_s": 0.1}
    handle = setup.init_telemetry_driver({**settings, "run_dir": str(tmp_path / "run")})
    assert handle is not None
    try:
        start_cluster(num_cpus=2, runtime_env=setup.telemetry_runtime_env())
        setup.attach_to_cluster()
        worker = ray.remote(Writer).remote()
        wait_for(lambda: address.socket_path(handle.run_id).exists(), "it listens")
        assert str(ray.get(worker.send.remote(handle.run_id, "tool"))) == "SUCCESS"
    finally:
        setup.shutdown_telemetry()
        ray.shutdown()
    (row,) = [row for row in load_run(tmp_path / "run").spans if row.name == "tool"]
    assert row.process.resource["service.name"] == "tools"
