"""The local OTLP receiver of a node: gRPC on a Unix socket, HTTP on loopback with a token, and all into the spool.

For whatever speaks OTLP beside a run: an engine's server, a tool server, an environment. Off unless asked for.
"""

from __future__ import annotations

import contextlib
import gzip
import hmac
import http.server
import io
import json
import os
import secrets
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _state
from raytrace_rl._encode import delimited, varint
from raytrace_rl.relay import address
from raytrace_rl.relay.requests import SIGNALS, Signal

if TYPE_CHECKING:
    from raytrace_rl.relay.intake import Intake, Taken

MAX_REQUEST: Final = 16 << 20
_THREADS: Final = 4
#: Seconds for which a sender on this node may pause in the midst of a request: it keeps others from sending theirs.
_PAUSE_S: Final = 3.0
_TYPE: Final = "application/x-protobuf"


class _HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # senders may all come at once; five is the default

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a sender that is gone before its answer: it would be a stack on the run's output."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Receiver:
    """Listens for one run on this node.

    Args:
        run_id: The run.
        intake: Where requests go.

    Attributes:
        on_loss: Called when something was refused that its sender will not send again, before the sender hears of it:
            a kill then loses no count.
    """

    def __init__(self, run_id: str, intake: Intake) -> None:
        self.intake = intake
        self.on_loss: Callable[[], None] = _nothing
        self._run_id = run_id
        self._grpc: Any = None
        self._http: http.server.ThreadingHTTPServer | None = None

    def start(self) -> None:
        """Listens.

        Raises:
            OSError: An address cannot be used.
        """
        address.make_directory()
        self._start_http()
        try:
            self._start_grpc()
        except ImportError:
            _state.warn_once("receiver-grpc", "grpcio is not installed: the local OTLP receiver takes HTTP alone.")

    def close(self) -> None:
        """Listens no more, and closes the spools."""
        if self._grpc is not None:
            self._grpc.stop(0.5).wait(1)
            address.socket_path(self._run_id).unlink(missing_ok=True)
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            address.http_path(self._run_id).unlink(missing_ok=True)
        self.intake.close()

    def take(self, signal: Signal, request: bytes) -> Taken:
        """Stores one request, and counts what came of it; see `Intake.take`."""
        try:
            taken = self.intake.take(signal, request)
        except ValueError:
            self.refuse("invalid")
            raise
        except OSError:
            self.refuse("no_room")
            raise
        if taken.rejected:
            self.on_loss()
        return taken

    def refuse(self, why: str) -> None:
        """Counts a request that is refused; see `intake.Received`."""
        self.intake.counts.add(why)
        if why != "unauthorised":
            self.on_loss()

    def _start_grpc(self) -> None:
        import grpc

        path = address.socket_path(self._run_id)
        path.unlink(missing_ok=True)  # left by a relay that was killed; who holds the node's lock listens
        # Of a connection no more requests are in memory than are worked at.
        options = [("grpc.max_receive_message_length", MAX_REQUEST), ("grpc.max_concurrent_streams", _THREADS)]
        server = grpc.server(ThreadPoolExecutor(_THREADS), handlers=[_handlers(grpc, self)], options=options)
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise OSError(f"{path}: {error}") from None
        server.start()
        self._grpc = server

    def _start_http(self) -> None:
        token = secrets.token_urlsafe(24)
        server = _HttpServer(("127.0.0.1", 0), _http_handler(self, token))
        serve = partial(server.serve_forever, 0.05)
        threading.Thread(target=serve, name="raytrace_rl-receiver-http", daemon=True).start()
        self._http = server
        path = address.http_path(self._run_id)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 - it is open, and nobody else's
            json.dump({"url": f"http://127.0.0.1:{server.server_port}", "token": token}, file)
        temporary.replace(path)


def _response(rejected: int) -> bytes:
    """Returns an export response; what was rejected is its ``partial_success``."""
    if not rejected:
        return b""
    return delimited(b"\x0a", b"\x08" + varint(rejected) + delimited(b"\x12", b"over 1 MiB each"))


def _handlers(grpc: Any, receiver: Receiver) -> Any:
    by_method = {signal.method: signal for signal in SIGNALS.values()}

    def export(signal: Signal, request: bytes, context: Any) -> bytes:
        try:
            taken = receiver.take(signal, request)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OSError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        if not taken.stored:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the spool has no room")
        return _response(taken.rejected)

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            signal = by_method.get(details.method)
            if signal is None:
                return None
            return grpc.unary_unary_rpc_method_handler(lambda request, context: export(signal, request, context))

    return Handlers()


def _http_handler(receiver: Receiver, token: str) -> type[http.server.BaseHTTPRequestHandler]:
    by_path = {signal.path: signal for signal in SIGNALS.values()}
    slots = threading.BoundedSemaphore(_THREADS)  # so many bodies are in memory at a time; others wait in the kernel

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_POST(self) -> None:
            status, body = self._take()
            self.close_connection = self.close_connection or status >= 400
            self.send_response(status)
            self.send_header("Content-Type", _TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _take(self) -> tuple[int, bytes]:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), token.encode()):
                receiver.refuse("unauthorised")
                return 401, b""
            signal = by_path.get(self.path)
            if signal is None:
                receiver.refuse("invalid")
                return 404, b""
            if self.headers.get_content_type() != _TYPE:
                receiver.refuse("invalid")
                return 415, b""
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or len(length) > len(str(MAX_REQUEST)) or int(length) > MAX_REQUEST:
                receiver.refuse("too_large")
                return 413, b""
            with slots:
                return self._store(signal, int(length))

        def _store(self, signal: Signal, length: int) -> tuple[int, bytes]:
            self.connection.settimeout(_PAUSE_S)
            data: bytes | None = self.rfile.read(length)
            self.connection.settimeout(self.timeout)
            if data is None or len(data) < length:  # cut off, and yet it may be a request, of fewer spans
                receiver.refuse("invalid")
                return 400, b""
            if self.headers.get("Content-Encoding", "").lower() == "gzip":
                data = _gunzip(data)
            if data is None:
                receiver.refuse("too_large")
                return 413, b""
            try:
                taken = receiver.take(signal, data)
            except ValueError:
                return 400, b""
            except OSError:
                return 503, b""
            return (200, _response(taken.rejected)) if taken.stored else (503, b"")

        def log_message(self, *_: Any) -> None:
            """Says nothing: what matters is counted elsewhere."""

    return Handler


def _gunzip(data: bytes) -> bytes | None:
    """Returns what is compressed in ``data``; None if that is too much, or no gzip."""
    with contextlib.suppress(zlib.error, gzip.BadGzipFile, EOFError):
        found = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_REQUEST + 1)  # of all members, if there are several
        return found if len(found) <= MAX_REQUEST else None
    return None


def _nothing() -> None:
    """Tells nobody."""
