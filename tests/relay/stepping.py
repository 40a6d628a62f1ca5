"""Steps of fixed work under telemetry, told one by one, so that several processes can be measured in turns.

What is compared are medians of pairs: two processes that did the same step one right after the other. A machine that
is busy makes single steps longer, and whole measurements too, but not one of two processes for long: who measures
tries again before it believes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from socket import create_server
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

#: What a step with a dead collector may take, of one without any.
SLACK = 1.5
ROUNDS = 25
#: The deadline of a shutdown (s), and what may come on top of it.
DEADLINE_S = 1.0
EXTRA_S = 0.5
_TRIES = 3

PROGRAM = """
import json, sys, time
from raytrace_rl import setup
from raytrace_rl.relay import asking
from tests.relay.stepping import step

asking._GRACE_S = 0.05
handle = setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "heartbeat_s": 0.1,
                                      "run_dir": sys.argv[1], "exporter": sys.argv[2]})
asker = handle._process.asker
for line in sys.stdin:
    if line == "begin\\n":
        step()
        while sys.argv[2] == "otlp" and not (asker._relay and asker._relay.counts()["traces"]["retries"]):
            time.sleep(0.005)
        print(json.dumps({}), flush=True)
    elif line == "step\\n":
        print(json.dumps(step()._asdict()), flush=True)
    elif line == "end\\n":
        begun = time.monotonic()
        setup.shutdown_telemetry(1000)
        print(json.dumps({"begun": begun, "took_s": time.monotonic() - begun}), flush=True)
        break
"""


class Step(NamedTuple):
    """What a step took, in seconds: CPU of its own thread, CPU of all others of the process, wall clock."""

    cpu_s: float
    others_s: float
    wall_s: float


def step() -> Step:
    """Does fixed work in a hundred spans, some 25 ms of it."""
    from time import perf_counter, process_time, thread_time

    from raytrace_rl.instrumentation import iteration_scope, managed_span, umbrella_span

    before = thread_time(), process_time(), perf_counter()
    with iteration_scope(1), umbrella_span("step", "rl.grpo.step"):
        for n in range(100):
            with managed_span("generation", "work", n=n):
                total = 0
                for value in range(4000):
                    total += value & n
    cpu_s = thread_time() - before[0]
    return Step(cpu_s, process_time() - before[1] - cpu_s, perf_counter() - before[2])


class Stepper:
    """A process that steps when it is told to."""

    def __init__(self, run_dir: Path, exporter: str, url: str = "") -> None:
        env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "500"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(run_dir), exporter],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def tell(self, line: str) -> dict[str, Any]:
        """Has it do something; returns what it says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"it has ended ({self._process.poll()})"
        found: dict[str, Any] = json.loads(answer)
        return found

    def step(self) -> Step:
        """One step."""
        return Step(**self.tell("step"))

    def end(self) -> tuple[float, float]:
        """Ends its telemetry and then itself; returns how long its shutdown took, and all of it (s)."""
        told = self.tell("end")
        self._process.wait(60)
        return told["took_s"], monotonic() - told["begun"]

    def kill(self) -> None:
        """Ends it whatever it does."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def collectors() -> Iterator[dict[str, str]]:
    """Addresses of collectors that are none: one where nothing listens, one that accepts and never answers."""
    with closing(create_server(("127.0.0.1", 0))) as hole:
        with closing(create_server(("127.0.0.1", 0))) as gone:
            dead = gone.getsockname()[1]
        yield {"dead": f"http://127.0.0.1:{dead}", "black hole": f"http://127.0.0.1:{hole.getsockname()[1]}"}


@contextmanager
def steppers(directory: Path, urls: Mapping[str, str]) -> Iterator[dict[str, Stepper]]:
    """A process without a collector, under the name ``none``, and one for each address; all have begun."""
    with ExitStack() as stack:
        found = {"none": Stepper(directory / "none", "spool")}
        stack.callback(found["none"].kill)
        for name, url in urls.items():
            found[name] = Stepper(directory / name, "otlp", url)
            stack.callback(found[name].kill)
        for one in found.values():
            one.tell("begin")
        yield found


def ratios(steps: Mapping[str, Sequence[Step]]) -> dict[str, tuple[float, float]]:
    """Returns, by name, the medians of what a step took of the one without a collector: CPU, and wall clock."""
    none = steps["none"]
    return {
        name: (
            median(one.cpu_s / other.cpu_s for one, other in zip(found, none, strict=True)),
            median(one.wall_s / other.wall_s for one, other in zip(found, none, strict=True)),
        )
        for name, found in steps.items()
        if name != "none"
    }


def in_turns(by_name: Mapping[str, Callable[[], Step]], rounds: int = ROUNDS) -> dict[str, list[Step]]:
    """Has each do its steps, one at a time, in turns."""
    found: dict[str, list[Step]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, one in by_name.items():
            found[name].append(one())
    return found


def settle(measure: Callable[[], list[str]]) -> None:
    """Measures until nothing is wrong, three times at most: noise passes, a real cost stays."""
    wrong = [measure()]
    while wrong[-1] and len(wrong) < _TRIES:
        wrong.append(measure())
    assert not wrong[-1], wrong
