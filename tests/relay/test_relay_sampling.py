from __future__ import annotations

import random

import pytest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from raytrace_rl._env_otlp import sampled_share
from raytrace_rl.relay import sampling
from raytrace_rl.relay.batch import Portion
from raytrace_rl.relay.raw import span_ids, trace_id
from raytrace_rl.spool.format import Kind
from tests import spooling

_random = random.Random(5)
TRACES = [_random.randbytes(16) for _ in range(2000)]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.25, 0.5, 0.999])
def test_it_keeps_the_traces_that_the_sdk_would_keep(share):
    """Catches a trace cut in two: kept by the relay, and left out by the SDK of a service that it goes through."""
    keeps = sampling.ratio(share)
    assert keeps is not None
    theirs = TraceIdRatioBased(share)
    for one in TRACES:
        expected = theirs.should_sample(None, int.from_bytes(one, "big"), "x").decision is Decision.RECORD_AND_SAMPLE
        assert keeps(spooling.span(1, 0, 1, trace=one)) is expected


def test_everything_is_kept_without_looking():
    """Catches a relay that looks into each span to keep all of them."""
    assert sampling.ratio(1.0) is None


def test_whole_traces_go_from_own_and_foreign_spans():
    """Catches spans of a foreign scope that escape sampling, or take the scope's other spans with them."""
    share = sampling.ratio(0.5)
    assert share is not None
    own = [spooling.span(n, 0, 1, trace=one) for n, one in enumerate(TRACES)]
    scope = InstrumentationScope(name="vllm")
    foreign = ScopeSpans(scope=scope, spans=[Span.FromString(one) for one in own], schema_url="https://x")
    none = ScopeSpans(scope=scope, spans=[Span.FromString(next(one for one in own if not share(one)))])
    portion = Portion(
        "1-1",
        b"",
        {Kind.SPAN: list(own), Kind.SCOPE_SPANS: [foreign.SerializeToString(), none.SerializeToString(), b"\xff"]},
    )
    kept = [one for one in own if share(one)]
    assert 800 < len(kept) < 1200
    assert sampling.sample([portion], share) == 2 * (2000 - len(kept)) + 1
    assert portion.payloads[Kind.SPAN] == kept
    first, unreadable = portion.payloads[Kind.SCOPE_SPANS]
    found = ScopeSpans.FromString(first)
    assert (found.scope, found.schema_url) == (scope, "https://x")
    assert [span.SerializeToString() for span in found.spans] == kept
    assert unreadable == b"\xff"


@pytest.mark.parametrize(
    ("name", "argument", "share"),
    [
        ("", "", 1.0),
        ("always_on", "", 1.0),
        ("always_off", "", 0.0),
        ("parentbased_always_on", "", 1.0),
        ("parentbased_always_off", "", 0.0),
        ("traceidratio", "0.25", 0.25),
        ("ParentBased_TraceIdRatio", " 0.25 ", 0.25),
        ("traceidratio", "", 1.0),
    ],
)
def test_the_standard_variables_choose(name, argument, share, caplog):
    """Catches a sampler of the specification that is read as another."""
    found = sampled_share({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument})
    assert (found, caplog.text) == (share, "")


@pytest.mark.parametrize(
    ("name", "argument"), [("jaeger_remote", ""), ("traceidratio", "2"), ("traceidratio", "x"), ("traceidratio", "nan")]
)
def test_what_cannot_be_done_sends_everything_and_says_so(name, argument, caplog):
    """Catches a misspelt sampler by which a run's traces never arrive."""
    assert sampled_share({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}) == 1.0
    assert "Everything is sent" in caplog.text


def test_ids_are_found_wherever_they_stand():
    """Catches ids looked for at a fixed offset, in a span with a trace state, or written by somebody else."""
    span = Span(trace_id=TRACES[0], span_id=b"12345678", trace_state="a=b", name="x" * 300, flags=0x101)
    data = span.SerializeToString()
    assert (trace_id(data), span_ids(data)) == (TRACES[0], TRACES[0] + b"12345678")
    late = Span(name="x").SerializeToString() + data
    assert (trace_id(late), span_ids(late)) == (TRACES[0], TRACES[0] + b"12345678")
    assert span_ids(Span(name="x").SerializeToString()) is None
    assert span_ids(data[:10]) is None
    assert trace_id(b"\xff") is None
