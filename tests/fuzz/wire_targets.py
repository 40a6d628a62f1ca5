"""Fuzz targets that take what others send or leave: carriers, requests to the local receiver, small JSON files."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace

from raytrace_rl import _carrier, _control, _redact, _scopes, _span, _state
from raytrace_rl.relay import cursors, receiver, status
from raytrace_rl.relay.intake import Intake
from raytrace_rl.relay.requests import SIGNALS, Signal
from raytrace_rl.spool.format import MAX_PAYLOAD
from tests.fuzz.checking import check, scratch
from tests.fuzz.official import parses

# -- carriers ---------------------------------------------------------------------------------------------------------

_KEYS: Final = ("traceparent", "tracestate", "raytrace", "baggage", "other")
#: What stands in a carrier besides text, when somebody makes one by hand.
_ODD: Final[tuple[Any, ...]] = (None, 7, b"bytes", 1.5, ["list"], {"a": 1}, True, "")


def _made_carrier(data: bytes) -> Any:
    """One line an entry: a byte for the key, one for whether the value is text, the text."""
    carrier: dict[Any, Any] = {}
    for line in data.split(b"\n"):
        if len(line) >= 2:
            text = line[2:].decode("utf-8", "surrogateescape")
            carrier[_KEYS[line[0] % len(_KEYS)]] = text if line[1] < 0xF0 else _ODD[line[1] % len(_ODD)]
    return carrier


def carrier(data: bytes) -> None:
    """Any carrier: it is read without an exception, what it makes current is valid, and goes out as it came in."""
    made = _made_carrier(data[1:])
    dispatched = bool(data and data[0] & 1)
    check("raytrace" not in _carrier.without_scopes(made), "no scopes in what is kept")
    attachment = _carrier.read(made, dispatched)
    if attachment is None:
        return
    otel, scopes = attachment
    before, scopes_before, tracing = _span.otel_var.get(), _scopes.var.get(), _state.tracing
    try:
        _span.otel_var.set(otel)
        _scopes.var.set(scopes)
        _state.tracing = True
        sent = _carrier.current()
        again = _carrier.read(dict(sent), dispatched)
    finally:
        _span.otel_var.set(before)
        _scopes.var.set(scopes_before)
        _state.tracing = tracing
    context = trace.get_current_span(otel).get_span_context()
    if "traceparent" in sent:
        check(context.is_valid, "a parent that is valid", context)
        check(sent["traceparent"][3:52] == f"{context.trace_id:032x}-{context.span_id:016x}", "the parent", sent)
        check(trace.get_current_span(otel_context.Context(otel)).get_span_context() == context, "the same to all")
    check(all(isinstance(value, str) for value in sent.values()), "a carrier of strings", sent)
    if again is not None and scopes is not None and again[1] is not None and dispatched:
        known = (scopes.iteration, scopes.bucket, scopes.per_prompt, scopes.muted)
        check(known == (again[1].iteration, again[1].bucket, again[1].per_prompt, again[1].muted), "scopes", sent)


# -- what is sent to the node's receiver ------------------------------------------------------------------------------

_CLASSES: Final = {
    "traces": ("ScopeSpans", "ExportTraceServiceRequest"),
    "metrics": ("ScopeMetrics", "ExportMetricsServiceRequest"),
    "logs": ("ScopeLogs", "ExportLogsServiceRequest"),
}
_GROUPS: Final = {"traces": "resource_spans", "metrics": "resource_metrics", "logs": "resource_logs"}
_SCOPES: Final = {"traces": "scope_spans", "metrics": "scope_metrics", "logs": "scope_logs"}
_ITEMS: Final = {"traces": "spans", "metrics": "metrics", "logs": "log_records"}


class _Kept:
    """Stands where a sender's spool would: a file for each resource that a fuzzer makes up would fill a disk."""

    def __init__(self) -> None:
        self.writer = self
        self.payloads: list[bytes] = []

    def append(self, _kind: int, payload: bytes) -> bool:
        self.payloads.append(payload)
        return True


class _Intake(Intake):
    """The real one, but for the files."""

    def __init__(self, *, capture_content: bool) -> None:
        super().__init__(scratch(), "run", 1 << 30, capture_content=capture_content)
        self.kept = _Kept()

    def _sender(self, resource: bytes) -> Any:
        check(parses("Resource", resource) is not None, "a resource that a collector takes", resource)
        return self.kept


def intake(data: bytes) -> None:
    """Any request: refused whole, or every item is stored as a message that a collector takes, without content."""
    flags = data[0] if data else 0
    signal: Signal = list(SIGNALS.values())[flags % len(SIGNALS)]
    scoped, whole = _CLASSES[signal.name]
    taker = _Intake(capture_content=bool(flags & 0x80))
    request = data[1:]
    message = parses(whole, request)
    try:
        taken = taker.take(signal, request)
    except ValueError:
        return
    items = 0
    for payload in taker.kept.payloads:
        check(len(payload) <= MAX_PAYLOAD, "it fits into a record", len(payload))
        stored = parses(scoped, payload)
        check(stored is not None, f"{scoped} that a collector takes", payload)
        items += len(getattr(stored, _ITEMS[signal.name]))
        if not flags & 0x80 and signal.name != "metrics":
            _without_content(stored, signal.name)
    if message is not None:
        groups = getattr(message, _GROUPS[signal.name])
        sent = sum(
            len(getattr(scope, _ITEMS[signal.name]))
            for group in groups
            for scope in getattr(group, _SCOPES[signal.name])
        )
        check(items + taken.rejected == sent, "every item is stored or rejected", items, taken.rejected, sent)


def _without_content(stored: Any, signal: str) -> None:
    for item in getattr(stored, _ITEMS[signal]):
        _redacted(item.attributes)
        for event in getattr(item, "events", ()):
            _redacted(event.attributes)
        for link in getattr(item, "links", ()):
            _redacted(link.attributes)


def _redacted(attributes: Any) -> None:
    for one in attributes:
        which = one.value.WhichOneof("value")
        if which in ("string_value", "array_value", "kvlist_value", "bytes_value") and _redact.is_sensitive(one.key):
            check(one.value.string_value == _redact.REDACTED, "content is taken out", one)
        else:
            _redacted_within(one.value)


def _redacted_within(value: Any) -> None:
    if value.WhichOneof("value") == "kvlist_value":
        _redacted(value.kvlist_value.values)
    elif value.WhichOneof("value") == "array_value":
        for item in value.array_value.values:
            _redacted_within(item)


def http(data: bytes) -> None:
    """Any bytes on the receiver's HTTP port, from somebody who knows the token: answered, by a status of ours."""
    handler_class: Any = receiver._http_handler(receiver.Receiver("run", _Intake(capture_content=False)), "token")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)  # less than what a socket takes without a reader
        ours.shutdown(socket.SHUT_WR)
        handler = handler_class(theirs, ("127.0.0.1", 1), None)
        theirs.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    if answer.startswith(b"HTTP/1.1"):
        code = int(answer.split(b" ", 2)[1])
        check(200 <= code < 600, "a status", answer[:80])
        check(code not in (500, 502), "no answer that says we failed", answer[:80])
    bare = getattr(handler, "request_version", "") == "HTTP/0.9"  # its answers have no status
    check(bare or answer or getattr(handler, "command", None) != "POST", "a request is answered", data)


# -- small files that a run's processes leave to each other ------------------------------------------------------------


def notes(data: bytes) -> None:
    """Any bytes as the control file, a relay's cursors, or its counts: no exception; what is read can be written."""
    body = data[1:]
    which = (data[0] if data else 0) % 3
    node = scratch() / "notes" / "spool" / "node"
    (node / cursors.DIRECTORY).mkdir(parents=True, exist_ok=True)
    if which == 0:
        path = scratch() / "notes" / _control.NAME
        path.write_bytes(body)
        _control.Control(str(path.parent), "none").check()
    elif which == 1:
        found = cursors.Cursors(node, "traces", "there")
        found.path.write_bytes(body)
        found.load()
        cursors.noted(node)
        found.add_truncated("7-8", 1)
        known = found._as_json()
        check(found.save(), "what was read can be noted again")
        found.load()
        check(found._as_json() == known, "the same after a restart", found._as_json(), known)
        found.path.unlink()
    else:
        (node / cursors.DIRECTORY / status.NAME).write_bytes(body)
        status.read(node)
        status.Status(node).write({status.FREED: status.Section({"spans": 1, "bytes": 2})})
        check(status.read(node)[status.FREED]["spans"] >= 1, "counts go on", status.read(node))


TARGETS: Final[dict[str, Callable[[bytes], Any]]] = {
    "carrier": carrier,
    "intake": intake,
    "http": http,
    "notes": notes,
}
