"""The workers of a torch DataLoader: forked or spawned, they trace under their parent, repeat no id and end."""

from __future__ import annotations

import functools
import multiprocessing
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from raytrace_rl import TraceContext, umbrella_span
from raytrace_rl.monitor import load_run
from tests import children_work
from tests.running import running

pytest_plugins = ["tests.telemetry_fixtures"]

LENGTH = 12


class Given(children_work.Numbers):
    """A data set that takes its trace context along, for workers that inherit none."""

    def __init__(self, given: TraceContext) -> None:
        super().__init__(LENGTH)
        self.given = given

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        with self.given.attach():
            return super().__getitem__(index)


def read(loader: Any) -> list[int]:
    """Everything that a loader gives, in order of value."""
    return sorted(int(value) for batch in loader for value in batch)


def items(run_dir: Any) -> Any:
    """The run's spans of items; none came twice, under no id that another has."""
    run = load_run(run_dir)
    assert run.damage == []
    assert run.duplicates == 0
    assert len({row.span_id for row in run.spans}) == len(run.spans)
    return [row for row in run.spans if row.name == "item"]


@pytest.mark.parametrize("persistent", [False, True])
def test_forked_workers_hang_under_the_span_that_was_current(tmp_path, persistent):
    """Catches workers with their parent's ids, that write into its file, or whose spans are lost at their end."""
    loader: Any = DataLoader(
        children_work.Numbers(LENGTH),
        batch_size=2,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context="fork",
    )
    with running(tmp_path / "run") as telemetry:
        with umbrella_span("step", "step"):
            assert read(loader) == read(loader) == list(range(LENGTH))
        step = telemetry.span("step")
    found = items(tmp_path / "run")
    assert Counter(row.attributes["index"] for row in found) == dict.fromkeys(range(LENGTH), 2)
    assert {row.parent_span_id for row in found} == {step.span_id.hex()}
    assert len({row.process.key for row in found}) == (2 if persistent else 4)
    assert {row.process.role for row in found} == {"worker"}
    del loader
    assert multiprocessing.active_children() == []


def test_spawned_workers_take_what_they_are_given(tmp_path):
    """Catches workers that start anew and whose telemetry nobody starts."""
    with running(tmp_path / "run") as telemetry:
        with umbrella_span("step", "step"):
            data: Any = Given(TraceContext.capture())
            loader: Any = DataLoader(data, num_workers=2, multiprocessing_context="spawn")
            assert read(loader) == list(range(LENGTH))
        step = telemetry.span("step")
    found = items(tmp_path / "run")
    assert sorted(row.attributes["index"] for row in found) == list(range(LENGTH))
    assert {row.parent_span_id for row in found} == {step.span_id.hex()}


def _die(worker: int, *, victim: int) -> None:
    if worker == victim:
        raise RuntimeError("no data here")


def test_a_worker_that_dies_takes_nothing_with_it(tmp_path):
    """Catches a loader that hangs because telemetry in its workers does."""
    loader: Any = DataLoader(
        children_work.Numbers(LENGTH),
        num_workers=2,
        multiprocessing_context="fork",
        worker_init_fn=functools.partial(_die, victim=1),
    )
    with running(tmp_path / "run"), umbrella_span("step", "step"), pytest.raises(RuntimeError, match="no data here"):
        read(loader)
    assert {row.attributes["index"] for row in items(tmp_path / "run")} <= set(range(LENGTH))
