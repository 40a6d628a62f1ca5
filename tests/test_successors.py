"""Who goes on where a process has died: against the plain rule, and for many processes."""

from __future__ import annotations

import random
from typing import Any

from raytrace_rl import semconv
from raytrace_rl.monitor.model import Process
from raytrace_rl.monitor.successors import Successors
from raytrace_rl.monitor.tree import lane_of


def _process(number: int, start_ns: int, last_ns: int, **identity: Any) -> Process:
    resource = {key: value for key, value in identity.items() if value is not None}
    process = Process(f"p{number}", "node-a", pid=number, resource=resource)
    process.start_ns, process.last_ns = start_ns, last_ns
    return process


def _drawn(number: int, rng: random.Random) -> Process:
    identity = {
        semconv.RAY_ACTOR_ID: rng.choice([None, None, "a", "b"]),
        semconv.RL_WORKER_GROUP: rng.choice(["training", "generation"]),
        semconv.NV_DL_RANK: rng.choice([None, 0, 1]),
        semconv.RL_ATTEMPT: rng.choice([1, 1, 2]),
    }
    start_ns = rng.randrange(20)
    return _process(number, start_ns, start_ns + rng.randrange(8), **identity)


def _succeeds(other: Process, process: Process) -> bool:
    if other is process or other.start_ns < process.start_ns or other.attempt != process.attempt:
        return False
    if process.actor_id is not None and other.actor_id == process.actor_id:
        return True
    lane = lane_of(process)
    return lane.rank is not None and lane_of(other) == lane and other.start_ns >= process.last_ns


def test_the_first_that_goes_on():
    """Catches a restart told of the wrong process, or of none."""
    rng = random.Random(5)
    met = 0
    for _ in range(300):
        processes = [_drawn(number, rng) for number in range(rng.randrange(1, 12))]
        successors = Successors(processes)
        for process in processes:
            following = [other for other in processes if _succeeds(other, process)]
            wanted = min(following, key=lambda other: other.start_ns) if following else None
            assert successors.of(process) is wanted
            met += wanted is not None
    assert met > 300


def test_many_that_died():
    """Catches each compared with each: forty thousand dead workers would take half an hour."""
    processes = [
        _process(number, 1, 2, **{semconv.RL_WORKER_GROUP: "generation", semconv.NV_DL_RANK: number})
        for number in range(40_000)
    ]
    successors = Successors(processes)
    assert not any(successors.of(process) for process in processes)
