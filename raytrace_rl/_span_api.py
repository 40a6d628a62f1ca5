"""The OTel span API on a span of ours: attributes, events, links, status, exceptions. What few spans use.

OTel's API never raises at its user: what cannot be done is counted, and warned of once.
"""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from raytrace_rl import _encode, _state
from raytrace_rl._clock import OFFSET_NS
from raytrace_rl._head import HAS_IS_REMOTE, IS_REMOTE
from raytrace_rl._interrupts import is_interrupt


class Rare:
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


class SpanApi(trace.Span):
    """What a span is told between its start and its end; `RecordingSpan` does the rest."""

    __slots__ = ()

    name: str
    attributes: dict[str, Any]
    version: int
    _rare: Rare | None
    _placed: bool

    @abstractmethod
    def _rebuild_head(self) -> None:
        """Encodes the head anew after a change to what it holds."""

    def _make_rare(self) -> Rare:
        if self._rare is None:
            self._rare = Rare()
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
            flags = (int(context.trace_flags) & 0xFF) | HAS_IS_REMOTE | (IS_REMOTE if context.is_remote else 0)
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
