"""The end of a worker group: clean up, flush, kill, each whatever has become of single workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._state import logger


def clean_up(workers: Sequence[Any], method: str, timeout_s: float | None) -> tuple[list[Any], bool]:
    """Calls ``method`` on every worker and waits for all of them together.

    Args:
        workers: Their handles, by rank.
        method: Takes no arguments.
        timeout_s: Seconds; None waits without end.

    Returns:
        The workers that answered, be it with an error of their own; whether all did, and without one.
    """
    import ray

    asked: dict[Any, int] = {}
    troubles: dict[int, str] = {}
    answering = []
    for rank, worker in enumerate(workers):
        try:
            asked[getattr(worker, method).remote()] = rank
        except Exception as error:  # no such method, or too many calls pending
            if is_interrupt(error):
                raise
            troubles[rank] = repr(error)
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    troubles.update({asked[ref]: "it did not answer in time" for ref in late})
    for ref in ready:
        rank = asked[ref]
        try:
            ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            troubles[rank] = repr(error.cause)
        except ray.exceptions.RayActorError:
            troubles[rank] = "it is dead"
            continue
        answering.append(workers[rank])
    for rank, trouble in sorted(troubles.items()):
        logger.warning("%s() of rank %d failed: %s", method, rank, trouble)
    return answering, not troubles


def kill(workers: Sequence[Any]) -> bool:
    """Kills every worker; returns whether Ray took each order."""
    import ray

    fine = True
    for rank, worker in enumerate(workers):
        try:
            ray.kill(worker)
        except Exception as error:  # Ray is down already
            if is_interrupt(error):
                raise
            logger.warning("rank %d could not be killed: %r", rank, error)
            fine = False
    return fine
