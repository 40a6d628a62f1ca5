from __future__ import annotations

import socket
import threading
import time
from collections import Counter

import grpc
import pytest

from raytrace_rl._env_otlp import endpoint
from raytrace_rl.relay import lane as module
from raytrace_rl.relay import sampling
from raytrace_rl.relay.lane import Lane
from raytrace_rl.relay.requests import SIGNALS
from raytrace_rl.relay.sender import sender_for
from raytrace_rl.spool.format import Kind, pack_record
from tests import spooling
from tests.relay.otlp_server import Refusal, partial_success, receiver
from tests.running import wait_for
from tests.spooling import Spool, ended, span

pytest_plugins = ["tests.relay.relay_fixtures"]
pytestmark = pytest.mark.usefixtures("quick_retries")

P = "OTEL_EXPORTER_OTLP_"
Code = grpc.StatusCode


@pytest.fixture
def spool(tmp_path):
    """A run directory with one node, and in it one living process with ten spans."""
    found = Spool(tmp_path / "run")
    found.live = found.alive(1)
    add(found, range(10))
    return found


def add(spool, numbers, number=0):
    """Writes a segment of the living process."""
    spool.segment(1, ended(*[span(n, 0, 1) for n in numbers]), number, pad=1000)


def lane_to(url, spool, signal="traces", sampler=None, **variables):
    """A lane as the environment describes it."""
    environ = {P + "ENDPOINT": url, **{P + name: str(value) for name, value in variables.items()}}
    found = endpoint(signal, environ)
    assert found is not None
    return Lane(spool.node_dir, SIGNALS[signal], found, sender_for(SIGNALS[signal], found), sampler)


def finish(lane, seconds=20.0, **options):
    """Sends what there is; whether all of it is acknowledged."""
    return lane.finish(time.monotonic() + seconds, **options)


def test_everything_is_sent_and_acknowledged(server, spool):
    """Catches a cursor that moves without, or does not move with, an acknowledgement."""
    lane = lane_to(server.url, spool)
    assert finish(lane)
    assert server.numbers() == list(range(10))
    assert (lane.counts.sent, lane.counts.requests, lane.counts.retries) == (10, 1, 0)
    assert finish(lane_to(server.url, spool))
    assert len(server.spans()) == 10


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.ABORTED, Code.DATA_LOSS])
def test_a_retryable_failure_is_tried_again_until_it_passes(server, spool, code):
    """Catches spans dropped because a collector was away for a moment."""
    server.answers += [Refusal(code)] * 5
    lane = lane_to(server.url, spool)
    assert finish(lane)
    assert server.numbers() == list(range(10))
    assert lane.counts.retries == 5


def test_a_refusal_for_good_is_dropped_counted_and_named(server, spool, caplog):
    """Catches one bad request that holds up everything behind it, or is lost in silence."""
    server.answers.append(Refusal(Code.INVALID_ARGUMENT, "no such tenant"))
    lane = lane_to(server.url, spool)
    assert finish(lane)
    assert (lane.counts.dropped, lane.counts.sent) == (10, 0)
    assert "no such tenant" in caplog.text
    add(spool, [10], 1)
    wait_for(lambda: finish(lane) and server.numbers() == [10], "what follows is sent")


def test_resource_exhausted_waits_as_long_as_it_is_told(server, spool):
    """Catches a collector under pressure that is pressed on, before the delay which it asked for."""
    server.answers.append(Refusal(Code.RESOURCE_EXHAUSTED, "busy", retry_s=0.4))
    lane = lane_to(server.url, spool)
    begun = time.monotonic()
    assert finish(lane)
    assert time.monotonic() - begun >= 0.4
    assert server.numbers() == list(range(10))


def test_resource_exhausted_without_a_delay_is_dropped(server, spool):
    """Catches retries that the OTLP specification forbids."""
    server.answers.append(Refusal(Code.RESOURCE_EXHAUSTED, "full"))
    lane = lane_to(server.url, spool)
    assert finish(lane)
    assert (lane.counts.dropped, len(server.attempts)) == (10, 1)


def test_partial_success_is_counted_and_not_sent_again(server, spool, caplog):
    """Catches spans sent again of which the receiver has said that it will never take them."""
    server.answers.append(partial_success(3, "too old"))
    lane = lane_to(server.url, spool)
    assert finish(lane)
    assert (lane.counts.sent, lane.counts.rejected, len(server.attempts)) == (10, 3, 1)
    assert "too old" in caplog.text


def test_a_receiver_with_a_small_limit_gets_smaller_requests(spool, monkeypatch):
    """Catches spans dropped by a receiver that would take them in smaller pieces."""
    monkeypatch.setattr(module, "_LEAST_BYTES", 1000)
    add(spool, range(10, 2000), 1)
    with receiver(options=[("grpc.max_receive_message_length", 50_000)]) as server:
        lane = lane_to(server.url, spool)
        assert finish(lane)
        assert sorted(server.numbers()) == list(range(2000))
        assert lane.counts.dropped == 0
        before = len(server.attempts)
        add(spool, range(2000, 4000), 2)
        wait_for(lambda: finish(lane) and len(server.spans()) == 4000, "it remembers")
        assert all(size < 50_000 for _, size, _ in server.attempts[before:])


def test_requests_stay_below_the_default_limit_of_grpc(server, spool):
    """Catches a batch that no receiver with default settings takes."""
    add(spool, range(10, 60_000), 1)
    assert finish(lane_to(server.url, spool))
    assert Counter(server.numbers()) == Counter(range(60_000))
    assert max(size for _, size, _ in server.attempts) < 4 << 20
    assert len(server.attempts) == 8, "and is full otherwise: 8,192 spans"


def test_a_dead_port_gives_up_at_once_when_told_to(spool):
    """Catches a script whose exit waits for a collector that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    begun = time.monotonic()
    assert not finish(lane_to(f"http://127.0.0.1:{port}", spool), gives_up=True)
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_black_hole_costs_no_more_than_the_deadline(spool, gives_up):
    """Catches an exit that waits for the time-out of a request instead of its own deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        lane = lane_to(f"http://127.0.0.1:{listener.getsockname()[1]}", spool)
        assert not finish(lane, 0.6, gives_up=gives_up)
    assert 0.5 <= time.monotonic() - begun < 1.1


def test_what_failed_is_sent_later(server, spool):
    """Catches spans read and not acknowledged that a later attempt believes to be sent."""
    server.answers += [Refusal(Code.UNAVAILABLE)] * 3
    lane = lane_to(server.url, spool)
    assert not finish(lane, gives_up=True)
    assert not finish(lane, gives_up=True)
    add(spool, [10], 1)
    wait_for(lambda: finish(lane, gives_up=True) and len(server.spans()) == 11, "it passes")
    assert Counter(server.numbers()) == Counter(range(11))


def test_a_slow_receiver_gets_smaller_requests(server, spool, monkeypatch):
    """Catches a batch that never passes since it takes longer than the time-out, whole, each time."""
    add(spool, range(10, 4000), 1)
    monkeypatch.setattr(module, "_LEAST_BYTES", 1000)
    taken = server.handle

    def slow(service, data, context):
        if len(data) > 100_000:
            time.sleep(0.4)
            context.abort(Code.DEADLINE_EXCEEDED, "too slow")
        return taken(service, data, context)

    server.handle = slow
    lane = lane_to(server.url, spool, TIMEOUT=300)
    assert finish(lane)
    assert Counter(server.numbers()) == Counter(range(4000))


def test_unsampled_traces_stay_and_move_the_cursor(server, spool):
    """Catches a sampler that leaves spans unsent for ever, or counts them as sent."""
    lane = lane_to(server.url, spool, sampler=sampling.ratio(0.0))
    assert finish(lane)
    assert (lane.counts.sent, lane.counts.sampled_out, server.attempts) == (0, 10, [])
    assert finish(lane_to(server.url, spool))
    assert server.spans() == []


def test_logs_are_sent_whatever_becomes_of_spans(spool):
    """Catches a signal that waits for another one's receiver."""
    spool.segment(1, ended(span(1, 0, 1)) + pack_record(Kind.LOGS, b"\x12\x00"), pad=100)
    with receiver() as server:
        lane = lane_to(server.url, spool, "logs", sampler=sampling.ratio(0.0))
        assert finish(lane)
        assert [service for service, _ in server.received] == ["LogsService"]


def test_a_thread_sends_what_comes_and_ends_when_told(server, spool):
    """Catches a lane that looks once, or cannot be stopped."""
    lane = lane_to(server.url, spool)
    thread = threading.Thread(target=lane.run)
    thread.start()
    server.wait(lambda: len(server.spans()) == 10, "the first")
    add(spool, range(10, 20), 1)
    server.wait(lambda: len(server.spans()) == 20, "the second")
    lane.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert not lane_to(server.url, spool).tail.read(1 << 20, 100).portions


def test_stopping_ends_a_wait_for_a_slow_receiver(server, spool):
    """Catches a shutdown that waits for a receiver, and a cursor that moves because it gave up."""
    blocked = threading.Event()
    server.answers.append(lambda: blocked.wait(30) and b"")
    lane = lane_to(server.url, spool)
    thread = threading.Thread(target=lane.run)
    thread.start()
    server.wait(lambda: server.attempts, "it is on its way")
    begun = time.monotonic()
    lane.stop()
    thread.join(10)
    blocked.set()
    assert time.monotonic() - begun < 2
    server.wait(lambda: len(server.spans()) == 10, "the receiver takes it after all")
    assert finish(lane_to(server.url, spool))
    assert len(server.spans()) == 20, "it was not acknowledged: it is sent once more"


def test_a_failure_of_our_own_is_tried_again(server, spool, monkeypatch, caplog):
    """Catches a lane whose thread ends with an exception, after which nothing is ever sent."""
    lane = lane_to(server.url, spool)
    real, failures = lane.tail.read, [ValueError("broken")]
    monkeypatch.setattr(lane.tail, "read", lambda *args: real(*args) if not failures else _raise(failures.pop()))
    thread = threading.Thread(target=lane.run)
    thread.start()
    server.wait(lambda: len(server.spans()) == 10, "it goes on")
    lane.stop()
    thread.join(10)
    assert "broken" in caplog.text


def _raise(error):
    raise error


def test_cursors_that_cannot_be_saved_send_on(server, spool, caplog):
    """Catches a full disk by which nothing is sent any more."""
    (spool.node_dir / "relay").write_bytes(b"")  # in the place of the directory
    lane = lane_to(server.url, spool)
    assert finish(lane)
    assert finish(lane)
    assert len(server.spans()) == 10
    assert "cannot note" in caplog.text


def test_resources_go_with_each_request(server, spool):
    """Catches a second batch without the identity that stood before the first one."""
    spool.segment(
        1,
        pack_record(Kind.RESOURCE, spooling.resource(rank=7)) + ended(*[span(n, 0, 1) for n in range(20_000)]),
        pad=1000,
    )
    assert finish(lane_to(server.url, spool))
    ranks = [
        one.resource.attributes[0].value.int_value for _, request in server.received for one in request.resource_spans
    ]
    assert ranks == [7, 7, 7]
