"""The report of a large run, from columns: the same dictionary as from rows, whatever the run."""

from __future__ import annotations

import json
import os
import pty
import random
import subprocess
import sys
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import made_demo, made_spool
from raytrace_rl import cli
from raytrace_rl.monitor import Run, html_data, large, load_run
from raytrace_rl.monitor.report import report
from raytrace_rl.monitor.timeline import CODES
from raytrace_rl.monitor.windows import TooManyWindowsError, Windows, stretch
from tests.bulk_runs import differences, drawn_runs, linked_run, ranked_run, spooled
from tests.made_runs import Made, data_parallel
from tests.spooling import SECOND, T0, Spool, ended, resource, span

pytest.importorskip("numpy")

from raytrace_rl.monitor.bulk import paths, reading
from raytrace_rl.monitor.bulk import report as bulk_report
from raytrace_rl.monitor.bulk import timeline as bulk_timeline
from raytrace_rl.monitor.bulk.goodput import Timelines
from raytrace_rl.monitor.bulk.lanes import NotForColumnsError
from raytrace_rl.monitor.bulk.reading import read

#: A stretch in the midst of what is drawn, and windows of its size.
_PARTS = Windows([stretch("1s..2.5s")], every_ns=2 * SECOND)


def compare(path, *, align=False, windows=None):
    """Where the reports of a run differ, by rows and by columns."""
    rows, columns = load_run(path, align=align), read(path, align=align)
    rows.windows = columns.run.windows = windows
    return differences(report(rows), bulk_report.report(columns))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(drawn_runs(), st.booleans(), st.booleans(), st.sampled_from([1, 100]))
def test_any_run_has_one_report(tmp_path_factory, write, align, parts, few):
    """Catches a section that columns answer otherwise than rows do; paths are walked side by side, or one by one."""
    run_dir = tmp_path_factory.mktemp("drawn")
    locks = write(run_dir)
    try:
        with mock.patch.object(paths, "_FEW", few):
            found = compare(run_dir, align=align, windows=_PARTS if parts else None)
    except (NotForColumnsError, TooManyWindowsError):
        found = []  # it is then read row by row
    finally:
        for lock in locks:
            lock.release()
    assert found == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("few", [1, 100])
def test_ranks_that_meet_and_stragglers_are_the_same(tmp_path, monkeypatch, seed, few):
    """Catches meetings, stragglers and paths that columns find elsewhere: restarts, several nodes, ranks left out."""
    monkeypatch.setattr(paths, "_FEW", few)
    assert compare(spooled(ranked_run(random.Random(seed)).run(), tmp_path)) == []


@pytest.mark.parametrize("seed", range(24))
def test_many_short_steps_with_links_are_the_same(tmp_path, seed):
    """Catches paths that go elsewhere when walked side by side, and links that are read otherwise by the thousand."""
    linked_run(tmp_path, random.Random(seed))
    assert compare(tmp_path) == []
    assert len(read(tmp_path).links.row) > 20


def test_a_run_like_the_demos_is_the_same(tmp_path):
    """Catches a made run that lacks what the demo's has, or of which columns say something else."""
    made_demo.make(tmp_path, 10_000)
    assert compare(tmp_path) == []
    found = bulk_report.report(read(tmp_path))
    assert found["trajectories"]["count"] == 4 * (found["steps"]["count"] - 1)
    assert found["trajectories"]["lag"]["max"] == 1
    assert found["traces"]["missing_parent"] == 0


def test_a_straggler_is_found(tmp_path):
    """Catches a comparison of two empty sections."""
    made = Made()
    data_parallel(made, [[4.0, 4.0, 4.0, 6.0]] * 5, collective=True, nodes=2)
    path = spooled(made.run(), tmp_path)
    assert compare(path) == []
    found = bulk_report.report(read(path))
    assert [(one["rank"], one["straggler"]) for one in found["stragglers"]["ranks"]][:1] == [(3, True)]
    assert found["findings"]
    assert found["bubbles"]["waits"]


def test_processes_that_read_side_by_side_give_the_same(tmp_path, monkeypatch):
    """Catches segments that are put together in another order than they were written."""
    monkeypatch.setattr(reading, "ALONE_BYTES", 0)
    monkeypatch.setattr(made_spool, "_SEGMENT", 1 << 16)
    made_spool.make(tmp_path / "run", 20_000)
    assert len(list(tmp_path.glob("run/spool/*/*.rts"))) > 33
    assert compare(tmp_path / "run") == []


def test_what_lives_is_not_read_before_what_it_had_open(tmp_path, monkeypatch):
    """Catches a span that ends between two looks, at the segment and then at what is open, and is in neither."""
    monkeypatch.setattr(reading, "ALONE_BYTES", 0)
    spool = Spool(tmp_path)
    for pid in (10, 11, 12):
        spool.segment(pid, ended(span(pid, 1, 2)))
        spool.live_file(pid)
    lock = spool.alive(11)
    begun: list[str] = []
    start = reading._Segments._start

    def noted(self, pool, path, final):
        begun.append(path)
        start(self, pool, path, final)

    monkeypatch.setattr(reading._Segments, "_start", noted)
    read_slots = reading._ProcessReader._slots

    def slots(self):
        assert not any(f"/{self.files.stem}." in path for path in begun) or self.process.state == "dead"
        read_slots(self)

    monkeypatch.setattr(reading._ProcessReader, "_slots", slots)
    try:
        assert len(read(tmp_path)) == 3
    finally:
        lock.release()
    assert len(begun) >= 3


def test_spans_met_twice_count_once(tmp_path):
    """Catches a span that was resent to another process's spool and counts twice, or is lost."""
    spool = Spool(tmp_path)
    both = [span(n, n, n + 2, name=f"span {n}") for n in range(1, 6)]
    spool.segment(10, ended(*both[:3], both[1]), resource=resource(rl__role="driver"))
    spool.segment(11, ended(*both[3:]) + ended(span(9, 1, 30)))
    spool.segment(12, ended(*both[3:], span(20, 1, 40)))
    assert compare(tmp_path) == []
    assert bulk_report.report(read(tmp_path))["loss"]["duplicates"] == 3


@pytest.mark.parametrize(
    "rows",
    [
        [span(1, 1, 2), span(2, -T0 // SECOND + (1 << 63) // SECOND, None)],
        [span(n, 5, 6, parent=n % 3 + 1, rl__bucket="idle", thread__id=1) for n in (1, 2, 3)],
        [span(1, 1, (1 << 62) // SECOND - T0 // SECOND - 5), span(2, 1, (1 << 62) // SECOND - T0 // SECOND - 5)],
    ],
    ids=["a time beyond all clocks", "parents in a circle", "a sum beyond 64 bits"],
)
def test_what_columns_cannot_say_is_read_row_by_row(tmp_path, monkeypatch, rows):
    """Catches a damaged number that overflows without a word."""
    monkeypatch.setattr(large, "LARGE_BYTES", 0)
    spool = Spool(tmp_path)
    spool.segment(10, ended(*rows))
    with pytest.raises(NotForColumnsError):
        read(tmp_path)
    said: list[str] = []
    assert large.report(large.read(tmp_path, say=said.append))["loss"]["spans"] == len(rows)
    assert ["span by span" in line for line in said] == [True]


def test_the_size_decides_how_a_run_is_read(tmp_path, monkeypatch):
    """Catches a large run that is read row by row, or a small one for which NumPy is imported."""
    made_spool.make(tmp_path / "small", 100)
    made_spool.make(tmp_path / "large", 30_000)
    assert isinstance(large.read(tmp_path / "small"), Run)
    assert not isinstance(large.read(tmp_path / "large"), Run)
    said: list[str] = []
    monkeypatch.setattr(large.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(large, "_SLOW_BYTES", 1 << 20)
    assert isinstance(large.read(tmp_path / "large", say=said.append), Run)
    assert ["pip install 'raytrace-rl[report]'" in line for line in said] == [True]


def test_command(tmp_path, capsys):
    """Catches a subcommand that prints another report of a large run than of a small one."""
    made_spool.make(tmp_path / "run", 30_000)
    wanted = load_run(tmp_path / "run")
    assert cli.main(["report", "--json", str(tmp_path / "run")]) == 0
    assert differences(json.loads(json.dumps(report(wanted))), json.loads(capsys.readouterr().out)) == []
    page = tmp_path / "page.html"
    assert cli.main(["report", "--html", str(page), str(tmp_path / "run")]) == 0
    assert "rl.grpo.step" in page.read_text(encoding="utf-8")


def test_long_lists_are_the_same_json(tmp_path, monkeypatch):
    """Catches an outline whose long lists are put in elsewhere, or a report that cannot be parsed."""
    linked_run(tmp_path, random.Random(3))
    run = load_run(tmp_path)
    monkeypatch.setattr(large, "_LONG", 2)
    assert differences(json.loads(json.dumps(report(run))), json.loads(large.json_text(run))) == []
    assert max(map(len, large.json_text(run).splitlines())) < 2000


@pytest.mark.parametrize("seed", range(4))
def test_page_of_few_spans_is_that_of_rows(tmp_path, seed):
    """Catches a chart or a track that is drawn otherwise."""
    path = spooled(ranked_run(random.Random(seed)).run(), tmp_path)
    wanted, found = html_data.document(load_run(path)), bulk_report.document(read(path))
    for document in (wanted, found):
        for group in document["timeline"]["groups"]:
            group["parts"] = list(bytes.fromhex(group["parts"]))
    for one, other in zip(wanted["timeline"]["groups"], found["timeline"]["groups"], strict=True):
        parts = zip(one.pop("parts"), other.pop("parts"), strict=True)
        assert all(abs(part - same) <= 1 for part, same in parts)
    assert differences(wanted, found) == []


def test_timeline_of_many_spans_fits_its_budget(tmp_path):
    """Catches a page of a large run that is too large, leaves spans out, or has rows that cannot be searched."""
    made_spool.make(tmp_path / "run", 30_000)
    columns = read(tmp_path / "run")
    drawn = bulk_timeline.timeline(columns, Timelines(columns), 3000)
    assert drawn["resolution"] > 0
    whole = slices = 0
    for lane in drawn["lanes"]:
        for row in (row for track in lane["tracks"] for row in track["rows"]):
            at = end = 0
            starts = []
            while at < len(row):
                code = row[at + 3]
                starts.append(end + row[at])
                end = starts[-1] + row[at + 1]
                whole += row[at + 4] if code & CODES["merged"] else 1
                slices += 1
                at += 5 if code & CODES["merged"] else 4
            assert all(one <= two for one, two in pairwise(starts))
    assert whole == len(columns)
    assert slices <= 2 * 3000
    assert {
        drawn["names"][row[2]] for lane in drawn["lanes"] for track in lane["tracks"] for row in track["rows"] if row
    }
    assert all(len(bytes.fromhex(group["parts"])) == drawn["bins"] * 4 for group in drawn["groups"])
    assert any(max(bytes.fromhex(group["parts"])) > 200 for group in drawn["groups"])


def test_progress_is_for_a_terminal_alone(tmp_path):
    """Catches a long read that says nothing to who waits for it, or escape codes in a log file."""
    made_spool.make(tmp_path / "run", 30_000)
    command = [sys.executable, "-m", "raytrace_rl.cli", "report", str(tmp_path / "run")]
    plain = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert plain.stderr == b""
    assert b"\x1b" not in plain.stdout
    ours, theirs = pty.openpty()
    try:
        watched = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True, timeout=120)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert watched.stdout == plain.stdout
    assert "100%" in shown
    assert "working out the report" in shown
    assert shown.endswith("\r\x1b[K")
