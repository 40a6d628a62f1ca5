from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.process_tree import ProcessTree, guarded
from benchmarks.rounds import measure, ratio_of_groups, standard_error

#: Starts a child that counts into a file, and waits for it.
COUNTING = """
import subprocess, sys
child = '''
import sys
n = 0
while True:
    n += 1
    open(sys.argv[1], "w").write(str(n))
'''
subprocess.run([sys.executable, "-c", child, sys.argv[1]])
"""
#: Stops such a program under guard, says its pid, and waits to be killed.
HARNESS = """
import subprocess, sys
from benchmarks.process_tree import guarded
process = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
with guarded(process.pid) as tree:
    while not open(sys.argv[1]).read():
        pass
    tree.freeze()
    print(process.pid, flush=True)
    sys.stdin.read()
"""


def wait_until(holds: Callable[[], bool]) -> None:
    """Returns once ``holds()`` is true; fails if that takes half a minute."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_frozen_program_stands_still_with_its_children(tmp_path: Path):
    """The demo that has no turn works on in its actors, and what it does there is paid by the other."""
    counter = tmp_path / "counter"
    counter.touch()
    with (
        subprocess.Popen([sys.executable, "-c", COUNTING, str(counter)]) as process,
        guarded(process.pid) as tree,
    ):
        wait_until(lambda: counter.read_text() != "")
        tree.freeze()
        cpu_s, count = tree.cpu_s(), counter.read_text()
        assert cpu_s > 0
        time.sleep(0.1)
        assert (tree.cpu_s(), counter.read_text()) == (cpu_s, count)
        tree.thaw()
        wait_until(lambda: tree.cpu_s() > cpu_s)
        tree.kill()
    assert process.returncode == -signal.SIGKILL


def test_frozen_program_dies_with_a_benchmark_that_is_killed(tmp_path: Path):
    """A benchmark that ran into its time limit leaves a stopped cluster behind, with its memory, until the reboot."""
    counter = tmp_path / "counter"
    counter.touch()
    with subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(counter), COUNTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as harness:
        assert harness.stdout is not None
        root = int(harness.stdout.readline())
        members = ProcessTree(root)._members()
        assert len(members) == 2
        harness.kill()
    wait_until(lambda: not any(alive(pid) for pid in members))


def alive(pid: int) -> bool:
    """True for a process that has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_standard_error_knows_that_groups_differ():
    """Two clusters that differ by 10 % pass for hundreds of independent rounds, and the figure for exact."""
    noise = random.Random(1)
    alike = [[noise.gauss(1.0, 0.02) for _ in range(100)] for _ in range(4)]
    apart = [[value + shift for value in group] for group, shift in zip(alike, (0.0, 0.1, 0.0, 0.1), strict=True)]
    assert 0 < standard_error(alike) < 0.005
    assert standard_error(apart) > 0.03
    assert standard_error([[1.0] * 9]) == 0
    row = ratio_of_groups("x", alike, [[1.0] * 100] * 4, bar=1, aim=1)
    assert row.value == pytest.approx(1.0, abs=0.02)
    assert row.error == standard_error(alike)


def test_rounds_alternate():
    """The contender that always comes first pays for the garbage of the one before."""
    order: list[str] = []
    measure({"a": lambda _: order.append("a"), "b": lambda _: order.append("b")}, turns=10, rounds=3, collect=False)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
