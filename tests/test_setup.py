"""The lifecycle of a process's telemetry: started once, completed, shut down in time, started again."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from raytrace_rl import _process, _state, semconv, setup
from raytrace_rl.config import ConfigError, TelemetryConfig
from raytrace_rl.instrumentation import managed_span, umbrella_span
from raytrace_rl.monitor import load_run
from raytrace_rl.setup import (
    get_telemetry_handle,
    init_telemetry_driver,
    init_telemetry_worker,
    shutdown_telemetry,
    start_from_carrier,
    telemetry_runtime_env,
)
from raytrace_rl.spool import seal
from raytrace_rl.spool.format import Kind, pack_header
from raytrace_rl.spool.journal import Journal
from tests.disks import warnings_of
from tests.running import Telemetry, attributes, child, running

pytest_plugins = ["tests.telemetry_fixtures"]


def ours() -> dict[str, str]:
    """Our variables in the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAYTRACE_RL_")}


def resource(run_dir: Path) -> dict[str, Any]:
    """What the one process of a run says of itself, by now."""
    (process,) = load_run(run_dir).processes
    return process.resource


# -- off ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "env"),
    [(None, {}), ({"enabled": False}, {}), ({"enabled": True}, {"OTEL_SDK_DISABLED": "TRUE"})],
)
def test_off_touches_no_global(tmp_path: Path, config: Any, env: dict[str, str]):
    """Telemetry that is off leaves variables, a TracerProvider, threads, files or an exit handler's work behind."""
    code = """
    import os, sys, threading, json, signal
    before = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    from opentelemetry import trace, metrics
    import logging
    from raytrace_rl import setup, _state
    from raytrace_rl.instrumentation import managed_span, span_cm, iteration_scope
    assert setup.init_telemetry_driver(json.loads(sys.argv[1])) is None
    assert setup.init_telemetry_worker(rank=1) is None
    setup.start_from_carrier()
    assert setup.get_telemetry_handle() is None
    assert setup.telemetry_runtime_env() == {}
    assert setup.telemetry_runtime_env({"pip": ["x"]}) == {"pip": ["x"]}
    setup.attach_to_cluster()
    with managed_span("generation", "a") as a, span_cm("b") as b, iteration_scope(3):
        assert a is None and b is None
        assert trace.get_current_span() is trace.INVALID_SPAN
    setup.shutdown_telemetry()
    assert dict(os.environ) == before
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    assert "opentelemetry.sdk.trace" not in sys.modules
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert sum(_state.drops.values()) == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(config)],
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# -- the driver --------------------------------------------------------------------------------------------------------


def test_driver_settles_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a word about it a run has no directory of its own, a relative one, or Ray packs it."""
    monkeypatch.chdir(tmp_path)
    handle = init_telemetry_driver({"enabled": True}, algorithm="grpo")
    assert handle is not None
    assert handle is get_telemetry_handle()
    assert handle.is_exporting
    assert handle.run_id is not None
    assert 6 <= len(handle.run_id) <= 12
    run_dir = tmp_path / "raytrace_runs" / handle.run_id
    assert handle.run_dir == str(run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    for name in (".gitignore", ".rayignore"):
        assert (run_dir / name).read_text(encoding="ascii") == "*\n"
    found = resource(run_dir)
    assert (found["rl.run.id"], found["rl.role"], found["rl.attempt"]) == (handle.run_id, "driver", 1)
    assert found["rl.algorithm"] == "grpo"
    assert ours()["RAYTRACE_RL_RUN_DIR"] == str(run_dir)
    assert ours()["RAYTRACE_RL_RUN_ID"] == handle.run_id
    assert ours()["RAYTRACE_RL_ENABLED"] == "1"
    shutdown_telemetry()
    assert ours() == {}
    assert get_telemetry_handle() is None


def test_a_directory_with_other_things_in_it_is_not_hidden(tmp_path: Path):
    """``run_dir=.`` overwrites the project's own ``.gitignore``, and Ray packs none of its code."""
    (tmp_path / ".gitignore").write_text("*.pyc\n", encoding="ascii")
    (tmp_path / "train.py").touch()
    with running(tmp_path):
        pass
    assert (tmp_path / ".gitignore").read_text(encoding="ascii") == "*.pyc\n"
    assert not (tmp_path / ".rayignore").exists()
    for name in ("spool", "attempts"):
        assert (tmp_path / name / ".rayignore").read_text(encoding="ascii") == "*\n"
        assert (tmp_path / name / ".gitignore").read_text(encoding="ascii") == "*\n"
    assert load_run(tmp_path).damage == []


@pytest.mark.parametrize("given_dir", ["runs/one", "~/runs/one"])
def test_run_dir_is_absolute_once_settled(tmp_path: Path, given_dir: str, monkeypatch: pytest.MonkeyPatch):
    """A worker with another working directory, or home, writes elsewhere than its driver."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    handle = init_telemetry_driver({"enabled": True, "run_dir": given_dir})
    assert handle is not None
    assert handle.run_dir == str(tmp_path / "runs" / "one") == ours()["RAYTRACE_RL_RUN_DIR"]


def test_run_dir_inside_a_ray_session_goes_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A driver that is a Ray job writes into the session's directory, which goes with the session."""
    inside = tmp_path / "ray" / "session_2026-01-02_03-04-05_678901_23" / "runtime_resources" / "x"
    inside.mkdir(parents=True)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(inside)
    handle = init_telemetry_driver({"enabled": True, "run_id": "r"})
    assert handle is not None
    assert handle.run_dir == str(home / "raytrace_runs" / "r")


def test_attempts_count_up(tmp_path: Path):
    """A restart of the same run counts as the same attempt: work done twice counts twice."""
    for expected in (1, 2, 3):
        with running(tmp_path / "run", run_id="r") as telemetry:
            assert ours()["RAYTRACE_RL_ATTEMPT"] == str(expected)
            assert _process.current is not None
            assert _process.current.resource["rl.attempt"] == expected
        with running(tmp_path / f"other {expected}", run_id="r"):
            assert ours()["RAYTRACE_RL_ATTEMPT"] == "1"
    assert [process.attempt for process in load_run(telemetry.run_dir).processes] == [1, 2, 3]
    about = json.loads((tmp_path / "run" / "attempts" / "2.json").read_text(encoding="utf-8"))
    assert (about["run_id"], about["attempt"]) == ("r", 2)


def test_workers_inherit_the_attempt(tmp_path: Path):
    """A worker of the second attempt says that it is of the first."""
    for _ in range(2):
        with running(tmp_path / "run"):
            child("from raytrace_rl import setup; setup.init_telemetry_worker(rank=0, worker_group='policy')")
    workers = [process for process in load_run(tmp_path / "run").processes if process.role == "worker"]
    assert [(process.attempt, process.rank, process.worker_group) for process in workers] == [
        (1, 0, "policy"),
        (2, 0, "policy"),
    ]


@pytest.mark.parametrize("rubbish", ["x", "-1", "²", "9" * 5000])
def test_attempt_variable_of_rubbish(tmp_path: Path, rubbish: str, monkeypatch: pytest.MonkeyPatch):
    """Rubbish in a variable of ours ends a worker, or its telemetry."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RAYTRACE_RL_ATTEMPT", rubbish)
    assert init_telemetry_worker() is not None
    shutdown_telemetry()
    assert load_run(tmp_path / "run").processes[0].attempt == 1


def test_environment_beats_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An operator cannot change what the program says."""
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("RAYTRACE_RL_SPAN_GROUPS", "reward")
    handle = init_telemetry_driver({"enabled": True, "run_dir": str(tmp_path / "code"), "span_groups": "all"})
    assert handle is not None
    assert handle.run_dir == str(tmp_path / "env")
    assert _state.enabled == {"reward"}
    shutdown_telemetry()
    assert ours() == {"RAYTRACE_RL_RUN_DIR": str(tmp_path / "env"), "RAYTRACE_RL_SPAN_GROUPS": "reward"}
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "false")
    assert init_telemetry_driver({"enabled": True}) is None


def test_start_again_with_other_settings(tmp_path: Path):
    """What the first run projected into the environment comes back as the user's in the second."""
    with (
        running(tmp_path / "one", span_groups="reward", run_id="one", service_name="first"),
        managed_span("reward", "kept"),
        managed_span("generation", "not"),
    ):
        pass
    with running(tmp_path / "two", span_groups="generation") as two:
        assert two.handle.run_id != "one"
        with managed_span("reward", "not"), managed_span("generation", "kept"):
            pass
        assert two.drops == {}
    assert ours() == {}
    one = load_run(tmp_path / "one")
    assert [row.name for row in one.spans] == [row.name for row in load_run(tmp_path / "two").spans] == ["kept"]
    assert one.processes[0].resource["service.name"] == "first"
    assert resource(tmp_path / "two")["service.name"] == "raytrace-rl"


def test_users_own_variables_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The shutdown removes, or keeps changed, what the user had set."""
    monkeypatch.setenv("RAYTRACE_RL_HEARTBEAT_S", " 3600 ")
    monkeypatch.setenv("RAYTRACE_RL_CAPTURE_CONTENT", "1")
    before = dict(os.environ)
    with running(tmp_path / "run"):
        assert os.environ["RAYTRACE_RL_HEARTBEAT_S"] == "3600.0"
    assert dict(os.environ) == before


def test_driver_called_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A second start closes the first, or makes a second spool in one process."""
    with running(tmp_path / "one") as telemetry:
        again = init_telemetry_driver({"enabled": True, "run_dir": str(tmp_path / "two")})
        assert again is telemetry.handle
        assert not (tmp_path / "two").exists()
        assert len(warnings_of(caplog)) == 1
        with managed_span("generation", "s"):
            pass
        assert len(telemetry.spans()) == 1


def test_misconfiguration_is_an_error_on_the_driver_and_a_warning_in_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A driver runs for days with a setting that it did not understand; or a worker dies of one."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RAYTRACE_RL_HEARTBEAT_S", "often")
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r"RAYTRACE_RL_HEARTBEAT_S='often'.*0\.01"):
        init_telemetry_driver({"enabled": True})
    with pytest.raises(ConfigError, match="span_group"):
        init_telemetry_driver({"enabled": True, "span_group": "all"})
    with pytest.raises(ConfigError, match="exporter"):
        init_telemetry_driver({"enabled": True, "exporter": "kafka"})
    assert dict(os.environ) == before
    assert get_telemetry_handle() is None
    assert not (tmp_path / "run").exists()
    caplog.clear()
    _state.forget_warnings()
    assert init_telemetry_worker() is not None
    (warning,) = warnings_of(caplog)
    assert "RAYTRACE_RL_HEARTBEAT_S='often'" in warning
    assert _state.config is not None
    assert _state.config.heartbeat_s == 1.0


def test_failure_at_the_start_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """A failure of our own (a mock) ends the driver, and leaves its environment changed."""

    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(setup, "process_resource", fail)
    before = dict(os.environ)
    assert init_telemetry_driver({"enabled": True, "run_dir": str(tmp_path / "run")}) is None
    assert dict(os.environ) == before
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    assert init_telemetry_worker() is None
    assert len(warnings_of(caplog)) == 2
    with managed_span("generation", "s") as span:
        assert span is None


# -- the worker --------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a driver projects for its workers; the run directory."""
    config = TelemetryConfig(
        enabled=True, span_groups="all", run_dir=str(tmp_path / "run"), run_id="r", heartbeat_s=3600.0
    )
    for name, value in setup.to_env(config).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "run"


def test_worker_says_who_it_is(worker_env: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker's spans cannot be told from another's."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("NRL_WORKER_GROUP", "old")
    monkeypatch.setenv("RAYTRACE_RL_WORKER_GROUP", "policy")
    handle = init_telemetry_worker(resource_attributes={"rl.backend": "megatron"}, gpus=["GPU-1"])
    assert handle is not None
    assert handle.role == "worker"
    found = resource(worker_env)
    assert (found["nv.dl.rank"], found["nv.dl.local_rank"], found["nv.dl.world_size"]) == (3, 1, 8)
    assert (found["rl.worker_group"], found["rl.role"], found["rl.backend"]) == ("policy", "worker", "megatron")
    assert found["service.instance.id"]


def test_second_call_fills_in_what_is_missing(worker_env: Path):
    """What a worker learns of itself later is lost, or overwrites what it had said."""
    first = init_telemetry_worker(rank=3)
    instance = resource(worker_env)["service.instance.id"]
    second = init_telemetry_worker(rank=5, world_size=8, worker_group="policy", resource_attributes={"rl.model": "m"})
    third = init_telemetry_worker(7, 9, "critic", {"rl.model": "other", "rl.reward": "verifier"})
    assert first is second is third
    found = resource(worker_env)
    assert (found["nv.dl.rank"], found["nv.dl.world_size"], found["rl.worker_group"]) == (3, 8, "policy")
    assert (found["rl.model"], found["rl.reward"]) == ("m", "verifier")
    assert found["service.instance.id"] == instance
    assert isinstance(first, setup.TelemetryHandle)
    records = [one for one in Telemetry(first).records() if one.kind == Kind.RESOURCE]
    assert len(records) == 2
    last = attributes(Resource.FromString(records[-1].payload))
    assert (last["nv.dl.rank"], last["rl.model"], last["service.instance.id"]) == (3, "m", instance)
    init_telemetry_worker(rank=3)
    assert len([one for one in Telemetry(first).records() if one.kind == Kind.RESOURCE]) == 2  # nothing new


def test_later_segments_carry_the_completed_identity(worker_env: Path):
    """When the first segment is dropped for the bound, nobody knows the rank of the spans in the others."""
    init_telemetry_worker()
    init_telemetry_worker(rank=4)
    assert _process.current is not None
    assert _process.current.writer is not None
    header = pack_header(_process.current.writer.header(9))
    assert b"nv.dl.rank" in header


def test_worker_called_by_many_threads(worker_env: Path):
    """Two threads that start telemetry at once make two spools."""
    handles: list[Any] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait(30)
        handles.append(init_telemetry_worker())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, handles))) == 1
    assert handles[0] is not None
    assert len(load_run(worker_env).processes) == 1


def test_worker_in_the_drivers_process(tmp_path: Path):
    """A local actor, or a Ray in local mode, turns the driver into a worker."""
    with running(tmp_path / "run") as telemetry:
        assert init_telemetry_worker(rank=0, worker_group="policy") is telemetry.handle
        assert telemetry.handle.role == "driver"
        assert resource(telemetry.run_dir)["rl.role"] == "driver"


def test_worker_never_raises(worker_env: Path, caplog: pytest.LogCaptureFixture):
    """Rubbish from a framework ends its worker."""
    assert init_telemetry_worker(resource_attributes=3) is not None
    assert len(warnings_of(caplog)) == 1
    odd: Any = object()
    attributes: Any = {"x": odd, 5: 6}
    rank: Any = "three"
    group: Any = b"\xff"
    handle = init_telemetry_worker(rank, odd, group, attributes, gpus=[odd])
    assert handle is not None
    with managed_span("generation", "s"):
        pass
    shutdown_telemetry()
    assert [row.name for row in load_run(worker_env).spans] == ["s"]


def test_carrier_starts_a_worker_and_not_again_after_its_last_flush(worker_env: Path, monkeypatch: pytest.MonkeyPatch):
    """A late call starts telemetry anew in an actor that has flushed for good: another spool, never closed."""
    monkeypatch.setattr(setup, "_finished_pid", 0)  # earlier tests have shut down in this process
    start_from_carrier()
    assert get_telemetry_handle() is not None
    start_from_carrier()
    shutdown_telemetry()
    start_from_carrier()
    assert get_telemetry_handle() is None
    assert init_telemetry_worker() is not None  # whoever asks for it gets it
    shutdown_telemetry()
    assert len(load_run(worker_env).processes) == 2


def test_carrier_does_not_restart_a_driver(worker_env: Path, monkeypatch: pytest.MonkeyPatch):
    """A driver that was enabled by the environment becomes a worker of its own run after its end."""
    monkeypatch.setattr(setup, "_finished_pid", 0)
    assert init_telemetry_driver() is not None
    shutdown_telemetry()
    start_from_carrier()
    assert get_telemetry_handle() is None
    assert init_telemetry_driver() is not None


# -- runtime_env -------------------------------------------------------------------------------------------------------


def test_runtime_env_holds_our_settings_and_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Workers of a cluster that was up before get no settings; or a key stands in clear in Ray's logs."""
    secrets = {
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=secret",
        "OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY": "secret",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://me:secret@host",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    shared = {"OTEL_RESOURCE_ATTRIBUTES": "team=rl", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    for name, value in {**secrets, **shared, "RAYTRACE_RL_CAPTURE_CONTENT": "1"}.items():
        monkeypatch.setenv(name, value)
    with running(tmp_path / "run", run_id="r", heartbeat_s=2.5) as telemetry:
        base = {"pip": ["x"], "env_vars": {"MINE": "1", "RAYTRACE_RL_SPAN_GROUPS": "reward"}}
        before = pickle.dumps(base)
        env = telemetry_runtime_env(base)
        assert pickle.dumps(base) == before
        assert env["pip"] == ["x"]
        found = env["env_vars"]
        assert found["MINE"] == "1"
        assert found["RAYTRACE_RL_SPAN_GROUPS"] == "reward"  # what the user says holds
        assert found["RAYTRACE_RL_RUN_DIR"] == str(telemetry.run_dir)
        assert (found["RAYTRACE_RL_RUN_ID"], found["RAYTRACE_RL_HEARTBEAT_S"]) == ("r", "2.5")
        assert (found["RAYTRACE_RL_ATTEMPT"], found["RAYTRACE_RL_CAPTURE_CONTENT"]) == ("1", "1")
        assert {name: found[name] for name in shared} == shared
        assert not secrets.keys() & found.keys()
        assert "secret" not in json.dumps(env)
        assert all(isinstance(value, str) for value in found.values())
        alone = telemetry_runtime_env()
        assert list(alone) == ["env_vars"]
        assert all(name.startswith(("RAYTRACE_RL_", "OTEL_")) for name in alone["env_vars"])
        assert telemetry_runtime_env({"env_vars": None})["env_vars"] == alone["env_vars"]
    assert telemetry_runtime_env({"pip": []}) == {"pip": []}


def test_worker_started_with_the_runtime_env_is_of_the_run(tmp_path: Path):
    """What the runtime_env holds does not suffice for a worker."""
    with running(tmp_path / "run", run_id="r"):
        env = telemetry_runtime_env()["env_vars"]
    code = """
    from raytrace_rl import setup
    from raytrace_rl.instrumentation import managed_span
    assert setup.init_telemetry_worker() is not None
    with managed_span("generation", "s"):
        pass
    """
    child(code, **env)
    run = load_run(tmp_path / "run")
    assert [(row.name, row.process.role, row.process.text("rl.run.id")) for row in run.spans] == [("s", "worker", "r")]


# -- shutdown ----------------------------------------------------------------------------------------------------------


def test_shutdown_is_idempotent(tmp_path: Path):
    """A second shutdown fails, or writes once more."""
    shutdown_telemetry()
    with running(tmp_path / "run") as telemetry:
        with managed_span("generation", "s"):
            pass
        shutdown_telemetry()
        before = {path: path.read_bytes() for path in telemetry.run_dir.rglob("*") if path.is_file()}
        shutdown_telemetry()
        shutdown_telemetry(0)
        assert {path: path.read_bytes() for path in telemetry.run_dir.rglob("*") if path.is_file()} == before
    assert [row.name for row in load_run(tmp_path / "run").spans] == ["s"]


def test_open_spans_end_innermost_first_marked_truncated(tmp_path: Path):
    """A span that nobody ended is missing, or its children end after it."""
    with running(tmp_path / "run") as telemetry:
        opened = [umbrella_span("job", "job"), umbrella_span("step", "step"), managed_span("reward", "leaf")]
        for span in opened:
            span.__enter__()
        shutdown_telemetry()
        names = [span.name for span in telemetry.spans()]
        assert names == ["job.started", "leaf", "step", "job"]
        for span in reversed(opened):
            span.__exit__(None, None, None)
        assert [span.name for span in telemetry.spans()] == names
    run = load_run(tmp_path / "run")
    assert {row.name: row.truncated for row in run.spans} == {
        "job.started": False,
        "leaf": True,
        "step": True,
        "job": True,
    }
    assert run.processes[0].state == "closed"


@pytest.mark.parametrize("hangs", ["seal_file", "adopt_orphans", "journal"])
def test_deadline_of_the_shutdown_is_real(tmp_path: Path, hangs: str, monkeypatch: pytest.MonkeyPatch):
    """A disk that hangs (a mock of what waits for it) holds the end of the run up."""
    go_on = threading.Event()
    entered = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        entered.set()
        go_on.wait(60)

    with running(tmp_path / "run") as telemetry:
        with managed_span("generation", "s"):
            pass
        if hangs == "journal":
            monkeypatch.setattr(Journal, "close", hang)
        else:
            monkeypatch.setattr(seal, hangs, hang)
        before = time.monotonic()
        shutdown_telemetry(300)
        took = time.monotonic() - before
        assert entered.is_set()
        assert 0.25 < took < 3
        assert get_telemetry_handle() is None
        assert _state.enabled == frozenset()
        assert ours() == {}
        with managed_span("generation", "late") as late:
            assert late is None
        found = load_run(telemetry.run_dir)
        assert [(row.name, row.truncated) for row in found.spans] == [("s", False)]
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "raytrace_rl-close":
                thread.join(30)


@pytest.mark.parametrize("timeout_ms", [0, -1, float("inf"), 1e300])
def test_any_timeout(tmp_path: Path, timeout_ms: float):
    """A strange time-out leaves telemetry half shut down."""
    with running(tmp_path / "run") as telemetry:
        with managed_span("generation", "s"):
            pass
        shutdown_telemetry(timeout_ms)
        assert get_telemetry_handle() is None
        assert (_state.writer, _state.table, _state.open_spans) == (None, None, {})
        for thread in threading.enumerate():
            if thread.name == "raytrace_rl-close":
                thread.join(30)
        assert [row.name for row in load_run(telemetry.run_dir).spans] == ["s"]


def test_what_was_lost_is_said_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Losses are known to nobody: not to the reader of the log, not to the reader of the spool."""
    with running(tmp_path / "run") as telemetry:
        _state.count_drop("spans", 3)
        _state.count_drop("logs")
        assert telemetry.handle.dropped["spans"] == 3
        with pytest.raises(TypeError):
            telemetry.handle.dropped["spans"] = 0  # type: ignore[index]
    assert 'lost: {"spans": 3, "logs": 1}' in caplog.text
    drops = load_run(tmp_path / "run").processes[0].drops
    assert (drops["spans"], drops["logs"]) == (3, 1)
    with running(tmp_path / "next") as telemetry:
        assert sum(telemetry.handle.dropped.values()) == 0


def test_program_that_forgets_to_shut_down(tmp_path: Path):
    """A program that ends without a shutdown leaves files in the tmpfs, and open spans without an end."""
    code = """
    import sys
    from raytrace_rl import setup, _process
    from raytrace_rl.instrumentation import managed_span
    setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": sys.argv[1]})
    managed_span("generation", "open").__enter__()
    print(_process.current.writer.place.active)
    """
    active = Path(child(code, tmp_path / "run").stdout.strip())
    run = load_run(tmp_path / "run")
    assert [(row.name, row.truncated) for row in run.spans] == [("open", True)]
    assert run.processes[0].state == "closed"
    assert not active.exists() or active.parent.name == "spool"


def test_handle_of_a_run_that_is_over(tmp_path: Path):
    """A handle kept from an earlier run speaks for the present one."""
    with running(tmp_path / "one") as one:
        pass
    with running(tmp_path / "two") as two:
        assert not one.handle.is_exporting
        assert two.handle.is_exporting
        assert one.handle.run_dir == str(tmp_path / "one")
        with two.handle.tracer.start_as_current_span("by the handle's tracer"):
            pass
        assert two.handle.meter is not None
        assert [span.name for span in two.spans()] == ["by the handle's tracer"]


@pytest.mark.parametrize(("setting", "exporting"), [({"traces_enabled": False}, False), ({"exporter": "none"}, False)])
def test_is_exporting_is_true_only_where_spans_go_somewhere(tmp_path: Path, setting: dict[str, Any], exporting: bool):
    """A program believes that its spans are kept."""
    with running(tmp_path / "run", **setting) as telemetry:
        assert telemetry.handle.is_exporting is exporting


# -- other instrumentation ---------------------------------------------------------------------------------------------


def test_provider_that_was_there_is_left_in_place(tmp_path: Path):
    """A TracerProvider that the user installed is replaced, gets our spans, or its spans miss from the spool."""
    code = """
    import sys
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    memory = InMemorySpanExporter()
    theirs = TracerProvider()
    theirs.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(theirs)
    from raytrace_rl import setup
    from raytrace_rl.instrumentation import managed_span
    for run in ("one", "two"):
        setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": f"{sys.argv[1]}/{run}"})
        assert trace.get_tracer_provider() is theirs
        with managed_span("generation", "ours") as ours:
            with trace.get_tracer("lib").start_as_current_span("theirs") as span:
                assert span.parent.span_id == ours.get_span_context().span_id
                with managed_span("reward", "inner"):
                    pass
        setup.shutdown_telemetry()
    with trace.get_tracer("lib").start_as_current_span("after"):
        pass
    assert [span.name for span in memory.get_finished_spans()] == ["theirs", "theirs", "after"]
    """
    child(code, tmp_path)
    for name in ("one", "two"):
        run = load_run(tmp_path / name)
        rows = {row.name: row for row in run.spans}
        assert sorted(row.name for row in run.spans) == ["inner", "ours", "theirs"]
        assert rows["theirs"].parent_span_id == rows["ours"].span_id
        assert rows["inner"].parent_span_id == rows["theirs"].span_id
        assert len({row.trace_id for row in run.spans}) == 1


def test_restarts_with_our_own_provider(tmp_path: Path):
    """After a restart SDK spans go to the old run, or to both."""
    code = """
    import sys
    from opentelemetry import trace
    tracer = trace.get_tracer("lib")
    from raytrace_rl import setup
    for run in ("one", "two"):
        setup.init_telemetry_driver({"enabled": True, "run_dir": f"{sys.argv[1]}/{run}"})
        with tracer.start_as_current_span(f"in {run}"):
            pass
        setup.shutdown_telemetry()
        with tracer.start_as_current_span("between"):
            pass
    """
    child(code, tmp_path)
    for name in ("one", "two"):
        assert [row.name for row in load_run(tmp_path / name).spans] == [f"in {name}"]


def test_resource_of_the_driver_is_complete_after_attaching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """The driver's Ray ids are missing, or a failure to get them (a mock) ends the run."""
    with running(tmp_path / "run") as telemetry:
        setup.attach_to_cluster()
        monkeypatch.setattr(setup, "ray_resource", lambda: {semconv.RAY_JOB_ID: "01"})
        setup.attach_to_cluster()
        setup.attach_to_cluster()
        assert resource(telemetry.run_dir)[semconv.RAY_JOB_ID] == "01"
        assert len([one for one in telemetry.records() if one.kind == Kind.RESOURCE]) == 1

        def fail() -> None:
            raise OSError("no cluster")

        monkeypatch.setattr(setup, "ray_resource", fail)
        setup.attach_to_cluster()
        assert len(warnings_of(caplog)) == 1


def test_spool_of_a_worker_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker that was enabled by hand, with no driver at all, has nowhere to write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    handle = init_telemetry_worker()
    assert handle is not None
    assert handle.run_dir is not None
    assert Path(handle.run_dir).parent == tmp_path / "raytrace_runs"
    shutdown_telemetry()
    assert len(load_run(handle.run_dir).processes) == 1
