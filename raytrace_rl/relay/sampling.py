"""``OTEL_TRACES_SAMPLER``, applied when spans leave the node: whole traces, by their id, read off the encoded bytes.

The spool always has everything. Every relay decides alike, since a trace's id decides; what a parent was sampled as is
not known here, so a ``parentbased_*`` sampler is the one that it would ask for a root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from raytrace_rl.relay.batch import Portion
from raytrace_rl.relay.raw import fields, trace_id
from raytrace_rl.spool.format import Kind

#: Whether the trace of an encoded span is sent.
Sampler = Callable[[bytes], bool]

_SPANS: Final = 0x12


def ratio(share: float) -> Sampler | None:
    """Returns a sampler that keeps ``share`` (0 to 1) of all traces; None for all of them.

    Source: OpenTelemetry specification, "Tracing SDK", TraceIdRatioBased; the low 8 bytes of the id are compared with
    the share, as the SDKs do, so that a trace is kept here and there alike.
    """
    if share >= 1:
        return None
    bound = round(share * (1 << 64))

    def keeps(span: bytes) -> bool:
        found = trace_id(span)
        return found is not None and int.from_bytes(found[8:], "big") < bound

    return keeps


def sample(portions: Iterable[Portion], sampler: Sampler) -> int:
    """Takes the spans of unsampled traces out of ``portions``; returns how many."""
    left_out = 0
    for portion in portions:
        own = portion.payloads[Kind.SPAN]
        kept = [span for span in own if sampler(span)]
        left_out += len(own) - len(kept)
        own[:] = kept
        scoped = []
        for payload in portion.payloads[Kind.SCOPE_SPANS]:
            sampled, out, some = _scope(payload, sampler)
            left_out += out
            if some:
                scoped.append(sampled)
        portion.payloads[Kind.SCOPE_SPANS][:] = scoped
    return left_out


def _scope(payload: bytes, sampler: Sampler) -> tuple[bytes, int, bool]:
    """Returns a ``ScopeSpans`` without unsampled spans, how many these were, and whether any is left."""
    parts = []
    left_out = kept = 0
    try:
        for tag, start, value, stop in fields(payload):
            if tag == _SPANS:
                if not sampler(payload[value:stop]):
                    left_out += 1
                    continue
                kept += 1
            parts.append(payload[start:stop])
    except ValueError:
        return payload, 0, True  # the receiver may make more of it
    return b"".join(parts), left_out, kept > 0
