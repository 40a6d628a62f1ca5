"""The peer of most figures: OpenTelemetry's SDK set up as in production, but for the sending.

A span goes through the BatchSpanProcessor and is encoded to OTLP by OpenTelemetry's own encoder; the bytes go nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

#: Spans encoded at once: the batch size of a BatchSpanProcessor.
BATCH: Final = 512


class Encode(SpanExporter):
    """Encodes, and counts what it has encoded."""

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encodes a batch."""
        encode_spans(spans).SerializeToString()
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


class Sdk:
    """A provider of its own, whose spans do not reach our spool.

    Args:
        queue: Spans that the processor holds before it drops them, as it does with more than 2048 unless told.
    """

    def __init__(self, queue: int) -> None:
        self.encode = Encode()
        self.processor = BatchSpanProcessor(self.encode, max_queue_size=queue, max_export_batch_size=BATCH)
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(self.processor)


def ray_tracing_hook() -> None:
    """What ``ray.init(_tracing_startup_hook=...)`` runs in every process."""
    trace.set_tracer_provider(Sdk(queue=1 << 16).provider)
