"""What a driver says of its run: checked there, and known to every worker of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from raytrace_rl import (
    _run_attributes,
    init_telemetry_driver,
    init_telemetry_worker,
    semconv,
    shutdown_telemetry,
    telemetry_runtime_env,
    telemetry_session,
)
from raytrace_rl.monitor import load_run
from tests.disks import warnings_of
from tests.running import drive

pytest_plugins = ["tests.telemetry_fixtures"]

#: Everything that holds for a whole run, as a training script has it, and as it arrives.
GIVEN: dict[str, Any] = {
    semconv.RL_MODEL: "meta-llama/Llama-3.1-8B, chat = yes & 100 %",
    semconv.RL_ALGORITHM: "grpo",
    semconv.RL_BACKEND: "megatron",
    semconv.RL_GENERATION_BACKEND: "vllm",
    semconv.RL_REWARD: "verifier",
    semconv.RL_NUM_ROLLOUTS: 512,
    semconv.RL_NUM_PROMPT_GROUPS: 32,
    semconv.RL_NUM_GENERATIONS_PER_PROMPT: 16,
    semconv.NV_DL_TOPOLOGY_SIZE_TP: 4,
    semconv.NV_DL_TOPOLOGY_SIZE_PP: 2,
    semconv.NV_DL_TOPOLOGY_SIZE_DP: 8,
    semconv.NV_DL_TOPOLOGY_SIZE_CP: 1,
    semconv.NV_DL_TOPOLOGY_SIZE_EP: 1,
}


class Backend(Enum):
    """As configurations have them."""

    MEGATRON = "megatron"


def resources(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Role, or worker group, to what a process of the run says of itself."""
    return {p.worker_group or str(p.role): p.resource for p in load_run(run_dir).processes}


def driver(run_dir: Path, attributes: Any, **more: Any) -> dict[str, Any]:
    """A driver that starts and ends; returns what it said of itself."""
    assert init_telemetry_driver({"enabled": True, "run_dir": str(run_dir)}, resource_attributes=attributes, **more)
    found = resources(run_dir)["driver"]
    shutdown_telemetry()
    return found


def test_what_the_driver_says_is_on_its_resource(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """An attribute that a driver gives is lost, or takes the place of what telemetry knows of itself."""
    found = driver(tmp_path / "run", {**GIVEN, "team": "alignment", "tags": ["a", "b"], "unset": None})
    assert found.items() >= GIVEN.items()
    assert (found["team"], found["tags"], found["rl.role"]) == ("alignment", ["a", "b"], "driver")
    assert "unset" not in found
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        (semconv.RL_NUM_ROLLOUTS, "512", 512),
        (semconv.RL_NUM_ROLLOUTS, np.int64(512), 512),
        (semconv.RL_NUM_ROLLOUTS, 512.0, 512),
        (semconv.RL_BACKEND, Backend.MEGATRON, "megatron"),
        (semconv.RL_MODEL, PurePosixPath("/models/tiny"), "/models/tiny"),
        (semconv.RL_MODEL, " tiny ", "tiny"),
    ],
)
def test_one_spelling_of_a_value(tmp_path: Path, key: str, given: Any, kept: Any):
    """A query for a model or a size finds some runs and not others, by the type that their scripts happened to have."""
    found = driver(tmp_path / "run", {key: given})[key]
    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize(
    "bad",
    [
        3,
        ["rl.model"],
        {semconv.RL_NUM_ROLLOUTS: "many"},
        {semconv.RL_NUM_ROLLOUTS: True},
        {semconv.RL_NUM_ROLLOUTS: -1},
        {semconv.RL_NUM_ROLLOUTS: 1.5},
        {semconv.RL_NUM_ROLLOUTS: float("inf")},
        {semconv.NV_DL_TOPOLOGY_SIZE_TP: 1 << 63},
        {semconv.RL_MODEL: ""},
        {semconv.RL_MODEL: 8},
        {semconv.RL_MODEL: "two\nlines"},
        {5: 6},
        {"": "x"},
        {"x": object()},
        {"x": {"a": "mapping"}},
        {"x": 1 << 70},
    ],
    ids=str,
)
def test_a_bad_one_is_a_warning_and_costs_itself_alone(tmp_path: Path, bad: Any, caplog: pytest.LogCaptureFixture):
    """One attribute of a configuration's making ends the driver, or takes the good ones with it."""
    given = {**bad, "good": 1} if isinstance(bad, dict) else bad
    found = driver(tmp_path / "run", given)
    assert len(warnings_of(caplog)) == 1
    assert found["rl.role"] == "driver"
    if isinstance(bad, dict):
        assert found["good"] == 1
        assert not set(map(str, bad)) & found.keys()


def test_algorithm_is_one_of_them_and_the_attribute_is_the_closer_word(tmp_path: Path):
    """The algorithm has two ways in, and the coarser one wins."""
    assert driver(tmp_path / "a", None, algorithm="grpo")["rl.algorithm"] == "grpo"
    assert driver(tmp_path / "b", {"rl.algorithm": "dapo"}, algorithm="grpo")["rl.algorithm"] == "dapo"


def test_a_worker_knows_what_holds_for_the_run_and_no_more(tmp_path: Path):
    """A worker's spans cannot be found by the model of their run, or bear what only the driver is."""
    init_telemetry_driver(
        {"enabled": True, "run_dir": str(tmp_path / "run")}, resource_attributes={**GIVEN, "seat": "head node"}
    )
    code = "from raytrace_rl import init_telemetry_worker\ninit_telemetry_worker(worker_group='policy')\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    shutdown_telemetry()
    assert _run_attributes.VARIABLE not in os.environ
    found = resources(tmp_path / "run")["policy"]
    assert found.items() >= GIVEN.items()
    assert "seat" not in found


def test_a_run_that_says_nothing_has_no_variable(tmp_path: Path):
    """Every worker's environment gets an empty variable more, or one that outlives the run that wrote it."""
    driver(tmp_path / "first", GIVEN)
    init_telemetry_driver({"enabled": True, "run_dir": str(tmp_path / "second")})
    assert _run_attributes.VARIABLE not in os.environ
    assert _run_attributes.VARIABLE not in telemetry_runtime_env()["env_vars"]
    assert "rl.model" not in resources(tmp_path / "second")["driver"]
    shutdown_telemetry()


def test_the_environment_beats_code_and_reaches_workers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A launch script cannot name the model, or its word ends with the driver."""
    monkeypatch.setenv(_run_attributes.VARIABLE, "rl.model=by%20hand,site=eu,rl.num_rollouts=8")
    init_telemetry_driver(
        {"enabled": True, "run_dir": str(tmp_path / "run")},
        resource_attributes={"rl.model": "by code", "rl.reward": "verifier", "site": "us", "mine": 1},
    )
    said = {"rl.model": "by hand", "site": "eu", "rl.num_rollouts": 8, "rl.reward": "verifier"}
    assert resources(tmp_path / "run")["driver"].items() >= {**said, "mine": 1}.items()
    sent = telemetry_runtime_env()["env_vars"][_run_attributes.VARIABLE]
    assert _run_attributes.of_environment({_run_attributes.VARIABLE: sent}) == (said, {})
    shutdown_telemetry()
    assert os.environ[_run_attributes.VARIABLE] == "rl.model=by%20hand,site=eu,rl.num_rollouts=8"
    monkeypatch.setenv(_run_attributes.VARIABLE, "no pairs at all")
    assert "rl.model" not in driver(tmp_path / "broken", None)
    (warning,) = warnings_of(caplog)
    assert "no pairs at all" in warning


@pytest.fixture
def worker_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a worker of a run whose driver has said something; yields the run directory."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv(_run_attributes.VARIABLE, "rl.model=tiny,nv.dl.topology.size.tp=2")
    return tmp_path / "run"


@pytest.mark.parametrize("early", [False, True])
def test_a_workers_own_word_wins(worker_env: Path, early: bool):
    """A generation worker says that it is sharded otherwise than training, and is not believed.

    ``early``: telemetry has started before the constructor that knows, as in every `TracedActor`.
    """
    if early:
        init_telemetry_worker(worker_group="generation")
    init_telemetry_worker(
        worker_group="generation",
        resource_attributes={"nv.dl.topology.size.tp": 4, "rl.backend": "vllm", "x": object()},
    )
    found = resources(worker_env)["generation"]
    assert (found["nv.dl.topology.size.tp"], found["rl.model"], found["rl.backend"]) == (4, "tiny", "vllm")
    init_telemetry_worker(resource_attributes={"nv.dl.topology.size.tp": 8})  # what it has said stays
    assert resources(worker_env)["generation"]["nv.dl.topology.size.tp"] == 4
    shutdown_telemetry()


@pytest.mark.parametrize("driver_says", [True, False])
def test_the_standard_variable_of_a_worker_is_its_own_word_unless_the_driver_overruled_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver_says: bool
):
    """The axes of a worker group, in its workers' environment, are lost; or driver and workers name two models."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "rl.model=of%20the%20environment,rl.num_rollouts=3")
    said = {"rl.model": "of the driver"} if driver_says else {}
    init_telemetry_driver(
        {"enabled": True, "run_dir": str(tmp_path / "run")},
        resource_attributes={**said, "nv.dl.topology.size.tp": 2, "nv.dl.topology.size.pp": 2},
    )
    code = "from raytrace_rl import init_telemetry_worker\ninit_telemetry_worker(worker_group='policy')\n"
    added = os.environ["OTEL_RESOURCE_ATTRIBUTES"] + ",nv.dl.topology.size.tp=4"
    worker_env = {**os.environ, "OTEL_RESOURCE_ATTRIBUTES": added}
    subprocess.run([sys.executable, "-c", code], env=worker_env, check=True, timeout=60)
    shutdown_telemetry()
    found = resources(tmp_path / "run")
    model = "of the driver" if driver_says else "of the environment"
    assert {group: resource["rl.model"] for group, resource in found.items()} == {"driver": model, "policy": model}
    assert {group: resource["rl.num_rollouts"] for group, resource in found.items()} == {"driver": 3, "policy": 3}
    sizes = [found["policy"][f"nv.dl.topology.size.{axis}"] for axis in ("tp", "pp")]
    assert (sizes, found["driver"]["nv.dl.topology.size.tp"]) == ([4, 2], 2)


DRIVER = """
import sys
import ray
from raytrace_rl import TracedActor, telemetry_session, traced, accepts_trace_context, managed_span
from raytrace_rl.instrumentation import umbrella_span

@ray.remote
class Worker(TracedActor):
    def __init__(self, group, **sizes):
        super().__init__(worker_group=group, resource_attributes=sizes)

    @accepts_trace_context
    def work(self):
        with managed_span("generation", "rl.grpo.generation"):
            return 1

@ray.remote
@accepts_trace_context
def task():
    with managed_span("reward", "rl.grpo.reward"):
        return 1

said = {"rl.model": "tiny", "rl.backend": "torch", "rl.num_rollouts": 8, "nv.dl.topology.size.tp": 2, "here": "only"}
with telemetry_session(algorithm="grpo", resource_attributes=said) as session:
    session.init_ray(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    plain, own = Worker.remote("plain"), Worker.remote("own", **{"nv.dl.topology.size.tp": 4})
    with umbrella_span("job", "rl.grpo.job"):
        ray.get([traced(plain).work.remote(), traced(own).work.remote(), traced(task).remote()])
"""


@pytest.mark.ray
def test_actors_and_tasks_of_a_run_know_it(tmp_path: Path):
    """On real Ray the word of the driver ends at the cluster's door."""
    done = drive(DRIVER, tmp_path)
    assert done.returncode == 0, done.stderr
    found = resources(tmp_path / "run")
    run_wide = {"rl.model": "tiny", "rl.backend": "torch", "rl.num_rollouts": 8, "rl.algorithm": "grpo"}
    assert found.keys() == {"driver", "plain", "own", "worker"}
    assert all(resource.items() >= run_wide.items() for resource in found.values())
    assert {group: found[group]["nv.dl.topology.size.tp"] for group in found} == {
        "driver": 2,
        "plain": 2,
        "own": 4,
        "worker": 2,
    }
    assert {group for group in found if "here" in found[group]} == {"driver"}


def test_a_session_passes_them_on(tmp_path: Path):
    """A session takes fewer arguments than the start that it stands for."""
    with telemetry_session({"run_dir": str(tmp_path / "run")}, resource_attributes=GIVEN, summary=False):
        pass
    assert resources(tmp_path / "run")["driver"].items() >= GIVEN.items()
