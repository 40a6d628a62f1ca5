"""The driver's run directory as a Ray actor on the driver's node, and how other nodes reach it."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any, Final

from raytrace_rl.relay.home import HomeFiles, Piece
from raytrace_rl.relay.published import NAMESPACE

#: Seconds within which a call is answered; then it counts as failed, and is made again.
_ANSWER_S: Final = 60.0
#: A node from which nothing came for so long (seconds) is taken for lost: whether its processes live is not known.
_LOST_S: Final = 60.0


class HomeActor:
    """`HomeFiles` for nodes that do not share the driver's run directory; leaves when no node has anything to bring.

    Args:
        run_dir: The run directory on the driver's node.
        idle_s: Seconds without a call, and without a living process elsewhere, after which it ends.
    """

    def __init__(self, run_dir: str, idle_s: float) -> None:
        import ray

        self._kill = ray.kill
        self._self = ray.get_runtime_context().current_actor
        self._files = HomeFiles(run_dir)
        self._idle_s = idle_s
        self._heard: dict[str, float] = {}
        self._begun = monotonic()
        threading.Thread(target=self._tend, name="raytrace_rl-home", daemon=True).start()

    def sizes(self, node: str, bound_bytes: int | None) -> dict[str, int]:
        """See `home.Home`."""
        self._heard[node] = monotonic()
        return self._files.sizes(node, bound_bytes)

    def write(self, node: str, pieces: list[Piece]) -> None:
        """See `home.Home`."""
        self._heard[node] = monotonic()
        self._files.write(node, pieces)

    def living(self, node: str, stems: list[str]) -> None:
        """See `home.Home`."""
        self._heard[node] = monotonic()
        self._files.living(node, stems)

    def remove(self, node: str, names: list[str]) -> None:
        """See `home.Home`."""
        self._heard[node] = monotonic()
        self._files.remove(node, names)

    def _tend(self) -> None:
        wake = threading.Event()
        while not wake.wait(1.0):
            now = monotonic()
            for node, at in list(self._heard.items()):
                if now - at > _LOST_S:
                    self._files.lose(node)
                    del self._heard[node]
            last = max([self._begun, *self._heard.values()])
            if now - last > self._idle_s and not self._files.has_living:
                self._kill(self._self)
                return


class RemoteHome:
    """A `home.Home` that calls the actor, and makes it where there is none.

    Args:
        run_id: The run.
        run_dir: Its directory on the driver's node.
        node_id: Ray's id of that node.
        idle_s: For the actor.
    """

    def __init__(self, run_id: str, run_dir: str, node_id: str, idle_s: float) -> None:
        self._run_id = run_id
        self._run_dir = run_dir
        self._node_id = node_id
        self._idle_s = idle_s
        self._actor: Any = None

    def sizes(self, node: str, bound_bytes: int | None) -> dict[str, int]:
        """See `home.Home`."""
        found: dict[str, int] = self._call("sizes", node, bound_bytes)
        return found

    def write(self, node: str, pieces: list[Piece]) -> None:
        """See `home.Home`."""
        self._call("write", node, pieces)

    def living(self, node: str, stems: list[str]) -> None:
        """See `home.Home`."""
        self._call("living", node, stems)

    def remove(self, node: str, names: list[str]) -> None:
        """See `home.Home`."""
        self._call("remove", node, names)

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            if self._actor is None:
                self._actor = self._ask()
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=_ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            self._actor = None
            raise error.cause from None  # what home said, without Ray's page about where it said it
        except BaseException:
            self._actor = None  # it may have left: the next call makes it anew
            raise

    def _ask(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {
            "name": f"home-{self._run_id}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node_id, soft=False),
        }
        return ray.remote(HomeActor).options(**options).remote(self._run_dir, self._idle_s)
