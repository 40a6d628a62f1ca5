"""The head of a span, encoded once at its start: ids, parentage, name, group, bucket, scopes and thread."""

from __future__ import annotations

import threading
from struct import Struct
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import TraceState

from raytrace_rl import _encode, _ids, _scopes, _state
from raytrace_rl._registry import default_bucket

GROUP_KEY: Final = "rl.span_group"
BUCKET_KEY: Final = "rl.bucket"
ITERATION_KEY: Final = "rl.iteration"
QUEUED_KEY: Final = "rl.queued_ns"
SENDER_KEY: Final = "rl.queued_from"
TRUNCATED_KEY: Final = "rl.truncated"
THREAD_ID_KEY: Final = "thread.id"
THREAD_NAME_KEY: Final = "thread.name"
#: Keys that the head of a span already holds: given by hand, they replace what the head would say (OTLP: attribute keys
#: are unique).
IN_HEAD: Final = frozenset(
    {GROUP_KEY, BUCKET_KEY, ITERATION_KEY, QUEUED_KEY, SENDER_KEY, THREAD_ID_KEY, THREAD_NAME_KEY}
)
#: These, and two keywords that say what the span is when their values do: a SpanKind, and links.
AT_START: Final = IN_HEAD | {"kind", "links"}
#: As ``rl.bucket``: no bucket, whatever the group's default and the scope.
NO_BUCKET: Final = object()

# trace.proto SpanFlags: bits 0-7 are the W3C trace flags; then "is_remote is known" and "the parent is remote".
_FLAGS_TAG: Final = b"\x85\x01"
HAS_IS_REMOTE: Final = 0x100
IS_REMOTE: Final = 0x200
_SAMPLED: Final = 1

_join: Final = b"".join
_fixed32: Final = Struct("<I").pack


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


threads: Final = _Threads()


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


def child_head(trace_: Trace, span_id: bytes, remote: bool) -> bytes:
    """Returns the encoded parentage (trace, parent, flags) of a child of ``span_id``."""
    flags = trace_.flags | HAS_IS_REMOTE | (IS_REMOTE if remote else 0)
    return trace_.head + b'"\x08' + span_id + _FLAGS_TAG + _fixed32(flags)


def adopt(parent: trace.Span | None) -> tuple[Trace, bytes]:
    """Returns the trace and the encoded parentage for a child of ``parent``: foreign, remote, or None (a root)."""
    context = parent.get_span_context() if parent is not None else None
    if context is None or not context.is_valid:
        new = Trace(_ids.new_trace_id(), _SAMPLED, TraceState())
        return new, new.head + _FLAGS_TAG + _fixed32(_SAMPLED | HAS_IS_REMOTE)
    own = Trace(context.trace_id.to_bytes(16, "big"), int(context.trace_flags) & 0xFF, context.trace_state)
    return own, child_head(own, context.span_id.to_bytes(8, "big"), context.is_remote)


def static(group: str | None, name: str, bucket: str | None, *, explicit: bool = False, kind: int = 1) -> bytes:
    """Returns the encoded name, kind, group and bucket of spans of ``group``; ``bucket`` is the scope's or explicit."""
    own = default_bucket(group)
    chosen = bucket if bucket is not None and (explicit or own is not None) else own
    parts = [_encode.delimited(b"\x2a", _encode.text(name, _encode.value_length_limit)), b"\x30", _encode.varint(kind)]
    if group is not None:
        parts.append(_encode.key_value(_encode.SPAN_ATTRIBUTE, GROUP_KEY, group))
    if chosen:
        parts.append(_encode.key_value(_encode.SPAN_ATTRIBUTE, BUCKET_KEY, chosen))
    return _join(parts)


def cached_static(key: tuple[str | None, str, str | None]) -> bytes:
    """Returns `static` of (group, name, scope's bucket), remembered."""
    encoded = static(*key)
    cache = _state.static_cache
    if len(cache) >= 4096:  # names made per request would otherwise grow it without end
        cache.clear()
    cache[key] = encoded
    return encoded


def scope_chunk(scopes: _scopes.Scopes, without: frozenset[str] = frozenset()) -> bytes:
    """Returns the encoded attributes that ``scopes`` puts on every span, but for the keys ``without``."""
    parts: list[bytes] = []
    shared = {key: value for key, value in scopes.attributes if key not in without}
    if scopes.iteration is not None and ITERATION_KEY not in without:
        shared[ITERATION_KEY] = scopes.iteration
    _encode.span_attributes(shared, parts)
    return _join(parts)
