"""Whether a message is one that any receiver can decode: protobuf's wire format, and UTF-8 wherever OTLP has text.

What others hand in is stored as it is and goes out in one request with what came from elsewhere: a single message that
a collector cannot decode would have it refuse them all. Shapes: opentelemetry-proto, ``common``, ``resource``,
``trace``, ``metrics``, ``logs``, all v1; `tests.relay.test_relay_valid` holds them against the official classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from raytrace_rl.relay.raw import fields, varint

#: What a length-delimited field holds besides a message or bytes.
TEXT: Final = "text"
FIXED64: Final = "fixed64"
VARINTS: Final = "varints"

Shape = Mapping[int, Any]

#: Messages in messages. Protobuf's own limit is 100, and a request stands around what is looked at here.
_DEEPEST: Final = 64

_ANY_VALUE: Final[dict[int, Any]] = {1: TEXT}
_KEY_VALUE: Final[Shape] = {1: TEXT, 2: _ANY_VALUE}
_ANY_VALUE[5] = {1: _ANY_VALUE}
_ANY_VALUE[6] = {1: _KEY_VALUE}
_SCOPE: Final[Shape] = {1: TEXT, 2: TEXT, 3: _KEY_VALUE}

_SPAN: Final[Shape] = {
    3: TEXT,
    5: TEXT,
    9: _KEY_VALUE,
    11: {2: TEXT, 3: _KEY_VALUE},
    13: {3: TEXT, 4: _KEY_VALUE},
    15: {2: TEXT},
}

_EXEMPLAR: Final[Shape] = {7: _KEY_VALUE}
_NUMBERS: Final[Shape] = {1: {5: _EXEMPLAR, 7: _KEY_VALUE}}
_BUCKETS: Final[Shape] = {2: VARINTS}
_METRIC: Final[Shape] = {
    1: TEXT,
    2: TEXT,
    3: TEXT,
    5: _NUMBERS,
    7: _NUMBERS,
    9: {1: {6: FIXED64, 7: FIXED64, 8: _EXEMPLAR, 9: _KEY_VALUE}},
    10: {1: {1: _KEY_VALUE, 8: _BUCKETS, 9: _BUCKETS, 11: _EXEMPLAR}},
    11: {1: {6: {}, 7: _KEY_VALUE}},
    12: _KEY_VALUE,
}

_LOG_RECORD: Final[Shape] = {3: TEXT, 5: _ANY_VALUE, 6: _KEY_VALUE, 12: TEXT}

#: The scope messages (``ScopeSpans``, ``ScopeMetrics``, ``ScopeLogs``) by the name of their signal.
SCOPES: Final[Mapping[str, Shape]] = {
    "traces": {1: _SCOPE, 2: _SPAN, 3: TEXT},
    "metrics": {1: _SCOPE, 2: _METRIC, 3: TEXT},
    "logs": {1: _SCOPE, 2: _LOG_RECORD, 3: TEXT},
}
RESOURCE: Final[Shape] = {1: _KEY_VALUE, 3: {1: TEXT, 2: TEXT, 3: TEXT, 4: TEXT}}


def check(message: bytes, shape: Shape, depth: int = 0) -> None:
    """Looks through a message and all that is in it.

    Args:
        message: Encoded.
        shape: What stands in which of its length-delimited fields; those that are not named may hold anything.
        depth: Messages around it.

    Raises:
        ValueError: A receiver would refuse it.
    """
    if depth > _DEEPEST:
        raise ValueError(f"messages nested deeper than {_DEEPEST}")
    for tag, _, start, stop in fields(message):
        if tag & 7 != 2:
            continue
        inner = shape.get(tag >> 3)
        if inner is None:
            continue
        if inner is TEXT:
            message[start:stop].decode()
        elif inner is FIXED64:
            if (stop - start) % 8:
                raise ValueError("packed field of a broken length")
        elif inner is VARINTS:
            _check_varints(message[start:stop])
        else:
            check(message[start:stop], inner, depth + 1)


def _check_varints(data: bytes) -> None:
    at = 0
    while at < len(data):
        _, at = varint(data, at)
