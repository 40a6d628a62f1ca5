"""What a carrier holds, written and read: W3C headers by hand, and the scopes of one dispatched call.

A carrier is a ``dict[str, str]`` with ``traceparent`` and ``tracestate`` (https://www.w3.org/TR/trace-context/), the
user's own ``baggage`` (https://www.w3.org/TR/baggage/), and one key of ours, ``raytrace``::

    i=7;b=overhead;p=1|1760000000000000000,node-3
    iteration, bucket, per-prompt | wall clock (ns) and node of the sender, put there by dispatch alone

    w=3|1760000000000000000,node-3
    in a trajectory's: the weights that made it | when, and on which node

Written by hand because OpenTelemetry's propagators cost several times as much, and every Ray call pays (``make bench``
compares them). For the same reason the hot functions here are long and straight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from time import time_ns
from typing import Any, Final

from opentelemetry.context.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.span import TraceState

from raytrace_rl import _baggage, _registry, _scopes, _span, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._invocation import Attachment
from raytrace_rl.spool.place import node_name

#: The keyword that a carrier travels under; NeMo-RL's own, so that its code and ours understand each other.
KEYWORD: Final = "_otel_carrier"

#: A carrier is a header of a call: what is longer than this comes from somewhere else.
_MAX_HEADER: Final = 8192
_MAX_TRACEPARENT: Final = 512
MAX_SCOPES: Final = 512
#: A delay longer than this, either way, is a wrong clock or a made-up number.
_MAX_QUEUED_NS: Final = 30 * 86_400 * 10**9
_MAX_ITERATION: Final = 2**63 - 1

#: W3C trace context 3.2.2: what a version-00 header is, whole; and what any later version may begin with.
_VERSION_00: Final = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}").fullmatch
_LATER_VERSION: Final = re.compile(
    "(?!ff|00)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?:-.*)?", re.DOTALL
).fullmatch


class RemoteSpan(NonRecordingSpan):
    """A span of another process, as a parent. What its headers mean is read when a child of it is opened.

    Attributes:
        traceparent: The header, of version 00 and valid.
        tracestate: The header; empty if there was none.
    """

    __slots__ = ("_lazy", "traceparent", "tracestate")

    def __init__(self, traceparent: str, tracestate: str = "") -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate
        self._lazy: SpanContext | None = None

    def get_span_context(self) -> SpanContext:
        """Returns what our own spans, and any other instrumentation, take parentage from."""
        context = self._lazy
        if context is None:
            header = self.traceparent
            self._lazy = context = SpanContext(
                int(header[3:35], 16),
                int(header[36:52], 16),
                is_remote=True,
                trace_flags=TraceFlags(int(header[53:], 16)),
                trace_state=TraceState.from_header([self.tracestate]) if self.tracestate else None,
            )
        return context

    def __repr__(self) -> str:
        return f"RemoteSpan({self.traceparent})"


# ---------------------------------------------------------------------------------------------------------- writing

#: The header written last, by the identity of the span id in it, and the scopes: calls go out by the dozen under one.
_last_parent: tuple[bytes, str] = (b"", "")
_last_scopes: tuple[_scopes.Scopes | None, str] = (None, "")


def current() -> dict[str, str]:
    """Returns the carrier of what is current here; empty with nothing to carry, or with telemetry off."""
    global _last_parent, _last_scopes
    carrier: dict[str, str] = {}
    if not _state.tracing:
        return carrier
    try:
        context = _span.otel_var.get()
        if context:
            span: Any = context.get(_span.SPAN_KEY)
            kind = type(span)
            if kind is _span.ManagedSpan or (kind is not RemoteSpan and isinstance(span, _span.RecordingSpan)):
                span_id = span.span_id
                known, header = _last_parent
                if known is not span_id:
                    header = f"00-{span.trace.id.hex()}-{span_id.hex()}-{span.trace.flags:02x}"
                    _last_parent = (span_id, header)
                carrier["traceparent"] = header
                if span.trace.state:
                    carrier["tracestate"] = span.trace.state.to_header()
            elif kind is RemoteSpan:
                carrier["traceparent"] = span.traceparent
                if span.tracestate:
                    carrier["tracestate"] = span.tracestate
            elif span is not None:
                _write_foreign(span, carrier)
            if len(context) > 1 or span is None:
                _baggage.write(carrier, context)
        scopes = _scopes.var.get()
        if scopes is not None:
            written, text = _last_scopes
            if written is not scopes:
                text = _scopes_text(scopes)
                _last_scopes = (scopes, text)
            if text:
                carrier["raytrace"] = text
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("carrier:write", "No trace context is sent: %r", error)
        return {}
    return carrier


def sent() -> dict[str, str]:
    """Returns `current`, if there is anything to carry with the send time: for one call that goes out now."""
    carrier = current()
    if carrier:
        carrier["raytrace"] = f"{carrier.get('raytrace', '')}|{time_ns()},{NODE}"
    return carrier


def _write_foreign(span: Any, carrier: dict[str, str]) -> None:
    """Writes the parentage of a span of other instrumentation."""
    parent = span.get_span_context()
    if parent.is_valid:
        carrier["traceparent"] = f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{parent.trace_flags:02x}"
        if parent.trace_state:
            carrier["tracestate"] = parent.trace_state.to_header()


def _scopes_text(scopes: _scopes.Scopes) -> str:
    """The part of ``raytrace`` that stays the same over a step; empty without any scope that travels."""
    parts = []
    if scopes.iteration is not None:
        parts.append(f"i={int(scopes.iteration)}")
    if scopes.bucket is not None:
        parts.append(f"b={scopes.bucket}")
    if scopes.per_prompt:
        parts.append("p=m" if scopes.muted else "p=1")
    return ";".join(parts)


#: The sender's node, by the name of its directory in the spool: a reader finds there whose clock it was.
NODE: Final = node_name()


# ---------------------------------------------------------------------------------------------------------- reading


#: The parent read last: a worker's calls come by the dozen from under one span.
_last_received: tuple[str, Context | None] = ("", None)


def read(carrier: Any, dispatched: bool) -> Attachment | None:
    """Returns what ``carrier`` makes current, or None if that is nothing; rubbish costs one warning.

    Args:
        carrier: What arrived; anything at all.
        dispatched: It came with one dispatched call, so its scopes and send time count. Otherwise (it outlived its
            call: a collector's, a sample's) it brings parentage and baggage, and the scopes here stay.
    """
    try:
        if type(carrier) is not dict:
            if not isinstance(carrier, Mapping):
                _rubbish("type", "a carrier is a dict of strings, not %s", type(carrier).__name__)
                return None
            carrier = dict(carrier)
        header = carrier.get("traceparent")
        otel: Context | None = None
        if header is not None:
            known, otel = _last_received
            if header != known or "tracestate" in carrier:
                otel = _read_parent(header, carrier.get("tracestate"))
        scopes = None
        if dispatched:
            header = carrier.get("raytrace")
            if header is not None:
                scopes = _read_scopes(header)
        header = carrier.get("baggage")
        if header is not None:
            otel = _read_baggage(header, otel)
        if otel is None:
            if scopes is None:
                return None
            otel = _span.otel_var.get()
        return otel, scopes if dispatched else _scopes.var.get()
    except Exception as error:
        if is_interrupt(error):
            raise
        _rubbish("error", "%r", error)
        return None


def without_scopes(carrier: object) -> dict[str, str]:
    """Returns a copy of ``carrier`` to keep beyond its call; empty for what is no carrier."""
    if carrier is None:
        return {}
    if not isinstance(carrier, Mapping):
        _rubbish("type", "a carrier is a dict of strings, not %s", type(carrier).__name__)
        return {}
    try:
        return {key: value for key, value in carrier.items() if key != "raytrace"}
    except Exception as error:
        if is_interrupt(error):
            raise
        _rubbish("error", "%r", error)
        return {}


def _read_parent(header: Any, state: Any) -> Context | None:
    """Reads ``traceparent`` and ``tracestate`` by the rules of the W3C's sections 3.2 and 3.3; None if not valid.

    Returns:
        A context with that parent and nothing else: what an earlier call left current has no part in this one.
    """
    global _last_received
    if not isinstance(header, str) or len(header) > _MAX_TRACEPARENT:
        _rubbish("traceparent", "no valid traceparent: %.80r", header)
        return None
    if not _VERSION_00(header):
        later = _LATER_VERSION(header)
        if later is None:
            _rubbish("traceparent", "no valid traceparent: %.80r", header)
            return None
        header = f"00-{later[1]}"
    if state is None:
        otel = Context({_span.SPAN_KEY: RemoteSpan(header)})
        _last_received = (header, otel)
        return otel
    if not isinstance(state, str) or len(state) > _MAX_HEADER:
        _rubbish("tracestate", "no usable tracestate: %.80r", state)
        state = ""
    return Context({_span.SPAN_KEY: RemoteSpan(header, state)})


def _read_baggage(header: Any, otel: Context | None) -> Context | None:
    """Returns ``otel`` (None: what is current) with the user's baggage; ``otel`` itself if there is none to read."""
    if not isinstance(header, str) or len(header) > _MAX_HEADER:
        _rubbish("baggage", "no usable baggage: %.80r", header)
        return otel
    current = _span.otel_var.get() if otel is None else otel
    found = _baggage.read(header, current)
    return otel if found is current else found


def _read_scopes(header: Any) -> _scopes.Scopes | None:
    if not isinstance(header, str) or len(header) > MAX_SCOPES:
        _rubbish("raytrace", "no scopes of ours: %.80r", header)
        return None
    try:
        text, _, sender = header.partition("|")
        iteration, bucket, per_prompt, muted = _parse_scopes(text)
        queued: list[int] = []
        node = NODE
        if sender:
            # Below zero where the clock of the sending node is ahead by more than the call waited: what was measured is
            # recorded, and whoever reads it knows by the sign that the two clocks disagree.
            sent_ns, _, node = sender.partition(",")
            queued_ns = time_ns() - int(sent_ns)
            if abs(queued_ns) > _MAX_QUEUED_NS:
                raise ValueError("sent longer ago than any call waits")
            queued.append(queued_ns)
    except ValueError:
        _rubbish("raytrace", "no scopes of ours: %.80r", header)
        return None
    return _scopes.Scopes(iteration, bucket, per_prompt, (), queued, muted, "" if node == NODE else node)


@lru_cache(maxsize=256)
def _parse_scopes(text: str) -> tuple[int | None, str | None, bool, bool]:
    """Reads what `_scopes_text` wrote; words it does not know are a later version's, and left out."""
    iteration: int | None = None
    bucket: str | None = None
    per_prompt = muted = False
    for part in text.split(";") if text else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(part)
        if key == "i":
            iteration = int(value)
            if not -_MAX_ITERATION <= iteration <= _MAX_ITERATION:
                raise ValueError(part)
        elif key == "b":
            if value not in _registry.BUCKET_VALUES:
                raise ValueError(part)
            bucket = value
        elif key == "p":
            per_prompt = value in ("1", "m")
            muted = value == "m"
    return iteration, bucket, per_prompt, muted


def _rubbish(kind: str, message: str, *args: object) -> None:
    """One warning a kind: the same broken sender is behind all the carriers that follow."""
    _state.warn_once(f"carrier:{kind}", f"A trace carrier is ignored in part or whole: {message}", *args)
