from __future__ import annotations

import socket
import sys
import time
from collections import Counter

import pytest

from raytrace_rl import _env_otlp
from raytrace_rl.cli import main
from raytrace_rl.relay import push
from raytrace_rl.relay.relay import Relay
from raytrace_rl.spool.format import Kind, pack_record
from tests import spooling, writers
from tests.relay.otlp_server import partial_success
from tests.spooling import Spool, ended, span

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.relay_fixtures"]


@pytest.fixture
def server(server, monkeypatch):
    """A receiver in this process, and the environment says so."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    return server


@pytest.fixture
def run_dir(tmp_path):
    """A run of two nodes: a process that closed here, a dead one of another host with a span open."""
    one = Spool(tmp_path / "run", "node-a")
    logs = pack_record(Kind.LOGS, b"\x12\x00")
    one.segment(1, ended(*[span(n, 0, 1) for n in range(10)]) + logs, sealed=True)
    other = Spool(tmp_path / "run", "node-b")
    other.segment(2, ended(*[span(n, 0, 1) for n in range(10, 20)]), boot_id=b"x" * 16)
    other.slots(2, [span(99, 0, None)], boot_id=b"x" * 16)
    other.live_file(2)
    return tmp_path / "run"


def test_every_node_is_sent_and_only_once(server, run_dir, capsys):
    """Catches a node that is left out, what is sent twice, and a span closed for a process that may live elsewhere."""
    assert main(["push", str(run_dir)]) == 0
    assert server.numbers() == list(range(20))
    out = capsys.readouterr().out
    assert "node-a: 10 spans sent, 1 log messages sent" in out
    assert "complete" in out
    assert main(["push", str(run_dir)]) == 0
    assert len(server.spans()) == 20
    assert "nothing to send" in capsys.readouterr().out


def test_it_goes_on_where_a_relay_was_killed(server, run_dir):
    """Catches a push that sends what the run's relay has sent."""
    node_dir = push.nodes(run_dir)[0]
    relay = Relay(node_dir, _env_otlp.settings())
    assert relay.acquire()
    lane = relay.lanes[0]
    lane.tail.acknowledge(lane.tail.read(1 << 20, 4))
    lane.cursors.save()
    relay.stop()
    assert main(["push", str(run_dir)]) == 0
    assert Counter(server.numbers()) == Counter(range(4, 20))


def test_again_sends_everything_anew(server, run_dir):
    """Catches a collector that lost its data and cannot be filled once more."""
    for _ in range(2):
        assert main(["push", str(run_dir), "--again"]) == 0
    assert Counter(server.numbers()) == Counter([*range(20), *range(20)])
    assert main(["push", str(run_dir)]) == 0
    assert len(server.spans()) == 40


def test_a_killed_process_of_this_host_is_completed(server, tmp_path):
    """Catches open spans of a dead run that never arrive, and its memory files."""
    with writers.worker(tmp_path / "run") as worker:
        worker.tell("write 20")
        worker.tell("open")
        worker.kill()
    assert main(["push", str(tmp_path / "run")]) == 0
    assert Counter(one.name for one in server.spans()) == {"s": 20, "open": 1}


def test_an_incomplete_push_says_why(run_dir, monkeypatch, capsys):
    """Catches a dead collector that looks like success, to a person or a script."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    begun = time.monotonic()
    assert main(["push", str(run_dir), "--timeout", "1"]) == 1
    assert time.monotonic() - begun < 4
    said = capsys.readouterr()
    assert "incomplete" in said.out
    assert "UNAVAILABLE" in said.err


def test_refusals_are_told(server, run_dir, capsys):
    """Catches spans that the receiver did not take and that count as sent."""
    server.answers.append(partial_success(3, "too old"))
    for _ in range(2):
        assert main(["push", str(run_dir)]) == 1
        out = capsys.readouterr().out
        assert "3 spans rejected by the receiver" in out
        assert out.endswith(": incomplete\n")


def test_a_node_with_a_relay_is_left_to_it(server, run_dir, capsys):
    """Catches a push into a running run that sends everything beside its relay."""
    relay = Relay(push.nodes(run_dir)[0], _env_otlp.settings())
    assert relay.acquire()
    assert main(["push", str(run_dir), "--timeout", "5"]) == 1
    assert "node-a: a relay is at work" in capsys.readouterr().out
    assert server.numbers() == list(range(10, 20))
    relay.stop()


def test_a_directory_that_cannot_be_written_is_not_a_relay_at_work(server, run_dir, capsys):
    """Catches somebody who waits for a relay that is not there, before a read-only archive."""
    for node_dir in push.nodes(run_dir):
        (node_dir / "relay").write_text("in the way, for root too")
    assert main(["push", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "at work" not in out
    assert out.count("cannot be written") == 2


def test_a_run_that_goes_on_is_sent_as_far_as_it_is(server, tmp_path, capsys):
    """Catches a live run's spans that wait for its end, and a push that does not say that more will come."""
    spool = Spool(tmp_path / "run")
    live = spool.alive(1)
    spool.segment(1, ended(span(1, 0, 1)), pad=1000)
    spool.slots(1, [span(2, 0, None)])
    assert main(["push", str(tmp_path / "run")]) == 0
    assert server.numbers() == [1]
    assert "processes still write there" in capsys.readouterr().err
    live.release()


@pytest.mark.parametrize("missing", ["spool", "grpc"])
def test_what_cannot_be_pushed_is_one_line(run_dir, tmp_path, monkeypatch, capsys, missing):
    """Catches a traceback for a wrong directory, or for the extra that is not installed."""
    if missing == "grpc":
        monkeypatch.setitem(sys.modules, "grpc", None)
    assert main(["push", str(run_dir if missing == "grpc" else tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("raytrace-rl: ")


def test_damage_is_passed_over(server, tmp_path):
    """Catches a damaged file behind which nothing is sent."""
    spool = Spool(tmp_path / "run")
    spool.segment(1, ended(span(1, 0, 1)) + b"rubbish" * 100 + ended(span(2, 0, 1)), sealed=True)
    (spool.node_dir / f"2-{spooling.T0}.0.rts").write_bytes(b"\xff" * 5000)
    assert main(["push", str(tmp_path / "run")]) == 0
    assert server.numbers() == [1, 2]
