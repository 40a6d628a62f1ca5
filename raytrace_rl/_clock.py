"""One clock for all spans of a process: the monotonic clock, anchored once to the wall clock.

Durations never jump when NTP steps the wall clock. Later anchors are written to the spool by the heartbeat, so that a
reader can see (and correct) a drift; the timestamps themselves keep the first anchor.
"""

from __future__ import annotations

from time import monotonic_ns, time_ns
from typing import Final, NamedTuple


class Anchor(NamedTuple):
    """The two clocks, read together.

    Attributes:
        wall_ns: Nanoseconds since the Unix epoch.
        monotonic_ns: ``time.monotonic_ns()`` at that moment.
    """

    wall_ns: int
    monotonic_ns: int


def read_anchor() -> Anchor:
    """Reads both clocks as close together as can be: the best of five tries, against being descheduled between."""
    best: Anchor | None = None
    gap = 0
    for _ in range(5):
        before = monotonic_ns()
        wall = time_ns()
        after = monotonic_ns()
        if best is None or after - before < gap:
            best, gap = Anchor(wall, (before + after) // 2), after - before
    assert best is not None
    return best


ANCHOR: Final = read_anchor()
#: Add to ``time.monotonic_ns()`` for nanoseconds since the Unix epoch.
OFFSET_NS: Final = ANCHOR.wall_ns - ANCHOR.monotonic_ns


def now_ns() -> int:
    """Returns nanoseconds since the Unix epoch on this process's clock."""
    return monotonic_ns() + OFFSET_NS
