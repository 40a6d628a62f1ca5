"""The relay as a Ray actor: one a node and run, named, detached, without a CPU, and gone when it has nothing to do.

It has a namespace of its own. Credentials reach it as an argument: what is in a ``runtime_env`` stands in clear in
Ray's logs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay.published import NAMESPACE
from raytrace_rl.relay.relay import relay_for

if TYPE_CHECKING:
    from raytrace_rl.relay.work import Work

#: Seconds for which it waits for the relay before it (a thread that hands over, one that was killed) to be gone.
_HANDOVER_S: Final = 10.0
#: Ray starts one that crashed anew; after that the processes of the node ask for another.
_RESTARTS: Final = 3


class RelayActor:
    """Runs a `Relay` until it is idle."""

    def __init__(self, work: Work) -> None:
        import ray

        self._kill = ray.kill
        self._self = ray.get_runtime_context().current_actor
        self._relay = relay_for(work)
        self._started = threading.Event()
        threading.Thread(target=self._begin, name="raytrace_rl-relay-begin", daemon=True).start()

    def _begin(self) -> None:
        if self._relay.acquire(_HANDOVER_S):
            self._relay.start(self._leave)
            self._started.set()
        else:
            self._leave()  # the node has another one

    def _leave(self) -> None:
        self._kill(self._self)

    def drain(self, timeout_s: float) -> bool:
        """Sends what is there by now, as `Relay.drain`; returns whether all of it is acknowledged."""
        begun = monotonic()
        return self._started.wait(timeout_s) and self._relay.drain(timeout_s - (monotonic() - begun))

    def status(self) -> dict[str, Any]:
        """Returns its process id, the counts by signal, and what keeps each signal from being sent, if anything."""
        failures = {lane.signal.name: lane.failure for lane in self._relay.lanes}
        carrier = self._relay.carrier
        carried = None if carrier is None else {**carrier.standing.counts(), **carrier.standing.now()}
        return {"pid": os.getpid(), "counts": self._relay.counts(), "failures": failures, "carried": carried}


def ask(work: Work) -> None:
    """Asks for the relay of the node that this process is on; nothing happens if there is one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "name": f"{_prefix(work.run_id)}{node_id}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": _RESTARTS,
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    ray.remote(RelayActor).options(**options).remote(work)


def relays(run_id: str) -> list[Any]:
    """Returns the handles of the run's relays, on whatever node."""
    import ray

    prefix = _prefix(run_id)
    found = []
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].startswith(prefix):
            try:
                found.append(ray.get_actor(one["name"], namespace=NAMESPACE))
            except ValueError:
                continue  # gone meanwhile
    return found


def drain(actors: Iterable[Any], timeout_s: float) -> bool:
    """Drains all of ``actors`` at once; returns whether each has sent all that was there, within the time."""
    import ray

    deadline = monotonic() + timeout_s
    asked = [actor.drain.remote(timeout_s * 0.9) for actor in actors]
    if not asked:
        return True
    ready, late = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    done = not late
    for ref in ready:
        try:
            done = ray.get(ref, timeout=max(0.1, deadline - monotonic())) and done
        except Exception as error:
            if is_interrupt(error):
                raise
            done = False
    return done


def _prefix(run_id: str) -> str:
    return f"relay-{run_id}-"
