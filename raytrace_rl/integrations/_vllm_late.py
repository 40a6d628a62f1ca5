"""Spans of vLLM's that had begun before telemetry could start in their process. Imports the OpenTelemetry SDK."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from raytrace_rl import _clock, _foreign, _state
from raytrace_rl._interrupts import is_interrupt


class LateSpans(SpanProcessor):
    """Keeps the spans whose start our processor, added while they were open, has not seen."""

    def __init__(self) -> None:
        self._since_ns = _clock.now_ns()

    def on_end(self, span: ReadableSpan) -> None:
        """Places a span that began before this processor."""
        if not _state.tracing or (span.start_time or 0) >= self._since_ns:
            return
        try:
            _foreign._place(span, span.end_time or _clock.now_ns())
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.count_drop("spans")
            _state.warn_once("vllm-late", "A span of vLLM's could not be kept: %r", error)
