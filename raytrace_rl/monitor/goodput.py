"""Where the time went: the sum view, the job view and the fleet view of goodput. Pure: rows in, numbers out.

- Sum view: durations of bucketed spans, added up by bucket, with their overlap. A sum across lanes is not time.
- Job view: the driver's lane over the wall clock of the job; adds up to it exactly, unattributed time included.
- Fleet view: the unit is the physical GPU, or the worker, its child processes included, where the run has no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrace_rl import semconv
from raytrace_rl.monitor import families, lanes
from raytrace_rl.monitor.goodput_lanes import JOB, Lane, of_rows
from raytrace_rl.monitor.model import BUCKETS, Process, Run, SpanRow
from raytrace_rl.monitor.windows import EVER, Windows

if TYPE_CHECKING:
    from raytrace_rl.monitor.goodput_lanes import Time
    from raytrace_rl.monitor.lanes import Interval

_STEP = "step"


@dataclass(frozen=True, slots=True)
class Beside:
    """What belongs beside a figure: how much of the lanes' wall clock it can see, and what was lost there.

    Attributes:
        coverage: Part (0 to 1) of the lanes' wall clock that is not left out under any span; None without such.
        dropped: Spans that the lanes' processes counted as dropped.
        truncated: Spans of the lanes that their process's death cut short.
    """

    coverage: float | None
    dropped: int
    truncated: int


@dataclass(frozen=True, slots=True)
class SumView:
    """Σ duration of bucketed spans (ns by bucket), and how much of it overlaps: Σ over lanes of (sum - union), ns."""

    buckets: dict[str, int]
    overlap_ns: int
    beside: Beside


@dataclass(frozen=True, slots=True)
class JobView:
    """The driver's lane: ``buckets``, ``unattributed_ns`` and ``recovery_ns`` (between attempts) are ``wall_ns``.

    ``excluded_ns`` is what was left out of it, on request.
    """

    buckets: dict[str, int]
    unattributed_ns: int
    recovery_ns: int
    wall_ns: int
    excluded_ns: int
    beside: Beside

    @property
    def goodput(self) -> float | None:
        """Productive part of the wall clock, 0 to 1; None without any."""
        return self.buckets["productive"] / self.wall_ns if self.wall_ns else None

    @property
    def no_goodput(self) -> str | None:
        """Why there is none."""
        return _why_none(self.wall_ns, self.excluded_ns)


@dataclass(frozen=True, slots=True)
class FleetView:
    """All units: ``buckets`` and ``unattributed_ns`` add up to ``gpu_ns``, the units' wall clocks added up.

    ``unit`` is ``gpu``, or ``worker`` where the run has no GPU; ``excluded_ns`` is what was left out of their time.
    """

    buckets: dict[str, int]
    unattributed_ns: int
    gpu_ns: int
    excluded_ns: int
    unit: str
    units: int
    beside: Beside

    @property
    def goodput(self) -> float | None:
        """Productive part of the units' time, 0 to 1; None without any."""
        return self.buckets["productive"] / self.gpu_ns if self.gpu_ns else None

    @property
    def no_goodput(self) -> str | None:
        """Why there is none."""
        return _why_none(self.gpu_ns, self.excluded_ns)


def _why_none(whole_ns: int, excluded_ns: int) -> str | None:
    return None if whole_ns else "all of it was left out" if excluded_ns else "it took no time"


@dataclass(frozen=True, slots=True)
class Goodput:
    """The three views; None where the run does not have what a view is about.

    ``windows`` are the job view's windows with what it is of each, where they were asked for.
    """

    sum: SumView
    job: JobView | None
    fleet: FleetView | None
    windows: Sequence[tuple[Interval, JobView]] = ()


def goodput(run: Run) -> Goodput:
    """Computes the three views of a run."""
    bucket = _buckets(run)
    by_process: dict[str, list[SpanRow]] = {process.key: [] for process in run.processes}
    for row in run.spans:
        by_process.setdefault(row.process.key, []).append(row)
    every = [
        of_rows(process, rows, bucket)
        for process in run.processes
        if (rows := by_process[process.key]) or process.start_ns
    ]
    return views(every, lambda processes: families.heads(processes, run.spans), run.windows or Windows())


def views(every: Sequence[Lane], heads: Callable[[list[Process]], dict[str, Process]], asked: Windows) -> Goodput:
    """Computes the three views.

    Args:
        every: The lanes, in the order of their processes.
        heads: Gives for processes what `families.heads` does.
        asked: What is left out of the job and fleet views; the sum view has all spans.

    Raises:
        TooManyWindowsError: More windows are asked for than can be told.
    """
    drivers = [(lane, window) for lane in _drivers(every) if (window := _window(lane)) is not None]
    windows = [window for _, window in drivers]
    begin = min((start for start, _ in windows or [lane.life for lane in every]), default=0)
    within = asked.within(begin)
    fleet = _fleet_view(every, windows, heads([lane.process for lane in every]), within)
    if not drivers:
        return Goodput(_sum_view(every), None, fleet)
    times = [(lane.time(), window) for lane, window in drivers]
    beside = _beside([lane for lane, _ in drivers], within)
    parts = [
        (part, _job_view(times, lanes.intersection(within, [part]), [part], beside))
        for part in asked.cut(begin, max(end for _, end in windows))
    ]
    return Goodput(_sum_view(every), _job_view(times, within, [EVER], beside), fleet, parts)


def _buckets(run: Run) -> Callable[[SpanRow], str | None]:
    """The bucket of each span: what a later attempt did again is wasted, whatever it was then."""
    last_attempt: dict[int, int] = {}
    for row in run.spans:
        if row.span_group == _STEP and row.iteration is not None:
            last_attempt[row.iteration] = max(row.attempt, last_attempt.get(row.iteration, 0))
    if len(set(last_attempt.values())) < 2 and len({process.attempt for process in run.processes}) < 2:
        return lanes.bucket_of

    def bucket(row: SpanRow) -> str | None:
        if row.bucket not in ("productive", "overhead") or row.iteration is None:
            return row.bucket
        return "wasted" if row.attempt < last_attempt.get(row.iteration, 0) else row.bucket

    return bucket


def _beside(every: Sequence[Lane], within: Sequence[Interval]) -> Beside:
    lives = [lanes.intersection([lane.life], within) for lane in every]
    wall = sum(map(lanes.total, lives))
    covered = sum(lane.covered(life) for lane, life in zip(every, lives, strict=True))
    return Beside(
        coverage=covered / wall if wall > 0 else None,
        dropped=sum(lane.process.drops.get("spans", 0) for lane in every),
        truncated=sum(lane.truncated for lane in every),
    )


def _sum_view(every: Sequence[Lane]) -> SumView:
    sums = dict.fromkeys(BUCKETS, 0)
    overlap = 0
    for lane in every:
        of_lane, twice = lane.tagged()
        for name, value in of_lane.items():
            sums[name] += value
        overlap += twice
    return SumView(sums, overlap, _beside(every, [EVER]))


def _drivers(every: Sequence[Lane]) -> list[Lane]:
    """The driver's lane of each attempt, in their order: the process that says so, else that of the job span."""
    chosen: dict[int, Lane] = {}
    for lane in sorted(every, key=_driver_rank):
        if lane.process.role == semconv.ROLE_DRIVER or lane.has_job:
            chosen.setdefault(lane.process.attempt, lane)
    return [lane for _, lane in sorted(chosen.items())]


def _driver_rank(lane: Lane) -> tuple[bool, bool, int]:
    return lane.process.role != semconv.ROLE_DRIVER, not lane.has_job, lane.life[0]


def _window(lane: Lane) -> Interval | None:
    """The job span's wall clock; without one from the lane's first span to its last."""
    spans = lane.of_group(JOB) or lane.of_group(None)
    if not spans:
        return None
    return min(start for start, _ in spans), max(end for _, end in spans)


def _job_view(
    drivers: Sequence[tuple[Time, Interval]], within: Sequence[Interval], whole: Sequence[Interval], beside: Beside
) -> JobView:
    """The job view of the instants ``within``, out of those of ``whole``."""
    buckets = dict.fromkeys(BUCKETS, 0)
    working = recovery = excluded = 0
    ended: int | None = None
    for time, window in drivers:
        own = lanes.intersection([window], within)
        for name, value in time.times(own).items():
            buckets[name] += value
        working += lanes.total(own)
        between = [(ended, window[0])] if ended is not None and ended < window[0] else []
        recovery += lanes.total(lanes.intersection(between, within))
        excluded += lanes.total(lanes.intersection([*between, window], whole))
        ended = window[1]
    excluded -= working + recovery
    return JobView(buckets, working - sum(buckets.values()), recovery, working + recovery, excluded, beside)


def _fleet_view(
    every: Sequence[Lane], windows: Sequence[Interval], heads: dict[str, Process], within: Sequence[Interval]
) -> FleetView | None:
    workers = [lane for lane in every if lane.process.role != semconv.ROLE_DRIVER and not lane.has_job]
    shared = _gpus(every, heads)
    of_run = lanes.union(windows) or lanes.union(lane.life for lane in every)
    units: list[tuple[list[Lane], list[Interval]]]
    if shared:
        # A GPU is held whether or not a process lives on it: its wall clock is the run's.
        units = [(members, of_run) for members in shared.values()]
    else:
        together: dict[str, list[Lane]] = {}
        for lane in workers:
            together.setdefault(heads[lane.process.key].key, []).append(lane)
        lives = [(members, lanes.union(lane.life for lane in members)) for members in together.values()]
        units = [(members, lanes.intersection(life, of_run)) for members, life in lives]
    if not units:
        return None
    steps = lanes.union(span for lane in every for span in lane.of_group(_STEP))
    buckets = dict.fromkeys(BUCKETS, 0)
    gpu_ns = excluded_ns = 0
    for members, whole in units:
        time = members[0].time(members[1:])
        window = lanes.intersection(whole, within)
        wall = lanes.total(window)
        gpu_ns += wall
        excluded_ns += lanes.total(whole) - wall
        for name, value in time.times(window).items():
            buckets[name] += value
        in_steps = lanes.intersection(window, steps)
        # A gap inside a step is idle.
        buckets["idle"] += lanes.total(in_steps) - time.covered(in_steps)
    lanes_seen = {lane.process.key: lane for members, _ in units for lane in members}
    return FleetView(
        buckets,
        gpu_ns - sum(buckets.values()),
        gpu_ns,
        excluded_ns,
        "gpu" if shared else "worker",
        len(units),
        _beside(list(lanes_seen.values()), within),
    )


def _gpus(every: Sequence[Lane], heads: dict[str, Process]) -> dict[tuple[str, str], list[Lane]]:
    """The lanes on each physical GPU: by UUID, else by node and index. Without a GPU of its own, that of its worker."""
    shared: dict[tuple[str, str], list[Lane]] = {}
    for lane in every:
        for gpu in _own_gpus(lane.process) or _own_gpus(heads[lane.process.key]):
            shared.setdefault(gpu, []).append(lane)
    return shared


def _own_gpus(process: Process) -> list[tuple[str, str]]:
    uuids = process.resource.get(semconv.RL_GPU_UUIDS)
    if isinstance(uuids, list) and uuids:
        return [("uuid", str(uuid)) for uuid in dict.fromkeys(map(str, uuids))]
    ids = process.resource.get(semconv.RL_GPU_IDS)
    if isinstance(ids, list):
        return [(process.node_id, index) for index in dict.fromkeys(map(str, ids))]
    return []
