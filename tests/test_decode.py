"""The protobuf decoder, against the official classes."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from raytrace_rl import _decode
from tests.fuzz import official

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=150)
enum = st.integers(-(2**31), 2**31 - 1)

scalars = st.one_of(
    st.builds(AnyValue),
    st.builds(AnyValue, string_value=text),
    st.builds(AnyValue, bool_value=st.booleans()),
    st.builds(AnyValue, int_value=st.integers(-(2**63), 2**63 - 1)),
    st.builds(AnyValue, double_value=st.floats(allow_nan=False)),
    st.builds(AnyValue, bytes_value=st.binary(max_size=200)),
)
any_values = st.recursive(
    scalars,
    lambda values: st.one_of(
        st.builds(lambda items: AnyValue(array_value=ArrayValue(values=items)), st.lists(values, max_size=4)),
        st.builds(
            lambda items: AnyValue(
                kvlist_value=KeyValueList(values=[KeyValue(key=key, value=value) for key, value in items.items()])
            ),
            st.dictionaries(text, values, max_size=4),
        ),
    ),
    max_leaves=8,
)
attributes = st.dictionaries(text, any_values, max_size=5).map(
    lambda items: [KeyValue(key=key, value=value) for key, value in items.items()]
)
ids = st.binary(max_size=20)
spans = st.builds(
    Span,
    trace_id=ids,
    span_id=ids,
    parent_span_id=ids,
    trace_state=text,
    name=text,
    kind=enum,
    start_time_unix_nano=u64,
    end_time_unix_nano=u64,
    attributes=attributes,
    dropped_attributes_count=u32,
    events=st.lists(
        st.builds(Span.Event, time_unix_nano=u64, name=text, attributes=attributes, dropped_attributes_count=u32),
        max_size=3,
    ),
    dropped_events_count=u32,
    links=st.lists(
        st.builds(
            Span.Link,
            trace_id=ids,
            span_id=ids,
            trace_state=text,
            attributes=attributes,
            dropped_attributes_count=u32,
            flags=u32,
        ),
        max_size=3,
    ),
    dropped_links_count=u32,
    status=st.one_of(st.none(), st.builds(Status, message=text, code=enum)),
    flags=u32,
)
requests = st.builds(
    ExportTraceServiceRequest,
    resource_spans=st.lists(
        st.builds(
            ResourceSpans,
            resource=st.builds(Resource, attributes=attributes, dropped_attributes_count=u32),
            scope_spans=st.lists(
                st.builds(
                    ScopeSpans,
                    scope=st.builds(
                        InstrumentationScope,
                        name=text,
                        version=text,
                        attributes=attributes,
                        dropped_attributes_count=u32,
                    ),
                    spans=st.lists(spans, max_size=2),
                    schema_url=text,
                ),
                max_size=2,
            ),
            schema_url=text,
        ),
        max_size=2,
    ),
)


def assert_same_span(got, wanted):
    """Every field of a span."""
    assert got.trace_id == wanted.trace_id
    assert got.span_id == wanted.span_id
    assert got.parent_span_id == wanted.parent_span_id
    assert got.trace_state == wanted.trace_state
    assert got.name == wanted.name
    assert got.kind == wanted.kind
    assert got.start_ns == wanted.start_time_unix_nano
    assert got.end_ns == wanted.end_time_unix_nano
    assert got.attributes == official.attributes_of(wanted.attributes)
    assert list(map(type, got.attributes.values())) == [
        type(official.value_of(item.value)) for item in wanted.attributes
    ]
    assert got.dropped_attributes == wanted.dropped_attributes_count
    assert got.events == tuple(
        (e.time_unix_nano, e.name, official.attributes_of(e.attributes), e.dropped_attributes_count)
        for e in wanted.events
    )
    assert got.dropped_events == wanted.dropped_events_count
    assert got.links == tuple(
        (
            link.trace_id,
            link.span_id,
            link.trace_state,
            official.attributes_of(link.attributes),
            link.dropped_attributes_count,
            link.flags,
        )
        for link in wanted.links
    )
    assert got.dropped_links == wanted.dropped_links_count
    assert got.status_message == wanted.status.message
    assert got.status_code == wanted.status.code
    assert got.flags == wanted.flags


@settings(max_examples=300)
@given(spans)
def test_span(message):
    """Catches any field that is decoded differently from protobuf itself."""
    assert_same_span(_decode.span(message.SerializeToString()), message)


@given(requests)
def test_request(message):
    """Catches a resource, scope or span that is lost or put elsewhere in an export request."""
    got = _decode.request(message.SerializeToString())
    assert len(got) == len(message.resource_spans)
    for batch, wanted in zip(got, message.resource_spans, strict=True):
        assert batch.resource == official.attributes_of(wanted.resource.attributes)
        assert _decode.resource(wanted.resource.SerializeToString()) == batch.resource
        assert len(batch.scopes) == len(wanted.scope_spans)
        for scope, wanted_scope in zip(batch.scopes, wanted.scope_spans, strict=True):
            assert scope.scope == (
                wanted_scope.scope.name,
                wanted_scope.scope.version,
                official.attributes_of(wanted_scope.scope.attributes),
            )
            assert len(scope.spans) == len(wanted_scope.spans)
            for span, wanted_span in zip(scope.spans, wanted_scope.spans, strict=True):
                assert_same_span(span, wanted_span)


def test_not_a_number():
    """Catches a NaN attribute that comes back as something else (NaN does not equal itself: its own test)."""
    value = _decode.any_value(AnyValue(double_value=math.nan).SerializeToString())
    assert isinstance(value, float)
    assert math.isnan(value)


@pytest.mark.parametrize("decode", [_decode.span, _decode.resource, _decode.scope_spans, _decode.request])
@given(data=st.binary(max_size=300))
def test_any_bytes(decode, data):
    """Catches rubbish that raises anything but ValueError."""
    try:
        decode(data)
    except ValueError:
        pass


@settings(max_examples=400)
@given(spans, st.data())
def test_damaged_span(message, data):
    """Catches a damaged span that raises anything but ValueError, or that is read where protobuf refuses it."""
    damaged = bytearray(message.SerializeToString())
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    try:
        got = _decode.span(bytes(damaged))
    except ValueError:
        return
    official = Span()
    official.ParseFromString(bytes(damaged))
    assert (got.trace_id, got.name, got.start_ns) == (official.trace_id, official.name, official.start_time_unix_nano)


def test_unknown_fields_are_passed_over():
    """Catches a span of a later OTLP version that cannot be read."""
    message = Span(name="x", flags=5)
    later = b"\xc2\x3e\x03abc" + b"\xc8\x3e\x07" + b"\xc9\x3e" + bytes(8) + b"\xcd\x3e" + bytes(4)
    assert_same_span(_decode.span(later + message.SerializeToString() + later), message)


@pytest.mark.parametrize("levels", [_decode.MAX_DEPTH, _decode.MAX_DEPTH + 1, 20_000])
def test_nesting_is_bounded(levels):
    """Catches a deeply nested attribute that overruns the stack."""
    value = AnyValue(string_value="x").SerializeToString()
    for _ in range(levels):
        for tag in (b"\x0a", b"\x2a"):
            size = len(value)
            prefix = bytearray()
            while size > 127:
                prefix.append(size & 127 | 128)
                size >>= 7
            value = tag + bytes(prefix) + bytes((size,)) + value
    if levels <= _decode.MAX_DEPTH:
        assert _decode.any_value(value) is not None
    else:
        with pytest.raises(ValueError, match="nested deeper"):
            _decode.any_value(value)


def test_spans_do_not_share_lists():
    """Catches a list attribute kept for the next span, which would change with it."""
    data = Span(
        attributes=[KeyValue(key="k", value=AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1)])))]
    ).SerializeToString()
    first, second = _decode.span(data), _decode.span(data)
    assert first.attributes["k"] == second.attributes["k"] == [1]
    assert first.attributes["k"] is not second.attributes["k"]


def test_kept_attributes_are_bounded(monkeypatch):
    """Catches memory that grows with every attribute value ever seen."""
    monkeypatch.setattr(_decode, "_KEPT_KEY_VALUES", 10)
    for n in range(100):
        _decode.key_value(KeyValue(key=f"key {n}", value=AnyValue(int_value=n)).SerializeToString())
        assert len(_decode._KEY_VALUES) <= 10


def test_falsy_attributes_are_kept():
    """Catches an attribute of value 0, false or "" that is read twice or lost."""
    for value in (AnyValue(int_value=0), AnyValue(bool_value=False), AnyValue(string_value="")):
        data = Span(attributes=[KeyValue(key="k", value=value)]).SerializeToString()
        for _ in range(2):
            assert _decode.span(data).attributes == {"k": official.value_of(value)}


def test_imports_nothing_heavy():
    """Catches an import in the reading side that a plain worker or login node does not have."""
    script = (
        "import sys, raytrace_rl.monitor, raytrace_rl.monitor.export, raytrace_rl.monitor.report\n"
        "heavy = {'ray', 'torch', 'grpc', 'google.protobuf', 'opentelemetry.sdk', 'opentelemetry.proto', 'duckdb'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
