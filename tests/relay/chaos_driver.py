"""A driver whose processes are killed: ``python -m tests.relay.chaos_driver NAME WORKERS [ADDRESS]``.

It joins the cluster at ``ADDRESS``, or starts its own; it, and each of its actors, ends spans without end, and notes
each in a file of its own (in the directory ``NOTED``) once it has ended: one ``write``, which a kill does not undo. It
prints the process ids of its actors as soon as all of them write.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import ray

from raytrace_rl import TracedActor, setup
from raytrace_rl.instrumentation import managed_span, umbrella_span
from raytrace_rl.threads import TracedThread
from tests.conftest import start_cluster


def write(name: str) -> None:
    """Ends spans until somebody kills the process."""
    name = f"{name}-{os.getpid()}"
    noted = os.open(Path(os.environ["NOTED"]) / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    with umbrella_span("job", f"{name} job"):
        n = 0
        while True:
            with managed_span("generation", f"{name} {n}", n=n) as span:
                pass
            if span is None:
                return  # Ray ends the process in order, since its driver is dead: telemetry is over
            os.write(noted, f"{name} {n}\n".encode())
            n += 1
            time.sleep(0.001)  # a pace that a relay keeps up with


class ChaosWriter(TracedActor):
    """Writes from its construction on, again when Ray starts it anew."""

    def __init__(self, name: str) -> None:
        self.thread = TracedThread(target=write, args=(name,), daemon=True)
        self.thread.start()

    def pid(self) -> int:
        """Returns its process id, once its construction is over."""
        return os.getpid()


def main(name: str, workers: str, address: str | None = None) -> None:
    """Drives."""
    setup.init_telemetry_driver()
    runtime_env = setup.telemetry_runtime_env({"env_vars": {"NOTED": os.environ["NOTED"]}})
    if address is None:
        start_cluster(num_cpus=4, runtime_env=runtime_env)
    else:
        ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
    setup.attach_to_cluster()
    remote = ray.remote(ChaosWriter).options(num_cpus=0.1, max_restarts=1)
    actors = [remote.remote(f"{name}-{n}") for n in range(int(workers))]
    print(json.dumps(ray.get([actor.pid.remote() for actor in actors])), flush=True)
    write(f"{name}-driver")


if __name__ == "__main__":
    main(*sys.argv[1:])
