"""Which process goes on where another has died, found without comparing each with each."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from raytrace_rl.monitor.tree import Lane, lane_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from raytrace_rl.monitor.model import Process


class Successors:
    """Who goes on as what a process was: the same actor, else the same rank; of one attempt at the run.

    Args:
        processes: Of the run.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self._by_key: dict[tuple[int, object], list[tuple[int, int, Process]]] = {}
        for number, process in enumerate(processes):
            for key in self._keys(process):
                self._by_key.setdefault(key, []).append((process.start_ns, number, process))
        for started in self._by_key.values():
            started.sort(key=lambda one: one[:2])

    def of(self, process: Process) -> Process | None:
        """Returns the first that started after ``process``, as a rank after its end; None if none did."""
        found = []
        for key in self._keys(process):
            since = max(process.start_ns, process.last_ns) if isinstance(key[1], Lane) else process.start_ns
            started = self._by_key[key]
            at = bisect_left(started, (since, -1), key=lambda one: one[:2])
            found += [one for one in started[at : at + 2] if one[2] is not process][:1]
        return min(found, key=lambda one: one[:2])[2] if found else None

    @staticmethod
    def _keys(process: Process) -> list[tuple[int, object]]:
        keys: list[tuple[int, object]] = []
        if process.actor_id is not None:
            keys.append((process.attempt, process.actor_id))
        lane = lane_of(process)
        if lane.rank is not None:
            keys.append((process.attempt, lane))
        return keys
