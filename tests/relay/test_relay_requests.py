from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from raytrace_rl._version import VERSION
from raytrace_rl.relay.batch import Portion
from raytrace_rl.relay.requests import SIGNALS, request
from raytrace_rl.spool.format import Kind
from tests import spooling


def traces(*portions):
    """The request for spans, as a message of the official class."""
    return ExportTraceServiceRequest.FromString(request(SIGNALS["traces"], portions))


def portion(spans=(), scopes=(), resource=b""):
    """What a request takes of a process."""
    return Portion("1-1", resource, {Kind.SPAN: list(spans), Kind.SCOPE_SPANS: list(scopes)})


def test_own_and_foreign_spans_stand_under_their_scopes_and_resource():
    """Catches a request in which the official decoder finds other spans, scopes or resources than were stored."""
    spans = [spooling.span(n, 0, 1, note="x" * n) for n in (1, 200, 3000)]
    foreign = ScopeSpans(scope=InstrumentationScope(name="vllm"), spans=[Span(name="llm_request")])
    found = traces(
        portion(spans, [foreign.SerializeToString()], spooling.resource(rl__role="worker")),
        portion(spans[:1], resource=spooling.resource(rl__role="driver")),
    )
    first, second = found.resource_spans
    assert first.resource == Resource.FromString(spooling.resource(rl__role="worker"))
    assert [(scope.scope.name, scope.scope.version) for scope in first.scope_spans] == [
        ("raytrace_rl", VERSION),
        ("vllm", ""),
    ]
    assert [span.SerializeToString() for span in first.scope_spans[0].spans] == spans
    assert first.scope_spans[1] == foreign
    assert len(second.scope_spans) == 1
    assert second.resource.attributes[0].value.string_value == "driver"


def test_metrics_and_logs_stand_under_their_resource():
    """Catches a request of one of the other two signals that no receiver can read."""
    metrics = ScopeMetrics(metrics=[Metric(name="rl.loss")])
    one = Portion("1-1", spooling.resource(a=1), {Kind.METRICS: [metrics.SerializeToString()] * 2})
    found = ExportMetricsServiceRequest.FromString(request(SIGNALS["metrics"], [one]))
    assert list(found.resource_metrics[0].scope_metrics) == [metrics, metrics]
    logs = ScopeLogs(log_records=[LogRecord(severity_number=9)])
    one = Portion("1-1", spooling.resource(a=1), {Kind.LOGS: [logs.SerializeToString()]})
    other = ExportLogsServiceRequest.FromString(request(SIGNALS["logs"], [one]))
    assert list(other.resource_logs[0].scope_logs) == [logs]
    assert other.resource_logs[0].resource.attributes[0].value.int_value == 1


def test_nothing_to_send_is_no_request():
    """Catches empty requests that are sent each half second."""
    assert request(SIGNALS["traces"], [portion(), portion(resource=b"\x0a\x00")]) == b""


@given(st.lists(st.lists(st.binary(max_size=3000), max_size=5), max_size=4))
def test_lengths_are_right_whatever_the_sizes(sizes):
    """Catches a length that is wrong where it needs another byte."""
    names = [[name.hex() for name in one] for one in sizes]
    found = traces(*[portion([Span(name=name).SerializeToString() for name in one]) for one in names])
    assert [[span.name for span in one.scope_spans[0].spans] for one in found.resource_spans] == [
        one for one in names if one
    ]
