"""Queueing delays in the report: by rank, and honest about clocks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.drawing import percent, seconds
from raytrace_rl.monitor.queueing import queueing
from raytrace_rl.monitor.report import text
from tests.spooling import SECOND, T0, Spool, ended, resource, span

MS = SECOND // 1000
FROM_A = {"rl__queued_from": "node-a"}


def _worker(rank: int | None, group: str | None = "generation") -> bytes:
    identity: dict[str, Any] = {"rl__role": "worker", "ray__actor__class": "GenWorker"}
    if group is not None:
        identity["rl__worker_group"] = group
    if rank is not None:
        identity["nv__dl__rank"] = rank
    return resource(**identity)


@pytest.fixture
def run(tmp_path):
    """A driver on node a, ranks 0 (on a) and 1 (on b, with a clock that is behind), an actor without a group."""
    here, there = Spool(tmp_path / "run", "node-a"), Spool(tmp_path / "run", "node-b")
    here.segment(10, ended(span(1, 0, 90, name="step")), resource=resource(rl__role="driver"))
    calls = [span(100 + n, n, n + 1, parent=1, rl__queued_ns=n * MS) for n in range(1, 21)]
    here.segment(11, ended(*calls, span(150, 1, 2, parent=101)), resource=_worker(0))
    there.segment(
        12,
        ended(*(span(200 + n, n, n + 1, parent=1, rl__queued_ns=n * 100 * MS, **FROM_A) for n in (-3, 1, 2))),
        resource=_worker(1),
    )
    lost = {"rl__queued_from": "node-c"}  # a node of which nothing is left
    here.segment(13, ended(span(300, 5, 6, parent=4711, rl__queued_ns=7 * MS, **lost)), resource=_worker(None, None))
    # rank 0 restarted: the same rank, another process
    here.segment(14, ended(span(400, 50, 51, parent=1, rl__queued_ns=21 * MS)), resource=_worker(0))
    return load_run(here.run_dir)


def test_delays_by_rank(run):
    """Catches delays of several ranks in one heap, and the statistics of a heap."""
    found = queueing(run)
    assert [(entry["callee"], entry["rank"], entry["calls"]) for entry in found["ranks"]] == [
        ("generation", 1, 3),
        ("generation", 0, 21),
        ("GenWorker", None, 1),
    ]
    zero = found["ranks"][1]
    assert (zero["median_s"], zero["max_s"]) == (pytest.approx(0.011), pytest.approx(0.021))
    assert zero["p95_s"] == pytest.approx(0.020)
    assert found["calls"] == 25


def test_delays_between_nodes_are_marked_and_below_zero_they_count_as_none(run):
    """Catches a delay that two clocks made up and that the report passes on as a fact."""
    found = queueing(run)
    one = found["ranks"][0]
    assert (one["other_node"], one["below_zero"], one["unknown_node"]) == (3, 1, 0)
    assert (one["median_s"], one["max_s"]) == (0.1, 0.2)
    assert found["ranks"][1]["other_node"] == 0, "one node has one clock"
    assert found["ranks"][2]["unknown_node"] == 1, "the caller's node is not in the run"
    shown = text(run)
    assert "3 between two nodes, 1 from a node that is not known: not corrected for clock skew between nodes" in shown
    assert "1 delays came out below zero, and count as 0: two clocks disagree" in shown


def test_one_node_needs_no_caveat(tmp_path):
    """Catches a warning about clocks where there is one."""
    spool = Spool(tmp_path / "run")
    rows = [span(1, 0, 9), span(2, 1, 2, parent=1, rl__queued_ns=5 * MS)]
    spool.segment(10, ended(*rows), heartbeat_ns=T0 + 9 * SECOND, resource=_worker(0))
    shown = text(load_run(spool.run_dir))
    assert "Queueing" in shown
    assert "clock skew" not in shown


def test_a_run_without_calls(tmp_path):
    """Catches a section about nothing."""
    spool = Spool(tmp_path / "run")
    spool.segment(10, ended(span(1, 0, 9)), resource=_worker(0))
    run = load_run(spool.run_dir)
    counts = ("calls", "below_zero", "other_node", "unknown_node", "corrected")
    assert queueing(run) == {**dict.fromkeys(counts, 0), "ranks": []}
    assert "Queueing" not in text(run)


@pytest.mark.parametrize("queued_ns", [2**62, -(2**62)])
def test_a_delay_that_no_two_clocks_could_make_is_not_believed(queued_ns, tmp_path):
    """Catches a damaged number of a file that becomes a rank's longest wait."""
    spool = Spool(tmp_path / "run")
    rows = [span(1, 0, 9), span(2, 1, 2, parent=1, rl__queued_ns=queued_ns), span(3, 1, 2, parent=1, rl__queued_ns=MS)]
    spool.segment(10, ended(*rows), heartbeat_ns=T0 + 9 * SECOND, resource=_worker(0))
    found = queueing(load_run(spool.run_dir))
    assert (found["calls"], found["below_zero"], found["ranks"][0]["max_s"]) == (1, 0, 0.001)


@pytest.mark.parametrize(
    ("value", "drawn"),
    [
        (0.0, "0s"),
        (-5.0, "-5.00s"),
        (90_000, "1d01h"),
        (math.inf, "n/a"),
        (math.nan, "n/a"),
        (1e308, "1e+308s"),
        (2**62, "5e+18s"),
    ],
)
def test_any_number_can_be_drawn(value, drawn):
    """Catches a report that ends because one number of it is not finite, or a column of three hundred digits."""
    assert seconds(value) == drawn
    assert percent(math.inf) == percent(math.nan) == "n/a"
