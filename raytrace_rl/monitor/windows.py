"""Which part of a run goodput is asked about: stretches that are left out, and the windows that it is told for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

from raytrace_rl.monitor import lanes

if TYPE_CHECKING:
    from raytrace_rl.monitor.lanes import Interval

#: More windows than these say nothing to a person, and each is worked out by itself.
MAX_WINDOWS: Final = 1000
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ALWAYS: Final = 1 << 62
#: All of time.
EVER: Final = (-_ALWAYS, _ALWAYS)
_LATEST_S: Final = 1e9


class TooManyWindowsError(ValueError):
    """More windows are asked for than can be told; the message is one line for a person."""


class Moment(NamedTuple):
    """A time (ns): since the epoch, or since the job began."""

    ns: int
    since_begin: bool

    def at(self, begin_ns: int) -> int:
        """Returns it since the epoch, of a job that began at ``begin_ns``."""
        return begin_ns + self.ns if self.since_begin else self.ns


@dataclass(frozen=True, slots=True)
class Windows:
    """What is asked.

    Attributes:
        exclude: From and to, of each stretch that is left out; they may overlap.
        every_ns: Length of the windows, from the job's begin on; None for no windows.
    """

    exclude: Sequence[tuple[Moment, Moment]] = ()
    every_ns: int | None = None

    def within(self, begin_ns: int) -> list[Interval]:
        """Returns the instants that are not left out, of a job that began at ``begin_ns``."""
        out = lanes.union((since.at(begin_ns), until.at(begin_ns)) for since, until in self.exclude)
        return lanes.complement(out, [EVER])

    def cut(self, begin_ns: int, end_ns: int) -> list[Interval]:
        """Returns the windows of a job, the last one as long as it is.

        Raises:
            TooManyWindowsError: That is what they would be.
        """
        if self.every_ns is None or end_ns <= begin_ns:
            return []
        number = -(-(end_ns - begin_ns) // self.every_ns)
        if number > MAX_WINDOWS:
            raise TooManyWindowsError(
                f"this run has {number:,} windows of {self.every_ns / 1e9:g} s: at most {MAX_WINDOWS:,} are told"
            )
        starts = range(begin_ns, end_ns, self.every_ns)
        return [(start, min(start + self.every_ns, end_ns)) for start in starts]


def stretch(text: str) -> tuple[Moment, Moment]:
    """Reads ``FROM..TO``.

    Each is a time since the job began (``90``, ``90s``, ``5m``, ``1.5h``), an ISO 8601 time (in this machine's zone
    unless it names one), or nothing: from the begin, to the end.

    Raises:
        ValueError: It is none, or ends before it begins; the message says so.
    """
    since, dots, until = text.partition("..")
    if not dots:
        raise ValueError(f"{text!r} is no FROM..TO, such as 90s..5m or 2026-01-31T09:00:00Z..2026-01-31T09:30:00Z")
    if not since.strip() and not until.strip():
        raise ValueError(f"{text!r} would leave out everything")
    begin = _moment(since.strip()) if since.strip() else Moment(-_ALWAYS, since_begin=False)
    end = _moment(until.strip()) if until.strip() else Moment(_ALWAYS, since_begin=False)
    if begin.since_begin == end.since_begin and end.ns <= begin.ns:
        raise ValueError(f"{text!r} ends before it begins")
    return begin, end


def _moment(text: str) -> Moment:
    try:
        seconds = float(text[:-1] if text[-1] in _UNITS else text) * _UNITS.get(text[-1], 1)
    except ValueError:
        pass
    else:
        if isfinite(seconds) and 0 <= seconds <= _LATEST_S:
            return Moment(round(seconds * 1e9), since_begin=True)
        raise ValueError(f"{text!r} is no time since the job began")
    try:
        # Python before 3.11 does not read the Z.
        found = datetime.fromisoformat(text[:-1] + "+00:00" if text[-1] in "zZ" else text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is neither a time since the job began (90s, 5m, 1h) nor an ISO 8601 time") from None
    return Moment(round(found.timestamp() * 1e9), since_begin=False)
