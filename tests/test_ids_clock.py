"""Ids that never repeat, and the one clock of a process."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from raytrace_rl import _clock, _ids
from tests.running import child


def test_equal_seeds_do_not_repeat_ids():
    """``random.seed(42)`` on every rank gives all ranks the same trace and span ids."""
    found = []
    for _ in range(2):
        random.seed(42)
        np.random.seed(42)  # noqa: NPY002 - what training scripts call
        found.append((_ids.new_trace_id(), _ids.new_span_id()))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_ids_do_not_disturb_the_users_random_numbers():
    """A traced run draws other samples than an untraced one."""
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    drawn = []
    for _ in range(3):
        _ids.new_trace_id()
        drawn.append(random.random())
    assert drawn == expected


def test_lengths_and_no_repeats():
    """Ids are of the wrong length, or repeat within one process."""
    spans = {_ids.new_span_id() for _ in range(20_000)}
    traces = {_ids.new_trace_id() for _ in range(20_000)}
    assert len(spans) == len(traces) == 20_000
    assert {len(one) for one in spans} == {8}
    assert {len(one) for one in traces} == {16}


def test_never_all_zero(monkeypatch: pytest.MonkeyPatch):
    """The all-zero id, which W3C calls invalid, comes out of the generator (a mock that draws zero)."""
    monkeypatch.setattr(_ids, "getrandbits", lambda bits: 0)
    assert any(_ids.new_trace_id())
    assert any(_ids.new_span_id())


def test_reseed_repeats_a_sequence_and_none_does_not():
    """Tests that want the same ids again do not get them, or everybody does."""
    try:
        _ids.reseed(3)
        first = [_ids.new_span_id() for _ in range(3)]
        _ids.reseed(3)
        assert [_ids.new_span_id() for _ in range(3)] == first
    finally:
        _ids.reseed()
    assert _ids.new_span_id() not in first


def test_forked_children_go_their_own_ways():
    """Forked workers go on with their parent's sequence, and repeat each other's ids."""
    done = child(
        """
        import os
        from raytrace_rl import _ids
        _ids.new_span_id()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                os.write(1, (_ids.new_trace_id() + _ids.new_span_id()).hex().encode() + b"\\n")
                os._exit(0)
            os.waitpid(pid, 0)
        print((_ids.new_trace_id() + _ids.new_span_id()).hex())
        """
    )
    lines = done.stdout.split()
    assert len(lines) == 4
    assert len({line[:32] for line in lines}) == len({line[32:] for line in lines}) == 4


def test_clock_runs_with_the_monotonic_one(monkeypatch: pytest.MonkeyPatch):
    """A span gets a negative or huge duration when NTP steps the wall clock (a mock of it steps back an hour)."""
    before = _clock.now_ns()
    hour = 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: before - hour)
    monkeypatch.setattr(_clock, "time_ns", lambda: before - hour)
    after = _clock.now_ns()
    assert 0 <= after - before < hour // 60
    assert _clock.read_anchor().wall_ns == before - hour  # a new anchor shows the step


def test_clock_is_the_wall_clock():
    """Times count from something else than the Unix epoch."""
    assert abs(_clock.now_ns() - time.time_ns()) < 5 * 10**9


def test_anchor_takes_the_closest_of_its_readings(monkeypatch: pytest.MonkeyPatch):
    """One preemption between the two clocks puts the whole process seconds off (a mock of the clocks stalls)."""
    ticks = iter([0, 9_000, 10_000, 10_010, 20_000, 29_000, 30_000, 39_000, 40_000, 49_000])
    walls = iter([1, 2, 3, 4, 5])
    monkeypatch.setattr(_clock, "monotonic_ns", lambda: next(ticks))
    monkeypatch.setattr(_clock, "time_ns", lambda: next(walls))
    assert _clock.read_anchor() == (2, 10_005)
