"""Actors of the tests of the relay on Ray, in a module of their own, so that workers import them by reference."""

from __future__ import annotations

import os

from raytrace_rl import TracedActor, accepts_trace_context, managed_span


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
