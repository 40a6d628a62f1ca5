"""A program with all the processes that it has started: stopped and continued as one, and the CPU time they have used.

Stopped with SIGSTOP, a Ray cluster does nothing at all, background work included, while another has the machine. It
would stay stopped for ever where the benchmark itself is killed: hence `guarded`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
#: Places in what follows the name in ``/proc/<pid>/stat``: proc(5).
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS = 0, 1, 11, 12
_STOPPED: Final = "T"
_ZOMBIE: Final = "Z"

_GUARD: Final = """
import sys
from benchmarks.process_tree import ProcessTree
if not sys.stdin.read():
    ProcessTree(int(sys.argv[1])).kill()
"""


class ProcessTree:
    """One process and all that descend from it.

    Args:
        root: Its pid.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._frozen: set[int] = set()
        self._cpu_s: dict[int, float] = {}

    def freeze(self) -> None:
        """Stops every process, and returns when each stands still."""
        # First those of the last time, at once; then what has been started since, or while the others were stopped.
        _signal(self._frozen, signal.SIGSTOP)
        while running := {pid for pid, state in self._members().items() if state != _STOPPED}:
            _signal(running, signal.SIGSTOP)
            self._frozen |= running

    def thaw(self) -> None:
        """Lets those that `freeze` has stopped go on."""
        _signal(self._frozen, signal.SIGCONT)

    def kill(self) -> None:
        """Ends every process."""
        _signal(set(self._members()) | self._frozen, signal.SIGKILL)

    def cpu_s(self) -> float:
        """Returns the CPU seconds used by the processes so far, by those too that it saw once and that have ended."""
        for pid in self._members():
            fields = _stat(pid)
            if fields is not None:
                self._cpu_s[pid] = (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) * _TICK_S
        return sum(self._cpu_s.values())

    def _members(self) -> dict[int, str]:
        """Returns the state of each process, by pid."""
        states: dict[int, str] = {}
        parents: dict[int, int] = {}
        for pid in (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()):
            fields = _stat(pid)
            if fields is not None and fields[_STATE] != _ZOMBIE:
                states[pid], parents[pid] = fields[_STATE], int(fields[_PARENT])
        found = {self._root} & parents.keys()
        while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
            found |= more
        return {pid: states[pid] for pid in found}


@contextmanager
def guarded(root: int) -> Iterator[ProcessTree]:
    """Yields the tree of ``root``; if this process dies before the end of the block, the tree is killed."""
    with subprocess.Popen([sys.executable, "-c", _GUARD, str(root)], stdin=subprocess.PIPE) as guard:
        yield ProcessTree(root)
        guard.communicate(b"ended")


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of ``/proc/<pid>/stat`` from the state on; None if there is no such process any more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
