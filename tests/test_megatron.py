"""Megatron's topology, phases and timers, on a Megatron of the same shape. The real one trains in `tests/engines`."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from raytrace_rl import RLSpanGroup as G
from raytrace_rl import _state, managed_span, setup
from raytrace_rl.integrations import _megatron_topology
from raytrace_rl.integrations.megatron import (
    MEGATRON_TIMER,
    SpanTimers,
    TracedMegatronWorker,
    describe_parallelism,
    forward_backward_span,
    log_prob_span,
    megatron_topology,
    optimizer_span,
    trace_megatron_timers,
    weight_export_span,
)
from raytrace_rl.monitor import load_run
from tests.running import attributes, child, running

pytest_plugins = ["tests.telemetry_fixtures"]

AXES = {
    "tensor_model_parallel": (4, 3),
    "pipeline_model_parallel": (2, 1),
    "data_parallel": (1, 0),
    "context_parallel": (1, 0),
    "expert_model_parallel": (2, 1),
}
SIZES = {"tp": 4, "pp": 2, "dp": 1, "cp": 1, "ep": 2}


class ParallelState(ModuleType):
    """The shape of ``megatron.core.parallel_state``."""

    initialized = True

    def model_parallel_is_initialized(self) -> bool:
        return self.initialized


class Timer:
    """The shape of one of Megatron's timers: it refuses to be started twice."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, barrier: bool = False) -> None:
        assert self.calls[-1:] != ["start"]
        self.calls.append("start")

    def stop(self, barrier: bool = False) -> None:
        self.calls.append("stop")

    def elapsed(self, reset: bool = True) -> float:
        return 1.5


class Timers:
    """The shape of ``megatron.core.timers.Timers``: what is above the log level is one dummy for all."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}
        self.dummy = SimpleNamespace(start=lambda barrier=False: None, stop=lambda barrier=False: None)

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return self.dummy if log_level == 2 else self._timers.setdefault(name, Timer())


@pytest.fixture
def megatron(monkeypatch) -> ParallelState:
    """Megatron's modules as far as we look at them, on rank 7 of 16, and a torch that agrees."""
    state = ParallelState("megatron.core.parallel_state")
    for name, (size, rank) in AXES.items():
        setattr(state, f"get_{name}_world_size", lambda size=size: size)
        setattr(state, f"get_{name}_rank", lambda rank=rank: rank)
    timers = ModuleType("megatron.core.timers")
    timers.Timers = type("Timers", (Timers,), {"__call__": Timers.__call__})
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setitem(sys.modules, "megatron.core.timers", timers)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 7)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 16)
    monkeypatch.setattr(_megatron_topology, "_told", None)
    return state


def timers_class() -> Any:
    """Megatron's class of timers, as the program imports it."""
    return sys.modules["megatron.core.timers"].Timers


def test_nothing_is_imported():
    """Catches an import that a worker without Megatron cannot do, or that takes CUDA before it chose a device."""
    child(
        """
        import sys
        import raytrace_rl.integrations.megatron as m
        with m.forward_backward_span():
            pass
        assert m.megatron_topology() is None
        assert not {'megatron', 'torch', 'ray'} & sys.modules.keys()
        """
    )


def test_without_megatron_the_phases_are_plain_spans(telemetry):
    """Catches a trainer of another make whose spans break, or claim a topology."""
    with log_prob_span(rows=3), forward_backward_span(), optimizer_span(), weight_export_span():
        pass
    found = {span.name: attributes(span) for span in telemetry.spans()}
    assert {name: span["rl.bucket"] for name, span in found.items()} == {
        "rl.megatron.log_probs": "overhead",
        "rl.megatron.forward_backward": "productive",
        "rl.megatron.optimizer": "productive",
        "rl.megatron.weight_export": "overhead",
    }
    assert found["rl.megatron.log_probs"]["rows"] == 3
    assert "dl.tensor_parallel.size" not in found["rl.megatron.optimizer"]
    assert not describe_parallelism()


def test_spans_and_resource_bear_the_topology_once_megatron_knows_it(megatron, tmp_path, monkeypatch):
    """Catches a rank that telemetry never hears of, because it had started before Megatron's groups."""
    megatron.initialized = False
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RAYTRACE_RL_SPAN_GROUPS", "all")
    setup.init_telemetry_worker(worker_group="training")
    with forward_backward_span():
        pass
    megatron.initialized = True
    with optimizer_span():
        pass
    setup.shutdown_telemetry()
    run = load_run(tmp_path / "run")
    (process,) = run.processes
    assert (process.rank, process.resource["nv.dl.world_size"]) == (7, 16)
    assert {axis: process.resource[f"nv.dl.topology.size.{axis}"] for axis in SIZES} == SIZES
    before, after = run.spans
    assert "dl.tensor_parallel.rank" not in before.attributes
    assert (after.attributes["dl.tensor_parallel.rank"], after.attributes["dl.pipeline_parallel.size"]) == (3, 2)


def test_a_rank_that_the_environment_gave_holds(megatron, tmp_path, monkeypatch):
    """Catches a rank local to a worker group that is overwritten by one among all of torch.distributed."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RANK", "1")
    setup.init_telemetry_worker(worker_group="training")
    assert describe_parallelism()
    setup.shutdown_telemetry()
    assert load_run(tmp_path / "run").processes[0].rank == 1


def test_another_megatron_is_named_once_and_the_rest_is_kept(megatron, telemetry, caplog):
    """Catches a release without expert parallelism that costs a rank all of its topology, or is passed over."""
    del megatron.get_expert_model_parallel_rank
    for _ in range(2):
        topology = megatron_topology()
        assert topology is not None
        assert topology.sizes == {"tp": 4, "pp": 2, "dp": 1, "cp": 1}
    assert caplog.text.count("has no parallel_state.get_expert_model_parallel_rank") == 1
    assert "was run against megatron 0.16.1" in caplog.text


def test_a_broken_megatron_costs_the_topology_alone(megatron, telemetry, caplog):
    """Catches a training step that fails because telemetry asked."""
    megatron.model_parallel_is_initialized = lambda: 1 / 0
    for _ in range(2):
        with forward_backward_span():
            pass
    assert len(telemetry.spans()) == 2
    assert caplog.text.count("its ranks have no topology") == 1


def test_the_worker_has_its_phases_as_methods(megatron, telemetry):
    """Catches a mixin whose methods and functions drift apart."""

    class Worker(TracedMegatronWorker):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

    worker = Worker(3)
    assert worker.describe_parallelism()
    with worker.log_prob_span(), worker.forward_backward_span(n=worker.n), worker.optimizer_span():
        pass
    with worker.weight_export_span(**{"rl.weight_version": 4}):
        pass
    assert [span.name.rpartition(".")[2] for span in telemetry.spans()] == [
        "optimizer",
        "forward_backward",
        "log_probs",
        "weight_export",
    ]
    assert attributes(telemetry.spans()[1])["n"] == 3


# -- timers ------------------------------------------------------------------------------------------------------------


def test_megatrons_timers_become_spans_and_stay_timers(megatron, telemetry):
    """Catches timers that time no more, spans that float beside their phase, and those that no log level shows."""
    timers = timers_class()()
    with trace_megatron_timers(), forward_backward_span():
        timers("forward-backward", log_level=1).start(barrier=False)
        timers("forward-compute", log_level=2).start()
        timers("forward-compute", log_level=2).stop()
        assert timers("forward-backward").elapsed() == 1.5
        timers("forward-backward").stop()
    timers("forward-backward").start()
    assert timers._timers["forward-backward"].calls == ["start", "stop", "start"]
    inner, outer, phase = telemetry.spans()
    assert [inner.name, outer.name] == ["rl.megatron.timer.forward_compute", "rl.megatron.timer.forward_backward"]
    assert (inner.parent_span_id, outer.parent_span_id) == (outer.span_id, phase.span_id)
    found = attributes(inner)
    assert "rl.bucket" not in found
    assert (found["rl.span_group"], found["dl.tensor_parallel.rank"]) == (MEGATRON_TIMER, 3)


def test_a_timer_that_an_exception_leaves_running_is_nobodys_parent(megatron, telemetry):
    """Catches a context that stays current for ever, in all later calls of an actor."""
    timers = SpanTimers()

    def step_that_fails() -> None:
        with managed_span(G.POLICY_UPDATE, "rl.test.step"):
            timers("forward-backward").start()
            raise ValueError("nan")

    with pytest.raises(ValueError, match="nan"):
        step_that_fails()
    with managed_span(G.POLICY_UPDATE, "rl.test.next"):
        timers("optimizer").start()
        timers("optimizer").stop()
    step, optimizer, following = telemetry.spans()
    assert following.parent_span_id == b""
    assert optimizer.parent_span_id == following.span_id
    timers("forward-backward").start()
    timers("forward-backward").stop()
    assert [span.name for span in telemetry.spans()][3:] == ["rl.megatron.timer.forward_backward"] * 2
    assert step.name == "rl.test.step"


def test_timers_are_copied_and_pickled_as_megatron_does_with_its_configuration(megatron, telemetry):
    """Catches a second model, or a checkpoint, that fails because the configuration's timers cannot be copied."""
    timers = SpanTimers()
    timers("forward-backward").start()
    for again in (copy.deepcopy(timers), pickle.loads(pickle.dumps(timers))):
        again("forward-backward").start()
        again("forward-backward").stop()
    timers("forward-backward").stop()
    assert len(telemetry.spans()) == 3
    with trace_megatron_timers():
        plain = timers_class()()
        view = plain("optimizer")
        view.start()
        assert copy.deepcopy(plain)("optimizer").elapsed() == 1.5
        assert copy.deepcopy(view).elapsed() == 1.5
        assert set(vars(plain)) == {"_timers", "dummy"}, "nothing is left in what Megatron writes out"
        view.stop()
    assert len(telemetry.spans()) == 4


def test_a_failing_timer_fails_as_before(megatron, telemetry):
    """Catches an assertion of Megatron's that telemetry hides."""
    timers = timers_class()()
    with trace_megatron_timers():
        timers("optimizer").start()
        with pytest.raises(AssertionError):
            timers("optimizer").start()
        timers("optimizer").stop()
    assert len(telemetry.spans()) == 1


def test_timers_are_left_alone_while_their_group_is_off(megatron, tmp_path):
    """Catches a span for each microbatch in a run that asked for its steps."""
    with running(tmp_path / "run", span_groups="per_step") as telemetry, trace_megatron_timers():
        timer = timers_class()()("forward-compute")
        timer.start()
        timer.stop()
        assert telemetry.spans() == []
        assert MEGATRON_TIMER not in _state.enabled


def test_asking_twice_hooks_once(megatron, telemetry):
    """Catches two spans for each run of a timer, and a hook that the first to leave takes from the second."""
    plain = timers_class().__call__
    with trace_megatron_timers() as first:
        with trace_megatron_timers():
            pass
        timer = timers_class()()("optimizer")
        timer.start()
        timer.stop()
        first.stop()
    assert len(telemetry.spans()) == 1
    assert timers_class().__call__ is plain


def test_without_megatron_its_timers_are_a_warning(monkeypatch, caplog):
    """Catches a program that fails where Megatron is absent."""
    monkeypatch.setitem(sys.modules, "megatron", None)
    with trace_megatron_timers():
        pass
    assert caplog.text.count("its timers make no spans") == 1
