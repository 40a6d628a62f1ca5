from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.relay.lock import NodeLock
from tests.running import attributes, child, wait_for

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.relay_fixtures"]

SCRIPT = """
import sys, time
from raytrace_rl import setup
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.relay import asking
{before}
handle = setup.init_telemetry_driver(
    {{"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "exporter": "otlp", "heartbeat_s": 0.05}}
)
for n in range(100):
    with managed_span("generation", "s", n=n):
        pass
{after}
"""


def script(before="", after=""):
    """A driver without Ray that writes a hundred spans."""
    return SCRIPT.format(before=before, after=textwrap.dedent(after))


def names(server):
    """How many spans of each name have arrived."""
    return Counter(span.name for span in server.spans())


def test_a_plain_script_sends_everything_by_its_end(server, tmp_path):
    """Catches a script too short for any relay whose spans are never sent."""
    done = child(script(), tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=server.url)
    assert names(server) == {"s": 100}
    assert "Not everything" not in done.stderr
    (request,) = [request for name, request in server.received if name == "TraceService"]
    assert attributes(request.resource_spans[0].resource)["rl.role"] == "driver"


def test_a_longer_script_sends_while_it_runs(server, tmp_path):
    """Catches spans that arrive only when the process ends, or never because it was killed."""
    code = script(before="asking._GRACE_S = 0.1", after="time.sleep(600)")
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": server.url}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], env=env) as process:
        server.wait(lambda: names(server) == {"s": 100}, "they arrive while it runs")
        process.kill()


def test_open_spans_at_the_end_are_sent_as_truncated(server, tmp_path):
    """Catches an order of the end in which spans are ended after the relay has looked for the last time."""
    child(
        script(after='managed_span("generation", "open").__enter__()'),
        tmp_path / "run",
        OTEL_EXPORTER_OTLP_ENDPOINT=server.url,
    )
    (found,) = [span for span in server.spans() if span.name == "open"]
    assert attributes(found)["rl.truncated"] is True


@pytest.mark.parametrize("kind", ["dead", "black hole"])
@pytest.mark.parametrize("running", [False, True])
def test_a_collector_that_is_not_there_costs_the_exit_no_more_than_its_deadline(tmp_path, kind, running):
    """Catches a training process that cannot end because of its telemetry."""
    measured = """
    before = time.monotonic()
    setup.shutdown_telemetry(1000)
    print(time.monotonic() - before)
    import atexit
    atexit.register(lambda: print("over", time.monotonic()))
    """
    begun = "asking._GRACE_S = 0.05" if running else ""
    wait = "while handle._process.asker._relay is None: time.sleep(0.01)\n" if running else ""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if kind == "dead":
            listener.close()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}" if kind != "dead" else "http://127.0.0.1:9"
        done = child(
            script(begun, textwrap.dedent(wait) + textwrap.dedent(measured)),
            tmp_path / "run",
            OTEL_EXPORTER_OTLP_ENDPOINT=url,
        )
    assert float(done.stdout.split()[0]) < 1.5
    assert "raytrace-rl push" in done.stderr


def test_several_processes_without_ray_have_one_relay(server, tmp_path):
    """Catches each of a node's ranks sending the spans of all of them."""
    code = """
    import sys
    from raytrace_rl import setup
    from raytrace_rl.instrumentation import managed_span
    from raytrace_rl.relay import asking
    asking._GRACE_S = 0.05
    handle = setup.init_telemetry_worker()
    print("ready", flush=True)
    for line in sys.stdin:
        for n in range(100):
            with managed_span("generation", f"rank {sys.argv[1]}"):
                pass
        print("done", flush=True)
    setup.shutdown_telemetry()
    """
    env = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": server.url,
        "RAYTRACE_RL_ENABLED": "1",
        "RAYTRACE_RL_RUN_DIR": str(tmp_path / "run"),
        "RAYTRACE_RL_RUN_ID": "r",
        "RAYTRACE_RL_EXPORTER": "otlp",
        "RAYTRACE_RL_SPAN_GROUPS": "all",
        "RAYTRACE_RL_HEARTBEAT_S": "0.05",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(rank)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        assert [rank.stdout.readline().strip() for rank in ranks] == ["ready"] * 3
        (node_dir,) = (tmp_path / "run" / "spool").iterdir()
        for rank in ranks:
            rank.stdin.write("go\n")
            rank.stdin.flush()
            assert rank.stdout.readline().strip() == "done"
        server.wait(lambda: names(server) == {f"rank {n}": 100 for n in range(3)}, "all arrive")
        noted = node_dir / "relay" / "status.json"
        pid = wait_for(lambda: noted.exists() and json.loads(noted.read_text())["pid"], "the relay has a name")
        assert NodeLock(node_dir).is_held()
        os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            rank.stdin.close()
            rank.wait(30)
        assert names(server) == {f"rank {n}": 100 for n in range(3)}
    finally:
        for rank in ranks:
            rank.kill()


def test_the_settings_of_the_other_exporters_start_no_relay(tmp_path):
    """Catches a process that sends although nobody has asked it to."""
    done = child(
        """
        import sys
        from raytrace_rl import setup, _process
        setup.init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1]})
        _process.current.asker._look_at = 0
        _process.current.asker.tick()
        assert _process.current.asker._thread is None
        setup.shutdown_telemetry()
        print([name for name in sys.modules if name.startswith("grpc")])
        """,
        tmp_path / "run",
    )
    assert json.loads(done.stdout) == []


def test_a_child_of_a_rays_worker_leaves_sending_to_the_nodes_relay(server, tmp_path):
    """Catches an engine's process that sends in a relay's place, without the headers that only that one was told."""
    code = """
    from raytrace_rl import setup, _process
    from raytrace_rl.instrumentation import managed_span
    from raytrace_rl.relay import asking
    asking._GRACE_S = 0
    setup.init_telemetry_worker()
    with managed_span("generation", "s"):
        pass
    asker = _process.current.asker
    asker._look_at = 0
    asker.tick()
    assert asker._thread is None
    setup.shutdown_telemetry()
    """
    about = {"RUN_DIR": str(tmp_path / "run"), "RUN_ID": "r", "ENABLED": "1", "SPAN_GROUPS": "all", "EXPORTER": "otlp"}
    environ = {f"RAYTRACE_RL_{name}": value for name, value in about.items()}
    child(code, tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=server.url, RAY_RAYLET_PID="1", **environ)
    assert not server.received
    assert [span.name for span in load_run(tmp_path / "run").spans] == ["s"]


def test_a_missing_grpc_is_one_warning_that_names_the_extra(tmp_path):
    """Catches a worker environment without the extra in which nobody learns why nothing arrives."""
    done = child(script(before="sys.modules['grpc'] = None"), tmp_path / "run")
    assert done.stderr.count("raytrace-rl[otlp]") == 1


def test_a_forked_child_leaves_its_parents_relay_alone(server, tmp_path):
    """Catches a child that stops, or waits for, a relay whose threads it does not have."""
    after = """
    import os
    while handle._process.asker._relay is None:
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        with managed_span("generation", "child"):
            pass
        begun = time.monotonic()
        setup.shutdown_telemetry()
        os._exit(0 if time.monotonic() - begun < 4 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    """
    child(script("asking._GRACE_S = 0.05", after), tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=server.url)
    # Told apart by id: gRPC's connection may break as the child ends, and what was not acknowledged is sent again.
    assert Counter({span.span_id: span.name for span in server.spans()}.values()) == {"s": 100, "child": 1}


def test_the_next_start_in_the_process_sends_again(server, tmp_path):
    """Catches a process that can relay only once."""
    after = """
    for run in ("2", "3"):
        setup.shutdown_telemetry()
        setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": sys.argv[1] + run,
                                     "exporter": "otlp"})
        with managed_span("generation", run):
            pass
    """
    begun = time.monotonic()
    child(script(after=after), tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=server.url)
    assert names(server) == {"s": 100, "2": 1, "3": 1}
    assert time.monotonic() - begun < 30
