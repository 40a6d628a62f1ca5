"""What a relay counts: nothing is forgotten with a kill, nothing counted twice, and all of it can be read by others."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import grpc
import pytest

from raytrace_rl import _env_otlp
from raytrace_rl.cli import main
from raytrace_rl.monitor.relay_counters import relay_counters
from raytrace_rl.relay import lane, notes, refusal, status
from raytrace_rl.relay.cursors import noted
from raytrace_rl.relay.relay import Relay
from tests import disks
from tests.relay.otlp_server import Refusal, partial_success, receiver
from tests.running import child, wait_for
from tests.spooling import Spool, ended, span

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.relay_fixtures"]
pytestmark = pytest.mark.usefixtures("quick_retries")

SEED = 20_260_802
SPANS = 30_000

RELAY = """
import sys, threading
from raytrace_rl import _env_otlp
from raytrace_rl.relay import lane, relay, retry

lane.MAX_RECORDS = 300
retry.FIRST_S, retry.LONGEST_S, relay._TEND_S = 0.01, 0.05, 0.02
running = relay.Relay(sys.argv[1], _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": sys.argv[2]}))
assert running.acquire(10)
running.start()
threading.Event().wait()
"""


@pytest.fixture
def spool(tmp_path):
    """A run directory with one node, and in it one process that has closed, with ten spans."""
    found = Spool(tmp_path / "run")
    found.segment(1, ended(*[span(n, 0, 1) for n in range(10)]), sealed=True, span_count=10)
    return found


def push(spool, url, seconds=20.0):
    """Sends what there is, as ``raytrace-rl push`` does; whether all of it is settled."""
    relay = Relay(spool.node_dir, _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url}))
    assert relay.acquire()
    try:
        return relay.finish(time.monotonic() + seconds)
    finally:
        relay.stop()


@contextmanager
def relaying(spool, url):
    """A relay in a process of its own, killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", RELAY, str(spool.node_dir), url])
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def dead_url():
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def signal_of(spool, name="traces"):
    """A signal's entry in the report, and the report's section."""
    section = relay_counters(str(spool.run_dir))
    (node,) = section["nodes"]
    (found,) = [one for one in node["signals"] if one["signal"] == name and one["current"]]
    return found, section


def test_no_kill_of_a_relay_costs_or_doubles_a_count(spool, monkeypatch):
    """Catches spans refused for good of which nobody knows, since the relay that knew was killed; or known twice."""
    rng = random.Random(SEED)
    spool.segment(1, ended(*[span(n, 0, 1) for n in range(10, SPANS)]), 1, sealed=True, span_count=SPANS - 10)
    with receiver() as server:
        taken = server.handle

        def moody(service, data, context):
            answer = taken(service, data, context)
            mood = len(server.attempts) % 5
            if mood == 1:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such tenant")
            return partial_success(2, "too old") if mood == 3 else answer

        def settled():
            return sum(one.tally["sent"] + one.tally["dropped"] for one in noted(spool.node_dir))

        def reached(goal):
            return len(server.attempts) >= goal or settled() == SPANS

        monkeypatch.setattr(server, "handle", moody)
        kills = 0
        while not settled() or signal_of(spool)[0]["unsent"]:
            with relaying(spool, server.url):
                server.wait(partial(reached, len(server.attempts) + rng.randrange(5, 25)), "it goes on")
                time.sleep(rng.uniform(0, 0.05))
            kills += 1
        found, section = signal_of(spool)
    assert kills >= 2, "how many depends on how fast they come"
    assert found["sent"] + found["dropped"] == SPANS
    assert found["dropped"] >= SPANS // 10
    assert found["rejected"] > 0
    assert found["rejected"] % 2 == 0
    assert (section["wrong"], found["last_error"]) == (True, found["last_error"])


def test_what_keeps_a_relay_is_known_although_it_was_killed(spool):
    """Catches a run that ended with nothing sent, and a report that cannot say why, or says that all is well."""
    url = dead_url()
    with relaying(spool, url):
        wait_for(lambda: noted(spool.node_dir) and signal_of(spool)[0]["retries"] >= 3, "it has tried")
        found, section = signal_of(spool)
        assert section["nodes"][0]["running"]
    found, section = signal_of(spool)
    assert not section["nodes"][0]["running"]
    assert (found["sent"], found["unsent"], found["acknowledged_ns"]) == (0, 10, None)
    assert found["unsent_bytes"] > 300
    assert found["failure"].startswith("UNAVAILABLE")
    assert found["last_error_ns"] > time.time_ns() - 60e9
    first, second = section["summary"]
    assert "10 records unsent" in first
    assert "raytrace-rl push" in second
    with receiver() as server:
        assert push(spool, server.url)
        found, section = signal_of(spool)
    assert (found["sent"], found["unsent"], found["failure"], section["wrong"]) == (10, 0, None, False)
    assert section["summary"][0].startswith("Relay: all 10 records acknowledged")


def test_unsent_is_what_a_push_sends(spool):
    """Catches a lag that is a guess: open spans of the dead left out, those of the living counted."""
    spool.segment(2, ended(*[span(n, 0, 1) for n in range(100, 103)]))
    spool.slots(2, [span(200, 0, None), span(201, 0, None)])
    spool.live_file(2)
    live = spool.alive(3)
    spool.segment(3, ended(span(300, 0, 1)), pad=10_000)
    spool.slots(3, [span(301, 0, None)])
    assert not push(spool, dead_url(), 0.3)
    unsent = signal_of(spool)[0]["unsent"]
    with receiver() as server:
        assert push(spool, server.url)
        assert len(server.spans()) == unsent == 10 + 3 + 2 + 1
    live.release()


def test_another_destination_does_not_count_what_the_first_one_lacks(spool):
    """Catches a run whose collector was moved that is said to be unsent for ever."""
    assert not push(spool, dead_url(), 0.3)
    assert relay_counters(str(spool.run_dir))["wrong"]
    with receiver() as server:
        assert push(spool, server.url)
    _, section = signal_of(spool)
    assert (section["sent"], section["unsent"], section["wrong"]) == (10, 0, False)
    assert [one["current"] for one in section["nodes"][0]["signals"]].count(True) == 3


def test_everything_anew_forgets_what_was_refused_before(spool, monkeypatch):
    """Catches a run that was completed by ``push --again`` and is said to lack spans for ever."""
    with receiver() as server:
        server.answers.append(Refusal(grpc.StatusCode.UNAUTHENTICATED, "no such token"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        assert main(["push", str(spool.run_dir)]) == 1
        assert main(["push", str(spool.run_dir)]) == 1, "not complete, although there is nothing left to send"
        found, section = signal_of(spool)
        assert (found["dropped"], section["wrong"]) == (10, True)
        assert "push --again" in section["summary"][1]
        assert "no such token" in section["summary"][1]
        assert main(["push", "--again", str(spool.run_dir)]) == 0
        found, section = signal_of(spool)
    assert (found["dropped"], found["sent"], section["wrong"]) == (0, 10, False)


def test_a_record_too_large_for_the_receiver_is_dropped_alone_and_counted(spool, monkeypatch):
    """Catches one record that takes those around it along, or goes without a count."""
    monkeypatch.setattr(lane, "_LEAST_BYTES", 1000)
    spool.segment(1, ended(span(10, 0, 1, note="x" * 100_000), span(11, 0, 1)), 1, sealed=True)
    with receiver(options=[("grpc.max_receive_message_length", 50_000)]) as server:
        assert push(spool, server.url)
        assert sorted(server.numbers()) == [*range(10), 11]
    found, section = signal_of(spool)
    assert (found["sent"], found["dropped"], section["wrong"]) == (11, 1, True)
    assert found["too_large"] >= 2
    assert "larger than max" in found["last_error"]


def test_time_outs_are_counted_as_such(spool):
    """Catches a slow receiver that looks like one which is down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        relay = Relay(spool.node_dir, _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url}))
        assert relay.acquire()
        assert not relay.finish(time.monotonic() + 0.5)
        relay.stop()
    found, _ = signal_of(spool)
    assert (found["timed_out"], found["retries"]) == (1, 1)


def test_segments_removed_by_a_relay_that_was_killed_there_and_then_are_counted(spool):
    """Catches spans that are gone from the run directory, and of which no relay says that it has removed them."""
    paths = [spool.segment(1, b"", number, sealed=True, span_count=number) for number in (1, 2)]
    killed = status.Status(spool.node_dir)
    killed.removing({path.name: (7, 100) for path in paths})
    paths[0].unlink()
    assert status.read(spool.node_dir)[status.FREED] == {"spans": 7, "bytes": 100}
    following = status.Status(spool.node_dir)
    following.write({})
    assert status.read(spool.node_dir)[status.FREED] == {"spans": 7, "bytes": 100}
    following.removing({paths[1].name: (5, 50)})
    paths[1].unlink()
    following.removed({"spans": 5, "bytes": 50})
    assert status.read(spool.node_dir)[status.FREED] == {"spans": 12, "bytes": 150}


def test_a_node_without_grpc_says_so_until_it_has_a_relay(spool, tmp_path):
    """Catches the commonest mistake of an installation, of which only the worker's log knows."""
    code = """
    import sys
    sys.modules["grpc"] = None
    from raytrace_rl import setup
    from raytrace_rl.instrumentation import managed_span
    setup.init_telemetry_driver(
        {"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "exporter": "otlp", "heartbeat_s": 0.05}
    )
    with managed_span("generation", "s"):
        pass
    """
    child(code, tmp_path / "without")
    section = relay_counters(str(tmp_path / "without"))
    assert section["wrong"]
    assert "raytrace-rl[otlp]" in section["summary"][1]
    refusal.note(spool.node_dir, "No module named 'grpc'")
    assert relay_counters(str(spool.run_dir))["wrong"]
    with receiver() as server:
        relay = Relay(spool.node_dir, _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": server.url}))
        assert relay.acquire()
        relay.start()
        assert relay.drain(20)
        relay.stop()
    assert not relay_counters(str(spool.run_dir))["wrong"]


def test_a_note_finds_its_place_on_a_full_disk(tmp_path, monkeypatch):
    """Catches the count of what had no room, which had no room either."""
    with disks.small_disk(tmp_path / "disk", monkeypatch, mib=1) as disk:
        if not disk.real:
            pytest.skip("needs a real file system: this process may not mount")
        path = disk.path / "relay" / "home.json"
        assert notes.replace_somehow(path, {"version": 1, "refused": 0})
        disk.fill()
        assert notes.replace_somehow(path, {"version": 1, "refused": 17})
        assert notes.read(path, 1) == {"version": 1, "refused": 17}
        assert not notes.replace_somehow(path.with_name("other.json"), {"version": 1})
        assert not notes.replace_somehow(path, {"version": 1, "text": "x" * 5000})
        assert [one.name for one in path.parent.iterdir()] == ["home.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "processes": 3, "finished": []}', "\xff"])
def test_damaged_notes_are_no_counts(spool, text):
    """Catches a report that dies of a note which a full disk cut short, or was written by another version."""
    directory = spool.node_dir / "relay"
    directory.mkdir()
    for name in ("traces-01234567.json", "status.json", "home.json", "refusal.json"):
        (directory / name).write_text(text)
    section = relay_counters(str(spool.run_dir))
    assert section["sent"] == 0
    assert os.listdir(spool.run_dir) == ["spool"]  # noqa: PTH208
