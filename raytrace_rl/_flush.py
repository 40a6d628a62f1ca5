"""Flushing actors from outside: asks all at once, waits for all together, and tells who answered."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any, Final, NamedTuple

from raytrace_rl import _handles, _process, _state, _targets
from raytrace_rl._interrupts import is_interrupt

_METHOD: Final = "flush_telemetry"
#: Share of the time that the actor itself may take, so that its answer comes back within the rest.
_INNER: Final = 0.8


class FlushReport(NamedTuple):
    """Which actors answered.

    Attributes:
        flushed: Their telemetry is complete.
        timed_out: No answer in time: busy, wedged, or not created yet.
        dead: They had died before they could answer.
    """

    flushed: tuple[Any, ...] = ()
    timed_out: tuple[Any, ...] = ()
    dead: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{len(self.flushed)} flushed, {len(self.timed_out)} timed out, {len(self.dead)} dead"


def registered_actors() -> list[Any]:
    """Returns one handle for each live `TracedActor` that this process dispatched to, or that was registered."""
    return [actor for actor in _handles.registered() if _targets.method_signature(actor, _METHOD) is not None]


def flush_actors(actors: Iterable[Any], timeout_s: float = 5.0, *, final: bool = True) -> FlushReport:
    """Flushes the telemetry of `TracedActor` actors, all at once. Never raises, whatever has died or hangs.

    Args:
        actors: Handles, or ``traced`` views of them. Actors that are no `TracedActor` have nothing to flush: they are
            left out, with one warning. With telemetry off here nobody is asked.
        timeout_s: Seconds for all of them together.
        final: Shut their telemetry down; see `TracedActor.flush_telemetry`.
    """
    try:
        return _flush_actors(list(actors), timeout_s, final)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("flush-actors", "Actors could not be flushed: %r", error)
        return FlushReport()


def flush_and_kill(actors: Iterable[Any], timeout_s: float = 5.0, *, no_restart: bool = True) -> FlushReport:
    """Flushes actors, then ends each with ``ray.kill``: those that did not answer, and untraced ones, too.

    Args:
        actors: Handles, or ``traced`` views of them.
        timeout_s: Seconds for the flush of all of them together.
        no_restart: As ``ray.kill``'s.
    """
    import ray

    handles = list(actors)
    report = flush_actors(handles, timeout_s)
    for handle in handles:
        try:
            ray.kill(handle, no_restart=no_restart)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("flush-kill", "An actor could not be killed: %r", error)
    return report


def flush_group(worker_group: Any, timeout_s: float = 15.0) -> FlushReport:
    """Flushes every worker of a worker group (an object with its workers' handles under ``workers``).

    Args:
        worker_group: The group; anything else flushes nobody, with one warning.
        timeout_s: Seconds for all of them together.
    """
    try:
        workers = list(worker_group.workers)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("flush-group", "%s has no workers to flush: %r", type(worker_group).__name__, error)
        return FlushReport()
    return flush_actors(workers, timeout_s)


def _flush_actors(actors: list[Any], timeout_s: float, final: bool) -> FlushReport:
    if not actors or _process.current is None:
        return FlushReport()
    import ray

    deadline = monotonic() + timeout_s
    asked: dict[Any, Any] = {}
    flushed: list[Any] = []
    timed_out: list[Any] = []
    dead: list[Any] = []
    for actor in {_handles.actor_id(actor): actor for actor in actors}.values():
        try:
            if _targets.method_signature(actor, _METHOD) is None:
                _state.warn_once(f"flush:{actor!r}", "%r is no TracedActor; it has nothing to flush.", actor)
                continue
            asked[actor.flush_telemetry.remote(timeout_s * _INNER, final=final)] = actor
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("flush-ask", "%r could not be asked to flush: %r", actor, error)
            timed_out.append(actor)
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    timed_out += [asked[ref] for ref in late]
    for ref in ready:
        try:
            ray.get(ref, timeout=max(1.0, deadline - monotonic()))
            flushed.append(asked[ref])
        except ray.exceptions.RayActorError:
            dead.append(asked[ref])
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("flush-answer", "%r could not be flushed: %r", asked[ref], error)
            timed_out.append(asked[ref])
    return FlushReport(tuple(flushed), tuple(timed_out), tuple(dead))
