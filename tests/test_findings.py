"""Findings on runs made by hand: each cause by its own name, none by another's, none in a healthy run."""

from __future__ import annotations

from typing import Any

import pytest

from raytrace_rl.monitor.model import StackRow
from raytrace_rl.monitor.report import report
from tests.made_runs import Made, data_parallel

STEPS = 8


def _loop(
    *, starve: float = 0.1, refit: float = 0.1, drain: float = 0.0, generate: float = 50.0, once: int = -1
) -> Made:
    """Steps of about 10 s of an asynchronous run; ``once`` gives the times to that step alone."""
    made = Made()
    collector = made.process("collector", rl__role="worker", rl__worker_group="collector")
    generator, trainer = made.rank(0, "generation"), made.rank(0)
    job = made.span(made.driver, "job", 0, 1000, group="job")
    at = 1.0
    for number in range(STEPS):
        given = once in {-1, number}
        wait, sync, idle = (starve, refit, drain) if given else (0.1, 0.1, 0.0)
        rollout = made.span(collector, "rollout", at - 1, at + wait, job, group="rollout")
        made.span(generator, "generate", max(at - 1, at + wait - generate), at + wait, rollout, bucket="productive")
        trained = at + wait + 9
        step = made.step(at, trained + idle + sync, parent=job)
        made.span(made.driver, "buffer_starvation", at, at + wait, step, bucket="idle")
        call = made.span(made.driver, "train", at + wait, trained, step, bucket="productive", links=(rollout,))
        made.span(trainer, "train", at + wait, trained, call, bucket="productive")
        phase = made.span(made.driver, "weight_sync", trained, trained + idle + sync, step, bucket="overhead")
        if idle:
            made.span(made.driver, "refit_bubble", trained, trained + idle, phase, bucket="idle")
        made.span(generator, "weight_sync", trained + idle, trained + idle + sync, phase, bucket="overhead")
        at = trained + idle + sync + 0.01
    return made


def _found(made: Made) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report(made.run())["findings"]
    return found


def _kinds(made: Made) -> list[tuple[str, str]]:
    return [(one["kind"], one["worker_group"]) for one in _found(made)]


def test_a_healthy_run_has_none():
    """Catches a finding where nothing is wrong."""
    assert _found(_loop()) == []
    assert _found(Made()) == []


def test_starvation_names_what_it_waits_for():
    """Catches a trainer said to starve, without who starves it."""
    (found,) = _found(_loop(starve=6))
    assert (found["kind"], found["worker_group"]) == ("starved_trainer", "generation")
    assert found["part"] == pytest.approx(6 / 15.1, rel=0.01)
    assert found["text"] == (
        "the trainer starves: 39.7% of a step goes to buffer_starvation, in which it waits for generate of generation"
    )


def test_refits():
    """Catches a slow refit called starvation, or not seen."""
    assert _kinds(_loop(refit=5)) == [("refit_bubble", "generation")]
    assert _kinds(_loop(drain=5)) == [("refit_bubble", "driver")], "waiting for workers to finish is one too"


def test_slow_generation_is_not_called_a_refit_as_well():
    """Catches the drain before a refit, long because generation is slow, named as a second cause."""
    assert _kinds(_loop(starve=8, drain=6)) == [("starved_trainer", "generation")]
    assert sorted(_kinds(_loop(starve=8, refit=6))) == [
        ("refit_bubble", "generation"),
        ("starved_trainer", "generation"),
    ]


@pytest.mark.parametrize("times", [{"starve": 60.0}, {"refit": 60.0}, {"drain": 60.0}])
def test_one_bad_step_is_no_verdict(times):
    """Catches a single long step (a restart, a checkpoint) that condemns the run."""
    assert _found(_loop(once=3, **times)) == []


def test_slow_ranks_and_nodes():
    """Catches a slow rank without its cost, and eight slow ranks where one node is slow."""
    made = Made()
    data_parallel(made, [[4.0, 4.0, 4.0, 8.0]] * 6, collective=True)
    (found,) = _found(made)
    assert (found["kind"], found["rank"]) == ("slow_rank", 3)
    assert "training[3] on node-0 is slow: in train it takes 2.0 times as long" in found["text"]
    assert "costs a step 4.00s" in found["text"]
    made = Made()
    data_parallel(made, [[4.0] * 6 + [8.0, 8.0]] * 6, nodes=4)
    (found,) = _found(made)
    assert (found["kind"], found["evidence"]["node"], found["rank"]) == ("slow_node", "node-3", None)


def test_a_small_excess_is_no_finding():
    """Catches a rank that costs two hundredths of a step in the list of what is wrong."""
    made = Made()
    data_parallel(made, [[9.9, 9.9, 10.1]] * 6)
    assert _found(made) == []


def _hangs(age: float, *, peers: int = 5, truncated: bool = True) -> Made:
    made = Made()
    collector = made.process("collector", rl__role="worker", rl__worker_group="collector")
    for n in range(peers):
        made.span(collector, "reward", n, n + 0.5, thread=n)
    outer = made.span(collector, "rollout", 10, None, thread=99, thread__name="rollout-9")
    inner = made.span(collector, "reward", 10, None, outer, thread=99, thread__name="rollout-9")
    made.span(collector, "other", 10 + age - 1, 10 + age)
    if truncated:
        for row in (outer, inner):
            row.truncate(collector.last_ns)
    return made


@pytest.mark.parametrize("truncated", [False, True])
def test_a_hanging_thread_is_named_once_by_its_innermost_span(truncated):
    """Catches a hang named for each span around it, or only once its process is dead."""
    made = _hangs(60, truncated=truncated)
    run = made.run()
    inner = next(row for row in run.spans if row.name == "reward" and row.thread == "rollout-9")
    text = '  File "/venv/site-packages/x.py", line 1, in y\n    z()\n'
    text = f'  File "/srv/rl/task.py", line 7, in score\n    judge(answer)\n{text}'
    run.stacks.append(StackRow(inner.trace_id, inner.span_id, 1, text))
    (found,) = report(run)["findings"]
    assert (found["kind"], found["worker_group"]) == ("stuck_thread", "collector")
    assert found["text"] == (
        "thread rollout-9 of collector pid 101 has stood in reward for 1m00s (others took 500.0ms), "
        'at "/srv/rl/task.py", line 7, in score: judge(answer)'
    )


def test_what_is_open_is_not_stuck():
    """Catches a span that is merely open, or cut short by a kill, called a hang; or one without peers."""
    assert _found(_hangs(4)) == []
    assert _found(_hangs(60, peers=1)) == []


def _died(at: float, *, back: float | None = None, until: float = 100) -> Made:
    made = Made()
    made.span(made.driver, "job", 0, until)
    worker = made.rank(1, "generation")
    worker.state = "dead"
    made.span(worker, "generate", at - 1, None).truncate(made.rows[-1].start_ns + 10**9)
    worker.last_ns = made.rows[-1].until_ns
    if back is not None:
        again = made.process("again", rl__role="worker", rl__worker_group="generation", nv__dl__rank=1)
        made.span(again, "generate", back, back + 1)
    return made


def test_restart_says_how_long_it_took():
    """Catches a worker that died and came back, of which nobody hears."""
    (found,) = _found(_died(50, back=58))
    assert (found["kind"], found["rank"], found["evidence"]["gap_s"]) == ("restart", 1, 8.0)
    assert "died, with 1 span open, and was back as pid 102 after 8.00s" in found["text"]


def test_a_worker_that_died_early_is_named_and_one_that_went_with_the_run_is_not():
    """Catches every worker of a run that ended without a flush in the list of what is wrong."""
    (found,) = _found(_died(50))
    assert (found["kind"], found["evidence"]["gap_s"]) == ("died", 50.0)
    assert _found(_died(97)) == []


def test_a_run_that_was_started_again():
    """Catches a second attempt that the report does not mention."""
    made = Made()
    made.step(0, 10, 1)
    again = made.process("driver-2", rl__role="driver", rl__attempt=2)
    made.span(again, "step", 20, 30, group="step", iteration=1)
    (found,) = _found(made)
    assert (found["kind"], found["evidence"]["attempts"]) == ("restart", 2)


def test_what_follows_from_a_slow_worker_is_not_named_twice():
    """Catches starvation listed beside the one slow generation worker that causes it."""
    made = _loop(starve=6)
    slow = made.rank(1, "generation")
    for n in range(20):
        made.span(slow, "generate", 20 * n, 20 * n + 12, bucket="productive")
    assert [one["kind"] for one in _found(made)] == ["slow_rank"]
