"""Sends export requests over OTLP/HTTP with protobuf bodies, by the standard library alone. Never retries by itself."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import io
import socket
import ssl
import tempfile
from email.utils import parsedate_to_datetime
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay.retry import RETRYABLE_HTTP, Answer, partial_success
from raytrace_rl.relay.sender import USER_AGENT

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Endpoint
    from raytrace_rl.relay.requests import Signal

_LONGEST_ANSWER = 1 << 20


class HttpSender:
    """One signal's way to one endpoint, over one connection that is kept."""

    def __init__(self, signal: Signal, endpoint: Endpoint) -> None:
        self._signal = signal
        self._endpoint = endpoint
        parts = urlsplit(endpoint.url if "//" in endpoint.url else f"//{endpoint.url}")
        self._path = (parts.path or signal.path) + (f"?{parts.query}" if parts.query else "")
        self._host = parts.netloc
        self._connection: http.client.HTTPConnection | None = None

    def send(self, request: bytes, timeout_s: float) -> Answer:
        """Sends one request; see `sender.Sender`."""
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": USER_AGENT, **dict(self._endpoint.headers)}
        if self._endpoint.compression == "gzip":
            request = gzip.compress(request, 1)
            headers["Content-Encoding"] = "gzip"
        try:
            connection = self._connected(monotonic() + timeout_s)
            connection.request("POST", self._path, request, headers)
            answer = connection.getresponse()
            body = answer.read(_LONGEST_ANSWER)
        except ValueError:  # its message would show the header
            self.close()
            return Answer(retry=True, message="a header holds what HTTP cannot carry (OTEL_EXPORTER_OTLP_HEADERS)")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(error, TimeoutError):
                return Answer(retry=True, timed_out=True, message="no answer in time")
            if is_interrupt(error):
                raise
            return Answer(retry=True, message=f"{type(error).__name__}: {error}")
        if answer.will_close or answer.status != 200:
            self.close()
        if 200 <= answer.status < 300 and answer.headers.get_content_type() == "text/html":
            return Answer(message=f"HTTP {answer.status} with a page for people: that is no OTLP receiver")
        if 200 <= answer.status < 300:
            return partial_success(body)
        return Answer(
            retry=answer.status in RETRYABLE_HTTP,
            delay_s=_retry_after_s(answer.getheader("Retry-After")),
            message=f"HTTP {answer.status} {answer.reason}",
            too_large=answer.status == 413,
        )

    def close(self) -> None:
        """Ends the connection; see `sender.Sender`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def _connected(self, deadline: float) -> http.client.HTTPConnection:
        connection = self._connection
        if connection is None:
            if self._endpoint.secure:
                connection = http.client.HTTPSConnection(self._host, context=_context(self._endpoint))
            else:
                connection = http.client.HTTPConnection(self._host)
            self._connection = connection
        if connection.sock is None:
            connection.timeout = _left_s(deadline)
            connection.connect()
        connection.sock.settimeout(_left_s(deadline))
        connection.response_class = partial(_Response, deadline)  # type: ignore[assignment]
        return connection


class _Response(http.client.HTTPResponse):
    """An answer that has come whole by its deadline; a socket's own time-out begins anew with each byte."""

    def __init__(self, deadline: float, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Arriving(self.fp.detach(), sock, deadline))


class _Arriving(io.RawIOBase):
    """What arrives at a socket until a deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_s(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left_s(deadline: float) -> float:
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    given = endpoint.certificate
    context = ssl.create_default_context(cadata=given.decode("ascii", "ignore") if given else None)
    if endpoint.client_certificate is not None:
        with tempfile.NamedTemporaryFile(mode="wb", suffix=".pem") as file:  # ssl takes it from a file alone
            file.write(endpoint.client_certificate + b"\n" + (endpoint.client_key or b""))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _retry_after_s(text: str | None) -> float:
    """Reads ``Retry-After``: seconds, or a date."""
    if not text:
        return 0.0
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, TypeError):
        return 0.0
