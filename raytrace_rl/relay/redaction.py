"""Takes content out of spans and logs that others encoded, by the key of an attribute, as our own encoder does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from raytrace_rl._decode import MAX_DEPTH
from raytrace_rl._encode import delimited, varint
from raytrace_rl._redact import REDACTED, is_sensitive
from raytrace_rl.relay.raw import fields

_REDACTED: Final = delimited(b"\x12", delimited(b"\x0a", REDACTED.encode()))
#: What is made of the values of a message's fields, by tag.
_Rules: TypeAlias = Mapping[int, Callable[[bytes], bytes]]

_ITEM: Final = 0x12
#: Fields of an AnyValue that are content: string, array, map, bytes. Booleans and numbers are not.
_CONTENT: Final = frozenset({0x0A, 0x2A, 0x32, 0x3A})


def spans(scope: bytes) -> bytes:
    """Returns an OTLP ``ScopeSpans`` without content: in attributes of spans, of their events, of their links.

    Raises:
        ValueError: The bytes are no such message.
    """
    return _replaced(scope, {_ITEM: _span})


def logs(scope: bytes) -> bytes:
    """Returns an OTLP ``ScopeLogs`` without content in its attributes; a body is the user's text.

    Raises:
        ValueError: The bytes are no such message.
    """
    return _replaced(scope, {_ITEM: lambda record: _replaced(record, {0x32: _key_value})})


def _span(span: bytes) -> bytes:
    event: _Rules = {0x1A: _key_value}
    link: _Rules = {0x22: _key_value}
    return _replaced(
        span, {0x4A: _key_value, 0x5A: lambda one: _replaced(one, event), 0x6A: lambda one: _replaced(one, link)}
    )


def _key_value(message: bytes, depth: int = 0) -> bytes:
    key = ""
    pieces = []
    for tag, _, at, stop in fields(message):
        if tag == 0x0A:
            key = message[at:stop].decode("utf-8", "replace")
        elif tag == 0x12:
            pieces.append(message[at:stop])
    value = b"".join(pieces)
    if is_sensitive(key):
        # Wherever in the value they stand: a receiver takes the last field, whatever came before it.
        if any(tag in _CONTENT for tag, *_ in fields(value)):
            return delimited(b"\x0a", key.encode()) + _REDACTED
    elif b"\x2a" in value or b"\x32" in value:  # an array or a map, perhaps: the keys in it decide
        return _replaced(message, {0x12: lambda one: _nested(one, depth + 1)})
    return message


def _nested(value: bytes, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise ValueError(f"attribute nested deeper than {MAX_DEPTH}")
    array: _Rules = {0x0A: lambda one: _nested(one, depth + 1)}
    entries: _Rules = {0x0A: lambda entry: _key_value(entry, depth)}
    return _replaced(value, {0x2A: lambda one: _replaced(one, array), 0x32: lambda one: _replaced(one, entries)})


def _replaced(message: bytes, by_tag: _Rules) -> bytes:
    """Returns ``message`` with the fields of some tags replaced by what a function makes of their values."""
    parts = []
    changed = False
    for tag, start, at, stop in fields(message):
        function = by_tag.get(tag)
        if function is not None:
            value = message[at:stop]
            new = function(value)
            if new != value:
                parts.append(varint(tag) + varint(len(new)) + new)
                changed = True
                continue
        parts.append(message[start:stop])
    return b"".join(parts) if changed else message
