from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from raytrace_rl._env_otlp import endpoint
from raytrace_rl.relay.http_sender import HttpSender
from raytrace_rl.relay.requests import SIGNALS
from tests.relay import certificates
from tests.relay.otlp_server import partial_success

P = "OTEL_EXPORTER_OTLP_"
REQUEST = b"\x0a\x00"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.requests.append((self.path, dict(self.headers), body, self.client_address))
        status, headers, answer = server.answers.pop(0) if server.answers else (200, {}, b"")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiver(context: ssl.SSLContext | None = None) -> Iterator[Any]:
    """An HTTP server that answers as it is told."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.requests, server.answers, server.daemon_threads = [], [], True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def sender(port, scheme="http", **variables):
    """A sender as the environment describes it."""
    environ = {P + "PROTOCOL": "http/protobuf", P + "ENDPOINT": f"{scheme}://127.0.0.1:{port}"}
    found = endpoint("traces", {**environ, **{P + name: str(value) for name, value in variables.items()}})
    assert found is not None
    return HttpSender(SIGNALS["traces"], found)


def test_requests_go_to_the_signals_path_over_one_connection():
    """Catches a path, a media type or a header that no collector takes, and a connection for each request."""
    with receiver() as server:
        one = sender(server.server_port, HEADERS="Api-Key=a")
        assert all(one.send(REQUEST, 10).accepted for _ in range(3))
        one.close()
    path, headers, body, _ = server.requests[0]
    assert (path, body) == ("/v1/traces", REQUEST)
    assert headers["Content-Type"] == "application/x-protobuf"
    assert headers["api-key"] == "a"
    assert len({client for *_, client in server.requests}) == 1


def test_bodies_are_compressed_on_request():
    """Catches a body that is not what its header says."""
    with receiver() as server:
        assert sender(server.server_port, COMPRESSION="gzip").send(REQUEST * 100, 10).accepted
    _, headers, body, _ = server.requests[0]
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == REQUEST * 100


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 502, 503, 504])
def test_codes_are_retryable_as_the_specification_says(status):
    """Catches data sent for ever that will never be taken, and data dropped that would be."""
    with receiver() as server:
        server.answers.append((status, {}, b""))
        answer = sender(server.server_port).send(REQUEST, 10)
    assert answer.accepted is False
    assert answer.retry is (status in {429, 502, 503, 504})
    assert answer.too_large is (status == 413)


def test_retry_after_is_honoured():
    """Catches a receiver's own delay that is read over, in seconds or as a date."""
    with receiver() as server:
        server.answers += [(429, {"Retry-After": "7"}, b""), (503, {"Retry-After": formatdate(time.time() + 60)}, b"")]
        server.answers.append((503, {"Retry-After": "soon"}, b""))
        one = sender(server.server_port)
        delays = [one.send(REQUEST, 10).delay_s for _ in range(3)]
    assert (delays[0], delays[2]) == (7.0, 0.0)
    assert 50 <= delays[1] <= 61


def test_partial_success_is_told():
    """Catches spans that the receiver refused being counted as sent."""
    with receiver() as server:
        server.answers.append((200, {}, partial_success(3, "too old")))
        answer = sender(server.server_port).send(REQUEST, 10)
    assert (answer.accepted, answer.rejected, answer.message) == (True, 3, "too old")


def test_silence_and_a_dead_port_are_failures_in_time():
    """Catches a relay held by a listener that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        begun = time.monotonic()
        silent = sender(port).send(REQUEST, 0.3)
        assert time.monotonic() - begun < 3
    dead = sender(port).send(REQUEST, 5)
    assert (silent.retry, silent.timed_out) == (True, True)
    assert (dead.retry, dead.timed_out) == (True, False)


def test_a_receiver_that_answers_byte_by_byte_is_late():
    """Catches a socket's time-out that begins anew with each byte: an answer of minutes, beyond every deadline."""

    def drip(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        begun = time.monotonic()
        answer = sender(listener.getsockname()[1]).send(REQUEST, 0.5)
        assert time.monotonic() - begun < 10
    assert (answer.accepted, answer.retry, answer.timed_out) == (False, True, True)
    thread.join(10)


@pytest.mark.parametrize("header", ["authorization=Bearer%20s3cret%0aX", "authorization=s3cret%E2%82%AC"])
def test_a_header_that_cannot_be_sent_is_a_failure_that_tells_no_secret(header):
    """Catches an exception instead of an answer, with the credential in it, and a connection that is stuck with it."""
    with receiver() as server:
        one = sender(server.server_port, HEADERS=header)
        for _ in range(2):
            answer = one.send(REQUEST, 10)
            assert (answer.accepted, answer.retry) == (False, True)
            assert "OTEL_EXPORTER_OTLP_HEADERS" in answer.message
            assert "s3cret" not in answer.message
    assert not server.requests


def test_a_page_for_people_is_no_acknowledgement():
    """Catches spans that a log-in page, or any web server, has "accepted"."""
    with receiver() as server:
        server.answers.append((200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>please log in"))
        answer = sender(server.server_port).send(REQUEST, 10)
    assert (answer.accepted, answer.retry) == (False, False)
    assert "no OTLP receiver" in answer.message


def test_tls(tmp_path):
    """Catches a private collector's certificate that is not trusted although its authority was given, or any other."""
    certificates.authority(tmp_path)
    certificates.signed(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with receiver(context) as server:
        assert not sender(server.server_port, "https").send(REQUEST, 5).accepted
        own = sender(server.server_port, "https", CERTIFICATE=tmp_path / "authority.pem")
        assert own.send(REQUEST, 10).accepted
        own.close()
