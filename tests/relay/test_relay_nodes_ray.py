"""Three nodes: run directories that are not shared, a node that is lost, and a driver that leaves without a word."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import ray

from raytrace_rl import setup
from raytrace_rl.cli import main
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.open_spans import hung_threads
from raytrace_rl.monitor.relay_counters import relay_counters
from raytrace_rl.relay import actor, asking
from raytrace_rl.spool.place import node_name
from tests.conftest import start_cluster
from tests.disks import Disk, may_mount, mounted
from tests.relay.otlp_server import receiver
from tests.relay.relay_actors import Hangs, Writer
from tests.relay.several_nodes import needs_namespaces, nodes
from tests.running import wait_for

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, needs_namespaces]


@pytest.fixture
def runs(tmp_path):
    """A directory for runs, of which further nodes may see one of their own."""
    path = tmp_path / "runs"
    path.mkdir()
    yield path
    setup.shutdown_telemetry()
    ray.shutdown()


def start(runs, **config):
    """Telemetry on the driver, and a cluster of one node that it is attached to."""
    settings = {"enabled": True, "span_groups": "all", "heartbeat_s": 0.1, "run_dir": str(runs / "run"), **config}
    handle = setup.init_telemetry_driver(settings)
    assert handle is not None
    start_cluster(num_cpus=2, runtime_env=setup.telemetry_runtime_env())
    setup.attach_to_cluster()
    return handle


def writer(name):
    """An actor on the node of that name."""
    return ray.remote(Writer).options(num_cpus=0.1, resources={name: 1}).remote()


def by_node(run_dir):
    """How many spans of each name the run directory holds of each host."""
    return Counter((row.process.node.rpartition("-")[0], row.name) for row in load_run(run_dir).spans)


def test_spools_come_home_from_nodes_that_do_not_share_the_run_directory(runs):
    """Catches spans of other nodes that stay there, come twice, or come only when nobody reads any more."""
    handle = start(runs)
    here = node_name().rpartition("-")[0]
    with nodes(["node-b", "node-c"], own=runs) as found:
        b, c, mine = writer("node-b"), writer("node-c"), ray.remote(Writer).options(num_cpus=0.1).remote()
        ray.get([one.write.remote("first", 200) for one in (b, c)])
        assert "node-b" not in {path.name.rpartition("-")[0] for path in (runs / "run" / "spool").iterdir()}
        expected = {("node-b", "first"): 200, ("node-c", "first"): 200}
        wait_for(lambda: by_node(runs / "run") == expected, "they come home while the run goes on")
        ray.get(b.leave_open.remote())
        wait_for(lambda: ("node-b", "open") in by_node(runs / "run"), "what is open is seen")
        assert all(row.process.state == "alive" for row in load_run(runs / "run").spans)
        assert len(actor.relays(handle.run_id)) == 2, "none on the node whose directory it is"
        ray.kill(b)
        found["node-c"].kill()
        again = writer("node-b")
        ray.get([again.write.remote("second", 500), mine.write.remote("second", 50)])
        setup.shutdown_telemetry(20_000)
        expected |= {("node-b", "second"): 500, ("node-b", "open"): 1, (here, "second"): 50}
        assert by_node(runs / "run") == expected
        run = load_run(runs / "run")
        (row,) = [row for row in run.spans if row.name == "open"]
        assert row.truncated
        assert not run.damage
        section = relay_counters(str(runs / "run"))
        assert (section["wrong"], section["summary"]) == (False, ["Relay: spools of 2 nodes brought home"])


def test_where_an_actor_of_another_node_hangs_is_told_at_home_after_its_death_too(runs, capsys):
    """Catches a run held up by a C call on another node, of which the head can tell no more than the span."""
    start(runs, stack_after_s=0.5)
    with nodes(["node-b"], own=runs):
        hangs = ray.remote(Hangs).options(num_cpus=0.1, resources={"node-b": 1}).remote()
        ray.get(hangs.write.remote("first", 1))
        wait_for(lambda: by_node(runs / "run"), "the node's relay brings home what there is")
        hangs.hang.remote()
        run_dir = str(runs / "run")
        told = wait_for(lambda: hung_threads(run_dir), "the stack comes home while it hangs", timeout_s=60)
        ray.kill(hangs)
        wait_for(lambda: any(row.truncated for row in load_run(run_dir).spans), "its death is known", timeout_s=60)
        setup.shutdown_telemetry(20_000)
    assert hung_threads(run_dir) == told
    assert main(["stuck", run_dir]) == 1
    shown = capsys.readouterr().out
    assert "hanging, open for" in shown
    assert "its process held the GIL, then died" in shown
    assert ", in hang\n" in shown


@pytest.mark.skipif(not may_mount(), reason="file systems cannot be mounted here")
def test_a_full_disk_at_home_holds_up_what_comes_and_loses_nothing(runs):
    """Catches a full disk of the driver's that ends relays elsewhere, loses their spools, or that nobody hears of."""
    with mounted(runs, "size=24m"):
        disk = Disk(runs, 24 << 20, real=True)
        start(runs)
        with nodes(["node-b"], own=runs):
            b = writer("node-b")
            ray.get(b.write.remote("first", 200))
            wait_for(lambda: by_node(runs / "run") == {("node-b", "first"): 200}, "they come home")
            disk.fill()
            ray.get(b.write.remote("second", 20_000))
            (node,) = wait_for(lambda: full_nodes(runs / "run"), "it is known that there is no room")
            assert node["home"]["failure"] == "No space left on device"
            assert relay_counters(str(runs / "run"))["wrong"]
            assert {process.state for process in load_run(runs / "run").processes} == {"alive"}
            disk.release()
            expected = {("node-b", "first"): 200, ("node-b", "second"): 20_000}
            wait_for(lambda: by_node(runs / "run") == expected, "they come home once there is room", timeout_s=60)
            setup.shutdown_telemetry(20_000)
        section = relay_counters(str(runs / "run"))
        (node,) = [node for node in section["nodes"] if node["copy"]]
        assert (section["wrong"], node["carried"]["failures"] > 0) == (False, True)
        assert node["carried"]["last_error"] == "OSError: [Errno 28] No space left on device"
        ray.shutdown()


def full_nodes(run_dir):
    """Nodes for whose spools there is no room."""
    return [one for one in relay_counters(str(run_dir))["nodes"] if one["copy"] and one["home"]["failure"]]


def test_every_node_sends_with_the_drivers_credentials(runs, monkeypatch):
    """Catches relays on other nodes that lack the headers, which no environment may carry there."""
    monkeypatch.setattr(asking, "_LOOK_S", 0.5)
    with receiver() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cret")
        settings = {"enabled": True, "span_groups": "all", "heartbeat_s": 0.1, "exporter": "otlp"}
        handle = setup.init_telemetry_driver({**settings, "run_dir": str(runs / "run")})
        assert handle is not None
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_HEADERS")
        start_cluster(num_cpus=2, runtime_env=setup.telemetry_runtime_env())
        setup.attach_to_cluster()
        with nodes(["node-b", "node-c"]):
            workers = [writer("node-b"), writer("node-c"), ray.remote(Writer).options(num_cpus=0.1).remote()]
            ray.get([one.write.remote("work", 300) for one in workers])
            server.wait(lambda: len({span.span_id for span in server.spans()}) == 900, "all arrive")
            assert len(actor.relays(handle.run_id)) == 3
            setup.shutdown_telemetry(20_000)
        assert {metadata.get("api-key") for _, _, metadata in server.attempts} == {"s3cret"}
        assert len(server.spans()) == 900


DRIVER = """
import os, sys
import ray
from raytrace_rl import setup
from tests.conftest import start_cluster
from tests.relay.relay_actors import Writer
from tests.relay.several_nodes import nodes
run_dir = sys.argv[1]
setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "heartbeat_s": 0.1, "run_dir": run_dir,
                             "exporter": "otlp"})
start_cluster(num_cpus=2, runtime_env=setup.telemetry_runtime_env())
setup.attach_to_cluster()
with nodes(["node-b", "node-c"]):
    where = [{"node-b": 1}, {"node-c": 1}, {}]
    workers = [ray.remote(Writer).options(num_cpus=0.1, resources=one).remote() for one in where]
    ray.get([one.write.remote("work", 1000) for one in workers])
    ray.get([one.leave_open.remote() for one in workers])
    ray.shutdown()
os._exit(0)
"""


@pytest.mark.parametrize("reachable", [True, False])
def test_push_completes_a_run_whose_driver_shut_ray_down_and_not_telemetry(tmp_path, monkeypatch, capsys, reachable):
    """Catches a run of three nodes that is incomplete for good because its driver ended as most drivers do."""
    with receiver() as server:
        port = server.port
        if reachable:
            drive(tmp_path, server.url)
    if not reachable:
        drive(tmp_path, f"http://127.0.0.1:{port}")
    before = server.spans()
    with receiver(port) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        assert main(["push", str(tmp_path / "run")]) == 0, capsys.readouterr()
        spans = {span.span_id: span for span in [*before, *server.spans()]}
        assert Counter(span.name for span in spans.values()) == {"work": 3000, "open": 3}
        assert main(["push", str(tmp_path / "run")]) == 0
        assert "nothing to send" in capsys.readouterr().out
    assert bool(before) is reachable


def drive(tmp_path: Path, url: str) -> None:
    """Runs the driver to its end in a process of its own."""
    import os

    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url}
    subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "run")],
        env=env,
        cwd=Path(__file__).parent,
        check=True,
        timeout=200,
    )
