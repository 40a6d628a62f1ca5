"""The span: started, made current, encoded and placed in the spool when it ends. The hot path of the library.

Everything a span needs at its end is on it or cached; nothing is queued. Its head (ids, start, name, group, bucket,
thread) is encoded once at the start, where it doubles as the span's entry in the table of open spans.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping
from contextvars import ContextVar, Token
from struct import Struct
from time import monotonic_ns
from types import TracebackType
from typing import Any, Final
from zlib import crc32

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from raytrace_rl import _encode, _ids, _scopes, _state
from raytrace_rl._clock import OFFSET_NS
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._registry import bucket_value, default_bucket
from raytrace_rl.spool.format import MAX_PAYLOAD, RECORD_HEADER, SYNC, Kind
from raytrace_rl.spool.opentable import FREE, LENGTHS, MAX_HEAD

_getrandbits: Final = _ids.getrandbits
_join: Final = b"".join
_pack: Final = RECORD_HEADER.pack
_SPAN: Final = int(Kind.SPAN)
_fixed32: Final = Struct("<I").pack

#: The key of the current span in an OTel context, found through the public API.
SPAN_KEY: Final[str] = next(iter(trace.set_span_in_context(trace.INVALID_SPAN, Context())))

# trace.proto SpanFlags: bits 0-7 are the W3C trace flags; then "is_remote is known" and "the parent is remote".
#: Room for the counts, and the instrumentation scope, that come on top of an oversized span cut to fit.
_ENVELOPE: Final = 4096
_FLAGS_TAG: Final = b"\x85\x01"
_HAS_IS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200
_SAMPLED: Final = 1
#: An alarm that goes off again and again may cut each try to end a span short.
_SALVAGE_TRIES: Final = 32

GROUP_KEY: Final = "rl.span_group"
BUCKET_KEY: Final = "rl.bucket"
ITERATION_KEY: Final = "rl.iteration"
QUEUED_KEY: Final = "rl.queued_ns"
TRUNCATED_KEY: Final = "rl.truncated"
THREAD_ID_KEY: Final = "thread.id"
THREAD_NAME_KEY: Final = "thread.name"
#: Keys that the head of a span already holds: given by hand, they replace what the head would say (OTLP: attribute keys
#: are unique).
_IN_HEAD: Final = frozenset({GROUP_KEY, BUCKET_KEY, ITERATION_KEY, QUEUED_KEY, THREAD_ID_KEY, THREAD_NAME_KEY})


class _RuntimeContextVar:
    """OTel's runtime context behind the three methods of a ContextVar, where it is none (OTEL_PYTHON_CONTEXT)."""

    def get(self) -> Context:
        return otel_context.get_current()

    def set(self, value: Context) -> Any:
        return otel_context.attach(value)

    def reset(self, token: Any) -> None:
        otel_context.detach(token)


def _find_otel_var() -> Any:
    var = getattr(getattr(otel_context, "_RUNTIME_CONTEXT", None), "_current_context", None)
    return var if isinstance(var, ContextVar) else _RuntimeContextVar()


#: The variable that holds OTel's current context: reading and setting it directly halves the cost of a span.
otel_var: Final[ContextVar[Context]] = _find_otel_var()
_otel_get: Final = otel_var.get
_otel_set: Final = otel_var.set
_otel_reset: Final = otel_var.reset
_scopes_get: Final = _scopes.var.get
_set_item: Final = dict.__setitem__


class ThreadInfo:
    """A thread as its spans know it: ``ident`` and the encoded ``thread.id`` and ``thread.name`` attributes."""

    __slots__ = ("chunk", "id_chunk", "ident", "name_chunk")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.id_chunk = _encode.key_value(_encode.SPAN_ATTRIBUTE, THREAD_ID_KEY, self.ident)
        name = threading.current_thread().name
        self.name_chunk = _encode.key_value(_encode.SPAN_ATTRIBUTE, THREAD_NAME_KEY, name) if name else b""
        self.chunk = self.id_chunk + self.name_chunk


class _Threads(threading.local):
    def __init__(self) -> None:
        self.info = ThreadInfo()


_threads: Final = _Threads()


class Trace:
    """What all spans of one trace in this process share: its id, flags and state, and their encoded form."""

    __slots__ = ("flags", "head", "id", "state")

    def __init__(self, trace_id: bytes, flags: int, state: TraceState) -> None:
        self.id = trace_id
        self.flags = flags
        self.state = state
        head = b"\x0a\x10" + trace_id
        if state:
            head += _encode.delimited(b"\x1a", _encode.text(state.to_header(), 4096))
        self.head = head


def _child_head(trace_: Trace, span_id: bytes, remote: bool) -> bytes:
    flags = trace_.flags | _HAS_IS_REMOTE | (_IS_REMOTE if remote else 0)
    return trace_.head + b'"\x08' + span_id + _FLAGS_TAG + _fixed32(flags)


def _adopt(parent: trace.Span | None) -> tuple[Trace, bytes]:
    """Returns the trace and the encoded parentage for a child of ``parent``: foreign, remote, or none (a root)."""
    if isinstance(parent, RecordingSpan):
        return parent.trace, parent.child_head or parent.make_child_head()
    context = parent.get_span_context() if parent is not None else None
    if context is None or not context.is_valid:
        new = Trace(_ids.new_trace_id(), _SAMPLED, TraceState())
        return new, new.head + _FLAGS_TAG + _fixed32(_SAMPLED | _HAS_IS_REMOTE)
    own = Trace(context.trace_id.to_bytes(16, "big"), int(context.trace_flags) & 0xFF, context.trace_state)
    return own, _child_head(own, context.span_id.to_bytes(8, "big"), context.is_remote)


def _static(group: str | None, name: str, bucket: str | None, *, explicit: bool = False, kind: int = 1) -> bytes:
    """Returns the encoded name, kind, group and bucket of spans of ``group``; ``bucket`` is the scope's or explicit."""
    own = default_bucket(group)
    chosen = bucket if bucket is not None and (explicit or own is not None) else own
    parts = [_encode.delimited(b"\x2a", _encode.text(name, _encode.value_length_limit)), b"\x30", _encode.varint(kind)]
    if group is not None:
        parts.append(_encode.key_value(_encode.SPAN_ATTRIBUTE, GROUP_KEY, group))
    if chosen is not None:
        parts.append(_encode.key_value(_encode.SPAN_ATTRIBUTE, BUCKET_KEY, chosen))
    return _join(parts)


def _cached_static(key: tuple[str | None, str, str | None]) -> bytes:
    encoded = _static(*key)
    cache = _state.static_cache
    if len(cache) >= 4096:  # names made per request would otherwise grow it without end
        cache.clear()
    cache[key] = encoded
    return encoded


def _scope_chunk(scopes: _scopes.Scopes, without: frozenset[str] = frozenset()) -> bytes:
    """Returns the encoded attributes that ``scopes`` puts on every span, but for the keys ``without``."""
    parts: list[bytes] = []
    shared = {key: value for key, value in scopes.attributes if key not in without}
    if scopes.iteration is not None and ITERATION_KEY not in without:
        shared[ITERATION_KEY] = scopes.iteration
    _encode.span_attributes(shared, parts)
    return _join(parts)


class _Rare:
    """What few spans have: events, links, a status, a kind, keys of the head given by hand."""

    __slots__ = (
        "bucket",
        "dropped_attributes",
        "dropped_events",
        "dropped_links",
        "events",
        "extra",
        "fixed",
        "group",
        "kind",
        "links",
        "message",
        "status",
    )

    def __init__(self) -> None:
        self.extra: list[bytes] = []
        self.events = self.links = 0
        self.dropped_events = self.dropped_links = 0
        self.status = 0
        self.message = ""
        self.kind = 1
        self.bucket: str | None = None
        self.group: str | None = None
        #: Iteration, queueing delay and thread as given by hand, or taken from the dispatched call.
        self.fixed: dict[str, Any] = {}
        self.dropped_attributes = 0

    def counts(self) -> bytes:
        """Returns the encoded counts of events and links that the span's limits cost it."""
        encoded = b""
        if self.dropped_events:
            encoded = b"\x60" + _encode.varint(self.dropped_events)
        if self.dropped_links:
            encoded += b"\x70" + _encode.varint(self.dropped_links)
        return encoded


class RecordingSpan(trace.Span):
    """A span of this library: an OTel API span whose record is in the mapped file when it has ended.

    Not started by construction but by `begin` (or, as a `ManagedSpan`, by ``with``).

    Attributes:
        group: Its span group; None for spans outside all groups.
        name: Its name.
        attributes: What the caller put on it; the fixed keys are not among them.
        trace: Its trace. ``trace_id``, ``trace_flags`` and ``trace_state`` read it.
        span_id: Eight bytes.
        start_ns: Start, ns since the epoch.
        version: Goes up with each change, for the journal of open spans.
    """

    __slots__ = (
        "_context",
        "_epoch",
        "_head",
        "_parent_head",
        "_placed",
        "_rare",
        "_scopes",
        "_thread",
        "_token",
        "attributes",
        "child_head",
        "group",
        "name",
        "slot",
        "span_id",
        "start_ns",
        "trace",
        "version",
    )

    def __init__(self, group: str | None, name: str, attributes: dict[str, Any]) -> None:
        self.group = group
        self.name = name
        self.attributes = attributes
        self.trace: Trace
        self.span_id: bytes
        self._rare: _Rare | None = None
        self._placed = False

    # -- start --------------------------------------------------------------------------------------------------

    def begin(self, context: Context, start_ns: int | None = None) -> None:
        """Starts the span as a child of whatever span ``context`` holds."""
        parent: Any = context.get(SPAN_KEY)
        if parent.__class__ is ManagedSpan:
            self.trace = parent.trace
            parent_head = parent.child_head or parent.make_child_head()
        else:
            self.trace, parent_head = _adopt(parent)
        self._parent_head = parent_head
        self.span_id = span_id = (_getrandbits(64) or 1).to_bytes(8, "big")
        self._scopes = scopes = _scopes_get()
        self._thread = thread = _threads.info
        self.child_head: bytes | None = None
        self.version = 0
        self._epoch = _state.epoch
        attributes = self.attributes
        if self._rare is not None or (attributes and not _IN_HEAD.isdisjoint(attributes)):
            tail = self._slow_tail(scopes)
        elif scopes is None:
            key = (self.group, self.name, None)
            tail = (_state.static_cache.get(key) or _cached_static(key)) + thread.chunk
        elif scopes.queued:
            tail = self._slow_tail(scopes)
        else:
            scoped = (self.group, self.name, scopes.bucket)
            static = _state.static_cache.get(scoped) or _cached_static(scoped)
            chunk = scopes.chunk
            if chunk is None:
                chunk = scopes.chunk = _scope_chunk(scopes)
            if scopes.attributes and attributes and not attributes.keys().isdisjoint(dict(scopes.attributes)):
                chunk = _scope_chunk(scopes, frozenset(attributes))
            tail = static + chunk + thread.chunk
        self.start_ns = start = monotonic_ns() + OFFSET_NS if start_ns is None else start_ns
        head = _join((parent_head, b"\x12\x08", span_id, b"9", start.to_bytes(8, "little"), tail))
        self._head = head
        table = _state.table
        length = len(head)
        self.slot = 0
        if length <= MAX_HEAD:
            try:
                self.slot = slot = table.free.pop()  # type: ignore[union-attr]
                table.buffer[slot : slot + length + 2] = LENGTHS[length] + head  # type: ignore[union-attr]
            except (IndexError, ValueError, AttributeError) as error:
                if is_interrupt(error):
                    raise
                # else more spans are open than slots, or the spool is closing: the heartbeat notes this one
        _state.open_spans[self] = None

    def _slow_tail(self, scopes: _scopes.Scopes | None) -> bytes:
        """Encodes what follows the start time, where a cached form will not do."""
        rare = self._rare
        if rare is None:
            rare = self._rare = _Rare()
        attributes = self.attributes
        if BUCKET_KEY in attributes:
            rare.bucket = bucket_value(attributes.pop(BUCKET_KEY))
        if GROUP_KEY in attributes:
            rare.group = str(attributes.pop(GROUP_KEY))
        fixed = rare.fixed
        for key in (ITERATION_KEY, QUEUED_KEY, THREAD_ID_KEY, THREAD_NAME_KEY):
            if key in attributes and (value := attributes.pop(key)) is not None:
                fixed[key] = value
        if scopes is not None and scopes.queued and QUEUED_KEY not in fixed:
            queued_ns = scopes.take_queued()
            if queued_ns is not None:
                fixed[QUEUED_KEY] = queued_ns
        group = rare.group if rare.group is not None else self.group
        if rare.bucket is not None:
            parts = [_static(group, self.name, rare.bucket, explicit=True, kind=rare.kind)]
        else:
            parts = [_static(group, self.name, scopes.bucket if scopes is not None else None, kind=rare.kind)]
        for key, value in list(fixed.items()):
            if _encode.span_attributes({key: value}, parts):
                rare.dropped_attributes += 1
                del fixed[key]  # counted; the next rebuild need not try again
        if scopes is not None:
            parts.append(_scope_chunk(scopes, frozenset(fixed) | frozenset(attributes)))
        if THREAD_ID_KEY not in fixed:
            parts.append(self._thread.id_chunk)
        if THREAD_NAME_KEY not in fixed:
            parts.append(self._thread.name_chunk)
        return _join(parts)

    def _rebuild_head(self) -> None:
        """Encodes the head anew after a change to what it holds (name, group, bucket, iteration)."""
        tail = self._slow_tail(self._scopes)
        start = self.start_ns.to_bytes(8, "little")
        self._head = _join((self._parent_head, b"\x12\x08", self.span_id, b"9", start, tail))

    def make_child_head(self) -> bytes:
        """Encodes, once, the parentage that all children of this span share."""
        self.child_head = head = _child_head(self.trace, self.span_id, remote=False)
        return head

    # -- end ----------------------------------------------------------------------------------------------------

    def _finish(self, end_ns: int) -> None:
        """Encodes the span and places it, once; safe to call again if an exception out of a handler cut it short."""
        if self._placed:
            return
        if self._epoch != _state.epoch:  # the parent of a fork, or the shutdown before a restart, accounted for it
            self._placed = True
            return
        parts = [self._head, b"A", end_ns.to_bytes(8, "little")]
        attributes = self.attributes
        rare = self._rare
        lost = 0
        if attributes:
            scopes = self._scopes
            if (
                len(attributes) > _encode.attribute_count_limit
                or not _IN_HEAD.isdisjoint(attributes)
                or (scopes is not None and not attributes.keys().isdisjoint(dict(scopes.attributes)))
            ):
                self._tidy()
                rare = self._rare
                parts[0] = self._head
            lost = _encode.span_attributes(attributes, parts)
            if lost and rare is None:
                rare = self._rare = _Rare()
        if rare is not None:
            parts.append(_encode.status(rare.status, rare.message))
            parts.append(rare.counts())
            parts += rare.extra
            if lost or rare.dropped_attributes:
                parts.append(b"\x50" + _encode.varint(rare.dropped_attributes + lost))
        payload = _join(parts)
        kind = _SPAN
        if self.group is None:
            payload, kind = self._enveloped(payload)
        length = len(payload)
        if length > MAX_PAYLOAD:
            payload, kind = self._enveloped(self._shrink(parts, lost))
            length = len(payload)
        word = length << 8 | kind
        record = _pack(SYNC, word, crc32(payload, word)) + payload
        segment = _state.segment
        try:
            # No call between these: no signal handler, no other thread. See Segment.
            start = segment.position  # type: ignore[union-attr]
            segment.position = stop = start + length + 12  # type: ignore[union-attr]
            segment.buffer[start:stop] = record  # type: ignore[union-attr]
            self._placed = True
        except (IndexError, ValueError, AttributeError):
            writer = _state.writer
            if writer is None or not writer.append_record(record):
                _state.count_drop("spans")
                _state.count_drop("bytes", len(record))
            self._placed = True
        _state.open_spans.pop(self, None)
        slot = self.slot
        if slot:
            table = _state.table
            try:
                table.buffer[slot : slot + 2] = FREE  # type: ignore[union-attr]
                self.slot = 0
                table.free.append(slot)  # type: ignore[union-attr]
            except (IndexError, ValueError, AttributeError) as error:
                if is_interrupt(error):
                    raise
                # else the table was closed just now

    def _enveloped(self, payload: bytes) -> tuple[bytes, int]:
        """Returns the payload and kind of the record of a span outside all groups."""
        return payload, _SPAN

    def _tidy(self) -> None:
        """Moves keys of the head out of the attributes and keeps their number inside the limit."""
        attributes = self.attributes
        self._rebuild_head()
        excess = len(attributes) - _encode.attribute_count_limit
        if excess > 0:
            for key in list(attributes)[-excess:]:
                del attributes[key]
            if self._rare is None:
                self._rare = _Rare()
            self._rare.dropped_attributes += excess
            _state.count_drop("attributes", excess)

    def _shrink(self, parts: list[bytes], lost: int) -> bytes:
        """Drops the largest parts, attributes and events, until the record fits; each is counted beside those ``lost``.

        Raises:
            ValueError: Name, scopes and ids alone are too large.
        """
        kept = [part for part in parts if part]
        dropped = 0
        total = sum(map(len, kept))
        for part in sorted(kept[3:], key=len, reverse=True):
            if total <= MAX_PAYLOAD - _ENVELOPE:
                break
            kept.remove(part)
            total -= len(part)
            dropped += 1
        if total > MAX_PAYLOAD - _ENVELOPE:
            raise ValueError(f"its name and scopes alone take {total} bytes")
        _state.count_drop("attributes", dropped)
        _state.warn_once(
            "span-size", "Span %r is over 1 MiB: its %d largest attributes or events are dropped.", self.name, dropped
        )
        lost += dropped + (self._rare.dropped_attributes if self._rare is not None else 0)
        kept.append(b"\x50" + _encode.varint(lost))  # of a field that stands twice, the last one holds
        return _join(kept)

    def truncate(self, end_ns: int) -> None:
        """Ends a span that nobody ended (shutdown), and says so."""
        self.attributes = {**self.attributes, TRUNCATED_KEY: True}
        self._finish(end_ns)

    # -- what the heartbeat reads ---------------------------------------------------------------------------------

    @property
    def ids(self) -> bytes:
        """Trace id (16) and span id (8)."""
        return self.trace.id + self.span_id

    @property
    def thread_ident(self) -> int:
        """``threading.get_ident()`` of the thread that started it."""
        return self._thread.ident

    def open_payload(self) -> bytes:
        """Returns the OTLP ``Span`` as far as it is known, without an end time."""
        parts = [self._head]
        given = {key: value for key, value in dict(self.attributes).items() if key not in _IN_HEAD}
        _encode.span_attributes(given, parts, counted=False)  # what is lost is counted once, at the span's end
        return _join(parts)

    # -- identity -------------------------------------------------------------------------------------------------

    @property
    def trace_id(self) -> bytes:
        """Sixteen bytes."""
        return self.trace.id

    @property
    def trace_flags(self) -> int:
        """W3C trace flags."""
        return self.trace.flags

    @property
    def trace_state(self) -> TraceState:
        """W3C trace state."""
        return self.trace.state

    @property
    def parent_id(self) -> bytes | None:
        """Span id of the parent (eight bytes), None for a root."""
        offset = len(self.trace.head)
        return self._parent_head[offset + 2 : offset + 10] if self._parent_head[offset : offset + 1] == b'"' else None

    def get_span_context(self) -> SpanContext:
        """Returns its identity for propagation."""
        try:
            return self._context
        except AttributeError:
            own = self.trace
            self._context: SpanContext = SpanContext(
                int.from_bytes(own.id, "big"),
                int.from_bytes(self.span_id, "big"),
                is_remote=False,
                trace_flags=TraceFlags(own.flags),
                trace_state=own.state,
            )
            return self._context

    # -- the rest of the OTel span API ------------------------------------------------------------------------------

    def _make_rare(self) -> _Rare:
        if self._rare is None:
            self._rare = _Rare()
        return self._rare

    def _refuse(self, method: str, error: Exception) -> None:
        """Counts a call that could not be carried out; OTel's API never raises at its user."""
        if is_interrupt(error):
            raise error
        _state.count_drop("attributes")
        _state.warn_once(f"span-api:{method}", "%s() of span %r is ignored: %r", method, self.name, error)

    def is_recording(self) -> bool:
        """True until it has ended."""
        return not self._placed

    def set_attribute(self, key: str, value: Any) -> None:
        """Sets one attribute; None leaves things as they are, an ended span does too."""
        if value is not None and not self._placed:
            try:
                self.attributes[key] = value
                self.version += 1
            except Exception as error:  # a key that cannot be hashed
                self._refuse("set_attribute", error)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Sets several attributes."""
        try:
            items = dict(attributes).items()
        except Exception as error:
            self._refuse("set_attributes", error)
            return
        for key, value in items:
            self.set_attribute(key, value)

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        """Adds an event; ``timestamp`` is in ns since the epoch, now by default."""
        if self._placed:
            return
        rare = self._make_rare()
        if rare.events >= _encode.event_count_limit:
            rare.dropped_events += 1
            _state.count_drop("attributes")
            return
        try:
            when = monotonic_ns() + OFFSET_NS if timestamp is None else timestamp
            rare.extra.append(_encode.event(str(name), when, attributes))
            rare.events += 1
        except Exception as error:
            self._refuse("add_event", error)

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        """Adds a link to another span."""
        if self._placed:
            return
        try:
            if not context.is_valid:
                return
            rare = self._make_rare()
            if rare.links >= _encode.link_count_limit:
                rare.dropped_links += 1
                _state.count_drop("attributes")
                return
            flags = (int(context.trace_flags) & 0xFF) | _HAS_IS_REMOTE | (_IS_REMOTE if context.is_remote else 0)
            encoded = _encode.link(
                context.trace_id.to_bytes(16, "big"),
                context.span_id.to_bytes(8, "big"),
                context.trace_state.to_header() if context.trace_state else "",
                attributes,
                flags,
            )
            rare.extra.append(encoded)
            rare.links += 1
        except Exception as error:
            self._refuse("add_link", error)

    def set_kind(self, kind: SpanKind) -> None:
        """Sets the span kind, before the span starts."""
        self._make_rare().kind = kind.value + 1  # OTLP counts from UNSPECIFIED

    def update_name(self, name: str) -> None:
        """Renames the span."""
        if not self._placed:
            try:
                self.name = str(name)
                self._rebuild_head()
                self.version += 1
            except Exception as error:
                self._refuse("update_name", error)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Sets the status. OK is final; UNSET is ignored (OTel trace API, "Set Status")."""
        if isinstance(status, Status):
            code, message = status.status_code.value, status.description
        elif isinstance(status, StatusCode):
            code, message = status.value, description
        else:
            self._refuse("set_status", TypeError(f"{type(status).__name__} is no status"))  # type: ignore[unreachable]
            return
        rare = self._make_rare()
        if not self._placed and code and rare.status != StatusCode.OK.value:
            rare.status = code
            rare.message = str(message or "") if code == StatusCode.ERROR.value else ""

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Adds an ``exception`` event (OTel semantic conventions: type, message, stack trace)."""
        if self._placed:
            return
        kind = type(exception)
        name = (
            kind.__qualname__
            if kind.__module__ in ("builtins", "__main__")
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        try:
            described = {
                "exception.type": name,
                "exception.message": _message(exception),
                "exception.stacktrace": _stack(exception),
                "exception.escaped": str(escaped),
                **(attributes or {}),
            }
            when = monotonic_ns() + OFFSET_NS if timestamp is None else timestamp
            # Exception texts are the user's own and pass unredacted; see docs/reliability.md.
            self._make_rare().extra.append(_encode.event("exception", when, described))
        except Exception as error:
            self._refuse("record_exception", error)

    def fail(self, exception: BaseException, when_ns: int | None = None) -> None:
        """Records an exception that left the span's body: event and ERROR status. A clean exit is no error.

        Args:
            exception: The exception.
            when_ns: When it did, ns since the epoch, so that the event does not lie behind the span's end; else now.
        """
        if isinstance(exception, GeneratorExit) or (isinstance(exception, SystemExit) and not exception.code):
            return
        # The status first: a signal handler may raise while the stack is being written down.
        self.set_status(StatusCode.ERROR, f"{type(exception).__name__}: {_message(exception)}")
        self.record_exception(exception, timestamp=when_ns, escaped=True)

    def end(self, end_time: int | None = None) -> None:
        """Ends the span, now or at ``end_time`` (ns since the epoch). Once; later calls do nothing."""
        end_ns = monotonic_ns() + OFFSET_NS if end_time is None else end_time
        try:
            self._finish(end_ns)
        except BaseException as error:
            self._salvage(error, end_ns)

    def _salvage(self, error: BaseException, end_ns: int, tries: int = _SALVAGE_TRIES) -> None:
        """Ends the span after all when ``error`` cut `_finish` short; re-raises what is the user's."""
        try:
            self._finish(end_ns)
        except BaseException as again:
            # Nested, so that each exception has the one before as its context, as from any handler within a handler.
            self._retry(again, end_ns, tries)
        if is_interrupt(error):
            raise error

    def _retry(self, error: BaseException, end_ns: int, tries: int) -> None:
        try:
            hopeless = tries <= 0 or not is_interrupt(error)
        except BaseException as interrupt:
            self._salvage(interrupt, end_ns, tries - 1)
            raise
        if hopeless:
            self._lose(error)
        else:
            self._salvage(error, end_ns, tries - 1)

    def _lose(self, error: BaseException) -> None:
        """Gives the span up, and says so."""
        if not self._placed:
            self._placed = True
            _state.open_spans.pop(self, None)
            _state.count_drop("spans")
            _state.warn_once("span-end", "Span %r could not be encoded (%r); it is dropped.", self.name, error)


class ManagedSpan(RecordingSpan):
    """A `RecordingSpan` as a context manager: ``with`` starts it, makes it current, and ends it."""

    __slots__ = ()

    def __enter__(self) -> ManagedSpan:  # noqa: PYI034 - typing.Self is 3.11
        context = _otel_get()
        try:
            self.begin(context)
            current = Context(context)
            _set_item(current, SPAN_KEY, self)
            self._token: Token[Context] | None = None
            self._token = _otel_set(current)
        except BaseException as error:
            self._abandon(context, error)
        return self

    def _abandon(self, context: Context, error: BaseException) -> None:
        """Undoes a start that an exception cut short; re-raises what is the user's, else goes on without a span."""
        if _otel_get().get(SPAN_KEY) is self:
            _otel_set(context)
        _state.open_spans.pop(self, None)
        self._placed = True
        self._token = None
        if is_interrupt(error):
            raise error
        self._context = INVALID_SPAN_CONTEXT  # the body may ask for it
        _state.count_drop("spans")
        _state.warn_once("span-start", "Span %r could not be started: %r", self.name, error)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback_: TracebackType | None
    ) -> None:
        end_ns = 0
        try:
            end_ns = monotonic_ns() + OFFSET_NS
            if exc is not None:
                self.fail(exc, end_ns)
                if not isinstance(exc, GeneratorExit) and _otel_get().get(SPAN_KEY) is not self:
                    self._end_abandoned(exc, end_ns)
            self._finish(end_ns)
        except BaseException as error:
            self._salvage(error, end_ns or monotonic_ns() + OFFSET_NS)
        finally:
            if self._token is not None:
                try:
                    _otel_reset(self._token)
                except (ValueError, RuntimeError) as error:
                    if is_interrupt(error):
                        raise
                    # else it ended in another context than it began in, which is left alone

    def _end_abandoned(self, exc: BaseException, end_ns: int) -> None:
        """Ends spans inside this one whose own ``__exit__`` a raising signal handler cut off at its first line.

        Only after such an exception, and only spans that were opened under this one: a generator that is closed or
        collected exits in the middle of whatever its consumer is doing, whose spans are none of its business.
        """
        inner: list[ManagedSpan] = []
        current: Any = _otel_get().get(SPAN_KEY)
        while current is not self:
            token = current._token if isinstance(current, ManagedSpan) else None
            before: Any = getattr(token, "old_value", Token.MISSING)
            if before is Token.MISSING:
                return
            inner.append(current)
            current = before.get(SPAN_KEY)
        if is_interrupt(exc):
            for span in inner:
                span.set_status(StatusCode.ERROR, "interrupted")
                span._finish(end_ns)


def _message(exception: BaseException) -> str:
    try:
        return str(exception)[: _encode.MAX_EXCEPTION_MESSAGE]
    except Exception as error:
        if is_interrupt(error):
            raise
        return f"<{type(exception).__name__}: str() failed>"


def _stack(exception: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(exception), exception, exception.__traceback__, limit=64))
    except Exception as error:
        if is_interrupt(error):
            raise
        return ""
