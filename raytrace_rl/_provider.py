"""The TracerProvider that we install where there is none: other instrumentation's spans become ours, scope and all.

Not the SDK's own: its handler after a fork starts threads and waits for them (OpenTelemetry 1.45,
``TracerProvider._handle_fork``), and in the child of a fork that came at a bad moment waits for ever, within the user's
``os.fork()``. The SDK's comes only for whoever asks this provider for what only that one has, such as a processor of
their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.util._decorator import _agnosticcontextmanager

from raytrace_rl import _encode, _span, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._span import RecordingSpan
from raytrace_rl.spool.format import Kind

Attributes = Mapping[str, Any] | None


class _ScopedSpan(RecordingSpan):
    """A span of another instrumentation scope; its record is a ``ScopeSpans`` that names the scope."""

    __slots__ = ("_on_exception", "_scope")

    def __init__(self, name: str, attributes: dict[str, Any], scope: bytes, on_exception: tuple[bool, bool]) -> None:
        super().__init__(None, name, attributes)
        self._scope = scope
        self._on_exception = on_exception

    def _enveloped(self, payload: bytes) -> tuple[bytes, int]:
        return self._scope + _encode.delimited(b"\x12", payload), int(Kind.SCOPE_SPANS)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the span; an exception is recorded as `start_span` was asked to (as the SDK's spans do)."""
        if exc is not None and self.is_recording():
            record, set_status = self._on_exception
            if record:
                self.record_exception(exc)
            if set_status:
                self.set_status(StatusCode.ERROR, f"{type(exc).__name__}: {exc}")
        self.end()


class SpoolTracer(trace.Tracer):
    """Makes spans of one instrumentation scope; they are in the spool when they have ended."""

    def __init__(self, provider: SpoolTracerProvider, name: str, version: str, schema_url: str) -> None:
        self._provider = provider
        self._names = (name, version, schema_url)
        self._scope = _encode.scope_spans(name, version, schema_url, ())

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """Starts a span; see ``opentelemetry.trace.Tracer.start_span``. ``start_time`` is in ns since the epoch."""
        if self._provider.sdk is not None:
            made: Span = self._provider.sdk.get_tracer(*self._names).start_span(
                name, context, kind, attributes, links, start_time, record_exception, set_status_on_exception
            )
            return made
        current = _span.otel_var.get() if context is None else context
        if not _state.tracing:
            return trace.NonRecordingSpan(trace.get_current_span(current).get_span_context())
        span = _ScopedSpan(str(name), dict(attributes or {}), self._scope, (record_exception, set_status_on_exception))
        try:
            if kind is not SpanKind.INTERNAL:
                span.set_kind(kind)
            for link in links or ():
                span.add_link(link.context, link.attributes)
            span.begin(current, start_time)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.count_drop("spans")
            _state.warn_once("tracer-start", "Span %r could not be started: %r", name, error)
            return trace.NonRecordingSpan(trace.get_current_span(current).get_span_context())
        return span

    @_agnosticcontextmanager
    def start_as_current_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> Iterator[Span]:
        """Starts a span and makes it current; see ``opentelemetry.trace.Tracer.start_as_current_span``."""
        span = self.start_span(
            name, context, kind, attributes, links, start_time, record_exception, set_status_on_exception
        )
        with trace.use_span(span, end_on_exit, record_exception, set_status_on_exception) as current:
            yield current


class SpoolTracerProvider(trace.TracerProvider):
    """Hands out tracers whose spans reach the spool.

    Attributes:
        sdk: The SDK's provider, once somebody has asked for what only that has; all tracers then use it, and its spans
            reach the spool by our processor.
    """

    def __init__(self, resource: Mapping[str, Any]) -> None:
        self.sdk: Any = None
        self._resource = dict(resource)
        self._lock = threading.Lock()

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,  # noqa: ARG002 - of the scope; OTLP backends index name and version
    ) -> trace.Tracer:
        """Returns a tracer of the named instrumentation scope."""
        return SpoolTracer(self, instrumenting_module_name, instrumenting_library_version or "", schema_url or "")

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Returns True: nothing of ours is queued; a processor that someone added is flushed."""
        return True if self.sdk is None else bool(self.sdk.force_flush(timeout_millis))

    def shutdown(self) -> None:
        """Ends what somebody added; the spool ends with `shutdown_telemetry`."""
        if self.sdk is not None:
            self.sdk.shutdown()

    def __getattr__(self, name: str) -> Any:
        # ``add_span_processor``, ``resource``, ``sampler``...: whoever asks for these wants the SDK's provider.
        if name.startswith("__"):
            raise AttributeError(name)
        with self._lock:
            if self.sdk is None:
                from raytrace_rl import _foreign

                self.sdk = _foreign.new_provider(self._resource)
        return getattr(self.sdk, name)
