"""Reading a test's own spans back from the spools of all processes of its run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from raytrace_rl.monitor import load_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from raytrace_rl.monitor.model import SpanRow

#: What the root of a traced test sets for everything that is dispatched from it.
ITERATION = 7
BUCKET = "overhead"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30) -> Any:
    """Returns the first true answer of ``condition``; fails, saying for what it waited, when none comes."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
    return answer


def get(ref: Any, timeout_s: float = 60) -> Any:
    """What the call returned, or each of the calls, within a minute."""
    import ray

    return ray.get(ref, timeout=timeout_s)


def gone(actor: Any) -> bool:
    """Whether a call to the actor finds it dead."""
    import ray

    try:
        get(actor.__ray_ready__.remote(), 30)
    except ray.exceptions.RayActorError:
        return True
    return False


class TracedTest:
    """A running test: its root span is current, and spans are read back from the spool of all processes."""

    def __init__(self, run_dir: Path, root: Any) -> None:
        self.run_dir = run_dir
        self.trace_id: str = root.trace_id.hex()
        self.root_id: str = root.span_id.hex()

    def all(self) -> list[SpanRow]:
        """Every span of the run, of other tests too."""
        return load_run(self.run_dir).spans

    def named(self, name: str, count: int = 1) -> list[SpanRow]:
        """Waits for ``count`` ended spans of this test's trace with that name; fails if there are more."""

        def found() -> list[SpanRow]:
            spans = [s for s in self.all() if s.trace_id == self.trace_id and s.name == name and s.end_ns is not None]
            return spans if len(spans) >= count else []

        spans: list[SpanRow] = wait_until(found, f"{count} ended spans {name!r}")
        assert len(spans) == count
        return spans

    def one(self, name: str) -> SpanRow:
        """The only span of this test's trace with that name, once it has ended."""
        return self.named(name)[0]

    def assert_dispatched(self, name: str) -> SpanRow:
        """The span ``name`` hangs under the root, with the scopes of the driver and a queueing delay."""
        span = self.one(name)
        assert span.parent_span_id == self.root_id
        assert span.iteration == ITERATION
        assert span.queued_ns is not None
        assert span.queued_ns >= 0
        return span
