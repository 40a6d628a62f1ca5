"""Flushing actors from outside: asks all at once, waits for all together, and tells who answered."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from time import monotonic
from typing import Any, Final, NamedTuple

from raytrace_rl import (
    _carrier,
    _clock_replies,
    _handles,
    _live_threads,
    _metrics_pipeline,
    _process,
    _state,
    _targets,
    setup,
)
from raytrace_rl._interrupts import is_interrupt

_METHOD: Final = "flush_telemetry"
#: Share of the time that the actor itself may take, so that its answer comes back within the rest.
_INNER: Final = 0.8
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class FlushReport(NamedTuple):
    """Which actors answered, each in one of these.

    Attributes:
        flushed: Their telemetry is complete.
        timed_out: No answer in time: busy, wedged, or not created yet.
        dead: They had died before they could answer.
        incomplete: They answered and are flushed for good, but for threads or pool tasks that would not end in time:
            the spans of these are truncated. Their own logs name them.
    """

    flushed: tuple[Any, ...] = ()
    timed_out: tuple[Any, ...] = ()
    dead: tuple[Any, ...] = ()
    incomplete: tuple[Any, ...] = ()

    def __str__(self) -> str:
        text = f"{len(self.flushed)} flushed, {len(self.timed_out)} timed out, {len(self.dead)} dead"
        return f"{text}, {len(self.incomplete)} incomplete" if self.incomplete else text


def registered_actors() -> list[Any]:
    """Returns one handle for each live `TracedActor` that this process dispatched to, or that was registered."""
    return [actor for actor in _handles.registered() if _targets.method_signature(actor, _METHOD) is not None]


def flush_actors(actors: Iterable[Any], timeout_s: float = 5.0, *, final: bool = True) -> FlushReport:
    """Flushes the telemetry of `TracedActor` actors, all at once. Never raises, whatever has died or hangs.

    Args:
        actors: Handles, or ``traced`` views of them. Actors that are no `TracedActor` have nothing to flush: they are
            left out, with one warning. With telemetry off here nobody is asked.
        timeout_s: Seconds for all of them together.
        final: Shut their telemetry down; see `TracedActor.flush_telemetry`. An actor's own ``flush_telemetry`` is
            called with what it takes of ``timeout_s`` and ``final``.
    """
    try:
        return _flush_actors(list(actors), timeout_s, final=final)
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
    """Flushes every worker of a worker group, all at once, and never past the deadline.

    Args:
        worker_group: An object with its workers' handles under ``workers``: ours, NeMo-RL's, verl's. Anything else
            flushes nobody, with one warning. Workers need not be `TracedActor`: each process whose telemetry runs is
            flushed, others are left out.
        timeout_s: Seconds for all of them together.
    """
    try:
        workers = list(worker_group.workers)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("flush-group", "%s has no workers to flush: %r", type(worker_group).__name__, error)
        return FlushReport()
    return flush_workers(workers, timeout_s)


def flush_workers(workers: Iterable[Any], timeout_s: float) -> FlushReport:
    """Flushes workers of a group; see `flush_group`."""
    try:
        return _flush_actors(list(workers), timeout_s, final=True, processes=True)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("flush-group", "A worker group could not be flushed: %r", error)
        return FlushReport()


def flush_process(timeout_s: float, quiesce_timeout_s: float | None = None, *, final: bool = True) -> bool:
    """Waits for this process's traced threads, then brings its telemetry to a clean end.

    Args:
        timeout_s: Seconds for all of it.
        quiesce_timeout_s: Seconds of these for threads and pool tasks; by default half.
        final: Shut telemetry down; else only collect metrics, so that what was recorded so far is kept.

    Returns:
        True if no traced thread was left running.
    """
    timeout_s = _seconds(timeout_s)
    deadline = monotonic() + timeout_s
    quiesce_s = timeout_s / 2 if quiesce_timeout_s is None else min(_seconds(quiesce_timeout_s), timeout_s)
    left = _live_threads.join(quiesce_s)
    if left:
        _state.logger.warning("Flushed while traced threads still ran: %s", ", ".join(left))
    if final:
        setup.shutdown_telemetry(timeout_ms=max(0.0, deadline - monotonic()) * 1000)
    else:
        _metrics_pipeline.collect(deadline)  # spans and logs lie in the spool already
    return not left


def flush_called_process(_actor: Any, timeout_s: float, *, final: bool = True) -> bool | None:
    """Flushes the process of an actor that knows nothing of it, called there by Ray's own ``__ray_call__``.

    Returns:
        What `flush_process` does; None if no telemetry runs there.
    """
    if setup.get_telemetry_handle() is None:
        return None
    return flush_process(timeout_s, final=final)


def _seconds(timeout_s: float) -> float:
    """Returns a time to wait; none for what is below zero or no number (nan would never be over)."""
    return timeout_s if timeout_s > 0 else 0.0


def _asking(parameters: Any, timeout_s: float, *, final: bool) -> dict[str, Any] | None:
    """Returns the keywords for an actor's ``flush_telemetry``: those of ours that it takes, for it may be its own.

    Args:
        parameters: Its parameters, as the actor's handle has them.
        timeout_s, final: What it is to be told.

    Returns:
        None if it cannot be called with these: it needs others.
    """
    given = parameters.parameters.values() if isinstance(parameters, inspect.Signature) else parameters
    of_user = [each for each in given if each.name not in ("self", _carrier.KEYWORD)]
    any_name = any(each.kind == each.VAR_KEYWORD for each in of_user)
    by_name = {each.name for each in of_user if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    ours = {"timeout_s": timeout_s, "final": final}
    keywords = {name: value for name, value in ours.items() if any_name or name in by_name}
    needed = {each.name for each in of_user if each.default is each.empty and each.kind not in _VARIADIC}
    return keywords if needed <= keywords.keys() else None


def _flush_actors(actors: list[Any], timeout_s: float, *, final: bool, processes: bool = False) -> FlushReport:
    timeout_s = _seconds(timeout_s)
    deadline = monotonic() + timeout_s
    if not actors or _process.current is None:
        return FlushReport()
    import ray

    asked: dict[Any, Any] = {}
    by_process: set[Any] = set()
    flushed: list[Any] = []
    timed_out: list[Any] = []
    dead: list[Any] = []
    incomplete: list[Any] = []
    for actor in {_handles.actor_id(actor): actor for actor in actors}.values():
        try:
            parameters = _targets.method_signature(actor, _METHOD)
            keywords = None if parameters is None else _asking(parameters, timeout_s * _INNER, final=final)
            if keywords is not None:
                asked[actor.flush_telemetry.remote(**keywords)] = actor
            elif processes or parameters is not None:  # one with a flush of its own that needs what we do not have
                ref = actor.__ray_call__.remote(flush_called_process, timeout_s * _INNER, final=final)
                asked[ref] = actor
                by_process.add(ref)
            else:
                _state.warn_once(f"flush:{actor!r}", "%r is no TracedActor; it has nothing to flush.", actor)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("flush-ask", "%r could not be asked to flush: %r", actor, error)
            timed_out.append(actor)
    waiting_s = max(0.0, deadline - monotonic())
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=waiting_s) if asked else ([], [])
    timed_out += [asked[ref] for ref in late]
    for ref in ready:
        try:
            # No time is needed: what is ready, and as small as this, is in this process already.
            answer = ray.get(ref, timeout=max(0.0, deadline - monotonic()))
            if answer is False and final:  # else threads that go on are cut short by nothing
                incomplete.append(asked[ref])
            elif answer is not None or ref not in by_process:  # None: a process without telemetry
                flushed.append(asked[ref])
        except ray.exceptions.RayActorError:
            dead.append(asked[ref])
        except ray.exceptions.GetTimeoutError:
            timed_out.append(asked[ref])
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("flush-answer", "%r could not be flushed: %r", asked[ref], getattr(error, "cause", error))
            if ref not in by_process:  # a worker in whose environment this package is missing has no telemetry
                timed_out.append(asked[ref])
    if final:
        _clock_replies.ask(flushed, deadline)
    return FlushReport(tuple(flushed), tuple(timed_out), tuple(dead), tuple(incomplete))
