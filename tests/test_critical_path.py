"""The critical path: known runs, and what must hold for any."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.monitor.critical_path import critical_path, path
from raytrace_rl.monitor.meetings import last_to_come, meetings, ranked
from raytrace_rl.monitor.tree import Tree
from tests.made_runs import Made, data_parallel, seconds


def _path(made: Made, number: int = 0, *, meet: bool = False) -> list[tuple[str, str, float, float]]:
    """Name, lane, start and end of each segment of a step's path."""
    tree = Tree(made.run())
    last = last_to_come(meetings(tree, [ranked(tree, step) for step in tree.steps])) if meet else None
    segments = path(tree, tree.steps[number], last)
    return [(s.row.name, s.row.process.key, seconds(s.start_ns), seconds(s.end_ns)) for s in segments]


def test_path_follows_the_child_that_ends_last_across_processes():
    """Catches a path that stays in the driver, or follows a worker on which nobody waited."""
    made = Made()
    step = made.step(0, 10)
    call = made.span(made.driver, "train", 1, 9, step)
    made.span(made.rank(0), "work", 2, 5, call)
    made.span(made.rank(1), "work", 2, 8, call)
    assert _path(made) == [
        ("step", "driver", 0, 1),
        ("train", "driver", 1, 2),
        ("work", "training-1", 2, 8),
        ("train", "driver", 8, 9),
        ("step", "driver", 9, 10),
    ]


def test_children_one_after_the_other_are_all_on_the_path():
    """Catches a path of the last child alone."""
    made = Made()
    step = made.step(0, 10)
    for start in (0, 3, 6):
        made.span(made.driver, f"part {start}", start, start + 3, step)
    assert _path(made) == [
        ("part 0", "driver", 0, 3),
        ("part 3", "driver", 3, 6),
        ("part 6", "driver", 6, 9),
        ("step", "driver", 9, 10),
    ]


def test_what_outlives_its_parent_was_not_waited_for():
    """Catches work that was started and left alone, taken for what the step waited for."""
    made = Made()
    step = made.step(0, 10)
    made.span(made.rank(0), "left alone", 1, 30, step)
    made.span(made.driver, "own", 2, 9, step)
    assert [(name, *times) for name, _, *times in _path(made)] == [("step", 0, 2), ("own", 2, 9), ("step", 9, 10)]


def test_a_child_on_a_node_whose_clock_is_ahead_counts():
    """Catches a worker that drops off the path because its clock is a millisecond ahead of its caller's."""
    made = Made()
    step = made.step(0, 10)
    made.span(made.rank(0, node="node-b"), "work", 1, 10.001, step)
    assert _path(made) == [("step", "driver", 0, 1), ("work", "training-0", 1, 10)]


def test_a_starved_trainer_leads_to_the_rollout_it_waited_for():
    """Catches a path that ends at the word starvation: what was slow is the rollout, in another tree."""
    made = Made()
    collector = made.process("collector", rl__role="worker", rl__worker_group="collector")
    generator = made.rank(0, "generation")
    job = made.span(made.driver, "job", 0, 30)
    first = made.span(collector, "rollout", 1, 4, job, group="rollout")
    second = made.span(collector, "rollout", 4, 9, job, group="rollout")
    made.span(generator, "generate", 5, 8, second, bucket="productive")
    step = made.step(2, 12)
    made.span(made.driver, "starved", 2, 10, step, bucket="idle")
    made.span(made.driver, "train", 10, 12, step, links=(first, second))
    assert _path(made) == [
        ("rollout", "collector", 2, 4),
        ("rollout", "collector", 4, 5),
        ("generate", "generation-0", 5, 8),
        ("rollout", "collector", 8, 9),
        ("starved", "driver", 9, 10),
        ("train", "driver", 10, 12),
    ]


def test_where_ranks_wait_for_each_other_the_path_goes_to_the_last_to_come():
    """Catches the fast rank's wait in a collective blamed for what a slow rank did."""
    made = Made()
    data_parallel(made, [[2.0, 7.0], [2.0, 6.0], [3.0, 7.0]], collective=True)
    segments = _path(made, meet=True)
    assert segments[:1] == [("train", "training-1", 0, 7)]
    assert (segments[1][0], segments[1][2], segments[1][3]) == ("all_reduce", 7, 7.125)
    names = {(name, lane) for name, lane, *_ in _path(made, 1, meet=True)}
    assert ("train", "training-1") in names
    assert ("train", "training-0") not in names


def test_table_adds_up_and_counts_steps_without_a_span():
    """Catches parts that are not parts of the steps, and a median over the few steps in which a span came."""
    made = Made()
    for number in range(4):
        step = made.step(10 * number, 10 * number + 8)
        made.span(made.driver, "train", 10 * number, 10 * number + 6, step, bucket="productive")
        if number == 3:
            made.span(made.driver, "save", 10 * number + 6, 10 * number + 8, step, bucket="overhead")
    tree = Tree(made.run())
    table = critical_path(tree, [path(tree, step) for step in tree.steps])
    assert table is not None
    assert (table["steps"], table["total_s"]) == (4, 32)
    assert [(e["name"], e["total_s"], e["part"], e["p50_s"], e["steps"]) for e in table["spans"]] == [
        ("train", 24, 0.75, 6, 4),
        ("step", 6, 6 / 32, 2, 3),
        ("save", 2, 2 / 32, 0, 1),
    ]
    assert table["list"][3]["path"] == [
        {"name": "train", "lane": "driver", "self_s": 6.0},
        {"name": "save", "lane": "driver", "self_s": 2.0},
    ]


def test_no_steps_no_path():
    """Catches a section about steps of a run that has none."""
    assert critical_path(Tree(Made().run()), []) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(0, 20),
            st.integers(0, 12),
            st.integers(0, 3),
            st.sampled_from(["idle", "productive", None]),
            st.lists(st.integers(0, 12), max_size=2),
        ),
        max_size=12,
    )
)
def test_path_fills_the_step_whatever_the_spans(drawn):
    """Catches an instant of a step that is on the path twice, or never; and damaged parentage that has no end."""
    made = Made()
    step = made.step(2, 17)
    rows = [step]
    processes = [made.driver, *(made.rank(n, node=f"node-{n % 2}") for n in range(3))]
    for start, length, _, process, bucket, _ in drawn:
        values = {} if bucket is None else {"bucket": bucket}
        rows.append(made.span(processes[process], f"s{len(rows)}", start, start + length, step, **values))
    for row, (_, _, parent, _, _, links) in zip(rows[1:], drawn, strict=True):
        row.parent_span_id = rows[parent % len(rows)].span_id  # of any shape, circles among them
        row.links = made.span(made.driver, "links", 0, 0, links=tuple(rows[at % len(rows)] for at in links)).links
    tree = Tree(made.run())
    last = {id(row): rows[(at + 1) % len(rows)] for at, row in enumerate(rows) if at % 3 == 0}
    for segments in (path(tree, step), path(tree, step, lambda row: last.get(id(row)))):
        assert seconds(segments[0].start_ns) == 2
        assert seconds(segments[-1].end_ns) == 17
        assert all(one.start_ns < one.end_ns for one in segments)
        assert all(one.end_ns == two.start_ns for one, two in pairwise(segments))


def test_deep_and_wide_steps_take_linear_time():
    """Catches a recursion that overflows on a deep tree, and children that are gone through again and again."""
    made = Made()
    at = made.step(0, 40_000)
    for n in range(3000):
        at = made.span(made.driver, "deep", n, 40_000 - n, at)
    for n in range(20_000):
        made.span(made.driver, "wide", 5000 + n, 5001 + n, at)
    assert len(_path(made)) == pytest.approx(26_000, abs=10)
