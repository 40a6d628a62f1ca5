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

#: Seconds for all questions together. One takes about a millisecond.
_LONGEST_S: Final = 1.0


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
        shortest: dict[str, int] = {}
        deadline = min(deadline, monotonic() + _LONGEST_S)
        for actor in actors:
            left_s = deadline - monotonic()
            if left_s <= 0:
                break
            node, sent_ns = ray.get(actor.__ray_call__.remote(_read), timeout=left_s)
            delay_ns = time_ns() - sent_ns
            if node != _carrier.NODE:
                shortest[node] = min(delay_ns, shortest.get(node, delay_ns))
        for node, delay_ns in shortest.items():
            process.writer.append(Kind.PEER_CLOCK, peer_clock(delay_ns, node))
    except Exception as error:  # an actor that has died or is busy again: what is known of the clocks has to do
        if is_interrupt(error):
            raise
        _state.logger.debug("Clocks of other nodes were not asked: %r", error)


def _read(_actor: Any) -> tuple[str, int]:
    """Returns a worker's node, as carriers name it, and its wall clock (ns since the epoch)."""
    return _carrier.NODE, time_ns()
