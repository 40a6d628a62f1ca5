from __future__ import annotations

import time

from raytrace_rl.relay.writers import Writers
from raytrace_rl.spool import liveness
from tests.spooling import Spool


def test_only_a_writer_that_lives_counts(tmp_path):
    """Catches a relay that stays for the dead, or leaves the living."""
    spool = Spool(tmp_path)
    writers = Writers(spool.node_dir)
    assert not writers.any()
    spool.live_file(1)
    assert not writers.any()
    live = spool.alive(2)
    assert writers.any()
    live.release()
    assert not writers.any()


def test_where_locks_tell_nothing_the_heart_decides(tmp_path, monkeypatch):
    """Catches a node without locks, on which a relay never ends, or ends under its writers."""
    monkeypatch.setattr(liveness, "state", lambda *_: "unknown")
    spool = Spool(tmp_path)
    spool.live_file(1)
    spool.segment(1, b"", heartbeat_ns=time.time_ns() - 120 * 10**9)
    assert not Writers(spool.node_dir).any()
    spool.segment(1, b"", 1, heartbeat_ns=time.time_ns())
    assert Writers(spool.node_dir).any()


def test_a_directory_that_is_gone_has_none(tmp_path):
    """Catches a relay of a deleted run that never ends."""
    assert not Writers(tmp_path / "gone").any()
