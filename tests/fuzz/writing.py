"""A process whose spool the fuzzer begins with: ``python -m tests.fuzz.writing RUN_DIR close|kill``.

Spans of ours and of another instrumentation, an exception, a link, metrics and logs; then a clean close, or open spans
in journal and table and a ``kill -9``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from opentelemetry import trace

from raytrace_rl import _process, setup
from raytrace_rl.instrumentation import iteration_scope, managed_span, umbrella_span


def main(run_dir: str, end: str) -> None:
    """Writes, and ends as it is told."""
    settings = {"enabled": True, "span_groups": "all", "heartbeat_s": 3600, "logs_enabled": True}
    # A place of its own for active files: in a shared tmpfs a killed process would leave them for good.
    handle = setup.init_telemetry_driver({**settings, "run_dir": run_dir, "spool_dir": f"{run_dir}-active"})
    assert handle is not None
    with umbrella_span("job", "rl.grpo.job"), iteration_scope(3), umbrella_span("step", "rl.grpo.step"):
        for n in range(4):
            with managed_span("generation", "rl.vllm.generate", n=n, share=0.5, names=["a", "b"], prompt="secret"):
                logging.getLogger("train").warning("step %d", n)
        try:
            with managed_span("reward", "rl.reward"):
                raise ValueError("no reward")
        except ValueError:
            pass
        link = trace.Link(trace.get_current_span().get_span_context(), {"why": "sample"})
        with trace.get_tracer("lib").start_as_current_span("foreign", links=[link]):
            pass
    handle.meter.create_counter("rl.count").add(2, {"kind": "x"})
    handle.meter.create_histogram("rl.seconds").record(0.5)
    handle.meter.create_gauge("rl.loss").set(1.25)
    if end == "close":
        setup.shutdown_telemetry()
        return
    open_spans = [managed_span("generation", f"open {n}", n=n) for n in range(3)]
    for span in open_spans:
        span.__enter__()
    assert _process.current is not None
    _process.current._heartbeat.beat()
    managed_span("generation", "just opened").__enter__()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
