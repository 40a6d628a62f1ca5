"""An OTLP/gRPC receiver that tests program: it answers as it is told, and decodes by the official classes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.running import wait_for

REQUESTS: dict[str, Any] = {
    "TraceService": ExportTraceServiceRequest,
    "MetricsService": ExportMetricsServiceRequest,
    "LogsService": ExportLogsServiceRequest,
}


@dataclass
class Refusal:
    """Answer to a request: a gRPC status, with a ``RetryInfo`` if ``retry_s`` is given."""

    code: grpc.StatusCode
    details: str = "refused"
    retry_s: float | None = None


@dataclass
class Server:
    """A receiver in this process.

    Attributes:
        port: On 127.0.0.1.
        answers: What the next requests are answered: a `Refusal`, response bytes, or a function that is called (to
            block, say) and returns one of the two. When there is none left, everything is accepted.
        received: Accepted requests: service and message.
        attempts: All requests: service, size in bytes, metadata.
    """

    port: int = 0
    answers: list[Any] = field(default_factory=list)
    received: list[tuple[str, Any]] = field(default_factory=list)
    attempts: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, service: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        with self.changed:
            self.attempts.append((service, len(data), dict(context.invocation_metadata())))
            self.changed.notify_all()
            answer = self.answers.pop(0) if self.answers else b""
        if callable(answer):
            answer = answer()
        if isinstance(answer, Refusal):
            if answer.retry_s is not None:
                info = AnyMessage()
                seconds = int(answer.retry_s)
                delay = Duration(seconds=seconds, nanos=round((answer.retry_s - seconds) * 1e9))
                info.Pack(RetryInfo(retry_delay=delay))
                status = Status(code=answer.code.value[0], message=answer.details, details=[info])
                context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(answer.code, answer.details)
        with self.changed:
            self.received.append((service, REQUESTS[service].FromString(data)))
            self.changed.notify_all()
        return answer if isinstance(answer, bytes) else b""

    def spans(self) -> list[Span]:
        """All spans of accepted requests, in the order in which they came."""
        return [
            span
            for _, message in list(self.received)
            if isinstance(message, ExportTraceServiceRequest)
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def numbers(self) -> list[int]:
        """The span ids of all accepted spans, as numbers (`tests.spooling.span`)."""
        return [int.from_bytes(span.span_id, "big") for span in self.spans()]

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        return wait_for(condition, what, timeout_s)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, server: Server) -> None:
        self._server = server

    def service(self, details: Any) -> Any:
        service = details.method.split("/")[1].rpartition(".")[2]
        if service not in REQUESTS or not details.method.endswith("/Export"):
            return None
        return grpc.unary_unary_rpc_method_handler(lambda data, context: self._server.handle(service, data, context))


@contextmanager
def receiver(port: int = 0, *, credentials: Any = None, options: Any = (), address: str = "") -> Iterator[Server]:
    """A receiver for the length of a ``with`` statement."""
    server = Server()
    running = grpc.server(
        ThreadPoolExecutor(8), handlers=[_Handlers(server)], options=[("grpc.so_reuseport", 0), *options]
    )
    where = address or f"127.0.0.1:{port}"
    server.port = running.add_secure_port(where, credentials) if credentials else running.add_insecure_port(where)
    assert address or server.port, "the port is taken"
    running.start()
    try:
        yield server
    finally:
        running.stop(None).wait(5)


def partial_success(rejected: int, message: str) -> bytes:
    """The bytes of a response that accepts a request but for ``rejected`` spans."""
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
    ).SerializeToString()
