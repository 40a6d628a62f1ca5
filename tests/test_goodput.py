"""Goodput: traces with a known answer, and what must hold for any trace."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrace_rl import _decode
from raytrace_rl.monitor import lanes
from raytrace_rl.monitor.goodput import goodput
from raytrace_rl.monitor.model import BUCKETS, Process, Run, SpanRow
from tests.spooling import TRACE, span_id

#: Seconds; any power of two, so that times in tests are exact.
S = 1 << 30


def process(key="driver", **resource):
    """A process; keywords are resource attributes, ``rl__role`` for ``rl.role``."""
    return Process(key, node="node-a", resource={name.replace("__", "."): value for name, value in resource.items()})


def row(proc, n, start, end, bucket=None, *, parent=0, group=None, thread=1, iteration=None, truncated=False):
    """A span of ``proc``, number ``n``, from ``start`` to ``end`` in units of S (end None: open)."""
    span = _decode.Span()
    span.trace_id, span.span_id = TRACE, span_id(n)
    span.parent_span_id = span_id(parent) if parent else b""
    span.name = f"span {n}"
    span.start_ns = round(start * S)
    span.end_ns = 0 if end is None else round(end * S)
    span.attributes = {"thread.id": thread}
    extra = {"rl.bucket": bucket, "rl.span_group": group, "rl.iteration": iteration}
    span.attributes.update({key: value for key, value in extra.items() if value is not None})
    made = SpanRow(span, proc)
    if truncated:
        made.truncate(span.end_ns)
    proc.last_ns = max(proc.last_ns, span.end_ns, span.start_ns)
    return made


def run_of(*rows):
    """A run with these spans and the processes they are in."""
    processes = list({r.process.key: r.process for r in rows}.values())
    return Run("test", "test", sorted(rows, key=lambda r: r.start_ns), processes)


def in_s(buckets):
    """Times by bucket in units of S, without those that are zero."""
    return {bucket: value / S for bucket, value in buckets.items() if value}


def owned(*rows, unit=S):
    """The timeline of one lane in units of S."""
    return [(start / unit, end / unit, bucket) for start, end, bucket in lanes.timeline(rows)]


# -- one lane ---------------------------------------------------------------------------------------------------------


def test_deepest_span_of_a_thread_owns_the_time():
    """Catches nested leaves that both count: a reward inside generation, say."""
    d = process()
    outer = row(d, 1, 0, 10, "productive")
    inner = row(d, 2, 2, 5, "idle", parent=1)
    assert owned(outer, inner) == [(0, 2, "productive"), (2, 5, "idle"), (5, 10, "productive")]


def test_nesting_goes_through_spans_without_bucket():
    """Catches an umbrella between two leaves that hides that one is inside the other."""
    d = process()
    rows = [row(d, 1, 0, 10, "productive"), row(d, 2, 1, 9, parent=1), row(d, 3, 2, 5, "idle", parent=2)]
    assert owned(*rows) == [(0, 2, "productive"), (2, 5, "idle"), (5, 10, "productive")]


def test_across_threads_the_order_of_buckets_decides():
    """Catches time counted twice where threads overlap, and a wait in one hiding work in another."""
    d = process()
    rows = [
        row(d, 1, 0, 4, "idle", thread=1),
        row(d, 2, 1, 3, "productive", thread=2),
        row(d, 3, 2, 6, "overhead", thread=3),
        row(d, 4, 5, 8, "wasted", thread=4),
    ]
    assert owned(*rows) == [
        (0, 1, "idle"),
        (1, 3, "productive"),
        (3, 6, "overhead"),
        (6, 8, "wasted"),
    ]


def test_a_child_in_another_thread_does_not_hide_its_parent():
    """Catches a productive parent that loses its time to the wait of a helper thread it started."""
    d = process()
    rows = [row(d, 1, 0, 4, "productive", thread=1), row(d, 2, 1, 3, "idle", parent=1, thread=2)]
    assert owned(*rows) == [(0, 4, "productive")]


def test_tasks_of_one_thread_are_like_threads():
    """Catches a span hidden by one that merely runs at the same time in another task."""
    d = process()
    assert owned(row(d, 1, 0, 4, "productive"), row(d, 2, 1, 3, "idle")) == [(0, 4, "productive")]


def test_a_grandchild_that_outlives_its_parent_still_owns():
    """Catches an asynchronous descendant forgotten when the span between ends first."""
    d = process()
    rows = [
        row(d, 1, 0, 10, "productive"),
        row(d, 2, 1, 3, "overhead", parent=1),
        row(d, 3, 2, 6, "idle", parent=2),
    ]
    assert owned(*rows) == [(0, 1, "productive"), (1, 2, "overhead"), (2, 6, "idle"), (6, 10, "productive")]


def test_a_descendant_that_starts_after_its_parent_ended():
    """Catches the time of an enclosing span given to both when a late descendant opens."""
    d = process()
    rows = [row(d, 1, 0, 10, "productive"), row(d, 2, 1, 2, "overhead", parent=1), row(d, 3, 4, 6, "idle", parent=2)]
    assert owned(*rows) == [
        (0, 1, "productive"),
        (1, 2, "overhead"),
        (2, 4, "productive"),
        (4, 6, "idle"),
        (6, 10, "productive"),
    ]


def test_a_child_that_starts_with_its_parent():
    """Catches a parent that owns its child's time because both started in the same nanosecond."""
    d = process()
    parent, child = row(d, 1, 0, 4, "productive"), row(d, 2, 0, 3, "idle", parent=1)
    for rows in ((parent, child), (child, parent)):
        assert owned(*rows) == [(0, 3, "idle"), (3, 4, "productive")]


lane_spans = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(-1, 12),
        st.sampled_from([None, *BUCKETS]),
        st.integers(0, 12),
        st.integers(1, 2),
        st.booleans(),
    ),
    max_size=12,
)


def lane_of(spans, proc):
    """Spans from drawn tuples: start, length, bucket, parent (any, even itself or a later one), thread, open."""
    return [
        row(proc, n, start, None if is_open else start + length, bucket, parent=parent, thread=thread)
        for n, (start, length, bucket, parent, thread, is_open) in enumerate(spans, 1)
    ]


def brute_force(rows, at):
    """Which bucket owns the instant, straight from the definition."""
    by_id = {r.span_id: r for r in rows}
    tagged = [r for r in rows if r.bucket and r.until_ns > r.start_ns]

    def above(r):
        """The nearest bucketed span around ``r`` in its thread."""
        seen = {r.span_id}
        step = r
        while (parent := by_id.get(step.parent_span_id)) is not None and parent.span_id not in seen:
            if parent.start_ns > step.start_ns:
                return None
            if parent in tagged:
                return parent if parent.thread_id == r.thread_id else None
            seen.add(parent.span_id)
            step = parent
        return None

    running = [r for r in tagged if r.start_ns <= at < r.until_ns]
    hidden = set()
    for r in running:
        seen = {r.span_id}
        step = above(r)
        while step is not None and step.span_id not in seen:
            seen.add(step.span_id)
            hidden.add(step.span_id)
            step = above(step)
    names = {r.bucket for r in running if r.span_id not in hidden}
    return next((bucket for bucket in BUCKETS if bucket in names), None)


@settings(max_examples=500)
@given(lane_spans)
def test_timeline_is_what_the_definition_says(spans):
    """Catches a sweep that differs from the definition, for any nesting, overlap and truncation."""
    proc = process()
    # Parents that start at the same time as their children may run in circles; the next test is for these.
    rows = [r for r in lane_of(spans, proc) if r.parent_span_id != r.span_id]
    starts = [r.start_ns for r in rows]
    if len(set(starts)) != len(starts):
        for shift, r in enumerate(rows):
            r.start_ns += shift * (S >> 5)
    got = lanes.timeline(rows)
    points = sorted({t for r in rows for t in (r.start_ns, r.until_ns)})
    for start, end in pairwise(points):
        owner = next((bucket for left, right, bucket in got if left <= start < right), None)
        assert owner == brute_force(rows, start), (start / S, end / S)


@settings(max_examples=300)
@given(lane_spans)
def test_timeline_is_disjoint_for_any_input(spans):
    """Catches circles of parents, or spans that end before they start, that count an instant twice or hang."""
    rows = lane_of(spans, process())
    timeline = lanes.timeline(rows)
    covered = lanes.union((r.start_ns, r.until_ns) for r in rows if r.bucket)
    for left, right in pairwise(timeline):
        assert left[1] <= right[0]
        assert left[1] < right[0] or left[2] != right[2], "neighbours are one piece"
    for start, end, _ in timeline:
        assert start < end
        assert lanes.intersection([(start, end)], covered) == [(start, end)]


def test_long_chains_are_not_quadratic():
    """Catches a walk up all ancestors for each span: a run whose every span is the child of the one before."""
    d = process()
    rows = [row(d, 1, 0, 10**6, "productive")]
    rows += [row(d, n, n, n + 0.5, "overhead", parent=n - 1) for n in range(2, 60_000)]
    started = time.process_time()
    timeline = lanes.timeline(rows)
    assert time.process_time() - started < 20
    assert lanes.times(timeline, [(0, S << 40)])["overhead"] == (60_000 - 2) * S // 2


# -- views ------------------------------------------------------------------------------------------------------------


def known_run():
    """A driver with two steps and two workers; every answer below is worked out by hand."""
    driver = process("driver", rl__role="driver")
    worker = process("worker", rl__role="worker", rl__worker_group="generation", nv__dl__rank=0)
    other = process("other", rl__role="worker", rl__worker_group="training", nv__dl__rank=0)
    return run_of(
        row(driver, 1, 0, 20, group="job"),
        row(driver, 2, 1, 10, parent=1, group="step", iteration=1),
        row(driver, 3, 11, 20, parent=1, group="step", iteration=2),
        row(driver, 4, 2, 4, "overhead", parent=2, group="data_processing", iteration=1),
        row(driver, 5, 4, 8, "productive", parent=2, group="policy_update", iteration=1),
        row(driver, 6, 5, 6, "idle", parent=5, group="efficiency", iteration=1),
        row(worker, 10, 2, 6, "productive", parent=2, group="generation", iteration=1),
        row(worker, 11, 4, 9, "productive", parent=2, group="generation", iteration=1, thread=2),
        row(worker, 12, 12, 18, "productive", parent=3, group="generation", iteration=2),
        row(other, 20, 0, 1, "overhead", parent=1, group="setup"),
        row(other, 21, 18, 19, "productive", parent=3, group="policy_update", iteration=2, truncated=True),
    )


def test_sum_view_of_a_known_run():
    """Catches durations that are not summed as they are, and an overlap that is not sum minus union."""
    view = goodput(known_run()).sum
    assert in_s(view.buckets) == {"productive": 4 + 4 + 5 + 6 + 1, "overhead": 2 + 1, "idle": 1}
    # Driver: 7 of tagged spans on 6 of clock. Generation: 15 on 13.
    assert view.overlap_ns == 3 * S


def test_job_view_of_a_known_run():
    """Catches other lanes leaking into the job view, and a nested wait counted as work."""
    view = goodput(known_run()).job
    assert view is not None
    assert in_s(view.buckets) == {"productive": 3, "overhead": 2, "idle": 1}
    assert (view.wall_ns, view.unattributed_ns, view.recovery_ns) == (20 * S, 14 * S, 0)
    assert view.goodput == 3 / 20


def test_fleet_view_of_a_known_run():
    """Catches gaps inside a step that are not idle, and time outside of steps that is."""
    view = goodput(known_run()).fleet
    assert view is not None
    assert (view.unit, view.units) == ("worker", 2)
    # generation lives from 2 to 18: 13 at work; of the other 3, the second from 10 to 11 is in no step.
    # training lives from 0 to 19: 2 at work; of the other 17, only that second is in no step.
    assert view.gpu_ns == (16 + 19) * S
    assert in_s(view.buckets) == {"productive": 14, "overhead": 1, "idle": 2 + 16}
    assert view.unattributed_ns == 2 * S
    assert view.goodput == 14 / 35


def test_what_stands_beside_the_figures():
    """Catches figures without the coverage and the losses that qualify them."""
    run = known_run()
    run.processes[1].drops["spans"] = 7
    views = goodput(run)
    assert views.job is not None
    assert views.fleet is not None
    assert (views.job.beside.coverage, views.job.beside.dropped, views.job.beside.truncated) == (1.0, 0, 0)
    assert (views.fleet.beside.dropped, views.fleet.beside.truncated) == (7, 1)
    assert views.fleet.beside.coverage == (7 + 6 + 1 + 1) / 35
    assert (views.sum.beside.dropped, views.sum.beside.truncated) == (7, 1)


def test_job_without_a_job_span_is_the_drivers_first_to_last_span():
    """Catches no job view at all for a driver that opened no job span."""
    driver = process("d", rl__role="driver")
    worker = process("w", rl__role="worker")
    view = goodput(run_of(row(driver, 1, 2, 5, "overhead"), row(driver, 2, 7, 8), row(worker, 3, 0, 30))).job
    assert view is not None
    assert (view.wall_ns, view.unattributed_ns) == (6 * S, 3 * S)


def test_driver_is_the_process_of_the_job_span_where_no_role_says_so():
    """Catches traces of other tools, without rl.role, that get no job view."""
    a, b = process("a"), process("b")
    views = goodput(run_of(row(a, 1, 0, 9, "productive"), row(b, 2, 1, 5, group="job"), row(b, 3, 2, 3, "idle")))
    assert views.job is not None
    assert in_s(views.job.buckets) == {"idle": 1}
    assert views.fleet is not None
    assert views.fleet.units == 1


def test_no_driver_no_workers():
    """Catches an invented view where the run has nothing of the kind."""
    views = goodput(run_of(row(process("a"), 1, 0, 9, "productive")))
    assert views.job is None
    empty = goodput(Run("x", "x"))
    assert (empty.job, empty.fleet, empty.sum.overlap_ns, empty.sum.beside.coverage) == (None, None, 0, None)


def test_processes_that_share_a_gpu_are_one_unit():
    """Catches two actors of half a GPU each counted as two GPUs."""
    d = process("d", rl__role="driver")
    a = process("a", rl__role="worker", rl__gpu__ids=["0"])
    b = process("b", rl__role="worker", rl__gpu__ids=["0"])
    c = process("c", rl__role="worker", rl__gpu__ids=["0", "1"], rl__gpu__uuids=["GPU-x", "GPU-y"])
    b.node = a.node
    view = goodput(
        run_of(
            row(d, 1, 0, 10, group="job"),
            row(a, 2, 0, 4, "productive"),
            row(b, 3, 2, 6, "overhead"),
            row(c, 4, 0, 5, "productive"),
        )
    ).fleet
    assert view is not None
    assert (view.unit, view.units, view.gpu_ns) == ("gpu", 3, 30 * S)
    assert in_s(view.buckets) == {"productive": 4 + 2 * 5, "overhead": 2}
    assert view.unattributed_ns == 14 * S


def test_an_engines_child_has_the_gpus_of_its_actor():
    """Catches an engine core process whose work counts for no GPU."""
    d = process("d", rl__role="driver")
    actor = process("actor", rl__role="worker", ray__actor__id="a1", rl__gpu__ids=["3"])
    engine = process("engine")
    view = goodput(
        run_of(
            row(d, 1, 0, 10, group="job"),
            row(actor, 2, 0, 8, parent=1, group="rollout"),
            row(engine, 3, 1, 7, "productive", parent=2),
        )
    ).fleet
    assert view is not None
    assert (view.units, in_s(view.buckets)) == (1, {"productive": 6})


def test_a_workers_child_processes_are_a_part_of_it():
    """Catches an engine's processes counted as workers beside their actor, however it is told whose they are."""
    d = process("d", rl__role="driver", process__pid=1)
    actor = process("actor", rl__role="worker", ray__actor__id="a1", ray__worker__id="w1", process__pid=2)
    # Telemetry of the children started first: the engine is older than the actor's.
    core = process("core", rl__role="worker", process__pid=3, process__parent_pid=2)
    rank = process("rank", rl__role="worker", process__pid=4, process__parent_pid=3)
    silent = process("silent", rl__role="worker", process__pid=5, process__parent_pid=2)
    silent.start_ns, silent.last_ns = 2 * S, 4 * S
    sender = process("sender", rl__role="worker")  # what a local OTLP receiver knows of one
    task = process("task", rl__role="worker", ray__worker__id="w2", process__pid=6, process__parent_pid=99)
    view = goodput(
        run_of(
            row(d, 1, 0, 10, group="job"),
            row(core, 3, 1, 3, "overhead", parent=1),
            row(actor, 2, 2, 8, parent=1, group="rollout"),
            row(rank, 4, 3, 7, "productive", parent=3),
            row(sender, 5, 6, 9, "productive", parent=2),
            row(task, 6, 4, 5, "overhead", parent=2),
        )
    )
    assert view.fleet is not None
    assert (view.fleet.unit, view.fleet.units) == ("worker", 2), "the actor with all its processes, and Ray's own task"
    assert view.fleet.gpu_ns == (8 + 1) * S, "from the first sign of life of any of them to the last"
    assert in_s(view.fleet.buckets) == {"productive": 6, "overhead": 2 + 1}
    run = run_of(row(d, 1, 0, 10, group="job"), row(actor, 2, 2, 8, parent=1), row(core, 3, 1, 3, "overhead"))
    run.processes.append(silent)
    silently = goodput(run).fleet
    assert silently is not None
    assert silently.units == 1, "one without any span too"


def test_a_pid_that_was_used_again_makes_no_family():
    """Catches a process counted as part of a worker that was dead before it began, and pids that run in a circle."""
    d = process("d", rl__role="driver")
    before = process("before", rl__role="worker", process__pid=7)
    after = process("after", rl__role="worker", process__pid=8, process__parent_pid=7)
    after.start_ns = 5 * S
    one = process("one", rl__role="worker", process__pid=10, process__parent_pid=11)
    two = process("two", rl__role="worker", process__pid=11, process__parent_pid=10)
    rows = [row(one, 4, 0, 4, "productive"), row(two, 5, 1, 5, "productive")]
    view = goodput(run_of(row(d, 1, 0, 10, group="job"), row(before, 2, 0, 4), row(after, 3, 5, 9), *rows)).fleet
    assert view is not None
    assert (view.units, in_s(view.buckets)) == (4, {"productive": 8})


def two_attempts():
    """A run that was restarted: the second attempt does step 2 again."""
    first, second = (process(f"d{n}", rl__role="driver", rl__attempt=n) for n in (1, 2))
    return run_of(
        row(first, 1, 0, 10, group="job"),
        row(first, 2, 1, 4, group="step", iteration=1, parent=1),
        row(first, 3, 1, 4, "productive", iteration=1, parent=2),
        row(first, 4, 5, 9, group="step", iteration=2, parent=1),
        row(first, 5, 5, 7, "productive", iteration=2, parent=4),
        row(first, 6, 7, 9, "idle", iteration=2, parent=4),
        row(second, 11, 15, 25, group="job"),
        row(second, 14, 16, 20, group="step", iteration=2, parent=11),
        row(second, 15, 16, 19, "productive", iteration=2, parent=14),
    )


def test_superseded_work_is_wasted_and_the_gap_is_recovery():
    """Catches work counted as goodput that a later attempt did again, and a restart's dead time that vanishes."""
    views = goodput(two_attempts())
    assert views.job is not None
    assert in_s(views.job.buckets) == {"productive": 3 + 3, "wasted": 2, "idle": 2}
    assert (views.job.wall_ns, views.job.recovery_ns) == (25 * S, 5 * S)
    assert views.job.unattributed_ns == (20 - 10) * S
    assert in_s(views.sum.buckets) == {"productive": 6, "wasted": 2, "idle": 2}


def test_open_spans_count_up_to_the_last_sign_of_life():
    """Catches a live run whose open work counts for nothing."""
    d = process("d", rl__role="driver")
    rows = [row(d, 1, 0, None, group="job"), row(d, 2, 2, None, "productive", parent=1)]
    d.last_ns = 6 * S
    view = goodput(run_of(*rows)).job
    assert view is not None
    assert (view.wall_ns, in_s(view.buckets)) == (6 * S, {"productive": 4})


any_process = st.tuples(
    st.sampled_from(["driver", "worker", None]),
    st.integers(1, 2),
    st.sampled_from([None, ["0"], ["0", "1"]]),
    st.sampled_from([None, 1, 2, 3]),
)
any_run = st.lists(st.tuples(any_process, lane_spans), min_size=1, max_size=4)


@settings(max_examples=300)
@given(any_run, st.randoms(use_true_random=False))
def test_views_add_up_for_any_run(drawn, rng: random.Random):
    """Catches a view that does not add up: any nesting, concurrency, truncation, attempts, shared GPUs."""
    rows, processes = [], []
    for n, ((role, attempt, gpus, parent), spans) in enumerate(drawn):
        proc = process(f"p{n}", rl__attempt=attempt, process__pid=n)
        told = {
            "rl.role": role,
            "rl.gpu.ids": gpus,
            "process.parent_pid": parent,
            "ray.actor.id": rng.choice([None, "a"]),
        }
        proc.resource.update({k: v for k, v in told.items() if v is not None})
        lane = lane_of(spans, proc)
        for r in lane:
            r.span_group = rng.choice([None, "job", "step", "generation"])
            r.iteration = rng.choice([None, 1, 2])
            r.span_id = f"{n:02x}{r.span_id[2:]}"
        rows += lane
        processes.append(proc)
    run = Run("test", "test", sorted(rows, key=lambda r: r.start_ns), processes)
    views = goodput(run)
    assert sum(views.sum.buckets.values()) == sum(r.until_ns - r.start_ns for r in rows if r.bucket)
    assert 0 <= views.sum.overlap_ns <= sum(views.sum.buckets.values())
    if views.job is not None:
        assert sum(views.job.buckets.values()) + views.job.unattributed_ns + views.job.recovery_ns == views.job.wall_ns
        assert min(*views.job.buckets.values(), views.job.unattributed_ns, views.job.recovery_ns) >= 0
        assert (views.job.goodput is None) == (views.job.wall_ns == 0)
        assert 0 <= (views.job.goodput or 0) <= 1
    if views.fleet is not None:
        assert sum(views.fleet.buckets.values()) + views.fleet.unattributed_ns == views.fleet.gpu_ns
        assert min(*views.fleet.buckets.values(), views.fleet.unattributed_ns) >= 0
        assert (views.fleet.goodput is None) == (views.fleet.gpu_ns == 0)
        assert 0 <= (views.fleet.goodput or 0) <= 1
    for view in (views.sum, views.job, views.fleet):
        assert view is None or view.beside.coverage is None or 0 <= view.beside.coverage <= 1


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8), st.lists(st.integers(0, 20), max_size=6)
)
def test_interval_algebra(intervals, cuts):
    """Catches unions and intersections that gain or lose an instant."""
    merged = lanes.union(intervals)
    window = lanes.union(zip(cuts[::2], cuts[1::2], strict=False))
    common = lanes.intersection(merged, window)

    def points(pieces):
        return {t for start, end in pieces for t in range(start, end)}

    assert points(merged) == points(intervals)
    assert points(common) == points(merged) & points(window)
    assert lanes.total(merged) == len(points(merged))
    assert all(left[1] < right[0] for left, right in pairwise(merged))


@pytest.mark.parametrize("count", [1, 3])
def test_merge_keeps_the_order_of_buckets(count):
    """Catches lanes on one GPU whose merge forgets that productive wins."""
    timelines = [[(0, 4, "idle")], [(1, 2, "wasted")], [(2, 3, "productive")]][:count]
    wanted = (
        [(0, 4, "idle")] if count == 1 else [(0, 1, "idle"), (1, 2, "wasted"), (2, 3, "productive"), (3, 4, "idle")]
    )
    assert lanes.merge(timelines) == wanted
