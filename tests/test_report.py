"""The report: known numbers, its documented schema, and text that fits its screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from raytrace_rl.monitor import Run, drawing, load_run, tables
from raytrace_rl.monitor.report import report, summary
from raytrace_rl.monitor.report import text as full_text
from raytrace_rl.monitor.windows import Windows
from raytrace_rl.spool.format import Kind, pack_record
from tests.clock_runs import troubled
from tests.made_runs import Made, data_parallel
from tests.relay.noted_runs import note_all, noted_run
from tests.spooling import SECOND, T0, Spool, ended, resource, span

#: What a link to the rollout of trajectories says.
ORIGIN = {"rl.trajectory.count": 8, "rl.trajectory.age_s": 2.5, "rl.weight_version": 1, "rl.trajectory.lag": 1}


@pytest.fixture
def run(tmp_path):
    """A driver with four steps; one generation worker was killed, one segment is damaged, one is lost."""
    spool = Spool(tmp_path / "run")
    rows = [span(1, 0, 20, name="rl.grpo.job", rl__span_group="job")]
    for n, seconds in enumerate((1, 2, 3, 4), 1):
        start = 4 * n
        rows.append(
            span(
                n + 1,
                start,
                start + seconds,
                parent=1,
                name="rl.grpo.step",
                rl__span_group="step",
                rl__iteration=n,
            )
        )
        rows.append(
            span(
                n + 10,
                start,
                start + 1,
                parent=n + 1,
                name="rl.grpo.data",
                rl__span_group="data_processing",
                rl__bucket="overhead",
                rl__iteration=n,
                error=n == 3,
                links=[(100, ORIGIN)] if n == 2 else (),
            )
        )
    drops = pack_record(Kind.DROPS, b'{"spans": 3, "attributes": 2}')
    spool.segment(
        10,
        ended(*rows) + drops,
        heartbeat_ns=T0 + 20 * SECOND,
        resource=resource(rl__role="driver", rl__run__id="my-run"),
    )
    identity = resource(
        rl__role="worker",
        rl__worker_group="generation",
        nv__dl__rank=1,
        ray__actor__class="GenWorker",
        rl__run__id="my-run",
    )
    work = ended(
        span(
            100,
            4,
            6,
            parent=2,
            name="rl.vllm.generate",
            rl__bucket="productive",
            rl__span_group="generation",
            rl__queued_ns=SECOND // 4,
        )
    )
    orphan = ended(span(101, 6, 7, parent=4711, name="lost child"))
    spool.segment(11, work + b"?" * 9 + orphan, heartbeat_ns=T0 + 12 * SECOND, resource=identity)
    spool.slots(11, [span(102, 8, None, parent=3, name="rl.vllm.generate", rl__bucket="productive")])
    spool.live_file(11)
    (spool.node_dir / f"{spool.stem(11)}.1.rts").symlink_to("/nowhere/else")
    return load_run(spool.run_dir)


def test_steps(run):
    """Catches wrong step statistics."""
    steps = report(run)["steps"]
    assert (steps["count"], steps["incomplete"]) == (4, 0)
    assert (steps["mean_s"], steps["p50_s"], steps["max_s"]) == (2.5, 2.5, 4)
    assert steps["p95_s"] == pytest.approx(3.85)
    assert [(step["iteration"], step["duration_s"]) for step in steps["list"]] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_span_names(run):
    """Catches totals by name that are wrong or in a useless order."""
    table = report(run)["span_names"]
    assert [(e["name"], e["count"], e["total_s"]) for e in table] == [
        ("rl.grpo.job", 1, 20),
        ("rl.grpo.step", 4, 10),
        ("rl.vllm.generate", 2, 6),
        ("rl.grpo.data", 4, 4),
        ("lost child", 1, 1),
    ]
    data = table[3]
    assert (data["span_group"], data["bucket"], data["errors"]) == ("data_processing", "overhead", 1)


def test_loss_names_the_truncated_span_and_its_worker(run):
    """Catches a killed worker that the report cannot name, and losses that it leaves out."""
    loss = report(run)["loss"]
    (cut,) = loss["truncated_spans"]
    assert (cut["name"], cut["duration_s"]) == ("rl.vllm.generate", 4)
    assert (cut["process"]["worker_group"], cut["process"]["rank"]) == ("generation", 1)
    assert (cut["process"]["pid"], cut["process"]["actor_class"], cut["process"]["role"]) == (11, "GenWorker", "worker")
    assert (loss["spans"], loss["truncated"], loss["dropped"], loss["open"]) == (12, 1, 3, 0)
    assert (loss["damaged_records"], loss["skipped_bytes"], loss["unreachable_segments"]) == (1, 9, 1)
    assert loss["drops"] == {"spans": 3, "attributes": 2}
    assert sorted(d["kind"] for d in loss["damage"]) == ["record", "unreachable"]


def test_traces(run):
    """Catches a trace that has fallen apart and a report that does not say so."""
    traces = report(run)["traces"]
    assert (traces["traces"], traces["roots"], traces["missing_parent"]) == (1, 1, 1)
    assert traces["root_names"] == {"rl.grpo.job": 1}
    assert traces["missing_parent_names"] == {"lost child": 1}


def test_processes(run):
    """Catches a process whose state or losses are not shown."""
    driver, worker = report(run)["processes"]
    assert (driver["state"], driver["role"], driver["spans"], driver["drops"]) == (
        "closed",
        "driver",
        9,
        {"spans": 3, "attributes": 2},
    )
    assert (worker["state"], worker["label"], worker["truncated"]) == ("dead", "generation[1] GenWorker pid 11", 1)
    assert worker["last_heartbeat_ns"] == T0 + 12 * SECOND


def test_goodput_in_seconds(run):
    """Catches a unit or a key that is wrong on the way into the report."""
    goodput = report(run)["goodput"]
    assert goodput["job"]["wall_s"] == 20
    assert goodput["job"]["overhead_s"] == 4
    assert goodput["job"]["unattributed_s"] == 16
    assert goodput["sum"]["productive_s"] == 6
    assert goodput["fleet"]["unit"] == "worker"
    assert goodput["fleet"]["productive_s"] == 6


def schema_paths(value, prefix=""):
    """Key paths of a report as docs/report.md writes them: ``steps.list[].iteration``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{prefix}{key}"
            yield from schema_paths(item, f"{prefix}{key}.")
    elif isinstance(value, list):
        for item in value[:1]:
            yield from schema_paths(item, prefix[:-1] + "[].")


def test_schema_is_documented(run, tmp_path):
    """Catches a key of ``report --json`` that docs/report.md does not describe, or one it describes in vain."""
    documentation = (Path(__file__).parents[1] / "docs" / "report.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|", documentation, re.MULTILINE))
    free = (
        "loss.drops.",
        "processes[].drops.",
        "traces.root_names.",
        "traces.missing_parent_names.",
        "trajectories.steps[].weight_versions.",
        "findings[].evidence.",
    )
    # open_spans is empty here, and has the entries of truncated_spans.
    made = Made()
    data_parallel(made, [[4.0, 4.0, 6.0, 6.0]] * 12, nodes=2)
    relayed = noted_run(tmp_path / "relayed")
    note_all(relayed)
    run.windows = Windows(every_ns=5 * SECOND)
    runs = (run, made.run(), troubled(), load_run(relayed.run_dir))
    documents = [json.loads(json.dumps(report(one))) for one in runs]
    actual = {path for one in documents for path in schema_paths(one) if not path.startswith(free)}
    assert actual == described


def test_summary_fits_a_screen(run):
    """Catches a summary that scrolls away, wraps, or holds escape codes."""
    for row in run.spans[:5]:
        row.truncate(row.start_ns + SECOND)
    run.spans[0].name = "x" * 200 + "\x1b[31m\n"
    run.run_id = "my-run" * 50
    lines = summary(run).splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines if "More:" not in line)
    assert all(line.isprintable() for line in lines)
    joined = "\n".join(lines)
    for wanted in ("my-run", "goodput", "coverage", "dropped", "truncated", "Steps: ", "on driver pid 10"):
        assert wanted in joined


def test_summary_names_the_truncated_span(run):
    """Catches the one line that matters after a kill -9 missing from the summary."""
    assert "truncated: rl.vllm.generate on generation[1] GenWorker pid 11 after 4.00s" in summary(run)


def test_text_has_each_section(run):
    """Catches a section of the report that is gone from the text."""
    shown = full_text(run)
    for wanted in (
        "Job (driver's lane, 20.00s of wall clock): goodput 0.0%",
        "Fleet (1 worker lane",
        "Sum of bucketed spans",
        "Steps: 4 complete, mean 2.50s, p50 2.50s",
        "Trajectories: 8 trained on, age 2.50s to 2.50s (median 2.50s)",
        "weight versions behind: 1 to 1 (median 1)",
        "generation                         1        1  250.0ms  250.0ms  250.0ms",
        "rl.grpo.data                   overhead         4    4.00s    1.00s    1.00s      1",
        "generation[1] GenWorker pid 11",
        "1 damaged records, 1 unreachable files",
        "/nowhere/else",
        "also dropped: 2 attributes",
        "parent missing: lost child (1 x)",
    ):
        assert wanted in shown
    assert max(map(len, (line for line in shown.splitlines() if " at " not in line))) <= 100


def test_text_says_why_steps_take_long():
    """Catches the sections on critical path, stragglers and bubbles missing from the text, or too wide for it."""
    made = Made()
    data_parallel(made, [[4.0, 4.0, 6.0]] * 5)
    shown = full_text(made.run())
    for wanted in (
        "Phases (seconds a step, in the driver's lane):",
        "Critical path (5 steps, 32.50s): what each step waited for",
        "  train                              training[2]          productive  92.3%    6.00s    6.00s      5",
        "Stragglers: 1 (3 ranks compared)",
        "  training[2] on node-0: 2.00s a step, 30.8% of it",
        "    is slow in train, by 2.00s (1.5 x the others) in 100.0% of 5 steps",
        "the step was in train of training",
    ):
        assert wanted in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_process_of_a_long_name_keeps_its_pid(tmp_path):
    """Catches the one word of a process that a person can look for on the host, cut off at the table's edge."""
    spool = Spool(tmp_path / "run")
    group = "a_worker_group_of_a_long_name"
    for pid in (1234567, 1234568):
        spool.segment(pid, b"", resource=resource(rl__worker_group=group, nv__dl__rank=pid % 8))
    lines = full_text(load_run(spool.run_dir)).splitlines()
    table = lines[lines.index("Processes:") + 1 :]
    assert table[0].split()[:2] == ["process", "pid"]
    assert [line.split()[1] for line in table[1:3]] == ["1234567", "1234568"]
    assert all(len(line) <= 80 for line in table[:3])


def test_empty_run():
    """Catches a report of nothing that divides by zero."""
    empty = Run("x", "x")
    assert report(empty)["goodput"]["job"] is None
    assert report(empty)["run"]["start_ns"] is None
    assert "no driver" in summary(empty)
    assert "Steps: none" in full_text(empty)


def test_live_run_shows_open_spans(tmp_path):
    """Catches a running job that is reported as broken."""
    spool = Spool(tmp_path / "run")
    spool.segment(10, b"", heartbeat_ns=T0 + 9 * SECOND, resource=resource(rl__role="driver"))
    spool.slots(10, [span(1, 0, None, name="rl.grpo.job", rl__span_group="job")])
    lock = spool.alive(10)
    try:
        run = load_run(spool.run_dir)
    finally:
        lock.release()
    loss = report(run)["loss"]
    assert (loss["open"], loss["truncated"]) == (1, 0)
    assert loss["open_spans"][0]["duration_s"] == 9
    assert "1 span still open" in summary(run)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, "0s"),
        (12e-6, "12us"),
        (0.0123, "12.3ms"),
        (1.5, "1.50s"),
        (61, "1m01s"),
        (3725, "1h02m"),
        (90061, "1d01h"),
    ],
)
def test_seconds(value, wanted):
    """Catches durations drawn in the wrong unit."""
    assert drawing.seconds(value) == wanted


def test_percentile():
    """Catches an off-by-one in the percentiles."""
    assert tables.percentile([7], 0.95) == 7
    assert tables.percentile([0, 10], 0.5) == 5
    assert tables.percentile(list(range(101)), 0.95) == 95
