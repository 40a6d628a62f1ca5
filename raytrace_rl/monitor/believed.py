"""Which numbers of a file are believed: it may say anything, and no number may make up a total or end a report."""

from __future__ import annotations

import math
from typing import Any, Final

#: Two clocks may differ by all that has passed since 1970, where one was never set; by no more than this. Seconds.
LONGEST_S: Final = 100 * 365.25 * 86400
#: Trajectories that one link may stand for.
MOST: Final = 2**31


def believed_s(value: Any) -> float | None:
    """Returns a time in seconds; None if it is no number, is not finite, or no two clocks could have made it."""
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > LONGEST_S:
        return None
    return float(value)


def believed_ns(value: int | None) -> int | None:
    """Returns a time in nanoseconds; None if no two clocks could have made it."""
    return value if value is not None and abs(value) <= LONGEST_S * 1e9 else None


def believed_count(value: Any) -> int:
    """Returns how many a link stands for: one, where it says nothing that could be."""
    return value if type(value) is int and 1 <= value <= MOST else 1
