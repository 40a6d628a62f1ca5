"""The official protobuf classes of OTLP by name, as what our own decoders are held against."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

_CLASSES = (
    AnyValue,
    ExportLogsServiceRequest,
    ExportMetricsServiceRequest,
    ExportTraceServiceRequest,
    Resource,
    ScopeLogs,
    ScopeMetrics,
    ScopeSpans,
    Span,
)


@cache
def _by_name() -> dict[str, Any]:
    return {one.DESCRIPTOR.name: one for one in _CLASSES}


def parses(name: str, data: bytes) -> Any:
    """Returns the message of that class; None where the bytes are none."""
    try:
        return _by_name()[name].FromString(data)
    except DecodeError:
        return None


def value_of(value: Any) -> Any:
    """What an ``AnyValue`` holds, as `raytrace_rl._decode` is to give it."""
    which = value.WhichOneof("value")
    if which in (None, "string_value_strindex"):  # a string of a table that only profiles have
        return None
    if which == "array_value":
        return [value_of(item) for item in value.array_value.values]
    if which == "kvlist_value":
        return attributes_of(value.kvlist_value.values)
    return getattr(value, which)


def attributes_of(items: Any) -> dict[str, Any]:
    """As `value_of`, for attributes."""
    return {item.key: value_of(item.value) for item in items}
