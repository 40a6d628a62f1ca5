"""A TRACEPARENT in the environment in which Ray was started: no parent of what its workers, and their children, do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from raytrace_rl import setup, traced, umbrella_span
from raytrace_rl.actors import flush_and_kill
from raytrace_rl.monitor import load_run
from tests.children_work import Sandbox
from tests.conftest import start_cluster
from tests.readback import get
from tests.test_children import PARENT, PROGRAM, TRACE_ID

if TYPE_CHECKING:
    from pathlib import Path

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = pytest.mark.ray


def test_what_ray_inherited_parents_nothing(tmp_path: Path, monkeypatch):
    """Catches calls without a carrier, and programs that a worker starts, in the trace of who once started Ray."""
    import ray

    monkeypatch.setenv("TRACEPARENT", PARENT)
    setup.init_telemetry_driver({"enabled": True, "run_dir": str(tmp_path / "run"), "span_groups": "all"})
    try:
        start_cluster(num_cpus=2)
        cls = ray.remote(num_cpus=0.01)(Sandbox)
        with umbrella_span("step", "step"):
            sandbox = traced(cls).remote()
            get(sandbox.around.remote())
            get(traced(sandbox).run.remote(PROGRAM))
            assert len(flush_and_kill([sandbox], 20).flushed) == 1
    finally:
        ray.shutdown()
        setup.shutdown_telemetry()
    spans = {row.name: row for row in load_run(tmp_path / "run").spans}
    assert spans["step"].trace_id == TRACE_ID, "the driver itself goes on with the trace that it was given"
    assert spans["actor.run"].parent_span_id == spans["step"].span_id
    assert spans["program.given"].parent_span_id == spans["actor.run"].span_id
    for name in ("actor.plain", "program.plain"):
        assert spans[name].parent_span_id is None
        assert spans[name].trace_id != TRACE_ID
