from __future__ import annotations

import socket
import threading
import time

import grpc
import pytest

from raytrace_rl._env_otlp import endpoint
from raytrace_rl.relay.requests import SIGNALS
from raytrace_rl.relay.sender import GrpcSender, sender_for
from tests.relay import certificates
from tests.relay.otlp_server import REQUESTS, Refusal, partial_success, receiver
from tests.relay.proxy import proxy

pytest_plugins = ["tests.relay.relay_fixtures"]

P = "OTEL_EXPORTER_OTLP_"
TRACES = SIGNALS["traces"]
#: An ``ExportTraceServiceRequest`` with one empty ``ResourceSpans``.
REQUEST = b"\x0a\x00"


def sender(url, signal="traces", **variables):
    """A sender as the environment describes it."""
    environ = {P + "ENDPOINT": url, **{P + name: str(value) for name, value in variables.items()}}
    found = endpoint(signal, environ)
    assert found is not None
    return GrpcSender(SIGNALS[signal], found)


@pytest.mark.parametrize(("signal", "service"), list(zip(SIGNALS, REQUESTS, strict=True)))
def test_each_signal_reaches_its_service(server, signal, service):
    """Catches a method's name that no collector knows."""
    answer = sender(server.url, signal).send(REQUEST, 10)
    assert (answer.accepted, answer.rejected) == (True, 0)
    assert [name for name, _ in server.received] == [service]


def test_headers_and_user_agent_go_with_every_request(server):
    """Catches a request without the key that the collector asks for."""
    sender(server.url, HEADERS="Api-Key=a%20b").send(REQUEST, 10)
    (_, _, metadata) = server.attempts[0]
    assert metadata["api-key"] == "a b"
    assert metadata["user-agent"].startswith("OTel-OTLP-Exporter-raytrace_rl/")


@pytest.mark.parametrize(("compression", "least", "most"), [("gzip", 0, 5_000), ("none", 100_000, 110_000)])
def test_compression_is_what_was_asked_for(server, compression, least, most):
    """Catches ``gzip`` that compresses nothing: the network would carry several times the bytes."""
    with proxy(server.port) as way:
        one = sender(f"http://127.0.0.1:{way.port}", COMPRESSION=compression)
        assert one.send(REQUEST * 50_000, 10).accepted
        assert least <= way.sent <= most
        one.close()


def test_partial_success_is_told(server):
    """Catches spans that the receiver refused being counted as sent."""
    server.answers.append(partial_success(3, "too old"))
    answer = sender(server.url).send(REQUEST, 10)
    assert (answer.accepted, answer.rejected, answer.message) == (True, 3, "too old")


def test_retry_info_comes_through_the_trailers(server):
    """Catches details of a status that gRPC delivers elsewhere than they are looked for."""
    server.answers.append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", retry_s=2.5))
    server.answers.append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    one = sender(server.url)
    busy, full = one.send(REQUEST, 10), one.send(REQUEST, 10)
    assert (busy.retry, busy.delay_s, "busy" in busy.message) == (True, 2.5, True)
    assert (full.accepted, full.retry) == (False, False)


def test_a_message_that_is_too_large_is_recognised():
    """Catches a receiver with a small limit whose refusal looks like any other."""
    with receiver(options=[("grpc.max_receive_message_length", 1000)]) as server:
        answer = sender(server.url).send(b"\x0a\x00" * 5000, 10)
    assert (answer.too_large, answer.retry) == (True, False)


def test_a_dead_port_is_told_at_once():
    """Catches a wait for the whole time-out where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    begun = time.monotonic()
    answer = sender(f"http://127.0.0.1:{port}").send(REQUEST, 30)
    assert (answer.retry, answer.timed_out) == (True, False)
    assert time.monotonic() - begun < 5


def test_a_listener_that_never_answers_costs_the_timeout_and_no_more():
    """Catches a black hole (a firewall, a wedged collector) that holds the relay for good."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        answer = sender(f"http://127.0.0.1:{listener.getsockname()[1]}").send(REQUEST, 0.5)
    assert (answer.retry, answer.accepted) == (True, False)
    assert time.monotonic() - begun < 3


def test_closing_ends_a_request_that_waits(server):
    """Catches a relay that cannot be stopped before the time-out of a slow collector."""
    blocked = threading.Event()
    server.answers.append(lambda: blocked.wait(30) and b"")
    one = sender(server.url)
    found = []
    thread = threading.Thread(target=lambda: found.append(one.send(REQUEST, 30)))
    thread.start()
    server.wait(lambda: server.attempts, "the request is there")
    one.close()
    thread.join(10)
    blocked.set()
    assert not thread.is_alive()
    assert not found[0].accepted
    assert one.send(REQUEST, 10).retry


def test_it_comes_back_when_the_collector_does():
    """Catches gRPC's own reconnection delay, of up to two minutes, deciding when spans flow again."""
    with receiver() as server:
        port = server.port
        one = sender(server.url)
        assert one.send(REQUEST, 10).accepted
    for _ in range(6):
        assert not one.send(REQUEST, 1).accepted
    with receiver(port) as server:
        server.wait(lambda: one.send(REQUEST, 2).accepted, "it is back", timeout_s=15)


def test_tls_with_a_certificate_of_the_users_own(tmp_path):
    """Catches a private collector's certificate that is not trusted although its authority was given, or any other."""
    certificates.authority(tmp_path)
    pair = certificates.signed(tmp_path, "server")
    with receiver(credentials=grpc.ssl_server_credentials([pair])) as server:
        url = f"https://127.0.0.1:{server.port}"
        assert not sender(url).send(REQUEST, 3).accepted
        assert sender(url, CERTIFICATE=tmp_path / "authority.pem").send(REQUEST, 10).accepted


def test_tls_with_a_client_certificate(tmp_path):
    """Catches a collector that asks who is calling, and gets no answer."""
    authority = certificates.authority(tmp_path)
    pair = certificates.signed(tmp_path, "server")
    certificates.signed(tmp_path, "client")
    credentials = grpc.ssl_server_credentials([pair], authority.certificate, require_client_auth=True)
    with receiver(credentials=credentials) as server:
        url = f"https://127.0.0.1:{server.port}"
        assert not sender(url, CERTIFICATE=tmp_path / "authority.pem").send(REQUEST, 3).accepted
        known = {"CLIENT_KEY": tmp_path / "client.key", "CLIENT_CERTIFICATE": tmp_path / "client.pem"}
        assert sender(url, CERTIFICATE=tmp_path / "authority.pem", **known).send(REQUEST, 10).accepted


def test_a_unix_socket(tmp_path):
    """Catches the address of a collector's socket that is taken for a host."""
    with receiver(address=f"unix:{tmp_path}/otlp.sock") as server:
        assert sender(f"unix:{tmp_path}/otlp.sock").send(REQUEST, 10).accepted
        assert len(server.received) == 1


@pytest.mark.parametrize("header", ["bad key!=s3cret", "key=s3%0acret", "key=s3%E2%82%ACcret", "key-bin=s3cret"])
def test_metadata_that_grpc_refuses_is_a_failure_that_tells_no_secret(server, header):
    """Catches a whole run dropped for good by its own machine, as if a receiver had refused it."""
    answer = sender(server.url, HEADERS=header).send(REQUEST, 5)
    assert (answer.accepted, answer.retry) == (False, True)
    assert repr(header.partition("=")[0]) in answer.message
    assert "cret" not in answer.message


def test_the_protocol_chooses_the_sender():
    """Catches HTTP spoken to a gRPC port, or the reverse."""
    for protocol, name in (("grpc", "GrpcSender"), ("http/protobuf", "HttpSender")):
        found = endpoint("traces", {P + "PROTOCOL": protocol})
        assert found is not None
        assert type(sender_for(TRACES, found)).__name__ == name
