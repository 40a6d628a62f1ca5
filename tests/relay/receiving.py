"""What tests send to a local receiver."""

from __future__ import annotations

import urllib.error
import urllib.request

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from raytrace_rl.relay import address
from tests import spooling
from tests.running import wait_for


def traces(*spans, scope="vllm", **resource):
    """An export request with these spans."""
    scopes = [ScopeSpans(scope=InstrumentationScope(name=scope), spans=[Span.FromString(one) for one in spans])]
    about = Resource(attributes=spooling.attributes(resource))
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=about, scope_spans=scopes)])


def post(data, *, path="/v1/traces", token=None, kind="application/x-protobuf", **headers):
    """Posts to the receiver as a program would that has read where it listens; status and body."""
    url, known = wait_for(lambda: address.local_http_endpoint("r"), "it listens")
    about = {"Content-Type": kind, "Authorization": f"Bearer {known if token is None else token}", **headers}
    request = urllib.request.Request(url + path, data=data, headers=about)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
