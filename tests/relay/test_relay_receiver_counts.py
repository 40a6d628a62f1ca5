"""What a local receiver refuses is counted, before its sender hears of it; what it holds in memory is bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from raytrace_rl import _state
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.relay_counters import relay_counters
from raytrace_rl.relay import address, status
from raytrace_rl.relay import receiver as module
from raytrace_rl.relay.requests import SIGNALS
from raytrace_rl.spool import bound, writer
from tests import spooling
from tests.relay.receiving import post, traces
from tests.running import wait_for

pytest_plugins = ["tests.telemetry_fixtures", "tests.relay.receiver_fixtures"]

TOO_LARGE = traces(spooling.span(1, 0, 1, note="x" * (2 << 20)), spooling.span(2, 0, 1)).SerializeToString()


def counts(node_dir):
    """What stands in the note, those that are not 0."""
    return {name: n for name, n in status.read(node_dir).get(status.RECEIVER, {}).items() if n}


def export(data):
    """Sends bytes over the socket; the status code."""
    with grpc.insecure_channel(address.local_endpoint("r")) as channel:
        try:
            channel.unary_unary(SIGNALS["traces"].method)(data, timeout=20)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: post(b"", path="/v1/nothing"), "invalid"),
        (lambda: post(b"{}", kind="application/json"), "invalid"),
        (lambda: post(b"\xff\xff"), "invalid"),
        (lambda: export(b"\xff\xff"), "invalid"),
        (lambda: _announce(1 << 30), "too_large"),
        (lambda: post(TOO_LARGE), "rejected"),
        (lambda: export(TOO_LARGE), "rejected"),
    ],
    ids=["path", "type", "rubbish", "rubbish over gRPC", "length", "record", "record over gRPC"],
)
def test_what_its_sender_will_not_send_again_is_noted_before_the_answer(relay, node_dir, make, name):
    """Catches a refusal that nobody but its sender knows of, or that is forgotten with a relay that is killed."""
    make()
    assert counts(node_dir)[name] == 1
    section = relay_counters(str(node_dir.parent.parent))
    assert section["wrong"]
    assert "1 requests or items refused by the local receiver" in section["summary"][0]


def _announce(length):
    """Begins a request that says to be ``length`` bytes long; the status."""
    import http.client

    url, token = wait_for(lambda: address.local_http_endpoint("r"), "it listens")
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.putrequest("POST", "/v1/traces")
    for key, value in {"Authorization": f"Bearer {token}", "Content-Type": "application/x-protobuf"}.items():
        connection.putheader(key, value)
    connection.putheader("Content-Length", str(length))
    connection.endheaders()
    found = connection.getresponse().status
    connection.close()
    return found


def test_strangers_are_counted_and_lose_nothing(relay, node_dir):
    """Catches a port scan that looks like lost spans."""
    assert post(b"", token="wrong")[0] == 401
    assert post(traces(spooling.span(1, 0, 1)).SerializeToString())[0] == 200
    wait_for(lambda: counts(node_dir) == {"unauthorised": 1, "requests": 1}, "they are noted")
    assert not relay_counters(str(node_dir.parent.parent))["wrong"]


def test_no_room_is_the_senders_to_send_again(relay, node_dir, monkeypatch):
    """Catches spans acknowledged that had no room, and a full disk that looks like lost spans."""
    assert post(traces(spooling.span(1, 0, 1)).SerializeToString())[0] == 200
    monkeypatch.setattr(writer.SpoolWriter, "append", lambda *_: False)
    assert post(traces(spooling.span(2, 0, 1)).SerializeToString())[0] == 503
    assert export(traces(spooling.span(2, 0, 1)).SerializeToString()) == "UNAVAILABLE"
    wait_for(lambda: counts(node_dir) == {"requests": 1, "no_room": 2}, "they are noted")
    assert not relay_counters(str(node_dir.parent.parent))["wrong"]


def test_what_the_bound_takes_in_the_relay_is_counted_once(relay, node_dir, monkeypatch):
    """Catches spans dropped in a relay's own process, of which nobody is told, or that each sender's spool counts."""
    monkeypatch.setitem(_state.drops, "spans", _state.drops["spans"])
    monkeypatch.setattr(_state, "config", None)  # a process of the relay's own, whatever other tests have started here
    for name in ("a", "b", "c"):
        assert post(traces(spooling.span(1, 0, 1), name=name).SerializeToString())[0] == 200
    bound._count_dropped(7, 1000)
    wait_for(lambda: counts(node_dir).get("dropped_spans") == 7, "it is noted")
    relay.stop()
    run = load_run(node_dir.parent.parent)
    assert sum(process.drops.get("spans", 0) for process in run.processes) == 0
    section = relay_counters(str(node_dir.parent.parent))
    assert "7 spans dropped beyond the bound by the local receiver" in section["summary"][0]


def test_counts_go_on_where_a_killed_relay_left_them(node_dir, root):
    """Catches rejections that are forgotten with a kill, which no sender repeats."""
    code = """
    import sys, threading
    from raytrace_rl.relay import address
    from raytrace_rl.relay.relay import relay_for
    from raytrace_rl.relay.work import Work
    address._ROOT = sys.argv[2]
    relay = relay_for(Work(sys.argv[1], "r", receives=True))
    assert relay.acquire(10)
    relay.start()
    threading.Event().wait()
    """
    for n in range(1, 4):
        command = [sys.executable, "-c", textwrap.dedent(code), str(node_dir), root]
        with subprocess.Popen(command) as process:
            try:
                wait_for(lambda: _reached(), "it listens")
                assert post(TOO_LARGE)[0] == 200
            finally:
                os.kill(process.pid, signal.SIGKILL)
        address.http_path("r").unlink()
        assert counts(node_dir)["rejected"] == n


def _reached():
    try:
        return post(b"", path="/v1/nothing")[0] == 404
    except OSError:
        return False


def test_only_so_many_bodies_are_in_memory_at_a_time(relay, monkeypatch):
    """Catches a receiver whose memory is as large as what all its senders have to send at once."""
    inside, most, lock, go = 0, 0, threading.Lock(), threading.Event()
    real = relay._receiver.take

    def slow(signal, data):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        go.wait(20)
        with lock:
            inside -= 1
        return real(signal, data)

    monkeypatch.setattr(relay._receiver, "take", slow)
    data = traces(spooling.span(1, 0, 1)).SerializeToString()
    with ThreadPoolExecutor(32) as pool:
        answers = [pool.submit(post, data) for _ in range(32)]
        wait_for(lambda: inside == module._THREADS, "as many as may are inside")
        go.set()
        assert {answer.result()[0] for answer in answers} == {200}
    assert most == module._THREADS
