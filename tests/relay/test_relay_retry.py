from __future__ import annotations

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import DebugInfo, RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.relay.retry import FIRST_S, LONGEST_S, Backoff, grpc_failure, partial_success, retry_delay_s
from tests.relay import otlp_server

#: As the OTLP specification lists them, under "Failures".
RETRYABLE = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}


def status(*details):
    """A serialized status with these details."""
    packed = []
    for detail in details:
        one = AnyMessage()
        one.Pack(detail)
        packed.append(one)
    return Status(code=8, message="busy", details=packed).SerializeToString()


@pytest.mark.parametrize("code", [code.name for code in grpc.StatusCode])
def test_codes_are_retryable_as_the_specification_says(code):
    """Catches data sent for ever that will never be taken, and data dropped that would be."""
    assert grpc_failure(code, "", None).retry is (code in RETRYABLE)


def test_resource_exhausted_is_retryable_only_with_retry_info():
    """Catches both: dropping what a busy collector asks to have later, and hammering one that is full for good."""
    assert not grpc_failure("RESOURCE_EXHAUSTED", "", status(DebugInfo(detail="x"))).retry
    found = grpc_failure("RESOURCE_EXHAUSTED", "", status(DebugInfo(), RetryInfo(retry_delay=Duration(seconds=7))))
    assert (found.retry, found.delay_s) == (True, 7.0)


@pytest.mark.parametrize(
    ("seconds", "nanos", "delay"), [(0, 0, 0.0), (3, 500_000_000, 3.5), (0, 1, 1e-9), (-5, 0, 0.0), (10**9, 0, 1e9)]
)
def test_the_delay_is_read(seconds, nanos, delay):
    """Catches a delay read as another: too early a retry, or none for years."""
    found = retry_delay_s(status(RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos))))
    assert found == pytest.approx(delay)


def test_no_delay_is_told_apart_from_one_of_zero():
    """Catches a RetryInfo without a delay, which still says that a retry is welcome."""
    assert retry_delay_s(status(RetryInfo())) == 0.0
    assert retry_delay_s(status()) is None
    assert retry_delay_s(None) is None


@given(st.binary(max_size=60))
def test_rubbish_is_no_delay(data):
    """Catches a crash over details that some proxy has mangled."""
    found = retry_delay_s(data)
    assert found is None or found >= 0
    assert partial_success(data).accepted


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5 vs. 4)"),
        ("RESOURCE_EXHAUSTED", "grpc: received message after decompression larger than max 4194304"),
        ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4194304: 5000000"),
        ("OUT_OF_RANGE", "Error, decoded message length too large: found 5 bytes, the limit is: 4 bytes"),
    ],
)
def test_a_message_too_large_is_told_apart(code, details):
    """Catches a batch that a receiver would take in halves: dropped whole (Java), or sent for ever as it is (Rust)."""
    found = grpc_failure(code, details, None)
    assert (found.too_large, found.retry) == (True, False)
    assert not grpc_failure(code, "the queue is too large", None).too_large


def test_partial_success_is_read():
    """Catches spans refused by the receiver that nobody counts."""
    found = partial_success(otlp_server.partial_success(300, "attribute limit"))
    assert (found.accepted, found.rejected, found.message) == (True, 300, "attribute limit")
    assert partial_success(b"").rejected == 0


def test_waits_grow_are_jittered_and_bounded():
    """Catches relays of many nodes that come back at the same moment, and a wait of hours."""
    waits = [[backoff.wait_s() for _ in range(12)] for backoff in map(Backoff, range(20))]
    for n in range(12):
        usual = min(FIRST_S * 2**n, LONGEST_S)
        assert all(0.5 * usual <= one[n] <= 1.5 * usual for one in waits)
        assert len({one[n] for one in waits}) == 20
    backoff = Backoff(1)
    for _ in range(5):
        backoff.wait_s()
    backoff.reset()
    assert backoff.wait_s() <= 1.5 * FIRST_S


def test_the_receivers_delay_is_never_undercut():
    """Catches a jitter that makes a retry earlier than the receiver asked for."""
    backoff = Backoff(1)
    assert all(7.0 <= backoff.wait_s(7.0) <= 7.7 for _ in range(100))


@pytest.mark.parametrize("asked_s", [1e20, float("inf")])
def test_an_absurd_delay_is_a_wait_that_can_be_waited_for(asked_s):
    """Catches a delay that no clock holds: the wait fails, and the receiver is asked again each second."""
    assert 3600 <= Backoff(1).wait_s(asked_s) <= 3960
