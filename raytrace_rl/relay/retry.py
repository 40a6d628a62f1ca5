"""What an answer to an export request means, and how long to wait before the same request is sent again.

Source: OpenTelemetry protocol specification, "Failures" and "OTLP/gRPC Throttling".
"""

from __future__ import annotations

import random
import re
from typing import Final, NamedTuple

from raytrace_rl.relay.raw import fields, varint

#: gRPC status codes after which the same data may be sent again. RESOURCE_EXHAUSTED is one only with a RetryInfo.
RETRYABLE: Final = frozenset(
    {
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNAVAILABLE",
        "DATA_LOSS",
    }
)
#: HTTP status codes of the same meaning.
RETRYABLE_HTTP: Final = frozenset({429, 502, 503, 504})

FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0
#: A receiver that asks to be left alone for longer is asked again after this.
LONGEST_ASKED_S: Final = 3600.0
_FACTOR: Final = 2.0
#: A wait is drawn from this much around what it would be, so that the relays of many nodes do not come back at once.
_JITTER: Final = 0.5
_RETRY_INFO: Final = b"google.rpc.RetryInfo"
#: How servers in Go, C++, Java, Rust and .NET say that a message is too long for them; Rust's by OUT_OF_RANGE.
_TOO_LARGE: Final = re.compile(r"message.*(larger than max|too large|exceeds)", re.IGNORECASE | re.DOTALL)
_TOO_LARGE_CODES: Final = frozenset({"RESOURCE_EXHAUSTED", "OUT_OF_RANGE"})


class Answer(NamedTuple):
    """What came of one request.

    Attributes:
        accepted: The receiver has it: all of it but ``rejected``.
        retry: It may be sent again; if neither this nor ``accepted``, it never will be accepted.
        delay_s: Seconds for which the receiver asks to be left alone.
        rejected: Items that the receiver refused of an accepted request: not to be sent again.
        message: What it said, for a person.
        too_large: It was refused for its size: the same in smaller requests may pass.
        timed_out: No answer in time.
    """

    accepted: bool = False
    retry: bool = False
    delay_s: float = 0.0
    rejected: int = 0
    message: str = ""
    too_large: bool = False
    timed_out: bool = False


class Backoff:
    """Exponential backoff with jitter.

    Args:
        seed: For tests: the same waits again.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._next_s = FIRST_S

    def wait_s(self, asked_s: float = 0.0) -> float:
        """Returns the seconds until the next attempt: no fewer than the receiver asked for, within an hour."""
        usual = self._next_s * self._random.uniform(1 - _JITTER, 1 + _JITTER)
        self._next_s = min(self._next_s * _FACTOR, LONGEST_S)
        if asked_s > 0:
            return min(asked_s, LONGEST_ASKED_S) * self._random.uniform(1.0, 1.0 + _JITTER / 5)
        return usual

    def reset(self) -> None:
        """Begins anew: a request was accepted."""
        self._next_s = FIRST_S


def grpc_failure(code: str, details: str, status: bytes | None) -> Answer:
    """Reads a gRPC status.

    Args:
        code: Name of the status code.
        details: What the status says.
        status: The ``google.rpc.Status`` in ``grpc-status-details-bin``, if there was one.
    """
    delay_s = retry_delay_s(status)
    too_large = code in _TOO_LARGE_CODES and delay_s is None and _TOO_LARGE.search(details) is not None
    retry = not too_large and (code in RETRYABLE or (code == "RESOURCE_EXHAUSTED" and delay_s is not None))
    return Answer(
        retry=retry,
        delay_s=delay_s or 0.0,
        message=f"{code}: {details}" if details else code,
        too_large=too_large,
        timed_out=code == "DEADLINE_EXCEEDED",
    )


def retry_delay_s(status: bytes | None) -> float | None:
    """Returns the delay in the ``RetryInfo`` of a ``google.rpc.Status``, None where there is none."""
    try:
        for tag, _, value, stop in fields(status or b""):
            if tag == 0x1A and status is not None:  # repeated google.protobuf.Any details = 3
                found = _retry_info(status[value:stop])
                if found is not None:
                    return found
    except ValueError:
        pass
    return None


def _retry_info(detail: bytes) -> float | None:
    kind = info = b""
    for tag, _, value, stop in fields(detail):
        if tag == 0x0A:
            kind = detail[value:stop]
        elif tag == 0x12:
            info = detail[value:stop]
    if not kind.endswith(_RETRY_INFO):
        return None
    seconds = nanos = 0
    for tag, _, value, stop in fields(info):
        if tag == 0x0A:  # Duration retry_delay = 1
            duration = info[value:stop]
            for inner, _, at, _ in fields(duration):
                if inner == 0x08:
                    seconds = _int64(duration, at)
                elif inner == 0x10:
                    nanos = _int64(duration, at)
    return max(0.0, seconds + nanos / 1e9)


def partial_success(response: bytes) -> Answer:
    """Reads an export response: what of the request was refused, if anything (``partial_success``)."""
    rejected, message = 0, ""
    try:
        for tag, _, value, stop in fields(response):
            if tag == 0x0A:
                inside = response[value:stop]
                for inner, _, at, behind in fields(inside):
                    if inner == 0x08:
                        rejected = max(0, _int64(inside, at))
                    elif inner == 0x12:
                        message = inside[at:behind].decode("utf-8", "replace")
    except ValueError:
        pass  # it was accepted, whatever else it says
    return Answer(accepted=True, rejected=rejected, message=message)


def _int64(data: bytes, pos: int) -> int:
    value, _ = varint(data, pos)
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
