"""Sending the trace context along with a Ray call, and taking it up on the other side.

The caller's side is `dispatch_with_trace_context` (or `traced`, the same as a proxy), the callee's
`accepts_trace_context`. The carrier travels in a keyword of its own, ``_otel_carrier``, NeMo-RL's own, and is sent only
where the callee's signature names it: a user's ``**kwargs`` never sees it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from raytrace_rl import _carrier, _handles, _state, _targets, _wrapping, context
from raytrace_rl._interrupts import is_interrupt

F = TypeVar("F")
T = TypeVar("T")


def trace_context_kwargs() -> dict[str, dict[str, str]]:
    """Returns ``{"_otel_carrier": carrier}`` for a call that you write yourself; ``{}`` with nothing to carry.

    For ``actor.method.remote(x, **trace_context_kwargs())``, where the method is known to accept it. Without a send
    time: ``rl.queued_ns`` comes from `dispatch_with_trace_context` and `traced` alone.
    """
    carrier = _carrier.current()
    return {_carrier.KEYWORD: carrier} if carrier else {}


def accepts_trace_context(fn: F) -> F:
    """Decorates a method or remote function to run under the span of whoever dispatched it.

    For plain, coroutine, generator and async generator methods, static and class methods, and plain ``@ray.remote``
    functions; above or below other decorators, below ``@ray.remote``. A carrier wins over whatever is current, and is
    gone from the context after the call; without one the current context is left alone, so that a local call nests
    where it stands. The decorator opens no span; it stamps ``rl.queued_ns`` on the first span opened in the call: from
    dispatch to here (a generator's first step), waiting for arguments and for the actor's creation included.

    Args:
        fn: Is not changed. What cannot take a carrier is returned as it is, with one warning.

    Returns:
        A function of the same kind, whose signature has ``_otel_carrier=None`` besides (see `_wrapping`).
    """
    try:
        wrapped: F = _wrapping.accepting(fn, context.receive)
    except Exception as error:
        if is_interrupt(error):
            raise
        name = getattr(fn, "__qualname__", None) or repr(fn)
        _state.warn_once(f"accepts:{name}", "%s cannot accept a trace context: %s", name, error)
        return fn
    return wrapped


def dispatch_with_trace_context(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls ``target`` remotely with the trace context that is current here.

    Args:
        target: ``actor.method``, ``actor.method.options(...)``, an actor class or ``Actor.options(...)`` (for
            its ``__init__``), a remote function, or a bound method of a worker group of ours, NeMo-RL's
            (``group.run_all_workers_sharded_data, "train", ...``) or verl's (``group.execute_all, "train", ...``, or a
            method that the group has bound from its workers: ``group.train, ...``). Anything else is called as it is,
            with one warning.
        args, kwargs: The user's own, as ``.remote`` or the group's method takes them.

    Returns:
        What ``.remote`` or the group's method returns.
    """
    call, kwargs, creates = _plan(target, args, kwargs)
    result = call(*args, **kwargs)
    if creates:
        _handles.register(result)
    return result


def traced(target: T) -> T:
    """Returns a view of an actor or worker group whose calls are dispatched with the trace context.

    ``traced(actor).generate.remote(batch)`` is ``dispatch_with_trace_context(actor.generate, batch)``. The view passes
    for the handle (``isinstance``, ``ray.kill``, as a key), pickles to the plain handle, and adds nothing while tracing
    is off. An actor class and a remote function may be given as well.

    Args:
        target: The handle or group; anything else is returned as it is, with one warning.
    """
    view: Any
    if isinstance(target, (_TracedView, _TracedCallable)):
        view = target
    elif _is_callable_target(target):
        view = _TracedCallable(target)
    elif _targets.is_actor(target):
        _handles.register(target)
        view = _TracedView(target)
    elif _targets.is_group(target):
        view = _TracedView(target)
    else:
        _warn_of(target, "no actor and no worker group")
        view = target
    result: T = view
    return result


Plan = tuple[Callable[..., Any], dict[str, Any], bool]


def _plan(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Returns what to call, with which keywords, and whether it creates an actor. Never fails."""
    if isinstance(target, _TracedCallable):
        target = target._raytrace_target
    if not _state.tracing:
        return _targets.plain_call(target), kwargs, False
    try:
        return _plan_remote(target, args, kwargs)
    except Exception as error:
        if is_interrupt(error):
            raise
        _warn_of(target, repr(error))
        return _targets.plain_call(target), kwargs, False


def _plan_remote(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    known = _targets.resolve(target)
    if known is None:
        return _plan_group(target, args, kwargs)
    if known.actor is not None:
        _handles.register(known.actor)
    if known.names_carrier and _carrier.KEYWORD not in kwargs:
        carrier = _carrier.sent()
        if carrier:
            kwargs[_carrier.KEYWORD] = carrier
    return known.call, kwargs, known.creates


def _plan_group(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    workers = _targets.group_workers(target)
    method = _targets.group_method(target, args, kwargs)
    if workers is None or not isinstance(method, str):
        _warn_of(target, "neither an actor's method or class, nor a remote function, nor a worker group's method")
        return _targets.plain_call(target), kwargs, False
    for worker in workers:
        _handles.register(worker)
    call, kwargs = _targets.group_call(target, workers, method, kwargs)
    return call, kwargs, False


def _warn_of(target: Any, why: str) -> None:
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    _state.warn_once(f"dispatch:{name}", "%s takes no trace context (%s); it is called as it is.", name, why)


def _is_callable_target(target: Any) -> bool:
    try:
        return _targets.is_target(target)
    except Exception as error:
        if is_interrupt(error):
            raise
        return False


class _TracedCallable:
    """A remote method, function or class whose ``remote`` dispatches with the trace context."""

    __slots__ = ("_raytrace_target",)

    def __init__(self, target: Any) -> None:
        self._raytrace_target = target

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return dispatch_with_trace_context(self._raytrace_target, *args, **kwargs)

    def options(self, *args: Any, **kwargs: Any) -> _TracedCallable:
        return _TracedCallable(self._raytrace_target.options(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raytrace_target, name)

    def __reduce__(self) -> Any:
        return operator.getitem, ((self._raytrace_target,), 0)


class _TracedGroupMethod(_TracedCallable):
    """A worker group's method: called as it is, and not by ``remote``."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return dispatch_with_trace_context(self._raytrace_target, *args, **kwargs)


class _TracedView:
    """An actor's handle, or a worker group, whose methods dispatch with the trace context."""

    __slots__ = ("_raytrace_target",)

    def __init__(self, target: Any) -> None:
        self._raytrace_target = target

    # So that ``ray.kill``, and others that ask ``isinstance``, take the view.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._raytrace_target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._raytrace_target, name)
        if _is_callable_target(value):
            return _TracedCallable(value)
        if _targets.is_group_call(name, value):
            return _TracedGroupMethod(value)
        return _TracedView(value) if _targets.is_subgroup(value) else value

    def __dir__(self) -> Any:
        return dir(self._raytrace_target)

    def __eq__(self, other: object) -> bool:
        return bool(self._raytrace_target == (other._raytrace_target if type(other) is _TracedView else other))

    def __hash__(self) -> int:
        return hash(self._raytrace_target)

    def __repr__(self) -> str:
        return f"traced({self._raytrace_target!r})"

    def __reduce__(self) -> Any:
        # To the plain handle, by a builtin: the reader of the pickle need not have this package.
        return operator.getitem, ((self._raytrace_target,), 0)
