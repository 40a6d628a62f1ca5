"""Sends export requests over OTLP/gRPC: bytes in, bytes out, one blocking call at a time. Never retries by itself."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._version import VERSION
from raytrace_rl.relay.retry import Answer, grpc_failure, partial_success

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Endpoint
    from raytrace_rl.relay.requests import Signal

USER_AGENT: Final = f"OTel-OTLP-Exporter-raytrace_rl/{VERSION}"
_VERBOSITY: Final = "GRPC_VERBOSITY"
_STATUS_DETAILS: Final = "grpc-status-details-bin"
#: Names and values of headers that gRPC takes as text; it would refuse each call for any other, as an INTERNAL error.
_NAME: Final = re.compile(r"[0-9a-z_.-]+(?<!-bin)")
_VALUE: Final = re.compile(r"[ -~]*")
#: After so many failures in a row the connection itself is in doubt (a peer that went silent): a new one is made.
_DOUBT_AFTER: Final = 3
#: The defaults let a collector that is back wait for two minutes.
_OPTIONS: Final = (
    ("grpc.primary_user_agent", USER_AGENT),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


class Sender(Protocol):
    """What a lane asks of whatever carries its requests."""

    def send(self, request: bytes, timeout_s: float) -> Answer:
        """Sends one request and waits for the answer, at most ``timeout_s`` seconds. Never raises."""
        ...

    def close(self) -> None:
        """Ends the connection, and with it a `send` that waits."""
        ...


def sender_for(signal: Signal, endpoint: Endpoint) -> Sender:
    """Returns what sends ``signal`` to ``endpoint``.

    Raises:
        ImportError: grpcio is not installed here.
    """
    if endpoint.protocol == "http/protobuf":
        from raytrace_rl.relay.http_sender import HttpSender

        return HttpSender(signal, endpoint)
    return GrpcSender(signal, endpoint)


class GrpcSender:
    """One signal's way to one endpoint. Channels to one endpoint share a connection: gRPC sees to that."""

    def __init__(self, signal: Signal, endpoint: Endpoint) -> None:
        self._grpc = _import_grpc()
        self._signal = signal
        self._endpoint = endpoint
        self._channel: Any = None
        self._export: Any = None
        self._failures = 0
        self._closed = False
        self._metadata = tuple(endpoint.headers)
        self._odd = [
            name for name, value in endpoint.headers if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value)
        ]

    def send(self, request: bytes, timeout_s: float) -> Answer:
        """Sends one request; see `Sender`."""
        if self._odd:
            odd = ", ".join(map(repr, self._odd))
            return Answer(retry=True, message=f"gRPC cannot carry the header {odd} (OTEL_EXPORTER_OTLP_HEADERS)")
        try:
            if self._channel is None:
                self._connect()
            response, _ = self._export.with_call(request, timeout=timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            if is_interrupt(error):
                raise
            self._failures += 1
            if self._failures % _DOUBT_AFTER == 0:
                self._disconnect()
            return grpc_failure(error.code().name, error.details() or "", _status_details(error))
        except Exception as error:  # a closed channel, unusable certificates
            if is_interrupt(error):
                raise
            return Answer(retry=True, message=f"{type(error).__name__}: {error}")
        self._failures = 0
        return partial_success(response)

    def close(self) -> None:
        """Ends the connection; see `Sender`."""
        self._closed = True
        self._disconnect()

    def _connect(self) -> None:
        if self._closed:
            raise RuntimeError("closed")
        grpc, endpoint = self._grpc, self._endpoint
        compression = grpc.Compression.Gzip if endpoint.compression == "gzip" else grpc.Compression.NoCompression
        options = [*_OPTIONS]
        if self._failures:
            options.append(("grpc.use_local_subchannel_pool", 1))  # else it would be the old connection once more
        if endpoint.secure:
            credentials = grpc.ssl_channel_credentials(
                endpoint.certificate, endpoint.client_key, endpoint.client_certificate
            )
            self._channel = grpc.secure_channel(endpoint.target, credentials, options, compression)
        else:
            self._channel = grpc.insecure_channel(endpoint.target, options, compression)
        # No serializers: bytes pass as they are.
        self._export = self._channel.unary_unary(self._signal.method)

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _import_grpc() -> Any:
    """Imports gRPC so that it does not print each restart of a collector into the output of a training run."""
    quiet = "grpc" not in sys.modules and _VERBOSITY not in os.environ
    if quiet:
        os.environ[_VERBOSITY] = "ERROR"  # read while it is imported, and only then
    try:
        import grpc
    finally:
        if quiet:
            os.environ.pop(_VERBOSITY, None)
    return grpc


def _status_details(error: Any) -> bytes | None:
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            return value
    return None
