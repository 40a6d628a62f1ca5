"""What other nodes' clocks say, asked of real actors on two raylets."""

from __future__ import annotations

import threading
import time

import pytest
import ray

from raytrace_rl import _carrier, _clock_replies
from tests.running import running

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.ray_fixtures"]


@ray.remote(num_cpus=0)
class Peer:
    """An actor of another node, by the name that its process goes by: raylets of one host share the host's."""

    def __init__(self, node: str) -> None:
        setattr(_carrier, "NODE", node)  # noqa: B010  (final)

    def ready(self) -> bool:
        """Returns once the actor runs."""
        return True

    def work(self) -> None:
        """Answers nothing else as long as the test goes on."""
        threading.Event().wait()


def test_an_actor_that_does_not_answer_costs_only_its_own_answer(two_nodes, tmp_path):
    """Catches clocks that nobody knows because one worker of the group had died, or was busy again."""
    first, dead, busy, last = (Peer.remote(f"node-{name}") for name in ("first", "dead", "busy", "last"))
    ray.get([actor.ready.remote() for actor in (first, dead, busy, last)], timeout=60)
    ray.kill(dead)
    busy.work.remote()
    with running(tmp_path / "run") as telemetry:
        _clock_replies.ask([first, dead, busy, last], time.monotonic() + 30)
        run = telemetry.run()
    (process,) = run.processes
    assert set(process.peers) == {"node-first", "node-last"}
    assert all(-60e9 < delay_ns < 60e9 for delay_ns in process.peers.values())
    for actor in (first, busy, last):
        ray.kill(actor)
