"""What it takes to read a run: report, page and Parquet, by the number of spans.

Runs are made of two kinds: with long steps of 32 ranks, and with the short steps of the demo, of which there are many.
``RAYTRACE_RL_BENCH_SPANS=1000000 python -m benchmarks monitor`` measures another size than the default of 10 million
(a spool of 2.6 GB, in the directory for temporary files); the smaller run is always a tenth of it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

from benchmarks import made_demo, made_spool
from benchmarks.table import Row

SPANS: Final = int(os.environ.get("RAYTRACE_RL_BENCH_SPANS", "10000000"))
#: Read row by row, as it is without the extra.
_FEW: Final = 50_000
_ROUNDS: Final = 3
_ROUNDS_SHORT: Final = 2
_CORES: Final = 2
_MILLION: Final = 1e6
_LOOK_S: Final = 0.05

_REPORT: Final = ("-m", "raytrace_rl.cli", "report", "--json")
_BY_ROWS: Final = """
import json, sys
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.report import report
json.dumps(report(load_run(sys.argv[1])))
"""
_PARQUET: Final = """
import sys
from raytrace_rl.monitor.store import Store
Store(sys.argv[1]).close()
"""


class _Cost(NamedTuple):
    """CPU and wall seconds of a program and of those that it starts, and the most memory of all at once, MiB."""

    cpu_s: float
    wall_s: float
    mib: float


def _run(*arguments: str) -> _Cost:
    """Runs a program on two cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = perf_counter()
    cores = sorted(os.sched_getaffinity(0))[:_CORES]
    program = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - nothing else runs in here
    )
    most = [0]
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(program.pid, most, over.wait))
    watcher.start()
    status = program.wait()
    wall = perf_counter() - started
    over.set()
    watcher.join()
    if status:
        raise subprocess.CalledProcessError(status, program.args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Cost(cpu, wall, most[0] / (1 << 20))


def _watch(pid: int, most: list[int], over: Callable[[float], bool]) -> None:
    """Keeps the most memory that a process and its descendants were seen with; pages that they share count twice."""
    while not over(_LOOK_S):
        most[0] = max(most[0], sum(map(_resident, _family(pid))))


def _family(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            found += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


class _Kind(NamedTuple):
    """A kind of run that is made, and what reading it takes: of a smaller and a larger run in turn.

    Attributes:
        name: For the table.
        spans: How many the larger has.
        some, many: The rounds of each.
    """

    name: str
    spans: int
    some: list[_Cost]
    many: list[_Cost]

    def rows(self) -> list[Row]:
        """Returns what the report takes, its memory, and how both grow."""
        growth = [large.wall_s / small.wall_s for small, large in zip(self.some, self.many, strict=True)]
        wall, memory = [one.wall_s for one in self.many], max(one.mib for one in self.many)
        million = f"{self.spans / _MILLION:.3g} M spans"
        return [
            Row(
                what=f"report of {million}, {self.name}, 2 cores",
                value=median(wall),
                spread=max(wall) - min(wall),
                bar=60,
                aim=20,
                ours=f"{median(one.cpu_s for one in self.many):.0f} s CPU",
                theirs="",
                unit="s",
            ),
            Row(
                what=f"its memory, all processes, {self.name}",
                value=memory,
                spread=memory - min(one.mib for one in self.many),
                bar=2048,
                aim=1024,
                ours=f"{memory * (1 << 20) / self.spans:.0f} bytes",
                theirs="",
                unit="MiB",
            ),
            Row(
                what=f"its time over that of a tenth, {self.name}",
                value=median(growth),
                spread=max(growth) - min(growth),
                bar=11,
                aim=10,
                ours=f"{median(wall):.1f} s",
                theirs=f"{median(one.wall_s for one in self.some):.1f} s",
            ),
        ]


def _measured(name: str, make: Callable[[Path, int], int], place: Path, rounds: int) -> _Kind:
    """Makes runs of one kind and has them reported on; the larger one is then at ``place / "many"``."""
    make(place / "some", SPANS // 10)
    kind = _Kind(name, make(place / "many", SPANS), [], [])
    for _ in range(rounds):
        kind.some.append(_run(*_REPORT, str(place / "some")))
        kind.many.append(_run(*_REPORT, str(place / "many")))
    return kind


def rows() -> list[Row]:
    """Measures; see the module."""
    with tempfile.TemporaryDirectory() as directory:
        # One after the other, so that the disk holds but one large run.
        short = _measured("short steps", made_demo.make, Path(directory), _ROUNDS_SHORT)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        long = _measured("long steps", made_spool.make, place, _ROUNDS)
        few, many = place / "few", place / "many"
        count, million = made_spool.make(few, _FEW), long.spans / _MILLION
        drawn = _run(*_REPORT[:3], "--html", str(place / "page.html"), str(many))
        size = (place / "page.html").stat().st_size / (1 << 20)
        by_rows = _run("-c", _BY_ROWS, str(few))
        parquet = _run("-c", _PARQUET, str(place / "some"))
    return [
        *long.rows(),
        *short.rows(),
        Row(
            what=f"page of {million:.3g} M spans, written",
            value=drawn.wall_s,
            spread=0,
            bar=60,
            aim=40,
            ours=f"{drawn.mib:.0f} MiB",
            theirs="",
            unit="s",
        ),
        Row(
            what=f"page of {million:.3g} M spans, size",
            value=size,
            spread=0,
            bar=15,
            aim=10,
            ours=f"{size:.1f} MiB",
            theirs="",
            unit="MiB",
        ),
        Row(
            what="report row by row, as without NumPy, CPU a span",
            value=by_rows.cpu_s / count * _MILLION,
            spread=0,
            bar=80,
            aim=40,
            ours=f"{count:,} spans",
            theirs="",
            unit="us",
        ),
        Row(
            what="spools to Parquet, wall a million spans",
            value=parquet.wall_s / (SPANS // 10) * _MILLION,
            spread=0,
            bar=30,
            aim=5,
            ours=f"{parquet.cpu_s:.1f} s CPU",
            theirs="",
            unit="s",
        ),
    ]
