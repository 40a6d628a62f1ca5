"""The workers of a torch DataLoader: forked or spawned, they trace under their parent, repeat no id and end."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from raytrace_rl import TraceContext, umbrella_span
from raytrace_rl.monitor import load_run
from tests import children_work
from tests.running import running

if TYPE_CHECKING:
    from pathlib import Path

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


#: In a process of its own: this one has had Ray and gRPC in it, whose C++ threads a fork may leave in pieces.
FORKING = """
import multiprocessing, sys
from torch.utils.data import DataLoader
from raytrace_rl import init_telemetry_driver, shutdown_telemetry, umbrella_span
from tests import children_work

run_dir, length, persistent, victim = sys.argv[1], *map(int, sys.argv[2:])

def start(worker):
    if worker == victim:
        raise RuntimeError("no data here")

loader = DataLoader(children_work.Numbers(length), batch_size=2, num_workers=2, persistent_workers=bool(persistent),
                    multiprocessing_context="fork", worker_init_fn=start)
init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": run_dir})
with umbrella_span("step", "step"):
    try:
        for _ in range(2):
            assert sorted(int(value) for batch in loader for value in batch) == list(range(length))
    except RuntimeError as error:
        assert victim >= 0 and "no data here" in str(error), error
    else:
        assert victim < 0
shutdown_telemetry()
del loader
assert victim >= 0 or multiprocessing.active_children() == []
"""


def forking(run_dir: Path, *, persistent: bool = False, victim: int = -1) -> None:
    """Reads a loader with forked workers twice; the worker ``victim`` fails as it starts."""
    command = [sys.executable, "-c", FORKING, str(run_dir), str(LENGTH), str(int(persistent)), str(victim)]
    done = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("persistent", [False, True])
def test_forked_workers_hang_under_the_span_that_was_current(tmp_path, persistent):
    """Catches workers with their parent's ids, that write into its file, or whose spans are lost at their end."""
    forking(tmp_path / "run", persistent=persistent)
    found = items(tmp_path / "run")
    (step,) = [row for row in load_run(tmp_path / "run").spans if row.name == "step"]
    assert Counter(row.attributes["index"] for row in found) == dict.fromkeys(range(LENGTH), 2)
    assert {row.parent_span_id for row in found} == {step.span_id}
    assert len({row.process.key for row in found}) == (2 if persistent else 4)
    assert {row.process.role for row in found} == {"worker"}


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


def test_a_worker_that_dies_takes_nothing_with_it(tmp_path):
    """Catches a loader that hangs because telemetry in its workers does."""
    forking(tmp_path / "run", victim=1)
    assert {row.attributes["index"] for row in items(tmp_path / "run")} <= set(range(LENGTH))
