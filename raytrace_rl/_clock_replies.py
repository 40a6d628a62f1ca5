"""What time it is on other nodes: asked by the driver when it flushes its actors, noted in its spool.

A driver's calls bound the skew of its workers' clocks on one side alone; workers that call nobody back send nothing the
other way. An answer is such a message: it was read before it arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic, time_ns
from typing import Any, Final

from raytrace_rl import _carrier, _process, _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.spool.format import Kind, peer_clock

#: Seconds for all questions together, and for one. One takes about a millisecond.
_LONGEST_S: Final = 1.0
_LONGEST_OF_ONE_S: Final = 0.2


def ask(actors: Iterable[Any], deadline: float) -> None:
    """Asks actors one after the other, on the driver of a cluster of several nodes. Never raises.

    Args:
        actors: Handles of actors that have just answered.
        deadline: By ``time.monotonic()``; it is over after a second in any case.
    """
    try:
        process = _process.current
        if process is None or process.writer is None or process.resource.get(semconv.RL_ROLE) != semconv.ROLE_DRIVER:
            return
        import ray

        nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
        if sum(bool(node.get("Alive")) for node in nodes) < 2:
            return
        for node, delay_ns in _shortest_delays(actors, min(deadline, monotonic() + _LONGEST_S)).items():
            process.writer.append(Kind.PEER_CLOCK, peer_clock(delay_ns, node))
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.logger.debug("Clocks of other nodes were not asked: %r", error)


def _shortest_delays(actors: Iterable[Any], deadline: float) -> dict[str, int]:
    """Returns the shortest delay of an answer (ns, of two clocks) by the name of the node that gave it."""
    import ray

    found: dict[str, int] = {}
    for actor in actors:
        left_s = deadline - monotonic()
        if left_s <= 0:
            break
        try:
            node, sent_ns = ray.get(actor.__ray_call__.remote(_read), timeout=min(left_s, _LONGEST_OF_ONE_S))
        except Exception as error:  # dead, or busy again: the others are asked all the same
            if is_interrupt(error):
                raise
            _state.logger.debug("%r did not say what time it is: %r", actor, error)
            continue
        delay_ns = time_ns() - sent_ns
        if node != _carrier.NODE:
            found[node] = min(delay_ns, found.get(node, delay_ns))
    return found


def _read(_actor: Any) -> tuple[str, int]:
    """Returns a worker's node, as carriers name it, and its wall clock (ns since the epoch)."""
    return _carrier.NODE, time_ns()
