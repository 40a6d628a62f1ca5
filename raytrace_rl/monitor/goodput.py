"""Where the time went: the sum view, the job view and the fleet view of goodput. Pure: rows in, numbers out.

- Sum view: durations of bucketed spans, added up by bucket, with their overlap. A sum across lanes is not time.
- Job view: the driver's lane over the wall clock of the job; adds up to it exactly, unattributed time included.
- Fleet view: the unit is the physical GPU, or the worker lane where the run has no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrace_rl import semconv
from raytrace_rl.monitor import lanes
from raytrace_rl.monitor.model import BUCKETS, Process, Run, SpanRow

if TYPE_CHECKING:
    from raytrace_rl.monitor.lanes import Interval, Owned

_JOB = "job"
_STEP = "step"


@dataclass(frozen=True, slots=True)
class Beside:
    """What belongs beside a figure: how much of the lanes' wall clock it can see, and what was lost there.

    Attributes:
        coverage: Part (0 to 1) of the lanes' wall clock under any span; None where there is no wall clock.
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
    """The driver's lane: ``buckets``, ``unattributed_ns`` and ``recovery_ns`` (between attempts) are ``wall_ns``."""

    buckets: dict[str, int]
    unattributed_ns: int
    recovery_ns: int
    wall_ns: int
    beside: Beside

    @property
    def goodput(self) -> float:
        """Productive part of the wall clock, 0 to 1."""
        return self.buckets["productive"] / self.wall_ns if self.wall_ns else 0.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """All units: ``buckets`` and ``unattributed_ns`` add up to ``gpu_ns``, the units' wall clocks added up.

    ``unit`` is ``gpu``, or ``worker`` where the run has no GPU; ``units`` is how many there are.
    """

    buckets: dict[str, int]
    unattributed_ns: int
    gpu_ns: int
    unit: str
    units: int
    beside: Beside

    @property
    def goodput(self) -> float:
        """Productive part of the units' time, 0 to 1."""
        return self.buckets["productive"] / self.gpu_ns if self.gpu_ns else 0.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """The three views; None where the run does not have what a view is about."""

    sum: SumView
    job: JobView | None
    fleet: FleetView | None


@dataclass(slots=True)
class _Lane:
    process: Process
    rows: list[SpanRow]
    owned: list[Owned]

    @property
    def life(self) -> Interval:
        """From its start, or its first span if that is earlier, to its last sign of life."""
        starts = [self.process.start_ns] if self.process.start_ns else []
        start = min(starts + [row.start_ns for row in self.rows[:1]], default=0)
        return start, max(self.process.last_ns, start)


def goodput(run: Run) -> Goodput:
    """Computes the three views of a run."""
    bucket = _buckets(run)
    by_process: dict[str, list[SpanRow]] = {process.key: [] for process in run.processes}
    for row in run.spans:
        by_process.setdefault(row.process.key, []).append(row)
    every = [
        _Lane(process, rows, lanes.timeline(rows, bucket))
        for process in run.processes
        if (rows := by_process[process.key]) or process.start_ns
    ]
    drivers = _drivers(every)
    windows = [(lane, window) for lane in drivers if (window := _window(lane)) is not None]
    return Goodput(_sum_view(every, bucket), _job_view(windows), _fleet_view(every, [w for _, w in windows]))


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


def _beside(every: Sequence[_Lane]) -> Beside:
    wall = covered = 0
    for lane in every:
        life = [lane.life]
        wall += lanes.total(life)
        spans = lanes.union((row.start_ns, row.until_ns) for row in lane.rows)
        covered += lanes.total(lanes.intersection(spans, life))
    return Beside(
        coverage=covered / wall if wall > 0 else None,
        dropped=sum(lane.process.drops.get("spans", 0) for lane in every),
        truncated=sum(row.truncated for lane in every for row in lane.rows),
    )


def _sum_view(every: Sequence[_Lane], bucket: Callable[[SpanRow], str | None]) -> SumView:
    sums = dict.fromkeys(BUCKETS, 0)
    overlap = 0
    for lane in every:
        tagged: list[Interval] = []
        for row in lane.rows:
            name = bucket(row)
            if name is not None:
                interval = row.start_ns, row.until_ns
                sums[name] += interval[1] - interval[0]
                tagged.append(interval)
        overlap += lanes.total(tagged) - lanes.total(lanes.union(tagged))
    return SumView(sums, overlap, _beside(every))


def _drivers(every: Sequence[_Lane]) -> list[_Lane]:
    """The driver's lane of each attempt, in their order: the process that says so, else that of the job span."""
    chosen: dict[int, _Lane] = {}
    for lane in sorted(every, key=_driver_rank):
        if lane.process.role == semconv.ROLE_DRIVER or _has_job(lane):
            chosen.setdefault(lane.process.attempt, lane)
    return [lane for _, lane in sorted(chosen.items())]


def _driver_rank(lane: _Lane) -> tuple[bool, bool, int]:
    return lane.process.role != semconv.ROLE_DRIVER, not _has_job(lane), lane.life[0]


def _has_job(lane: _Lane) -> bool:
    return any(row.span_group == _JOB for row in lane.rows)


def _window(lane: _Lane) -> Interval | None:
    """The job span's wall clock; without one from the lane's first span to its last."""
    rows = [row for row in lane.rows if row.span_group == _JOB] or lane.rows
    if not rows:
        return None
    return min(row.start_ns for row in rows), max(row.until_ns for row in rows)


def _job_view(windows: Sequence[tuple[_Lane, Interval]]) -> JobView | None:
    if not windows:
        return None
    buckets = dict.fromkeys(BUCKETS, 0)
    wall = recovery = 0
    ended: int | None = None
    for lane, (start, end) in windows:
        for name, value in lanes.times(lane.owned, [(start, end)]).items():
            buckets[name] += value
        wall += end - start
        if ended is not None:
            recovery += max(0, start - ended)
        ended = end
    wall += recovery
    unattributed = wall - recovery - sum(buckets.values())
    return JobView(buckets, unattributed, recovery, wall, _beside([lane for lane, _ in windows]))


def _fleet_view(every: Sequence[_Lane], windows: Sequence[Interval]) -> FleetView | None:
    workers = [lane for lane in every if lane.process.role != semconv.ROLE_DRIVER and not _has_job(lane)]
    shared = _gpus(every)
    span_of_run = lanes.union(windows) or lanes.union(lane.life for lane in every)
    units: list[tuple[list[_Lane], list[Interval]]]
    if shared:
        # A GPU is held whether or not a process lives on it: its wall clock is the run's.
        units = [(members, span_of_run) for members in shared.values()]
    else:
        units = [([lane], lanes.intersection([lane.life], span_of_run)) for lane in workers]
    if not units:
        return None
    steps = lanes.union((row.start_ns, row.until_ns) for lane in every for row in lane.rows if row.span_group == _STEP)
    buckets = dict.fromkeys(BUCKETS, 0)
    gpu_ns = 0
    for members, window in units:
        owned = lanes.merge([lane.owned for lane in members])
        wall = lanes.total(window)
        gpu_ns += wall
        for name, value in lanes.times(owned, window).items():
            buckets[name] += value
        in_steps = lanes.intersection(window, steps)
        covered = lanes.union((start, end) for start, end, _ in owned)
        # A gap inside a step is idle.
        buckets["idle"] += lanes.total(in_steps) - lanes.total(lanes.intersection(covered, in_steps))
    lanes_seen = {lane.process.key: lane for members, _ in units for lane in members}
    return FleetView(
        buckets,
        gpu_ns - sum(buckets.values()),
        gpu_ns,
        "gpu" if shared else "worker",
        len(units),
        _beside(list(lanes_seen.values())),
    )


def _gpus(every: Sequence[_Lane]) -> dict[tuple[str, str], list[_Lane]]:
    """The lanes on each physical GPU: by UUID, else by node and index."""
    held = {lane.process.key: _own_gpus(lane.process) for lane in every}
    if not any(held.values()):
        return {}
    by_span = {row.trace_id + row.span_id: row.process for lane in every for row in lane.rows}
    shared: dict[tuple[str, str], list[_Lane]] = {}
    for lane in every:
        gpus = held[lane.process.key] or _inherited(lane, by_span, held)
        for gpu in gpus:
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


def _inherited(
    lane: _Lane, by_span: dict[str, Process], held: dict[str, list[tuple[str, str]]]
) -> list[tuple[str, str]]:
    """An engine's child process (no actor, no GPU of its own) has the GPUs of the actor that its spans hang from."""
    process = lane.process
    if process.actor_id is not None or process.role == semconv.ROLE_DRIVER:
        return []
    for row in lane.rows:
        parent = by_span.get(row.trace_id + row.parent_span_id) if row.parent_span_id else None
        if parent is not None and parent is not process and parent.actor_id and parent.node_id == process.node_id:
            return held.get(parent.key, [])
    return []
