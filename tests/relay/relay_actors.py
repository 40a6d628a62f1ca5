"""Actors of the tests of the relay on Ray, in a module of their own, so that workers import them by reference."""

from __future__ import annotations

import ctypes
import os

from raytrace_rl import TracedActor, _state, accepts_trace_context, managed_span
from tests.relay.stepping import step


class Writer(TracedActor):
    """Ends spans on command."""

    @accepts_trace_context
    def write(self, name: str, count: int) -> int:
        """Ends ``count`` spans; returns its process id."""
        for n in range(count):
            with managed_span("generation", name, n=n):
                pass
        return os.getpid()

    def leave_open(self) -> None:
        """Begins a span that it does not end."""
        managed_span("generation", "open").__enter__()

    def environment(self) -> dict[str, str]:
        """Returns what its process inherited."""
        return dict(os.environ)

    def send(self, run_id: str, name: str) -> str:
        """Sends a span to the node's receiver, as a tool server beside the run would."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        from raytrace_rl.relay.address import local_endpoint

        provider = TracerProvider(resource=Resource({"service.name": "tools"}), shutdown_on_exit=False)
        span = provider.get_tracer("tools").start_span(name)
        span.end()
        return OTLPSpanExporter(local_endpoint(run_id), insecure=True).export([span]).name  # type: ignore[list-item]


class Hangs(Writer):
    """Stands in C with the GIL held."""

    def hang(self) -> None:
        """Comes back after ten minutes."""
        with managed_span("generation", "hanging"):
            ctypes.PyDLL(None).sleep(600)


class Stepping(TracedActor):
    """Does steps of fixed work."""

    def step(self) -> tuple[float, ...]:
        """One step; see `stepping.Step`."""
        return tuple(step())

    def exporter(self) -> str:
        """Returns what its telemetry exports to."""
        assert _state.config is not None
        return _state.config.exporter
