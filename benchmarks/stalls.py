"""The slowest of 100,000 spans beside everything that could hold one up, against a bare loop under the same load.

While they are recorded, the heartbeat runs every 0.1 s, segments roll over, and another process writes and fsyncs to
the disk that the run directory lies on. The bare loop reads the clock and does nothing else, for as long as the spans
took: what the machine itself takes away is in both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from benchmarks.table import Row
from raytrace_rl import RLSpanGroup as G
from raytrace_rl import init_telemetry_driver, managed_span, shutdown_telemetry, umbrella_span

SPANS: Final = 100_000
ROUNDS: Final = 5

_FSYNCS: Final = """
import os, sys
block = os.urandom(4 << 20)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600)
print("ready", flush=True)
while os.getppid() == int(sys.argv[2]):
    for _ in range(16):
        os.write(file, block)
    os.fsync(file)
    os.lseek(file, 0, os.SEEK_SET)
"""


def _span() -> None:
    with managed_span(G.GENERATION, "rl.grpo.generation", prompts=3, mode="train"):
        pass


def _slowest_span_ns() -> tuple[int, int]:
    """Returns the slowest span, and how long all of them took."""
    slowest = 0
    started = perf_counter_ns()
    for _ in range(SPANS):
        begun = perf_counter_ns()
        _span()
        slowest = max(slowest, perf_counter_ns() - begun)
    return slowest, perf_counter_ns() - started


def _slowest_turn_ns(for_ns: int) -> int:
    """Returns the slowest turn of a loop that does nothing for so long."""
    slowest = 0
    started = begun = perf_counter_ns()
    while begun - started < for_ns:
        now = perf_counter_ns()
        slowest = max(slowest, now - begun)
        begun = now
    return slowest


def rows() -> list[Row]:
    """Measures both in turn."""
    ours: list[float] = []
    theirs: list[float] = []
    # The disk, and not a tmpfs that /tmp may be: that is where the run directory of a real run lies.
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as run_dir:
        load = subprocess.Popen(
            [sys.executable, "-c", _FSYNCS, f"{run_dir}/load", str(os.getpid())], stdout=subprocess.PIPE
        )
        assert load.stdout is not None
        load.stdout.readline()
        settings = {"enabled": True, "span_groups": "per_step", "run_dir": run_dir, "spool_max_mib": 1024}
        init_telemetry_driver({**settings, "heartbeat_s": 0.1})
        try:
            with umbrella_span(G.U_JOB, "rl.grpo.job"):
                for _ in range(ROUNDS):
                    slowest, taken = _slowest_span_ns()
                    ours.append(slowest / 1e9)
                    theirs.append(_slowest_turn_ns(taken) / 1e9)
        finally:
            shutdown_telemetry()
            load.kill()
            load.wait()
    # Of maxima, the medians: one round in which the machine stood still says nothing about either.
    mine, bare = statistics.median(ours), statistics.median(theirs)
    first, _, third = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return [
        Row(
            "slowest of 100,000 spans under load / of a bare loop",
            mine / bare,
            third - first,
            bar=3.0,
            aim=1.5,
            ours=f"{mine * 1e3:.2f} ms",
            theirs=f"{bare * 1e3:.2f} ms",
        )
    ]
