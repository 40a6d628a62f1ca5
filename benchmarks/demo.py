"""What everything together costs a run: the demo's step with all span groups, metrics and logs on, against off.

Two runs of the demo live side by side and take turns of a few steps. Whoever has no turn is stopped, all processes of
it: the one on turn has the machine to itself, and pays itself for what it does in the background (heartbeats,
collecting metrics, keeping the spool). That a turn is as long as a heartbeat's interval counts against us: one beat is
due at once when a turn begins. The time of a turn is from its beginning to the line that the demo prints after its last
step, so that what is logged between steps is in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Final

from benchmarks.process_tree import ProcessTree, guarded
from benchmarks.rounds import ratio_of_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.table import Row

#: Two runs that do the same differ by one to two percent for as long as they live: many are needed, and short ones do.
PAIRS: Final = 16
#: Steps of a turn, turns of each run, and steps before the first turn.
TURN: Final = 5
TURNS: Final = 6
WARM_UP: Final = 5
#: No batch is too stale: one that is refused is made anew, and how many are differs by more than the bar.
EQUAL_WORK: Final = ("--max-staleness", "9")

_STEP_LINE: Final = re.compile(r"step +\d+/").match


class Demo:
    """A run of the demo, stopped but for its turns.

    Args:
        process: The driver, its output to be read.
        tree: It, and all that it starts.
    """

    def __init__(self, process: subprocess.Popen[str], tree: ProcessTree) -> None:
        self._process = process
        self._tree = tree
        self._cpu_s = 0.0

    def warm_up(self) -> None:
        """Lets it start, and stops it after its first steps."""
        self._await_steps(WARM_UP)
        self._tree.freeze()
        self._cpu_s = self._tree.cpu_s()

    def turn(self) -> tuple[float, float]:
        """Lets it go on for one turn; returns the seconds, and the CPU seconds of all its processes, of a step."""
        begun = perf_counter()
        self._tree.thaw()
        self._await_steps(TURN)
        seconds = perf_counter() - begun
        self._tree.freeze()
        before, self._cpu_s = self._cpu_s, self._tree.cpu_s()
        return seconds / TURN, (self._cpu_s - before) / TURN

    def finish(self) -> None:
        """Lets it come to its end."""
        self._tree.thaw()
        self._process.communicate(timeout=60)
        if self._process.returncode:
            raise RuntimeError(f"the demo ended with exit status {self._process.returncode}")

    def _await_steps(self, count: int) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            count -= _STEP_LINE(line) is not None
            if not count:
                return
        raise RuntimeError("the demo ended before its last turn")


@contextmanager
def _demo(run_dir: str, *, telemetry: bool) -> Iterator[Demo]:
    steps = WARM_UP + TURN * TURNS + 1  # the last one is not measured: what follows it is the run's end
    command = [sys.executable, "-m", "examples.async_grpo", "--steps", str(steps), "--run-dir", run_dir, *EQUAL_WORK]
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "RAYTRACE_RL_"))}
    settings = {"RAYTRACE_RL_SPAN_GROUPS": "all", "RAYTRACE_RL_LOGS_ENABLED": "1"}
    if not telemetry:
        command.append("--no-telemetry")
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**others, **settings}
        ) as process,
        guarded(process.pid) as tree,
    ):
        yield Demo(process, tree)


def _pair(directory: str, *, on_first: bool) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Measures the turns of a run with telemetry and of one without: seconds and CPU seconds of a step.

    Args:
        directory: Where their run directories go.
        on_first: Which of them starts first.
    """
    on: list[tuple[float, float]] = []
    off: list[tuple[float, float]] = []
    with ExitStack() as stack:
        sides = []
        for found, telemetry in ((on, True), (off, False)) if on_first else ((off, False), (on, True)):
            demo = stack.enter_context(_demo(f"{directory}/{telemetry}", telemetry=telemetry))
            demo.warm_up()
            sides.append((demo, found))
        for _ in range(TURNS):
            for demo, found in sides:
                found.append(demo.turn())
            sides.reverse()
        for demo, _ in sides:
            demo.finish()
    return on, off


def rows() -> list[Row]:
    """Runs `PAIRS` pairs, one after the other."""
    pairs = []
    for number in range(PAIRS):
        with tempfile.TemporaryDirectory() as directory:
            pairs.append(_pair(directory, on_first=number % 2 == 0))
    (on_s, off_s), (on_cpu, off_cpu) = (
        [[[turn[kind] for turn in pair[side]] for pair in pairs] for side in (0, 1)] for kind in (0, 1)
    )
    return [
        ratio_of_groups("demo step time, everything on / telemetry off", on_s, off_s, bar=1.02, aim=1.005),
        ratio_of_groups("CPU time of all its processes, likewise", on_cpu, off_cpu, bar=1.05, aim=1.01),
    ]
