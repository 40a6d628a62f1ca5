from __future__ import annotations

import grpc
import pytest

from raytrace_rl import _env_otlp
from raytrace_rl.relay import lane, room, status
from raytrace_rl.relay import relay as module
from raytrace_rl.relay.cursors import Cursors
from raytrace_rl.relay.relay import Relay
from tests.relay.otlp_server import Refusal, receiver
from tests.running import wait_for
from tests.spooling import Spool, ended, span


@pytest.fixture
def spool(tmp_path):
    """A node with four sealed segments of some 10 kB and one that is being written."""
    found = Spool(tmp_path / "run")
    found.live = found.alive(1)
    for number in range(4):
        found.segment(
            1, ended(*[span(n, 0, 1, note="x" * 50) for n in range(100)]), number, sealed=True, span_count=100
        )
    found.segment(1, ended(span(1, 0, 1)), 4, pad=100)
    return found


def left(spool):
    """Numbers of the segments that are there."""
    return sorted(int(path.name.split(".")[1]) for path in spool.node_dir.glob("*.rts"))


def test_the_oldest_acknowledged_segments_go_and_no_more_than_needed(spool):
    """Catches what is not sent being removed, and a run directory emptied without need."""
    assert room.free(spool.node_dir, 1 << 30, lambda *_: True) == (0, 0)
    assert left(spool) == [0, 1, 2, 3, 4]
    total = sum(path.stat().st_size for path in spool.node_dir.glob("*.rts"))
    freed = room.free(spool.node_dir, int(total / room._SHARE) - 1000, lambda _, number: number in (1, 2))
    assert (left(spool), freed.spans) == ([0, 2, 3, 4], 100)
    assert room.free(spool.node_dir, 1000, lambda *_: False) == (0, 0)
    room.free(spool.node_dir, 1000, lambda *_: True)
    assert left(spool) == [4], "the one that is written stays"


def test_a_relay_frees_what_every_signal_has_passed(spool, monkeypatch):
    """Catches spans counted as lost by writers although they are at the receiver, and a removal nobody counts."""
    monkeypatch.setattr(module, "_TEND_S", 0.02)
    with receiver() as server:
        settings = _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": server.url})
        relay = Relay(spool.node_dir, settings, bound_bytes=1000)
        assert relay.acquire()
        relay.start()
        wait_for(lambda: left(spool) == [4], "they are gone")
        relay.stop()
        assert len(server.spans()) == 401
    assert status.read(spool.node_dir)[status.FREED]["spans"] == 400
    again = Relay(spool.node_dir, settings)
    assert again.acquire()
    again.stop()
    assert status.read(spool.node_dir)[status.FREED]["spans"] == 400


def test_what_was_refused_is_not_removed_as_acknowledged(spool, monkeypatch):
    """Catches spans at no receiver and in no spool, that nobody counts as lost and a push cannot send again."""
    monkeypatch.setattr(module, "_TEND_S", 0.02)
    monkeypatch.setattr(lane, "MAX_RECORDS", 150)
    with receiver() as server:
        settings = _env_otlp.settings({"OTEL_EXPORTER_OTLP_ENDPOINT": server.url})
        server.answers.append(Refusal(grpc.StatusCode.UNAUTHENTICATED))
        for _ in range(2):  # the second one has it from the file
            relay = Relay(spool.node_dir, settings, bound_bytes=1000)
            assert relay.acquire()
            relay.start()
            wait_for(lambda: left(spool) == [0, 1, 4], "the others are gone")
            assert relay.drain(20)
            relay.stop()
    found = Cursors(spool.node_dir, "traces", server.url)
    assert found.tally.total()["dropped"] == 150
    assert [number for number in range(5) if found.is_refused(spool.stem(1), number)] == [0, 1]
    found.clear()
    assert not found.is_refused(spool.stem(1), 0)


def test_a_directory_that_is_gone_is_no_error(tmp_path):
    """Catches a relay that dies with a run directory that was deleted."""
    assert room.free(tmp_path / "gone", 1, lambda *_: True) == (0, 0)
