"""Spans of other instrumentation: made with the OpenTelemetry SDK, kept in our spool.

Imports the SDK; so only `_process`, when telemetry starts, and an explicit foreign tracer lead here.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanContext

from raytrace_rl import _clock, _encode, _ids, _state
from raytrace_rl._head import TRUNCATED_KEY
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.spool.format import Kind

_HAS_IS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200


def _flags(context: SpanContext | None, own: SpanContext | None = None) -> int:
    carried = own if own is not None else context
    flags = (int(carried.trace_flags) & 0xFF if carried is not None else 0) | _HAS_IS_REMOTE
    return flags | _IS_REMOTE if context is not None and context.is_remote else flags


def encode_span(span: ReadableSpan, end_ns: int | None, extra: dict[str, Any] | None = None) -> bytes:
    """Returns a foreign span as an OTLP ``Span``.

    Args:
        span: The SDK's span; it may still be open.
        end_ns: Its end, ns since the epoch; None leaves it open.
        extra: Attributes to add.
    """
    context = span.get_span_context()
    if context is None:
        raise ValueError("a span without a context")
    parts = [b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")]
    if context.trace_state:
        parts.append(_encode.delimited(b"\x1a", _encode.text(context.trace_state.to_header(), 4096)))
    if span.parent is not None:
        parts += [b'"\x08', span.parent.span_id.to_bytes(8, "big")]
    parts.append(_encode.delimited(b"\x2a", _encode.text(span.name, _encode.value_length_limit)))
    parts += [b"\x30", _encode.varint(span.kind.value + 1)]
    parts += [b"\x39", (span.start_time or 0).to_bytes(8, "little")]
    if end_ns is not None:
        parts += [b"\x41", end_ns.to_bytes(8, "little")]
    lost = _encode.span_attributes({**(span.attributes or {}), **(extra or {})}, parts)
    if lost + span.dropped_attributes:
        parts.append(b"\x50" + _encode.varint(lost + span.dropped_attributes))
    parts += [_encode.event(e.name, e.timestamp, e.attributes, e.dropped_attributes) for e in span.events]
    if span.dropped_events:
        parts.append(b"\x60" + _encode.varint(span.dropped_events))
    for link in span.links:
        linked = link.context
        parts.append(
            _encode.link(
                linked.trace_id.to_bytes(16, "big"),
                linked.span_id.to_bytes(8, "big"),
                linked.trace_state.to_header() if linked.trace_state else "",
                link.attributes,
                _flags(linked),
                link.dropped_attributes,
            )
        )
    if span.dropped_links:
        parts.append(b"\x70" + _encode.varint(span.dropped_links))
    parts.append(_encode.status(span.status.status_code.value, span.status.description or ""))
    parts += [b"\x85\x01", _flags(span.parent, context).to_bytes(4, "little")]
    return b"".join(parts)


def _place(span: ReadableSpan, end_ns: int, extra: dict[str, Any] | None = None) -> None:
    scope = span.instrumentation_scope
    payload = _encode.scope_spans(
        scope.name if scope else "",
        (scope.version or "") if scope else "",
        (scope.schema_url or "") if scope else "",
        [encode_span(span, end_ns, extra)],
    )
    writer = _state.writer
    if writer is None or not writer.append(Kind.SCOPE_SPANS, payload):
        _state.count_drop("spans")
        _state.count_drop("bytes", len(payload))


class OpenForeignSpan:
    """A foreign span that has not ended, as the heartbeat and shutdown see it (`journal.OpenSpan`)."""

    __slots__ = ("_span", "slot", "start_ns", "thread_ident")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.slot = 0
        self.start_ns = span.start_time or 0
        self.thread_ident = threading.get_ident()

    @property
    def ids(self) -> bytes:
        """Trace id (16) and span id (8)."""
        return _ids_of(self._span.get_span_context())

    @property
    def version(self) -> int:
        """Goes up as attributes are added; a replaced value is not seen."""
        return len(self._span.attributes or {})

    def open_payload(self) -> bytes:
        """OTLP ``Span`` without an end time."""
        return encode_span(self._span, None)

    def truncate(self, end_ns: int) -> None:
        """Places the span as it stands, marked truncated; the SDK's own pipeline is not touched."""
        _place(self._span, end_ns, {TRUNCATED_KEY: True})


def _ids_of(context: SpanContext) -> bytes:
    return context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big")


class SpoolSpanProcessor(SpanProcessor):
    """Hands every span of an SDK TracerProvider to this process's spool; inert while telemetry is off."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, OpenForeignSpan]] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Notes the span as open."""
        if _state.tracing:
            opened = OpenForeignSpan(span)
            self._open[opened.ids] = (_state.epoch, opened)
            _state.open_spans[opened] = None

    def on_end(self, span: ReadableSpan) -> None:
        """Places the ended span. One that began before a fork, a shutdown or a restart was accounted for there."""
        context = span.get_span_context()
        if context is None:
            return
        epoch, opened = self._open.pop(_ids_of(context), (-1, None))
        if opened is None or epoch != _state.epoch:
            return
        try:
            _place(span, span.end_time or _clock.now_ns())
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.count_drop("spans")
            _state.warn_once("foreign-span", "A span of another tracer could not be kept: %r", error)
        _state.open_spans.pop(opened, None)

    def shutdown(self) -> None:
        """Nothing to end: what has ended is in the mapped file."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Returns True: nothing is queued."""
        return True


class _Ids(IdGenerator):
    """Our ids, so that equal seeds on two ranks do not make equal ids."""

    def generate_span_id(self) -> int:
        return int.from_bytes(_ids.new_span_id(), "big")

    def generate_trace_id(self) -> int:
        return int.from_bytes(_ids.new_trace_id(), "big")


def new_provider(resource_attributes: dict[str, Any]) -> TracerProvider:
    """Returns an SDK TracerProvider whose every span reaches the spool. Sampling acts at export, not here."""
    from opentelemetry.sdk.resources import Resource

    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource(resource_attributes),
        shutdown_on_exit=False,
        id_generator=_Ids(),
    )
    provider.add_span_processor(SpoolSpanProcessor())
    return provider
