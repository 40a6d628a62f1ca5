"""A span over a stream: current step by step and never in the consumer's code between; and starting one unentered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import Span

from raytrace_rl import _otel_context, _prompts, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._primitives import NO_SPAN, umbrella_span
from raytrace_rl._prompts import PER_PROMPT
from raytrace_rl._span import RecordingSpan
from raytrace_rl.span_groups import is_span_group_enabled

if TYPE_CHECKING:
    from contextvars import Token


class streaming_umbrella_span:
    """Opens an umbrella over a stream, to be made current step by step and never across a ``yield``.

    ::

        with streaming_umbrella_span(G.U_ROLLOUT, "rl.grpo.stream") as step:
            while True:
                with step():
                    item = await stream.__anext__()
                yield item

    Args:
        group: An umbrella group; a leaf group warns once and gets a bucketed leaf.
        name: Span name.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.
    """

    __slots__ = ("_attributes", "_group", "_name", "_span", "_tracer")

    def __init__(self, group: str, name: str, /, *, tracer: Any = None, **attributes: Any) -> None:
        self._group = group
        self._name = name
        self._tracer = tracer
        self._attributes = attributes
        self._span: Span | None = None

    def __enter__(self) -> Callable[[], AbstractContextManager[Span | None]]:
        if not is_span_group_enabled(self._group) or (self._group in PER_PROMPT and _prompts.muted()):
            return lambda: NO_SPAN
        span: Any = umbrella_span(self._group, self._name, tracer=None, **self._attributes)
        if self._tracer is not None and callable(getattr(self._tracer, "start_span", None)):
            span = of_tracer(self._tracer, self._name, {"rl.span_group": self._group, **self._attributes})
            if span is None:
                return lambda: NO_SPAN
        else:
            span.begin(_otel_context.otel_var.get())
        self._span = span
        return lambda: _Current(span)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span = self._span
        if span is None:
            return
        if exc is not None and isinstance(span, RecordingSpan):
            span.fail(exc)
        span.end()


class _Current:
    """Makes a span current without ending it."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._token: Token[Context] | None = None

    def __enter__(self) -> Span:
        self._token = _otel_context.otel_var.set(
            Context({**_otel_context.otel_var.get(), _otel_context.SPAN_KEY: self._span})
        )
        return self._span

    def __exit__(self, *exc: object) -> None:
        if self._token is not None:
            try:
                _otel_context.otel_var.reset(self._token)
            except (ValueError, RuntimeError):
                pass  # a step that was closed elsewhere


def of_tracer(tracer: Any, name: str, attributes: dict[str, Any]) -> Span | None:
    """Starts a span with the caller's own tracer; None, with one warning, if that fails."""
    try:
        span: Span = tracer.start_span(name, attributes=attributes)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("tracer-failed", "The tracer given for span %r failed: %r", name, error)
        return None
    return span
