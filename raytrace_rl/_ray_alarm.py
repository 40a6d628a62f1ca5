"""The alarm by which Ray's C++ part aborts a driver 3 s after a SIGTERM, held off while telemetry is flushed.

Flushing takes its own time, which is bounded too. Python does not know of that alarm's handler, which tells it from one
of the program's own: that one goes on.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held_off() -> Iterator[None]:
    """Holds the alarm off while the body runs; afterwards it has the seconds left that it had before."""
    left_s = _stop()
    try:
        yield
    finally:
        if left_s:
            signal.alarm(left_s)


def _stop() -> int:
    """Stops the alarm; returns the seconds it had left, 0 if there is none."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    rays = caught is not None and int(caught[1], 16) >> (signal.SIGALRM - 1) & 1
    return signal.alarm(0) if rays and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL else 0
