"""The difference of two runs: planted changes are found, noise and few spans are told as what they are."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import made_spool
from raytrace_rl import cli
from raytrace_rl.monitor import large, load_run
from raytrace_rl.monitor.diff import diff, of_sides, side
from raytrace_rl.monitor.model import Run
from raytrace_rl.monitor.text_diff import render
from tests.bulk_runs import ranked_run, spooled
from tests.made_runs import Made
from tests.spooling import T0, Spool, ended, resource, span
from tests.test_report import schema_paths

STEPS = 15


def _run(seed: int, *, noise: float = 0.03, steps: int = STEPS, **factors: float) -> Run:
    """Steps with a refit, a training of two ranks and a constant span; ``train=2`` makes the training take twice."""
    rng = random.Random(seed)
    made = Made()
    ranks = [made.rank(0), made.rank(1)]
    job = made.span(made.driver, "job", 0, 100 * steps, group="job")

    def length(name: str, typical: float) -> float:
        return typical * factors.get(name, 1.0) * (1 + noise * rng.uniform(-1, 1))

    for n in range(steps):
        at = 100.0 * n
        refit = length("refit", 2)
        train = [length("train", 10) * factors.get(f"rank_{rank}", 1.0) for rank in (0, 1)]
        step = made.step(at, at + refit + max(train), parent=job)
        made.span(made.driver, "refit", at, at + refit, step, bucket="overhead")
        for process, duration in zip(ranks, train, strict=True):
            made.span(process, "train", at + refit, at + refit + duration, step, bucket="productive")
    return made.run()


def _verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["verdict"] for entry in found["span_names"]}


def test_a_run_does_not_differ_from_itself():
    """Catches a difference that is made by comparing."""
    found = diff(_run(1), _run(1))
    assert set(_verdicts(found).values()) <= {"same", "unclear"}
    assert found["steps"]["verdict"] == "same"
    assert all(entry["change"] == 0 for entry in found["buckets"])


def test_what_got_slower_is_named_and_nothing_else():
    """Catches a slower span that is missed, or that takes unchanged ones along."""
    found = diff(_run(1), _run(2, train=1.3))
    assert _verdicts(found) == {"train": "slower", "step": "slower", "refit": "same", "job": "unclear"}
    train = next(entry for entry in found["span_names"] if entry["name"] == "train")
    assert train["ratio"] == pytest.approx(1.3, rel=0.05)
    assert train["step_change_s"] == pytest.approx(6, rel=0.2)
    back = diff(_run(2, train=1.3), _run(1))
    assert _verdicts(back)["train"] == "faster"


def test_one_rank_that_got_slower_is_named():
    """Catches a slow rank that the mean of its group hides."""
    found = diff(_run(1), _run(2, rank_1=1.5))
    changed = [(e["worker_group"], e["rank"], e["name"]) for e in found["ranks"] if e["verdict"] == "slower"]
    assert changed == [("training", 1, "train")]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_difference(seed):
    """Catches a verdict of slower on two runs of the same code."""
    found = diff(_run(seed, noise=0.4), _run(1000 + seed, noise=0.4))
    assert set(_verdicts(found).values()) <= {"same", "unclear"}
    assert {entry["verdict"] for entry in found["ranks"]} <= {"same", "unclear"}


def test_few_spans_and_noise_are_unclear_and_not_the_same():
    """Catches a clean bill of health on three spans, or on noise in which a change would drown."""
    assert _verdicts(diff(_run(1, steps=3), _run(2, steps=3)))["refit"] == "unclear"
    assert _verdicts(diff(_run(1, noise=0.9), _run(2, noise=0.9)))["refit"] == "unclear"


def test_new_and_gone_names():
    """Catches a span that exists in one run only, compared with zero."""
    a, b = _run(1), _run(2)
    for row in b.spans:
        if row.name == "refit":
            row.name = "new refit"
    verdicts = _verdicts(diff(a, b))
    assert (verdicts["refit"], verdicts["new refit"]) == ("gone", "new")


def test_empty_runs():
    """Catches a division by zero where there is nothing to compare."""
    found = diff(Run("a", "a"), Run("b", "b"))
    assert (found["span_names"], found["buckets"], found["steps"]["verdict"]) == ([], [], "same")
    assert "one of the runs has none" in render(found)


def test_schema_is_documented():
    """Catches a key of ``diff --json`` that docs/diff.md does not describe, or one it describes in vain."""
    page = (Path(__file__).parents[1] / "docs" / "diff.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|", page, re.MULTILINE))
    found = json.loads(json.dumps(diff(_run(1), _run(2, train=1.5))))
    assert set(schema_paths(found)) == described
    assert found["schema"] == 1


def test_text_shows_changes_first():
    """Catches a text in which one has to look for what changed."""
    text = render(diff(_run(1), _run(2, train=2, rank_1=1.2)))
    lines = text.splitlines()
    table = lines[lines.index("Spans by name (p50 of one; summed time a step):") + 2 :]
    assert table[0].split()[0] == "train"
    assert table[0].endswith("slower")
    assert "Ranks that changed:" in text
    assert re.search(r"Steps: 12\.\d\ds -> \d\d\.\d\ds \(median, x[12]\.\d\d\): slower", text)
    assert max(map(len, lines)) <= 120


def test_command(tmp_path, capsys):
    """Catches a command that reads the wrong run first, or fails without a word where one cannot be read."""
    for letter, seconds in (("a", 1.0), ("b", 2.0)):
        spool = Spool(tmp_path / letter)
        spool.segment(1, ended(*(span(n, n, n + seconds, name="x") for n in range(1, 9))), resource=resource())
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == cli.OK
    (entry,) = json.loads(capsys.readouterr().out)["span_names"]
    assert (entry["a_p50_s"], entry["b_p50_s"], entry["verdict"]) == (1, 2, "slower")
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "none")]) == cli.UNUSABLE
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_large_run_is_compared_as_a_small_one(tmp_path, seed):
    """Catches columns that another duration is taken from, or a median that differs in its last digit."""
    pytest.importorskip("numpy")
    from raytrace_rl.monitor.bulk import reading, sides

    paths = [spooled(ranked_run(random.Random(seed + n)).run(), tmp_path / str(n)) for n in (0, 100)]
    rows = [side(load_run(path)) for path in paths]
    columns = [sides.side(reading.read(path)) for path in paths]
    assert columns == rows
    assert of_sides(*columns) == of_sides(*rows)


def test_open_and_truncated_spans_are_left_out_of_columns_too(tmp_path):
    """Catches a span that a kill has cut short, in the durations of a large run alone."""
    pytest.importorskip("numpy")
    from raytrace_rl.monitor.bulk import reading, sides

    spool = Spool(tmp_path)
    spool.segment(1, ended(*(span(n, n, n + 1, name="x") for n in range(1, 9))), resource=resource(), heartbeat_ns=T0)
    spool.slots(1, [span(20, 2, None, name="x")])
    spool.live_file(1)
    found = sides.side(reading.read(tmp_path))
    assert (found.spans, found.names["x"].size) == (9, 8)
    assert found == side(load_run(tmp_path))


def test_command_reads_large_runs_as_columns(tmp_path, capsys, monkeypatch):
    """Catches a comparison of two large runs for which each span becomes an object."""
    pytest.importorskip("numpy")
    for letter in "ab":
        made_spool.make(tmp_path / letter, 200)
    paths = [str(tmp_path / letter) for letter in "ab"]
    assert cli.main(["diff", *paths, "--json"]) == cli.OK
    wanted = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(large, "LARGE_BYTES", 0)
    monkeypatch.setattr(large, "load_run", None)
    assert cli.main(["diff", *paths, "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out) == wanted
