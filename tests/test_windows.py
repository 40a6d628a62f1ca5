"""Windows of goodput: what is left out, what is told for each of them, and how both are asked for."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrace_rl.cli import main
from raytrace_rl.monitor.goodput import goodput
from raytrace_rl.monitor.windows import MAX_WINDOWS, Moment, TooManyWindowsError, Windows, stretch
from tests.spooling import Spool, ended, resource, span
from tests.test_goodput import S, in_s, lane_of, lane_spans, process, row, run_of

#: From and to, in units of S since the job's begin, which is what `Windows` takes once they are Moments.
stretches = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=3)


def asked(exclude, every=None):
    """Windows, in units of S since the job began."""
    moments = [(Moment(since * S, since_begin=True), Moment(until * S, since_begin=True)) for since, until in exclude]
    return Windows(moments, None if every is None else every * S)


def job_run(windows):
    """A job of 10: 4 productive, 2 idle, the rest unattributed; a worker that is productive throughout."""
    driver, worker = process("d", rl__role="driver"), process("w", rl__role="worker")
    run = run_of(
        row(driver, 1, 0, 10, group="job"),
        row(driver, 2, 1, 5, "productive", parent=1),
        row(driver, 3, 6, 8, "idle", parent=1),
        row(worker, 4, 0, 10, "productive", parent=1),
    )
    run.windows = windows
    return run


def test_what_is_excluded_is_in_neither_part_nor_whole():
    """Catches time that is taken out of the wall clock but not of a bucket, and units that keep it."""
    views = goodput(job_run(asked([(4, 7), (3, 5)])))
    assert views.job is not None
    assert views.fleet is not None
    assert in_s(views.job.buckets) == {"productive": 2, "idle": 1}
    assert (views.job.wall_ns, views.job.excluded_ns, views.job.unattributed_ns) == (6 * S, 4 * S, 3 * S)
    assert (views.fleet.gpu_ns, in_s(views.fleet.buckets)) == (6 * S, {"productive": 6})


def test_what_is_left_out_is_covered_by_nothing():
    """Catches a coverage that is good because of a stretch that nobody asked about, and bad because of another one."""
    driver, worker = process("d", rl__role="driver"), process("w", rl__role="worker")
    run = run_of(row(driver, 1, 0, 4, group="job"), row(driver, 2, 8, 10), row(worker, 3, 0, 5), row(worker, 4, 9, 10))
    covered = goodput(run)
    assert covered.job is not None
    assert covered.fleet is not None
    assert (covered.job.beside.coverage, covered.fleet.beside.coverage) == (0.6, 0.6)
    run.windows = asked([(4, 8)])
    views = goodput(run)
    assert views.job is not None
    assert views.fleet is not None
    assert views.job.beside.coverage == 1
    assert views.fleet.beside.coverage == pytest.approx(5 / 6)
    assert views.sum.beside.coverage == covered.sum.beside.coverage


def test_nothing_left_is_no_goodput_and_says_why():
    """Catches 0 % for a stretch of which nothing is known, which reads as one in which nothing was done."""
    views = goodput(job_run(asked([(0, 10)], every=5)))
    assert views.job is not None
    assert views.fleet is not None
    every = [views.job, views.fleet, *(view for _, view in views.windows)]
    assert [(view.goodput, view.no_goodput) for view in every] == [(None, "all of it was left out")] * 4
    assert views.job.beside.coverage is None
    assert views.fleet.excluded_ns == 10 * S
    assert job_run(asked([(2, 3)])).windows is not None
    some = goodput(job_run(asked([(2, 3)]))).job
    assert some is not None
    assert some.goodput == pytest.approx(3 / 9)
    assert some.no_goodput is None
    driver = process("d", rl__role="driver")
    empty = goodput(run_of(row(driver, 1, 5, 5, group="job"))).job
    assert empty is not None
    assert (empty.goodput, empty.no_goodput) == (None, "it took no time")


def test_windows_begin_with_the_job_and_the_last_one_is_shorter():
    """Catches windows that are off by one, or a remainder that is left out."""
    views = goodput(job_run(asked([(6, 10)], every=4)))
    assert [((start - views.windows[0][0][0]) // S, (end - start) // S) for (start, end), _ in views.windows] == [
        (0, 4),
        (4, 4),
        (8, 2),
    ]
    assert [(in_s(view.buckets), view.wall_ns // S, view.excluded_ns // S) for _, view in views.windows] == [
        ({"productive": 3}, 4, 0),
        ({"productive": 1}, 2, 2),
        ({}, 0, 2),
    ]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 2), lane_spans), min_size=1, max_size=3), stretches, st.integers(1, 9))
def test_windows_add_up_to_the_job(drawn, exclude, every):
    """Catches an instant that two windows have, or none: any nesting, any attempts, anything left out."""
    rows = []
    for n, (attempt, spans) in enumerate(drawn):
        proc = process(f"p{n}", rl__role="driver", rl__attempt=attempt)
        lane = lane_of(spans, proc)
        for one in lane:
            one.span_id = f"{n:02x}{one.span_id[2:]}"
        rows += lane
    run = run_of(*rows)
    whole = goodput(run).job
    scale = max(1, every * max((r.until_ns for r in rows), default=0) // 50 // S)
    run.windows = asked(exclude, scale)
    views = goodput(run)
    assert (whole is None) == (views.job is None)
    if whole is None or views.job is None:
        return
    assert views.job.wall_ns + views.job.excluded_ns == whole.wall_ns
    for view in (views.job, *(view for _, view in views.windows)):
        assert sum(view.buckets.values()) + view.unattributed_ns + view.recovery_ns == view.wall_ns
        assert min(*view.buckets.values(), view.unattributed_ns, view.recovery_ns, view.excluded_ns) >= 0
    for part in ("unattributed_ns", "recovery_ns", "wall_ns", "excluded_ns"):
        assert sum(getattr(view, part) for _, view in views.windows) == getattr(views.job, part), part
    for bucket in whole.buckets:
        assert sum(view.buckets[bucket] for _, view in views.windows) == views.job.buckets[bucket]


def test_too_many_windows_are_refused():
    """Catches a report that works on a window a millisecond for hours."""
    with pytest.raises(TooManyWindowsError, match="1,001 windows"):
        Windows(every_ns=S).cut(0, (MAX_WINDOWS + 1) * S)
    assert len(Windows(every_ns=S).cut(0, MAX_WINDOWS * S)) == MAX_WINDOWS


def test_stretches_are_read():
    """Catches a unit, a zone or an open end that is read otherwise than it is written."""
    nine = int(datetime(2026, 1, 31, 9, tzinfo=timezone.utc).timestamp() * 1e9)
    assert stretch("90s..1.5h") == (Moment(90 * 10**9, True), Moment(5400 * 10**9, True))
    assert stretch("10..5m")[0] == Moment(10**10, True)
    assert stretch("2026-01-31T09:00:00Z..2026-01-31T11:30:00+01:00") == (
        Moment(nine, False),
        Moment(nine + 5400 * 10**9, False),
    )
    since, until = stretch("..2026-01-31T09:00:00Z")
    assert since.at(5) < 0 < until.at(5) == nine
    assert stretch("5m..")[1].at(0) > 1 << 61


@pytest.mark.parametrize(
    "text", ["", "5m", "..", "x..y", "5m..3m", "nan..5", "-5..5", "1e30..", "2026-13-01..", "5q..9q"]
)
def test_other_stretches_are_refused(text):
    """Catches a traceback, or a stretch that is quietly taken for another one."""
    with pytest.raises(ValueError, match=r"'|FROM"):
        stretch(text)


@pytest.fixture
def run_dir(tmp_path):
    """A job of ten seconds, half of it productive."""
    spool = Spool(tmp_path / "run")
    rows = [
        span(1, 0, 10, name="rl.grpo.job", rl__span_group="job"),
        span(2, 0, 5, parent=1, name="rl.work", rl__bucket="productive"),
    ]
    spool.segment(10, ended(*rows), resource=resource(rl__role="driver", rl__run__id="my-run"))
    return str(spool.run_dir)


def test_command(run_dir, capsys):
    """Catches options that do not reach the report, and a report that does not say what it left out."""
    assert main(["report", run_dir, "--exclude", "6s..8s", "--every", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["goodput"]
    assert (told["job"]["wall_s"], told["job"]["excluded_s"], told["job"]["goodput"]) == (8, 2, 0.625)
    assert [(window["wall_s"], window["goodput"]) for window in told["windows"]] == [(5, 1), (3, 0)]
    assert main(["report", run_dir, "--exclude", "6s..8s", "--every", "5"]) == 0
    out = capsys.readouterr().out
    assert "8.00s of wall clock, 2.00s left out" in out
    assert "Goodput by window, since the job began" in out


@pytest.mark.parametrize("options", [["--exclude", "8s..6s"], ["--every", "0"], ["--every", "1e-9s"]])
def test_command_refuses(run_dir, capsys, options):
    """Catches a traceback instead of one line that names the value."""
    assert main(["report", run_dir, *options]) == 2
    assert options[0] in capsys.readouterr().err
