"""The trace context as it leaves and enters a process: carriers, and reattaching them in threads.

What a carrier holds is said in `_carrier`. Scopes (iteration, bucket, per-prompt) belong to one dispatched call: the
carriers here, which may outlive a call, bring parentage and baggage only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import Token
from types import TracebackType
from typing import Any, TypeVar

from raytrace_rl import _carrier, _env_carrier, _invocation, _span, _state, setup
from raytrace_rl._traced_thread import TracedThread

F = TypeVar("F", bound=Callable[..., Any])

#: Process and epoch in which telemetry was last asked to start because of a carrier; where it is off it stays off.
_asked: tuple[int, int] | None = None


def current_trace_carrier() -> dict[str, str]:
    """Returns the carrier of what is current here, to hand to another process, thread or sample.

    Returns:
        ``traceparent`` (and ``tracestate``) if a valid span is current, ``baggage`` if the user set any, ``raytrace``
        if a scope is open. Empty with nothing to carry, or with telemetry off.
    """
    return _carrier.current()


def trace_context_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a child process that is to go on with the trace.

    For ``subprocess.run(command, env=trace_context_env())``: with ``TRACEPARENT``, ``TRACESTATE`` and ``BAGGAGE`` of
    what is current here (OpenTelemetry specification, "Environment variables as context propagation carriers"). A child
    that starts telemetry, ours or that of another OpenTelemetry SDK which looks there, has the current span as the
    parent of what its main thread opens.

    Args:
        base: Variables to add to; by default all of ``os.environ``, with telemetry's settings in it.

    Returns:
        A copy. With nothing current, or telemetry off, just that.
    """
    return _env_carrier.environment(base)


class remote_trace_context:
    """``with remote_trace_context(carrier):`` makes the carrier's span the parent of what is opened inside.

    Args:
        carrier: From `current_trace_carrier`, NeMo-RL, or any W3C propagator. None and ``{}`` change nothing; rubbish
            changes nothing and costs one warning.
    """

    __slots__ = ("_carrier", "_token")

    def __init__(self, carrier: Mapping[str, str] | None) -> None:
        self._carrier = carrier
        self._token: Token[Any] | None = None

    def __enter__(self) -> None:
        attachment = receive(self._carrier, False)
        if attachment is not None:
            self._token = _span.otel_var.set(attachment[0])

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        _invocation.detach(token)


class TraceContext:
    """A carrier that is kept, for work that outlives the call which brought it: a collector's, a sample's.

    Taken once (``self._trace = TraceContext.capture()`` in ``__init__``) and reattached in every thread. Pickles as its
    carrier.

    Args:
        carrier: As for `remote_trace_context`.
    """

    __slots__ = ("_carrier",)

    def __init__(self, carrier: Mapping[str, str] | None = None) -> None:
        self._carrier = _carrier.without_scopes(carrier)

    @classmethod
    def capture(cls) -> TraceContext:
        """Returns what is current now: its span and baggage, without the scopes of the call."""
        return cls(_carrier.current())

    @property
    def carrier(self) -> dict[str, str]:
        """A copy of the carrier; empty if nothing was current, or telemetry was off."""
        return dict(self._carrier)

    def attach(self) -> remote_trace_context:
        """Returns a context manager, a new one for each ``with``, inside which the captured span is the parent."""
        return remote_trace_context(self._carrier)

    def wrap(self, fn: F) -> F:
        """Returns ``fn``, of the same kind (plain, coroutine, generator, async generator), attached at each call."""
        carrier = self._carrier
        wrapper = _invocation.attached(fn, lambda _kwargs: receive(carrier, dispatched=False))
        attached: F = _invocation.named_after(fn, wrapper)
        return attached

    def thread(
        self,
        target: Callable[..., object] | None = None,
        *,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> TracedThread:
        """Returns an unstarted `TracedThread` that runs ``target`` attached. Arguments as `threading.Thread`'s."""
        return TracedThread(target=target, name=name, args=args, kwargs=kwargs, daemon=daemon, trace_context=self)

    def __reduce__(self) -> tuple[type[TraceContext], tuple[dict[str, str]]]:
        return type(self), (self._carrier,)

    def __repr__(self) -> str:
        return f"TraceContext({self._carrier!r})"


def receive(carrier: object, dispatched: bool = True) -> _invocation.Attachment | None:
    """Returns what a carrier that arrived here makes current; None if nothing. Never fails.

    Starts the telemetry of a process that the first carrier reaches before anything else has: a plain remote function
    has no ``__init__`` to do it.

    Args:
        carrier: What arrived; anything at all.
        dispatched: It came with one dispatched call, and its scopes and send time count.
    """
    if carrier is None or not (_state.tracing or _start_telemetry(carrier)):
        return None
    return _carrier.read(carrier, dispatched)


def _start_telemetry(carrier: object) -> bool:
    """Asks `setup` to start, once; returns whether this process traces now."""
    global _asked
    if not isinstance(carrier, Mapping) or not carrier:
        return False
    asking = os.getpid(), _state.epoch
    if _asked != asking and setup.get_telemetry_handle() is None:
        # Noted only afterwards: calls that arrive in other threads meanwhile wait in there for the start to be done.
        setup.start_from_carrier()
        _asked = asking
    return _state.tracing
