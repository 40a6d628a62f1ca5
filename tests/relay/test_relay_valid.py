"""What the local receiver lets in, against the official classes."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor
from opentelemetry.proto.logs.v1.logs_pb2 import ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import ScopeMetrics
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from raytrace_rl.relay import valid
from tests import spooling

MESSAGES = [
    (valid.SCOPES["traces"], ScopeSpans),
    (valid.SCOPES["metrics"], ScopeMetrics),
    (valid.SCOPES["logs"], ScopeLogs),
    (valid.RESOURCE, Resource),
]


def shape_of(descriptor, known):
    """A shape as the official class describes it; a message within itself is that same shape."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    shape = known[descriptor.full_name] = {}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            shape[field.number] = shape_of(field.message_type, known)
        elif field.type == FieldDescriptor.TYPE_STRING:
            shape[field.number] = valid.TEXT
        elif field.is_repeated:
            fixed = field.type in (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_DOUBLE)
            shape[field.number] = valid.FIXED64 if fixed else valid.VARINTS
    return shape


def assert_same(got, wanted, seen):
    """Two shapes, which may hold themselves."""
    if id(got) in seen:
        return
    seen.add(id(got))
    assert got.keys() == wanted.keys()
    for number, inner in got.items():
        if isinstance(inner, str):
            assert inner == wanted[number]
        else:
            assert_same(inner, wanted[number], seen)


@pytest.mark.parametrize(("shape", "official"), MESSAGES)
def test_the_shapes_are_those_of_the_official_classes(shape, official):
    """Catches a field whose text nobody checks, and a field of a later version of OTLP that is not known here."""
    assert_same(shape, shape_of(official.DESCRIPTOR, {}), set())


def test_text_that_is_no_text_is_refused_wherever_it_stands():
    """Catches a byte that makes a collector refuse a whole request of many senders."""
    whole = ScopeSpans(schema_url="schema", spans=[spooling.Span.FromString(spooling.span(1, 0, 1, note="text"))])
    data = whole.SerializeToString()
    valid.check(data, valid.SCOPES["traces"])
    for text in (b"schema", b"span 1", b"note", b"text"):
        at = data.index(text)
        with pytest.raises(ValueError, match="utf-8"):
            valid.check(data[:at] + b"\xff" + data[at + 1 :], valid.SCOPES["traces"])


def test_attributes_without_end_are_refused():
    """Catches a message nested so deep that a collector, or we ourselves, give up on it."""
    deep: object = "x"
    for _ in range(40):
        deep = [deep]
    data = ScopeSpans(spans=[spooling.Span(attributes=spooling.attributes({"deep": deep}))]).SerializeToString()
    with pytest.raises(ValueError, match="nested"):
        valid.check(data, valid.SCOPES["traces"])
