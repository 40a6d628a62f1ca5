"""A driver that knows nothing of raytrace_rl, with an actor on each of three nodes. Run as a script, by SLURM."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray


@ray.remote(num_gpus=1)
class Rank:
    """One of three, each alone on its node."""

    def where(self):
        return ray.util.get_node_ip_address()

    def step(self):
        time.sleep(0.02)

    def call(self, other):
        ray.get(other.where.remote())

    def stay(self, marker):
        Path(marker).touch()
        while True:
            time.sleep(1)


if __name__ == "__main__":
    marks = Path(sys.argv[1])
    ray.init(logging_level="ERROR", log_to_driver=False)
    actors = [Rank.remote() for _ in range(3)]
    addresses = ray.get([actor.where.remote() for actor in actors])
    assert len(set(addresses)) == 3, addresses
    for _step in range(5):
        ray.get([actor.step.remote() for actor in actors])
        if sys.argv[2] == "stay":
            for number, actor in enumerate(actors):  # one after the other: a rank that waits for its call answers none
                ray.get(actor.call.remote(actors[number - 1]))
    if sys.argv[2] == "stay":
        waiting = [actor.stay.remote(marks / f"at-{at}") for actor, at in zip(actors, addresses, strict=True)]
        gone, _ = ray.wait(waiting)
        try:
            ray.get(gone)
        except ray.exceptions.RayError as error:
            (marks / "gone").write_text(repr(error))
        while True:
            time.sleep(1)
    print("trained")
