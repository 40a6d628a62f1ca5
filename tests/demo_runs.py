"""Runs the demo in a process of its own, and reads its trace: what the tests of the demo share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrace_rl.monitor import Run, SpanRow

ROOT = Path(__file__).parent.parent


class Demo:
    """A run of the demo in a process of its own.

    Args:
        run_dir: Its run directory.
        flags: Of its command line.
        telemetry: Settings that it finds in its environment; nothing of ours is there otherwise.
    """

    def __init__(self, run_dir: Path, *flags: str, **telemetry: str) -> None:
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAYTRACE_RL_", "NEMO_RL_OTEL_", "OTEL_"))
        }
        environ |= {f"RAYTRACE_RL_{field.upper()}": value for field, value in telemetry.items()}
        self.run_dir = run_dir
        self.lines: list[str] = []
        self._stderr = run_dir.with_name(run_dir.name + ".stderr")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.async_grpo", "--run-dir", str(run_dir), *flags],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=self._stderr.open("w"),
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    @property
    def output(self) -> str:
        """What it printed, its complaints included."""
        return "\n".join([*self.lines, self._stderr.read_text()])

    def wait(self, timeout_s: float = 200) -> Demo:
        """Waits for its end, which must be a good one."""
        try:
            self.process.wait(timeout_s)
        finally:
            self.stop()
        self._reader.join(timeout=30)
        assert self.process.returncode == 0, self.output
        return self

    def stop(self) -> None:
        """Ends it, and with it the Ray cluster that it started, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=30)

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary


def run_demo(run_dir: Path, *flags: str, **telemetry: str) -> Demo:
    """Runs the demo to its end; once more if Ray's own start timed out, as it does now and then on busy machines."""
    try:
        return Demo(run_dir, *flags, **telemetry).wait()
    except AssertionError as error:
        if "timed out during startup" not in str(error):
            raise
        print(f"ray.init timed out, trying once more: {error}", file=sys.stderr)
        return Demo(run_dir.with_name(run_dir.name + "-again"), *flags, **telemetry).wait()


def named(run: Run, name: str) -> list[SpanRow]:
    """The spans of that name, in the order of their start."""
    return [row for row in run.spans if row.name == name]


def ancestors(run: Run) -> dict[str, list[SpanRow]]:
    """Span id to its chain of parents, from the nearest to the last that is known."""
    rows = {row.span_id: row for row in run.spans}
    chains = {}
    for row in run.spans:
        chain: list[SpanRow] = []
        while (parent := (chain[-1] if chain else row).parent_span_id) in rows and len(chain) < 100:
            chain.append(rows[parent])
        chains[row.span_id] = chain
    return chains


def assert_one_tree(run: Run) -> None:
    """Every span of the run reaches its one root, the job span, by its parents."""
    roots = [row for row in run.spans if row.parent_span_id is None]
    assert [(root.name, root.process.role) for root in roots] == [("rl.grpo.job", "driver")]
    chains = ancestors(run)
    astray = Counter(row.name for row in run.spans if row is not roots[0] and chains[row.span_id][-1:] != roots)
    assert astray == Counter()
    assert {row.trace_id for row in run.spans} == {roots[0].trace_id}
