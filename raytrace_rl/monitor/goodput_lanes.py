"""What goodput asks of a lane, in whatever form its spans are; and how rows answer. (Columns: `bulk.goodput`.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from raytrace_rl.monitor import lanes
from raytrace_rl.monitor.model import BUCKETS, Process, SpanRow

if TYPE_CHECKING:
    from raytrace_rl.monitor.lanes import Interval, Owned

JOB: Final = "job"


class Time(ABC):
    """Which bucket owns which time of one lane, or of several that share a unit."""

    @abstractmethod
    def times(self, windows: Sequence[Interval]) -> dict[str, int]:
        """Returns ns by bucket within ``windows`` (disjoint, in order)."""

    @abstractmethod
    def covered(self, windows: Sequence[Interval]) -> int:
        """Returns how much of ``windows`` (ns) any bucket owns."""


class Lane(ABC):
    """What the views ask of a lane, in whatever form its spans are.

    Args:
        process: Whose lane it is.
    """

    def __init__(self, process: Process) -> None:
        self.process = process

    @property
    def life(self) -> Interval:
        """From its start, or its first span if that is earlier, to its last sign of life."""
        starts = [time for time in (self.process.start_ns or None, self.first_ns) if time is not None]
        start = min(starts, default=0)
        return start, max(self.process.last_ns, start)

    @property
    @abstractmethod
    def first_ns(self) -> int | None:
        """When its first span started."""

    @property
    @abstractmethod
    def truncated(self) -> int:
        """How many of its spans its end has cut short."""

    @abstractmethod
    def of_group(self, group: str | None) -> Sequence[Interval]:
        """Returns the spans of a group, of all groups if that is None; or else the same instants."""

    @abstractmethod
    def tagged(self) -> tuple[dict[str, int], int]:
        """Returns the durations of its bucketed spans, added up by bucket, and by how much these overlap."""

    @abstractmethod
    def covered(self, windows: Sequence[Interval]) -> int:
        """Returns how much (ns) of ``windows`` (disjoint, in order) is under any span."""

    @abstractmethod
    def time(self, others: Sequence[Lane] = ()) -> Time:
        """Returns who owns its time; with others that share its unit, who owns that."""

    @property
    def has_job(self) -> bool:
        """Whether it has the job span."""
        return bool(self.of_group(JOB))


class _RowTime(Time):
    def __init__(self, owned: Sequence[Owned]) -> None:
        self.owned = owned

    def times(self, windows: Sequence[Interval]) -> dict[str, int]:
        return lanes.times(self.owned, windows)

    def covered(self, windows: Sequence[Interval]) -> int:
        return lanes.total(lanes.intersection(lanes.union((start, end) for start, end, _ in self.owned), windows))


class _RowLane(Lane):
    def __init__(self, process: Process, rows: list[SpanRow], bucket: Callable[[SpanRow], str | None]) -> None:
        super().__init__(process)
        self.rows = rows
        self.bucket = bucket
        self.owned = lanes.timeline(rows, bucket)

    @property
    def first_ns(self) -> int | None:
        return self.rows[0].start_ns if self.rows else None

    @property
    def truncated(self) -> int:
        return sum(row.truncated for row in self.rows)

    def of_group(self, group: str | None) -> list[Interval]:
        return [(row.start_ns, row.until_ns) for row in self.rows if group is None or row.span_group == group]

    def tagged(self) -> tuple[dict[str, int], int]:
        sums = dict.fromkeys(BUCKETS, 0)
        tagged: list[Interval] = []
        for row in self.rows:
            name = self.bucket(row)
            if name is not None:
                interval = row.start_ns, row.until_ns
                sums[name] += interval[1] - interval[0]
                tagged.append(interval)
        return sums, lanes.total(tagged) - lanes.total(lanes.union(tagged))

    def covered(self, windows: Sequence[Interval]) -> int:
        return lanes.total(lanes.intersection(lanes.union(self.of_group(None)), windows))

    def time(self, others: Sequence[Lane] = ()) -> _RowTime:
        return _RowTime(lanes.merge([self.owned, *(lane.owned for lane in others if isinstance(lane, _RowLane))]))


def of_rows(process: Process, rows: list[SpanRow], bucket: Callable[[SpanRow], str | None]) -> Lane:
    """Returns a lane.

    Args:
        process: Whose it is.
        rows: Its spans, in the order of their start.
        bucket: Gives what each counts as.
    """
    return _RowLane(process, rows, bucket)
