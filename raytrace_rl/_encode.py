"""OTLP protobuf bytes, written by hand: attribute values, events, links, status. The only encoder of the project.

Field numbers are those of ``opentelemetry/proto/trace/v1/trace.proto`` and ``common/v1/common.proto`` (OTLP 1.x).
Why not the protobuf library: training workers must not import it, and it takes 22-27 µs a span under the GIL; cached
encodings take about 1. The tests hold every field against the official classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import islice
from struct import Struct
from typing import Any, Final

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._redact import REDACTED, is_sensitive

#: Values are cut at this many characters (OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT), set at start.
value_length_limit: int = 64 * 1024
#: Attributes of one span, event or link beyond this are dropped and counted (OTEL_ATTRIBUTE_COUNT_LIMIT).
attribute_count_limit: int = 128
#: Events and links of one span beyond these are dropped and counted (OTEL_SPAN_EVENT_COUNT_LIMIT, ..._LINK_...).
event_count_limit: int = 128
link_count_limit: int = 128
MAX_ARRAY: Final = 64
MAX_EXCEPTION_MESSAGE: Final = 1024
#: A Resource stands in the header of every segment, whose size a reader bounds.
MAX_RESOURCE: Final = 512 * 1024

_double: Final = Struct("<d").pack
_ONE_BYTE: Final = tuple(bytes((n,)) for n in range(128))
_INT64: Final = 1 << 64

# Tag bytes: field number << 3 | wire type.
_KEY = b"\x0a"
_VALUE = b"\x12"
_ANY_STRING = b"\x0a"
_ANY_BOOL = b"\x10"
_ANY_INT = b"\x18"
_ANY_DOUBLE = b"\x21"
_ANY_ARRAY = b"\x2a"
_ANY_BYTES = b"\x3a"
SPAN_ATTRIBUTE: Final = b"\x4a"
EVENT_ATTRIBUTE: Final = b"\x1a"
LINK_ATTRIBUTE: Final = b"\x22"
RESOURCE_ATTRIBUTE: Final = b"\x0a"


class UnencodableError(Exception):
    """A value that no OTLP attribute can hold; the message says why."""


def varint(n: int) -> bytes:
    """Returns ``n`` (0 <= n < 2**64) as a protobuf varint."""
    if n < 128:
        return _ONE_BYTE[n]
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def delimited(tag: bytes, payload: bytes) -> bytes:
    """Returns a length-delimited field."""
    return tag + varint(len(payload)) + payload


def text(value: str, limit: int) -> bytes:
    """Returns UTF-8, cut at ``limit`` characters; lone surrogates, which UTF-8 cannot hold, are escaped."""
    return value[:limit].encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Returns ``value`` as one of the types that OTLP knows, or raises `UnencodableError`."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, (str, bool, int, float, bytes, list, tuple)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # NumPy and torch, without importing either. A tensor on a device is refused: reading it would wait for the GPU.
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        device = getattr(value, "device", None)
        if getattr(device, "type", "cpu") != "cpu":
            raise UnencodableError(f"it lies on {device}; pass .item() where the wait for the device is wanted")
        if len(value.shape) == 0:
            return value.item()
        if len(value.shape) == 1 and value.shape[0] <= MAX_ARRAY:
            return value.tolist()
        raise UnencodableError(
            f"arrays hold at most {MAX_ARRAY} elements in one dimension, this one is {tuple(value.shape)}"
        )
    raise UnencodableError(f"{type(value).__name__} is no attribute type")


def _any_value(value: Any, redact: bool) -> bytes:
    """Returns the ``AnyValue`` bytes of one scalar."""
    value = _plain(value)
    if isinstance(value, str):
        return delimited(_ANY_STRING, text(REDACTED if redact else value, value_length_limit))
    if isinstance(value, bool):
        return _ANY_BOOL + (b"\x01" if value else b"\x00")
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise UnencodableError("the integer does not fit 64 bits")
        return _ANY_INT + varint(value % _INT64)
    if isinstance(value, float):
        return _ANY_DOUBLE + _double(value)
    if isinstance(value, bytes):
        return delimited(_ANY_BYTES, REDACTED.encode() if redact else value[:value_length_limit])
    raise UnencodableError(f"{type(value).__name__} is no attribute type")


def any_value(key: str, value: Any) -> bytes:
    """Returns the ``AnyValue`` bytes of ``value`` under ``key`` (which decides on redaction).

    Raises:
        UnencodableError: No OTLP attribute can hold it.
    """
    redact = not _state.capture_content and is_sensitive(key)
    value = _plain(value)
    if not isinstance(value, (list, tuple)):
        return _any_value(value, redact)
    found = list(islice(value, MAX_ARRAY + 1))  # and not len(): a user's list may say what it likes
    if len(found) > MAX_ARRAY:
        raise UnencodableError(f"arrays hold at most {MAX_ARRAY} elements, this one has {len(value)}")
    items = (b"" if item is None else _any_value(item, redact) for item in found)
    return delimited(_ANY_ARRAY, b"".join(delimited(b"\x0a", item) for item in items))


def key_value(tag: bytes, key: str, value: Any) -> bytes:
    """Returns one ``KeyValue`` as the field ``tag``; nothing for None, which OpenTelemetry has no value for.

    Raises:
        UnencodableError: No OTLP attribute can hold it.
    """
    if value is None:
        return b""
    encoded = any_value(key, value)
    return delimited(tag, delimited(_KEY, text(key, value_length_limit)) + delimited(_VALUE, encoded))


# Attributes seen before, by (key, value): one table a type, since True == 1 == 1.0. `dict.items()` hands out the very
# tuple that is the key here. Bounded, and without long values, so that they never hold much.
_CACHE_SIZE: Final = 4096
_CACHED_LENGTH: Final = 64
_strings: Final[dict[tuple[str, Any], bytes]] = {}
_ints: Final[dict[tuple[str, Any], bytes]] = {}
_bools: Final[dict[tuple[str, Any], bytes]] = {}
#: Everything before the eight bytes of a double, by key.
_double_prefixes: Final[dict[str, bytes]] = {}
#: The key of an integer attribute, as encoded in its ``KeyValue``; larger integers are not remembered one by one.
_int_keys: Final[dict[str, bytes]] = {}
_REMEMBERED_INTS: Final = 1024


def clear_caches() -> None:
    """Forgets encodings that limits or redaction settings had a part in."""
    for cache in (_strings, _ints, _bools, _double_prefixes, _int_keys):
        cache.clear()


def _remember(cache: dict[Any, bytes], key: Any, encoded: bytes) -> None:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[key] = encoded


def span_attributes(attributes: Mapping[str, Any], parts: list[bytes], *, counted: bool = True) -> int:
    """Appends each attribute, encoded as a span's, to ``parts``. The hot path of the encoder.

    Args:
        attributes: The attributes.
        parts: Where their encodings go.
        counted: Count those that cannot be encoded, and name the first of its kind in a warning.

    Returns:
        How many could not be encoded.
    """
    lost = 0
    for item in attributes.items():
        kind = type(item[1])
        if kind is str:
            encoded = _strings.get(item)
        elif kind is int:
            encoded = _ints.get(item) or _int_attribute(item)
        elif kind is float:
            prefix = _double_prefixes.get(item[0])
            encoded = None if prefix is None else prefix + _double(item[1])
        elif kind is bool:
            encoded = _bools.get(item)
        else:
            encoded = None
        if encoded is None:
            encoded = _attribute(SPAN_ATTRIBUTE, item, counted=counted)
            if encoded is None:
                lost += 1
                continue
        parts.append(encoded)
    return lost


def _int_attribute(item: tuple[str, int]) -> bytes | None:
    """Encodes an integer under a key seen before: token counts and steps seldom repeat. None if it must be slower."""
    key = _int_keys.get(item[0])
    if key is None or not 0 <= item[1] < 1 << 63:
        return None
    number = varint(item[1])
    pair = key + _ONE_BYTE[len(number) + 1] + _ANY_INT + number
    return SPAN_ATTRIBUTE + varint(len(pair)) + pair


def _attribute(tag: bytes, item: tuple[Any, Any], *, counted: bool = True) -> bytes | None:
    """Encodes one attribute whatever it is; None (counted, warned) if it cannot be."""
    key, value = item
    try:
        if not isinstance(key, str) or not key:
            raise UnencodableError("attribute keys are non-empty strings")
        encoded = key_value(tag, key, value)
    except Exception as error:  # a hostile __len__, item() or property of the user's object included
        if is_interrupt(error):
            raise
        if counted:
            lost_attribute(key, value, error)
        return None
    if tag is SPAN_ATTRIBUTE:
        kind = type(value)
        if kind is str and len(value) <= _CACHED_LENGTH and len(key) <= _CACHED_LENGTH:
            _remember(_strings, item, encoded)
        elif kind is int:
            _remember(_int_keys, key, delimited(_KEY, text(key, value_length_limit)) + _VALUE)
            if 0 <= value < _REMEMBERED_INTS:
                _remember(_ints, item, encoded)
        elif kind is bool:
            _remember(_bools, item, encoded)
        elif kind is float:
            _remember(_double_prefixes, key, encoded[:-8])
    return encoded


def lost_attribute(key: object, value: object, error: BaseException) -> None:
    """Counts an attribute that could not be kept and names it once."""
    _state.count_drop("attributes")
    name = f"{key!r:.100}" if isinstance(key, str) else type(key).__name__
    _state.warn_once(
        f"attribute:{name}:{type(value).__name__}",
        "Attribute %s (a %s) is dropped: %s. Pass a str, bool, int, float or a short list of these.",
        name,
        type(value).__name__,
        error if isinstance(error, UnencodableError) else type(error).__name__,
    )


def attributes_of(tag: bytes, attributes: Mapping[str, Any] | None, limit: int | None = None) -> tuple[bytes, int]:
    """Returns the attributes of an event, link or resource as fields ``tag``, and how many were lost."""
    if not attributes:
        return b"", 0
    parts: list[bytes] = []
    lost = 0
    limit = attribute_count_limit if limit is None else limit
    for item in attributes.items():
        encoded = _attribute(tag, item) if len(parts) < limit else None
        if encoded is None:
            if len(parts) >= limit:
                _state.count_drop("attributes")
            lost += 1
        else:
            parts.append(encoded)
    return b"".join(parts), lost


def event(name: str, time_ns: int, attributes: Mapping[str, Any] | None, dropped: int = 0) -> bytes:
    """Returns a ``Span.Event`` as field 11 of a span.

    Args:
        name: Its name.
        time_ns: Ns since the epoch.
        attributes: Its attributes.
        dropped: Attributes that it has lost before.
    """
    encoded, lost = attributes_of(EVENT_ATTRIBUTE, attributes)
    lost += dropped
    body = b"\x09" + (time_ns % _INT64).to_bytes(8, "little") + delimited(b"\x12", text(name, value_length_limit))
    body += encoded
    if lost:
        body += b"\x20" + varint(lost)
    return delimited(b"\x5a", body)


def link(
    trace_id: bytes,
    span_id: bytes,
    trace_state: str,
    attributes: Mapping[str, Any] | None,
    flags: int,
    dropped: int = 0,
) -> bytes:
    """Returns a ``Span.Link`` as field 13 of a span; ``dropped`` attributes were lost before."""
    encoded, lost = attributes_of(LINK_ATTRIBUTE, attributes)
    lost += dropped
    body = delimited(b"\x0a", trace_id) + delimited(b"\x12", span_id)
    if trace_state:
        body += delimited(b"\x1a", text(trace_state, value_length_limit))
    body += encoded
    if lost:
        body += b"\x28" + varint(lost)
    return delimited(b"\x6a", body + b"\x35" + flags.to_bytes(4, "little"))


def status(code: int, message: str) -> bytes:
    """Returns a ``Status`` as field 15 of a span (code 1 is OK, 2 is ERROR), nothing for UNSET."""
    if not code:
        return b""
    described = delimited(b"\x12", text(message, MAX_EXCEPTION_MESSAGE)) if message else b""
    return delimited(b"\x7a", described + b"\x18" + varint(code))


def resource(attributes: Mapping[str, Any]) -> bytes:
    """Returns an OTLP ``Resource`` of at most `MAX_RESOURCE` bytes; what does not fit is counted."""
    parts: list[bytes] = []
    size = 0
    for item in attributes.items():
        encoded = _attribute(RESOURCE_ATTRIBUTE, item)
        if encoded is None:
            continue
        if size + len(encoded) > MAX_RESOURCE:
            lost_attribute(item[0], item[1], UnencodableError(f"the resource would exceed {MAX_RESOURCE} bytes"))
            continue
        size += len(encoded)
        parts.append(encoded)
    return b"".join(parts)


def scope_spans(scope_name: str, scope_version: str, schema_url: str, spans: Iterable[bytes]) -> bytes:
    """Returns an OTLP ``ScopeSpans`` holding encoded spans under the named instrumentation scope."""
    scope = delimited(b"\x0a", text(scope_name, value_length_limit))
    if scope_version:
        scope += delimited(b"\x12", text(scope_version, value_length_limit))
    body = delimited(b"\x0a", scope) + b"".join(delimited(b"\x12", span) for span in spans)
    if schema_url:
        body += delimited(b"\x1a", text(schema_url, value_length_limit))
    return body
