"""Builds OTLP export requests out of stored bytes: messages are wrapped in lengths and concatenated, never decoded.

The field numbers are the same for the three signals: a request holds resource messages (1), each of these a
``Resource`` (1) and scope messages (2); of a spool's records, spans of our own instrumentation lack their scope
message, everything else is one. Source: opentelemetry-proto, ``collector/*/v1`` and ``{trace,metrics,logs}/v1``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from raytrace_rl._encode import delimited, varint
from raytrace_rl._version import VERSION
from raytrace_rl.relay.batch import Portion
from raytrace_rl.spool.format import Kind

_FIRST: Final = b"\x0a"
_SECOND: Final = b"\x12"
_SCOPE: Final = delimited(_FIRST, delimited(_FIRST, b"raytrace_rl") + delimited(_SECOND, VERSION.encode()))


@dataclass(frozen=True)
class Signal:
    """One of OTLP's signals.

    Attributes:
        name: ``traces``, ``metrics`` or ``logs``.
        own: Kind of the records that lack their scope message, if there is one.
        scoped: Kind of the records that are scope messages.
        method: Full name of the gRPC method that takes the request.
        path: Path of the same over HTTP.
    """

    name: str
    own: int | None
    scoped: int
    method: str
    path: str

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of records that it sends."""
        return (self.scoped,) if self.own is None else (self.own, self.scoped)


_SERVICE: Final = "/opentelemetry.proto.collector.{0}.v1.{1}Service/Export"
SIGNALS: Final = {
    "traces": Signal("traces", Kind.SPAN, Kind.SCOPE_SPANS, _SERVICE.format("trace", "Trace"), "/v1/traces"),
    "metrics": Signal("metrics", None, Kind.METRICS, _SERVICE.format("metrics", "Metrics"), "/v1/metrics"),
    "logs": Signal("logs", None, Kind.LOGS, _SERVICE.format("logs", "Logs"), "/v1/logs"),
}

#: Tag and length in front of a payload, made once for the lengths that most have.
_FRAMES: Final = tuple(_SECOND + varint(length) for length in range(2048))


def request(signal: Signal, portions: Iterable[Portion]) -> bytes:
    """Returns the export request of ``signal`` for all that the portions hold; empty where that is nothing."""
    parts: list[bytes] = []
    for portion in portions:
        if not portion.empty:
            _add_resource(parts, signal, portion)
    return b"".join(parts)


def _add_resource(parts: list[bytes], signal: Signal, portion: Portion) -> None:
    own = _framed(portion.payloads[signal.own]) if signal.own is not None else []
    scoped = _framed(portion.payloads[signal.scoped])
    body = [_FIRST + varint(len(portion.resource)), portion.resource]
    if own:
        body += (_SECOND + varint(len(_SCOPE) + sum(map(len, own))), _SCOPE)
        body += own
    body += scoped
    parts.append(_FIRST + varint(sum(map(len, body))))
    parts += body


def _framed(payloads: list[bytes]) -> list[bytes]:
    framed: list[bytes] = []
    add = framed.append
    for payload in payloads:
        length = len(payload)
        add(_FRAMES[length] if length < 2048 else _SECOND + varint(length))
        add(payload)
    return framed
