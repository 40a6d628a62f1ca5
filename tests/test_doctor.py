"""`raytrace-rl doctor`: each mistake that it is there to find, found; and nothing found where there is none."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing

import pytest

from raytrace_rl import _doctor, setup
from raytrace_rl.cli import main
from raytrace_rl.instrumentation import umbrella_span
from raytrace_rl.spool import place
from tests.relay.noted_runs import note
from tests.relay.otlp_server import Refusal, receiver
from tests.running import SETTINGS
from tests.spooling import Spool, ended, resource, span


@pytest.fixture(name="doctor")
def _doctor_fixture(capsys, tmp_path, monkeypatch):
    """Runs the command in an empty directory; returns its exit code and its checks by area."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, dict[str, list[tuple[str, str]]]]:
        code = main(["doctor", "--json", "--timeout", "2s", *map(str, arguments)])
        told = json.loads(capsys.readouterr().out)
        found: dict[str, list[tuple[str, str]]] = {}
        for check in told["checks"]:
            found.setdefault(check["area"], []).append((check["state"], check["text"]))
        assert told["problems"] == sum(state == "problem" for checks in found.values() for state, _ in checks)
        assert code == (1 if told["problems"] else 0)
        return code, found

    return run


def problems(found) -> list[str]:
    """The texts of all problems."""
    return [text for checks in found.values() for state, text in checks if state == "problem"]


def text(found, area: str) -> str:
    """All lines of an area."""
    return "\n".join(line for _, line in found[area])


def test_nothing_is_wrong_with_a_machine_without_settings(doctor, tmp_path):
    """Problems are cried where there are none, or the run directory is made by looking."""
    code, found = doctor()
    assert code == 0
    assert {"versions", "settings", "place", "clock"} <= found.keys()
    assert "off unless the program switches it on" in text(found, "settings")
    assert str(tmp_path) in text(found, "place")
    assert list(tmp_path.iterdir()) == []


def test_each_setting_is_told_with_the_variable_that_says_it(doctor, monkeypatch, tmp_path):
    """Somebody looks for hours for the launch script that has set a variable."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("NEMO_RL_OTEL_SPAN_GROUPS", "per_step,their_group")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "runs"))
    code, found = doctor()
    assert code == 0
    told = text(found, "settings")
    assert "on: RAYTRACE_RL_ENABLED" in told
    assert "span_groups=per_step,their_group (NEMO_RL_OTEL_SPAN_GROUPS)" in told
    assert "service_name=ours (OTEL_SERVICE_NAME)" in told
    assert "their_group: no span group known here" in told
    assert f"run directory: {tmp_path / 'runs'}" in text(found, "place")


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RAYTRACE_RL_HEARTBEET_S": "2"}, "RAYTRACE_RL_HEARTBEAT_S"),
        ({"RAYTRACE_RL_HEARTBEAT_S": "often"}, "cannot be used"),
        ({"RAYTRACE_RL_ENABLED": "1", "OTEL_SDK_DISABLED": "true"}, "OTEL_SDK_DISABLED"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, "sends nothing"),
        ({"RAYTRACE_RL_SPOOL_DIR": "/nonexistent"}, "no directory that can be written"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_a_problem(doctor, monkeypatch, environ, told):
    """A misspelt or contradictory setting is silent until the run is over."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, found = doctor()
    assert code == 1
    assert told in "\n".join(problems(found))


def test_an_endpoint_that_answers(doctor, monkeypatch):
    """A collector that works is reported as one that does not, or is sent something that it stores."""
    with receiver() as server:
        monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
        monkeypatch.setenv("RAYTRACE_RL_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        code, found = doctor()
        assert code == 0
        assert [state for state, _ in found["endpoint"]] == ["ok", "ok"]  # logs are off by default, and not asked
        assert server.spans() == []


def test_an_endpoint_that_refuses_is_quoted(doctor, monkeypatch):
    """A wrong token, or a backend that takes traces alone, looks like a network that is down."""
    import grpc

    with receiver() as server:
        server.answers += [Refusal(grpc.StatusCode.UNAUTHENTICATED, "no such token")]
        server.answers += [Refusal(grpc.StatusCode.UNIMPLEMENTED, "unknown service")]
        monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
        monkeypatch.setenv("RAYTRACE_RL_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        code, found = doctor()
    assert code == 1
    traces, metrics = problems(found)
    assert "no such token" in traces
    assert "OTEL_METRICS_EXPORTER=none" in metrics


def test_an_endpoint_where_nothing_listens_and_one_that_never_answers(doctor, monkeypatch):
    """The check hangs on a dead endpoint, or says of a silent one that all is well."""
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_EXPORTER", "otlp")
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with closing(socket.create_server(("127.0.0.1", 0))) as closed:
            gone = closed.getsockname()[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{gone}")
        began = time.monotonic()
        code, found = doctor()
    assert code == 1
    assert time.monotonic() - began < 30
    traces, metrics = problems(found)
    assert "no connection" not in traces
    assert "no connection" in metrics


def test_a_directory_that_cannot_be_written_is_a_problem(doctor, monkeypatch):
    """A read-only volume is found out when the spans of a run have been dropped."""
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", "/proc/runs")
    code, found = doctor()
    assert code == 1
    assert any("cannot be written" in line or "free" in line for line in problems(found))


def test_little_shared_memory_is_told_with_the_way_out(doctor, monkeypatch):
    """A container's 64 MiB of /dev/shm put the spool on a disk, where a write may wait, and nobody knows why."""
    monkeypatch.setattr(place, "MIN_TMPFS_FREE", 1 << 60)
    _, found = doctor()
    assert "--shm-size" in text(found, "place")


def test_the_clock_is_told(monkeypatch):
    """Skew between hosts is blamed on the library, where a host's clock is not synchronised at all."""
    assert _doctor.clock().area == "clock"
    monkeypatch.setattr(_doctor.ctypes, "CDLL", lambda *_, **__: None)
    assert _doctor.clock().text == "the kernel does not say whether the clock is synchronised"


def test_a_sound_run(doctor, tmp_path):
    """A run with nothing lost raises problems."""
    setup.init_telemetry_driver({**SETTINGS, "run_dir": str(tmp_path / "run"), "run_id": "sound"})
    with umbrella_span("job", "rl.grpo.job"):
        pass
    setup.shutdown_telemetry()
    code, found = doctor(tmp_path / "run")
    assert code == 0
    assert "sound: 2 spans of 1 processes (1 closed)" in text(found, "run")


def test_a_run_that_lost_something(doctor, tmp_path):
    """Drops, broken parentage, a missing driver and a relay that cannot send stay in four different places."""
    spool = Spool(tmp_path / "run")
    spool.segment(10, ended(span(2, 0, 1, parent=1, name="rl.lost")), resource=resource(rl__role="worker"))
    note(spool, sent=3, dropped=2, last_error="UNAUTHENTICATED: no such token")
    code, found = doctor(tmp_path / "run")
    assert code == 1
    told = "\n".join(problems(found))
    assert "1 spans whose parent is missing" in told
    assert "no driver among the processes" in told
    assert "2 dropped, 1 unsent; UNAUTHENTICATED: no such token" in told


def test_wiring_mistakes_of_a_source_tree(doctor, tmp_path):
    """What the lint knows has to be asked for separately, by those who do not know of it."""
    imports = "from raytrace_rl import RLSpanGroup as G, umbrella_span\n\n"
    (tmp_path / "train.py").write_text(f"{imports}with umbrella_span(G.GENERATION, 'rl.a.b'):\n    pass\n")
    code, found = doctor("--source", tmp_path / "train.py")
    assert code == 1
    assert "train.py:3" in "\n".join(problems(found))


def test_a_run_that_is_none_and_a_source_that_is_none(tmp_path, capsys):
    """A typing error passes for a machine without problems."""
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert main(["doctor", "--source", str(tmp_path / "none.py")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_text_form_says_how_many_problems_there_are(capsys, monkeypatch, tmp_path):
    """The one form that people read is not the one that is tested."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYTRACE_RL_HEARTBEAT_S", "often")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "!! RAYTRACE_RL_HEARTBEAT_S='often' cannot be used" in out
    assert out.endswith("1 problem\n")
