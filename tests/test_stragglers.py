"""Stragglers and meetings: planted ones are found, noise is not, and the waiting rank is not the slow one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raytrace_rl.monitor import noise
from raytrace_rl.monitor.meetings import meetings, ranked
from raytrace_rl.monitor.stragglers import Stragglers
from raytrace_rl.monitor.tree import Tree
from tests.made_runs import Made, data_parallel

STEPS = 12


def _durations(ranks: int, noise: float = 0.05, **slower: float) -> list[list[float]]:
    """Seconds by step and rank: about 4, with noise; ``rank_1=2`` makes rank 1 take twice as long."""
    rng = random.Random(7)
    factors = [slower.get(f"rank_{rank}", 1.0) for rank in range(ranks)]
    return [[4 * factor * (1 + noise * rng.uniform(-1, 1)) for factor in factors] for _ in range(STEPS)]


def _found(made: Made) -> dict[str, Any]:
    tree = Tree(made.run())
    steps = [ranked(tree, step) for step in tree.steps]
    return Stragglers(tree, steps, meetings(tree, steps)).report()


def _flagged(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(one["worker_group"], one["rank"]) for one in found["ranks"] if one["straggler"]]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("collective", [False, True])
def test_slow_rank_is_found(ranks, collective):
    """Catches a slow rank that hides behind the mean, or, of two, blames the other one."""
    made = Made()
    data_parallel(made, _durations(ranks, rank_1=1.5), collective=collective)
    found = _found(made)
    assert _flagged(found) == [("training", 1)]
    first = found["ranks"][0]
    assert first["excess_s"] == pytest.approx(2, rel=0.2)
    kinds = {(span["name"], span["kind"]) for span in first["spans"] if span["straggler"]}
    assert kinds == ({("train", "slow"), ("all_reduce", "late")} if collective else {("train", "slow")})
    (slow,) = [span for span in first["spans"] if span["kind"] == "slow"]
    assert slow["ratio"] == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_noise_is_no_straggler(ranks, noise, collective):
    """Catches a finding in a healthy run: nobody believes the next one."""
    made = Made()
    data_parallel(made, _durations(ranks, noise), collective=collective)
    assert _flagged(_found(made)) == []


@pytest.mark.parametrize(("ranks", "steps"), [(2, 6), (3, 4), (4, 4), (8, 3)])
def test_few_steps_are_no_evidence(ranks, steps):
    """Catches a rank named for what any of them may do by chance: to come last a few times."""
    made = Made()
    data_parallel(made, _durations(ranks, rank_1=1.5)[:steps])
    found = _found(made)
    assert _flagged(found) == []
    assert found["ranks"][0]["rank"] == 1
    assert found["ranks"][0]["spans"][0]["chance"] > 0.025


@pytest.mark.parametrize(("ranks", "steps"), [(2, 7), (3, 5), (4, 5), (8, 4), (64, 4)])
def test_as_many_steps_as_it_takes_are_enough(ranks, steps):
    """Catches a slow rank that goes unnamed in a short run although no chance would have it last each time."""
    made = Made()
    data_parallel(made, _durations(ranks, rank_1=1.5)[:steps])
    assert _flagged(_found(made)) == [("training", 1)]


def test_healthy_runs_of_few_steps_name_none():
    """Catches a verdict that small numbers make: medians of three to five steps, of any noise."""
    rng = random.Random(11)
    named = 0
    for _ in range(300):
        ranks, steps = rng.choice([2, 3, 4, 8]), rng.randint(3, 5)
        made = Made()
        data_parallel(made, [[4 * rng.lognormvariate(0, 0.3) for _ in range(ranks)] for _ in range(steps)])
        named += bool(_flagged(_found(made)))
    assert named <= 1


@pytest.mark.parametrize("ranks", [2, 3, 8, 20])
def test_chance_is_bounded_from_above(ranks):
    """Catches a bound below what chance does: it is the promise on runs in which no rank is slow."""
    rng = random.Random(ranks)
    bounds = []
    for _ in range(1500):
        slowest = [[0] * len(noise.PARTS) for _ in range(ranks)]
        for _ in range(6):
            for place, rank in enumerate(rng.sample(range(ranks), ranks), 1):
                for n, part in enumerate(noise.PARTS):
                    slowest[rank][n] += place * part <= ranks
        bounds.append(min(noise.by_chance(often, 6, ranks) for often in slowest))
    for level in (0.01, 0.05, 0.2):
        assert sum(bound <= level for bound in bounds) <= 1500 * level + 3 * (1500 * level) ** 0.5
    assert noise.by_chance([6, 6, 6, 6, 6, 6], 6, 1) == 1.0
    assert noise.by_chance([10_000], 10_000, 2) < 1e-300


def test_one_slow_step_is_no_slow_rank():
    """Catches a hiccup (a checkpoint, a page fault) that condemns a rank."""
    durations = _durations(4)
    durations[3][2] = 30.0
    made = Made()
    data_parallel(made, durations)
    assert _flagged(_found(made)) == []


def test_who_waits_in_a_collective_is_not_slow():
    """Catches the rank with the longest all-reduce named, which is the fastest one."""
    made = Made()
    data_parallel(made, _durations(4, rank_3=2.0), collective=True)
    found = _found(made)
    assert _flagged(found) == [("training", 3)]
    for one in found["ranks"]:
        assert one["rank"] == 3 or not any(span["name"] == "all_reduce" and span["straggler"] for span in one["spans"])


def test_spans_that_merely_overlap_are_no_meeting():
    """Catches independent work of ranks taken for a collective, so that its durations are not compared."""
    made = Made()
    data_parallel(made, _durations(4, 0.2))
    tree = Tree(made.run())
    assert meetings(tree, [ranked(tree, step) for step in tree.steps]) == {}


def test_ranks_that_enter_unequally_often_do_not_meet():
    """Catches entries of different rounds laid beside each other."""
    made = Made()
    data_parallel(made, _durations(2), collective=True)
    extra = next(row for row in made.rows if row.name == "all_reduce")
    made.span(extra.process, "all_reduce", 0.1, 0.2, made.rows[1])
    tree = Tree(made.run())
    assert meetings(tree, [ranked(tree, step) for step in tree.steps]) == {}


def test_a_slow_worker_outside_of_steps_is_found():
    """Catches a generation worker that is slow for the whole run, in spans that no step holds."""
    rng = random.Random(3)
    made = Made()
    workers = [made.rank(rank, "generation") for rank in range(4)]
    for n in range(20):
        for rank, worker in enumerate(workers):
            length = rng.uniform(0.9, 1.1) * (2 if rank == 2 else 1)
            made.span(worker, "generate", 3 * n, 3 * n + length, bucket="productive")
    found = _found(made)
    assert _flagged(found) == [("generation", 2)]
    assert found["ranks"][0]["part_of_step"] is None
    assert found["ranks"][0]["spans"][0]["in_steps"] is False


def test_a_slow_node_is_told_from_slow_ranks():
    """Catches eight stragglers listed one by one where a single node is to be drained."""
    slow = {f"rank_{rank}": 1.5 for rank in (4, 5, 6, 7)}
    made = Made()
    data_parallel(made, _durations(16, **slow), nodes=4)
    found = _found(made)
    assert sorted(_flagged(found)) == [("training", rank) for rank in (4, 5, 6, 7)]
    assert [one["node"] for one in found["nodes"] if one["straggler"]] == ["node-1"]

    scattered = Made()
    data_parallel(scattered, _durations(16, rank_1=1.5, rank_6=1.5), nodes=4)
    assert not any(one["straggler"] for one in _found(scattered)["nodes"])


def test_a_restarted_rank_is_one_rank():
    """Catches a rank that is split in two by a restart, and then seen in too few steps."""
    made = Made()
    data_parallel(made, _durations(2, rank_1=1.5))
    again = made.process("again", rl__role="worker", rl__worker_group="training", nv__dl__rank=1)
    for row in made.rows[len(made.rows) // 2 :]:
        if row.process.key == "training-1":
            row.process = again
    assert _flagged(_found(made)) == [("training", 1)]


def test_nothing_to_compare():
    """Catches a division by zero in a run without ranks, or with one."""
    assert _found(Made()) == {"compared": 0, "ranks": [], "nodes": []}
    made = Made()
    data_parallel(made, _durations(1))
    assert _flagged(_found(made)) == []
