"""Bubbles and phases: idle time inside steps is named, all of it and none twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.monitor import lanes
from raytrace_rl.monitor.bubbles import bubbles
from raytrace_rl.monitor.critical_path import path
from raytrace_rl.monitor.step_times import first_step, phases
from raytrace_rl.monitor.tree import Tree
from tests.made_runs import Made


def _bubbles(made: Made):
    tree = Tree(made.run())
    found = bubbles(tree, [path(tree, step) for step in tree.steps])
    assert found is not None
    return found


def _waits(made: Made, lane: str):
    (entry,) = [one for one in _bubbles(made)["lanes"] if one["lane"] == lane]
    return [(one["kind"], one["name"], one["of"], one["idle_s"]) for one in entry["waits"]]


def test_gap_bears_the_name_of_what_the_step_waited_for():
    """Catches idle trainers of which nobody learns what they waited for."""
    made = Made()
    step = made.step(0, 10)
    sync = made.span(made.driver, "refit", 4, 8, step, bucket="overhead")
    generator, trainer = made.rank(0, "generation"), made.rank(0)
    made.span(generator, "update_weights", 5, 7, sync, bucket="overhead")
    made.span(trainer, "train", 0, 4, step, bucket="productive")
    made.span(trainer, "after", 10, 11, bucket="productive")
    assert _waits(made, "training[0]") == [
        ("step", "refit", "driver", 2),
        ("step", "step", "driver", 2),
        ("step", "update_weights", "generation[0]", 2),
    ]


def test_idle_span_names_itself():
    """Catches a wait that the worker itself has named, called after something else."""
    made = Made()
    made.step(0, 10)
    worker = made.rank(0, "generation")
    made.span(worker, "generate", 0, 3, bucket="productive")
    outer = made.span(worker, "buffer_full", 3, 9, bucket="idle")
    made.span(worker, "nested", 5, 6, outer, bucket="idle")
    made.span(worker, "generate", 9, 12, bucket="productive")
    assert _waits(made, "generation[0]") == [("span", "buffer_full", "", 5), ("span", "nested", "", 1)]


def test_time_outside_of_steps_is_no_bubble():
    """Catches start-up and validation between steps counted as bubbles of steps."""
    made = Made()
    made.step(10, 20)
    worker = made.rank(0)
    made.span(worker, "a", 0, 1, bucket="productive")
    made.span(worker, "wait", 2, 12, bucket="idle")
    made.span(worker, "b", 30, 31, bucket="productive")
    (entry,) = _bubbles(made)["lanes"]
    assert (entry["idle_s"], entry["part"]) == (10, 1)


def test_an_engines_process_is_no_lane_of_its_own():
    """Catches an engine that is listed as idle while its actor waits for it, or works without it."""
    made = Made()
    step = made.step(0, 10)
    actor, engine = made.rank(0, "generation"), made.rank(0, "generation.engine")
    actor.resource["process.pid"], engine.resource["process.parent_pid"] = 77, 77
    made.span(actor, "generate", 0, 6, step, bucket="productive")
    made.span(engine, "llm_request", 1, 2, step)
    assert [one["lane"] for one in _bubbles(made)["lanes"]] == ["generation[0]"]


def test_groups_add_their_ranks_up():
    """Catches a thousand ranks listed one by one where one line says it."""
    made = Made()
    step = made.step(0, 10)
    made.span(made.driver, "refit", 0, 10, step, bucket="overhead")
    for rank in range(4):
        worker = made.rank(rank)
        made.span(worker, "x", -1, 0, bucket="productive")
        made.span(worker, "y", 10, 11, bucket="productive")
    (entry,) = _bubbles(made)["waits"]
    assert (entry["worker_group"], entry["name"], entry["idle_s"], entry["part"]) == ("training", "refit", 40, 1)


TIMES = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(
    st.lists(TIMES, max_size=4),
    st.lists(st.tuples(TIMES, st.sampled_from(["productive", "idle", "overhead", None])), max_size=12),
)
def test_named_time_is_all_idle_time(steps, spans):
    """Catches idle time that is named twice, or not at all."""
    made = Made()
    for start, end in steps:
        made.step(start, end)
    worker = made.rank(0)
    for (start, end), bucket in [*spans, ((0, 0), None), ((30, 30), None)]:
        made.span(worker, f"s{len(made.rows)}", start, end, **({"bucket": bucket} if bucket else {}))
    run = made.run()
    tree = Tree(run)
    found = bubbles(tree, [path(tree, step) for step in tree.steps])
    if found is None:
        return
    own = [row for row in run.spans if row.process is worker]
    windows = lanes.union((step.start_ns, step.until_ns) for step in tree.steps)
    busy = [(start, end) for start, end, bucket in lanes.timeline(own) if bucket != "idle"]
    idle = lanes.total(windows) - lanes.total(lanes.intersection(lanes.union(busy), windows))
    assert round(sum(one["idle_s"] for one in found["lanes"]) * 1e9) == idle


@given(st.lists(TIMES, max_size=10), st.lists(TIMES, max_size=10))
def test_complement(left, within):
    """Catches an instant that is in a set and in its complement, or in neither."""
    left, within = lanes.union(map(tuple, left)), lanes.union(map(tuple, within))
    rest = lanes.complement(left, within)
    assert lanes.union(rest) == rest
    assert lanes.intersection(rest, left) == []
    assert lanes.total(rest) + lanes.total(lanes.intersection(left, within)) == lanes.total(within)


def _steps(*durations: float) -> Made:
    made = Made()
    for number, duration in enumerate(durations):
        step = made.step(100 * number, 100 * number + duration)
        made.span(made.driver, "train", 100 * number, 100 * number + duration - 1, step)
    return made


def test_phases_count_the_steps_in_which_they_do_not_come():
    """Catches a checkpoint at every fourth step that is told as a phase of each."""
    made = _steps(4, 4, 4, 8)
    step = next(row for row in made.rows if row.iteration == 4)
    made.span(made.driver, "save", 307, 308, step)
    entries = {one["name"]: one for one in phases(Tree(made.run()))}
    assert (entries["train"]["p50_s"], entries["train"]["max_s"], entries["train"]["mean_s"]) == (3, 7, 4)
    assert (entries["save"]["p50_s"], entries["save"]["max_s"], entries["save"]["steps"]) == (0, 1, 1)
    assert sum(one["total_s"] for one in entries.values()) == 20
    assert entries[None]["total_s"] == 3


def test_first_step_is_compared_with_those_after_it():
    """Catches compilation in the first step that is averaged away, or seen where there is none."""
    found = first_step(Tree(_steps(30, 4, 5, 4, 4).run()))
    assert found is not None
    assert (found["duration_s"], found["later_p50_s"], found["extra_s"], found["stands_out"]) == (30, 4, 26, True)
    assert found["spans"] == [{"name": "train", "duration_s": 29, "later_p50_s": 3, "extra_s": 26}]
    even = first_step(Tree(_steps(5, 4, 5, 4, 4).run()))
    assert even is not None
    assert even["stands_out"] is False
    assert first_step(Tree(_steps(5, 4, 5).run())) is None
    assert first_step(Tree(Made().run())) is None
