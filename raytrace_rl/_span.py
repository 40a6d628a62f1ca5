"""The span: started, made current, encoded and placed in the spool when it ends. The hot path of the library.

Everything a span needs at its end is on it or cached; nothing is queued. Its head (ids, start, name, group, bucket,
thread) is encoded once at the start, where it doubles as the span's entry in the table of open spans.
"""

from __future__ import annotations

import contextlib
import sys
from contextvars import Token
from inspect import CO_GENERATOR
from time import monotonic_ns
from types import TracebackType
from typing import Any, Final
from zlib import crc32

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
)

from raytrace_rl import _encode, _ids, _scopes, _state
from raytrace_rl._clock import OFFSET_NS
from raytrace_rl._head import (
    AT_START,
    BUCKET_KEY,
    GROUP_KEY,
    IN_HEAD,
    ITERATION_KEY,
    NO_BUCKET,
    QUEUED_KEY,
    SENDER_KEY,
    THREAD_ID_KEY,
    THREAD_NAME_KEY,
    TRUNCATED_KEY,
    Trace,
    adopt,
    cached_static,
    child_head,
    scope_chunk,
    static,
    threads,
)
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._otel_context import HELD_KEY, SPAN_KEY, otel_var
from raytrace_rl._registry import bucket_value
from raytrace_rl._span_api import Rare, SpanApi
from raytrace_rl.spool.format import MAX_PAYLOAD, RECORD_HEADER, SYNC, Kind
from raytrace_rl.spool.opentable import FREE, LENGTHS, MAX_HEAD

__all__ = ["SPAN_KEY", "ManagedSpan", "RecordingSpan", "otel_var"]

_getrandbits: Final = _ids.getrandbits
_join: Final = b"".join
_pack: Final = RECORD_HEADER.pack
_SPAN: Final = int(Kind.SPAN)
#: Room for the counts, and the instrumentation scope, that come on top of an oversized span cut to fit.
_ENVELOPE: Final = 4096
#: An alarm that goes off again and again may cut each try to end a span short.
_SALVAGE_TRIES: Final = 32

_otel_get: Final = otel_var.get
_otel_set: Final = otel_var.set
_otel_reset: Final = otel_var.reset
_scopes_get: Final = _scopes.var.get


class RecordingSpan(SpanApi):
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
        "_current",
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
        self._rare: Rare | None = None
        self._placed = False

    # -- start --------------------------------------------------------------------------------------------------

    def begin(self, context: Context, start_ns: int | None = None) -> None:
        """Starts the span as a child of whatever span ``context`` holds."""
        parent: Any = context.get(SPAN_KEY)
        if parent.__class__ is ManagedSpan or isinstance(parent, RecordingSpan):  # the first for speed
            self.trace = parent.trace
            parent_head = parent.child_head or parent.make_child_head()
        else:
            self.trace, parent_head = adopt(parent)
        self._parent_head = parent_head
        self.span_id = span_id = (_getrandbits(64) or 1).to_bytes(8, "big")
        self._scopes = scopes = _scopes_get()
        self._thread = thread = threads.info
        self.child_head: bytes | None = None
        self.version = 0
        self._epoch = _state.epoch
        attributes = self.attributes
        if self._rare is not None or (attributes and not AT_START.isdisjoint(attributes)):
            tail = self._slow_tail(scopes)
        elif scopes is None:
            key = (self.group, self.name, None)
            tail = (_state.static_cache.get(key) or cached_static(key)) + thread.chunk
        elif scopes.queued:
            tail = self._slow_tail(scopes)
        else:
            scoped = (self.group, self.name, scopes.bucket)
            named = _state.static_cache.get(scoped) or cached_static(scoped)
            chunk = scopes.chunk
            if chunk is None:
                chunk = scopes.chunk = scope_chunk(scopes)
            if scopes.attributes and attributes and not attributes.keys().isdisjoint(dict(scopes.attributes)):
                chunk = scope_chunk(scopes, frozenset(attributes))
            tail = named + chunk + thread.chunk
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
                if table is None:
                    self._begin_spool()
                # else more spans are open than slots, or the spool is closing: the heartbeat notes this one
        _state.open_spans[self] = None

    def _begin_spool(self) -> None:
        """Has a forked child open its spool with its first span, which a kill in its midst would else lose."""
        open_spool = getattr(_state.writer, "open_spool", None)
        if open_spool is not None:
            open_spool()
            self.enter_table()

    def enter_table(self) -> None:
        """Takes a slot of the table of open spans, if there is one: for a span that began before the table.

        `begin` does the same, in line: it is too hot for a call.
        """
        table = _state.table
        length = len(self._head)
        if table is not None and not self.slot and length <= MAX_HEAD:
            try:
                self.slot = slot = table.free.pop()
                table.buffer[slot : slot + length + 2] = LENGTHS[length] + self._head
            except (IndexError, ValueError) as error:
                if is_interrupt(error):
                    raise

    def _slow_tail(self, scopes: _scopes.Scopes | None) -> bytes:
        """Encodes what follows the start time, where a cached form will not do."""
        rare = self._rare
        if rare is None:
            rare = self._rare = Rare()
        attributes = self.attributes
        if BUCKET_KEY in attributes:
            given = attributes.pop(BUCKET_KEY)
            rare.bucket = "" if given is NO_BUCKET else bucket_value(given)
        if GROUP_KEY in attributes:
            rare.group = str(attributes.pop(GROUP_KEY))
        if isinstance(attributes.get("kind"), SpanKind):
            self.set_kind(attributes.pop("kind"))
        if "links" in attributes:
            self._take_links()
        fixed = rare.fixed
        for key in (ITERATION_KEY, QUEUED_KEY, SENDER_KEY, THREAD_ID_KEY, THREAD_NAME_KEY):
            if key in attributes and (value := attributes.pop(key)) is not None:
                fixed[key] = value
        if scopes is not None and scopes.queued and QUEUED_KEY not in fixed:
            queued_ns = scopes.take_queued()
            if queued_ns is not None:
                fixed[QUEUED_KEY] = queued_ns
                if scopes.sender:
                    fixed[SENDER_KEY] = scopes.sender
        group = rare.group if rare.group is not None else self.group
        if rare.bucket is not None:
            parts = [static(group, self.name, rare.bucket, explicit=True, kind=rare.kind)]
        else:
            parts = [static(group, self.name, scopes.bucket if scopes is not None else None, kind=rare.kind)]
        for key, value in list(fixed.items()):
            if _encode.span_attributes({key: value}, parts):
                rare.dropped_attributes += 1
                del fixed[key]  # counted; the next rebuild need not try again
        if scopes is not None:
            parts.append(scope_chunk(scopes, frozenset(fixed) | frozenset(attributes)))
        if THREAD_ID_KEY not in fixed:
            parts.append(self._thread.id_chunk)
        if THREAD_NAME_KEY not in fixed:
            parts.append(self._thread.name_chunk)
        return _join(parts)

    def _take_links(self) -> None:
        """Makes links of a ``links`` attribute that holds Links or SpanContexts; anything else stays an attribute."""
        links = self.attributes["links"]
        if isinstance(links, (list, tuple)) and all(isinstance(link, (Link, SpanContext)) for link in links):
            del self.attributes["links"]
            for link in links:
                if isinstance(link, SpanContext):
                    self.add_link(link)
                else:
                    self.add_link(link.context, link.attributes)

    def _rebuild_head(self) -> None:
        """Encodes the head anew after a change to what it holds (name, group, bucket, iteration)."""
        tail = self._slow_tail(self._scopes)
        start = self.start_ns.to_bytes(8, "little")
        self._head = _join((self._parent_head, b"\x12\x08", self.span_id, b"9", start, tail))

    def make_child_head(self) -> bytes:
        """Encodes, once, the parentage that all children of this span share."""
        self.child_head = head = child_head(self.trace, self.span_id, remote=False)
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
            # Keys of the head, and of the scopes, were seen to at the start; what was set since may bring new ones.
            if len(attributes) > _encode.attribute_count_limit or (self.version and self._clashes(attributes)):
                self._tidy()
                rare = self._rare
                parts[0] = self._head
            lost = _encode.span_attributes(attributes, parts)
            if lost and rare is None:
                rare = self._rare = Rare()
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

    def _clashes(self, attributes: dict[str, Any]) -> bool:
        """True if an attribute was set whose key the head holds."""
        if not IN_HEAD.isdisjoint(attributes):
            return True
        scopes = self._scopes
        return scopes is not None and not attributes.keys().isdisjoint(dict(scopes.attributes))

    def _tidy(self) -> None:
        """Moves keys of the head out of the attributes and keeps their number inside the limit."""
        attributes = self.attributes
        self._rebuild_head()
        excess = len(attributes) - _encode.attribute_count_limit
        if excess > 0:
            for key in list(attributes)[-excess:]:
                del attributes[key]
            if self._rare is None:
                self._rare = Rare()
            self._rare.dropped_attributes += excess
            _state.count_drop("attributes", excess)
            _state.warn_once(
                "attribute-count",
                "Span %r has %d attributes beyond the limit of %d (OTEL_ATTRIBUTE_COUNT_LIMIT): the last are dropped.",
                self.name,
                excess,
                _encode.attribute_count_limit,
            )

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
        given = {key: value for key, value in dict(self.attributes).items() if key not in IN_HEAD}
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
            inside = context.copy()  # a plain dict; unpacking into a display costs half as much again
            inside[SPAN_KEY] = inside[HELD_KEY] = self
            self._current: Context | None = Context(inside)
            self._token: Token[Context] | None = None
            self._token = _otel_set(self._current)
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
        held = True
        try:
            end_ns = monotonic_ns() + OFFSET_NS
            if exc is not None:
                self.fail(exc, end_ns)
            if _otel_get() is not self._current:
                held = self._end_inside(exc, end_ns)
            self._finish(end_ns)
        except BaseException as error:
            self._salvage(error, end_ns or monotonic_ns() + OFFSET_NS)
        finally:
            if held and self._token is not None:
                try:
                    _otel_reset(self._token)
                except (ValueError, RuntimeError) as error:
                    if is_interrupt(error):
                        raise
                    # else it ended in another context than it began in, which is left alone
            self._current = None  # it holds this span: a cycle would have to wait for the collector

    def _end_inside(self, exc: BaseException | None, end_ns: int) -> bool:
        """Settles what is current in the place of this span, at its end.

        A generator that began in its consumer's context may end after the span around it, or in the middle of another
        one; neither is to be changed. Otherwise what is left current inside this span (by a library, by a generator
        that is read no further) goes with it, and a span inside whose own ``__exit__`` a raising signal handler cut
        off at its first line is ended here.

        Returns:
            Whether this span is still among those that are held, so that the context before it is to come back.
        """
        inner: list[ManagedSpan] = []
        current: Any = _otel_get().get(HELD_KEY)
        while current is not self:
            if current is None or current._token is None:
                return False
            before: Any = getattr(current._token, "old_value", None)
            if before is None:
                return True  # another kind of context than a ContextVar: it cannot be told
            if before is Token.MISSING:
                return False
            inner.append(current)
            current = before.get(HELD_KEY)
        if exc is not None and not isinstance(exc, GeneratorExit) and is_interrupt(exc):
            for span in inner:
                span.set_status(StatusCode.ERROR, "interrupted")
                span._finish(end_ns)
            return True
        # The frame with the ``with`` statement; one of `contextlib`'s generators ends where its own ``with`` does.
        holder = sys._getframe(2)
        caller = holder.f_back
        return not holder.f_code.co_flags & CO_GENERATOR or (
            caller is not None and caller.f_code.co_filename == contextlib.__file__
        )
