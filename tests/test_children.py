"""Child processes: what a TRACEPARENT in the environment means, and that fork, spawn and subprocess repeat nothing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context, trace

from raytrace_rl import TraceContext, _env_carrier, iteration_scope, managed_span, setup, umbrella_span
from raytrace_rl.context import remote_trace_context, trace_context_env
from raytrace_rl.monitor import load_run
from tests import children_work
from tests.running import child, running

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run, SpanRow

pytest_plugins = ["tests.telemetry_fixtures"]

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
PROGRAM = """
import sys
from raytrace_rl import init_telemetry_worker, managed_span
init_telemetry_worker()
for name in sys.argv[1:]:
    with managed_span("reward", name):
        pass
"""


def current_parent() -> str | None:
    """The current span as ``trace-span``, None if there is none."""
    found = trace.get_current_span().get_span_context()
    return f"{found.trace_id:032x}-{found.span_id:016x}" if found.is_valid else None


def start(**settings: Any) -> None:
    """Starts telemetry as a child does, its spans going nowhere."""
    setup.init_telemetry_driver({"enabled": True, "exporter": "none", "span_groups": "all", **settings})


def rows(run: Run, name: str) -> list[SpanRow]:
    """The spans of that name; no id of the run repeats, and nothing was damaged."""
    assert run.damage == []
    assert run.duplicates == 0
    assert Counter(row.span_id for row in run.spans).most_common(1)[0][1] == 1
    return [row for row in run.spans if row.name == name]


# --------------------------------------------------------------------------------------------------- the environment


def test_the_environment_for_a_child_carries_what_is_current(telemetry, monkeypatch):
    """Catches a child that is handed another parent's state or baggage, and a parent whose own environment changes."""
    monkeypatch.setenv("TRACEPARENT", PARENT)
    monkeypatch.setenv("TRACESTATE", "vendor=old")
    monkeypatch.setenv("BAGGAGE", "user=old")
    before = dict(os.environ)
    token = context.attach(baggage.set_baggage("user", "ann"))
    try:
        with managed_span("generation", "x") as span, iteration_scope(7):
            assert span is not None
            environ = trace_context_env()
            small = trace_context_env({"PATH": "/bin"})
    finally:
        context.detach(token)
    own = span.get_span_context()
    assert environ["TRACEPARENT"] == f"00-{own.trace_id:032x}-{own.span_id:016x}-01"
    assert "TRACESTATE" not in environ
    assert environ["BAGGAGE"] == "user=ann"
    assert set(small) == {"PATH", "TRACEPARENT", "BAGGAGE"}
    assert {**environ, **{k: before[k] for k in ("TRACEPARENT", "TRACESTATE", "BAGGAGE")}} == before == dict(os.environ)


def test_with_nothing_current_a_child_gets_what_its_parent_got(telemetry, monkeypatch):
    """Catches a trace that ends in a process which only passes it on."""
    monkeypatch.setenv("TRACEPARENT", PARENT)
    assert trace_context_env() == dict(os.environ)


def test_off_the_environment_is_as_it_was(monkeypatch):
    """Catches variables of ours in the children of a program that does not trace."""
    monkeypatch.setenv("TRACEPARENT", PARENT)
    with remote_trace_context({"traceparent": PARENT}):
        assert trace_context_env() == dict(os.environ)


def test_a_process_that_starts_takes_its_parent_from_the_environment(monkeypatch):
    """Catches a child whose spans are roots, and a parent that stays current after telemetry has ended."""
    monkeypatch.setenv("TRACEPARENT", PARENT)
    monkeypatch.setenv("TRACESTATE", "vendor=x")
    monkeypatch.setenv("BAGGAGE", "user=ann")
    start()
    assert current_parent() == f"{TRACE_ID}-{SPAN_ID}"
    assert trace.get_current_span().get_span_context().trace_state.to_header() == "vendor=x"
    assert baggage.get_all() == {"user": "ann"}
    with managed_span("generation", "x") as span:
        assert span is not None
        assert span.get_span_context().trace_id == int(TRACE_ID, 16)
    setup.shutdown_telemetry()
    assert current_parent() is None
    assert baggage.get_all() == {}


def test_what_is_current_already_wins(monkeypatch):
    """Catches a start in the middle of somebody's span that takes its children away."""
    monkeypatch.setenv("TRACEPARENT", PARENT)
    other = trace.NonRecordingSpan(
        trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED))
    )
    with trace.use_span(other):
        start()
        assert trace.get_current_span() is other
        setup.shutdown_telemetry()
        assert trace.get_current_span() is other


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10_000])
def test_rubbish_in_the_environment_is_no_parent(header, monkeypatch):
    """Catches a shell's broken variable that ends the start of a run."""
    monkeypatch.setenv("TRACEPARENT", header)
    start()
    assert current_parent() is None


def test_what_the_raylet_has_is_no_parent(monkeypatch):
    """Catches a Ray worker, or a child of one, under the span in which somebody once started Ray."""
    pipe, environ = subprocess.PIPE, {**os.environ, "TRACEPARENT": PARENT}
    program = [sys.executable, "-c", "print('ready', flush=True); input()"]
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, env=environ) as raylet:
        assert raylet.stdout is not None
        assert raylet.stdout.readline() == b"ready\n"
        environ = {"RAY_RAYLET_PID": str(raylet.pid), "TRACEPARENT": PARENT, "BAGGAGE": "user=old"}
        assert _env_carrier.inherited(environ) == {}
        other = PARENT.replace("b7", "c8")
        assert _env_carrier.inherited({**environ, "TRACEPARENT": other})["traceparent"] == other
        raylet.communicate(b"\n", timeout=30)
    assert _env_carrier.inherited(environ) == {}, "a raylet that cannot be asked vouches for nothing"
    assert _env_carrier.inherited({**environ, "RAY_RAYLET_PID": "nonsense"}) == {}


# --------------------------------------------------------------------------------------------------------- subprocess


def test_a_subprocess_goes_on_with_the_trace(tmp_path):
    """Catches a reward sandbox, or an engine's server, whose spans are a trace of their own."""
    with running(tmp_path / "run") as telemetry:
        with umbrella_span("step", "step"):
            for name in ("first", "second"):
                child(PROGRAM, name, f"{name}-2", **_only_new(trace_context_env()))
        step = telemetry.span("step")
    run = load_run(tmp_path / "run")
    for name in ("first", "first-2", "second", "second-2"):
        (row,) = rows(run, name)
        assert (row.trace_id, row.parent_span_id) == (step.trace_id.hex(), step.span_id.hex())
        assert row.process.role == "worker"
    assert len(run.processes) == 3


def test_a_subprocess_of_a_subprocess_goes_on_too(tmp_path):
    """Catches a chain (a shell, a launcher, the program) that the trace does not outlast."""
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(
        """
        import subprocess
        from raytrace_rl.context import trace_context_env
        if sys.argv[1] == "outer":
            with managed_span("reward", "around"):
                again = [sys.executable, sys.argv[2], "inner"]
                subprocess.run(["/bin/sh", "-c", '"$0" "$@"', *again], env=trace_context_env(), check=True, timeout=60)
        """
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    with running(tmp_path / "run"), umbrella_span("step", "step"):
        subprocess.run([sys.executable, path, "outer", path], env=trace_context_env(), check=True, timeout=120)
    run = load_run(tmp_path / "run")
    (around,), (inner,), (step,) = rows(run, "around"), rows(run, "inner"), rows(run, "step")
    assert around.parent_span_id == step.span_id
    assert inner.parent_span_id == around.span_id


def _only_new(environ: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if os.environ.get(key) != value}


# ---------------------------------------------------------------------------------------------------- multiprocessing


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_children_under_a_context_that_is_handed_to_them(method, tmp_path):
    """Catches children that are roots, whose ids repeat, that write twice, or that never end."""
    processes = multiprocessing.get_context(method)
    with running(tmp_path / "run") as telemetry:
        with umbrella_span("step", "step"):
            given = TraceContext.capture()
        children = [processes.Process(target=children_work.under, args=(given, f"child-{n}", 20)) for n in range(3)]
        for process in children:
            process.start()
        for process in children:
            process.join(60)
            assert process.exitcode == 0
        step = telemetry.span("step")
    run = load_run(tmp_path / "run")
    for n in range(3):
        found = rows(run, f"child-{n}")
        assert len(found) == 20
        assert {row.parent_span_id for row in found} == {step.span_id.hex()}
        assert len({row.process.key for row in found}) == 1
    assert len({row.process.key for row in run.spans}) == 4


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_of_processes(method, tmp_path):
    """Catches a pool whose workers hang at their end, and tasks that lose the span that sent them."""
    processes = multiprocessing.get_context(method)
    with running(tmp_path / "run"), processes.Pool(2) as pool:
        sent = []
        for n in range(4):
            with managed_span("reward", f"send-{n}"):
                sent.append(pool.apply_async(children_work.under, (TraceContext.capture(), f"task-{n}", 1)))
        assert [each.get(60) for each in sent] == [None] * 4
        pool.close()
        pool.join()
    run = load_run(tmp_path / "run")
    for n in range(4):
        (task,), (send,) = rows(run, f"task-{n}"), rows(run, f"send-{n}")
        assert task.parent_span_id == send.span_id


def test_a_killed_child_keeps_what_it_had_finished(tmp_path):
    """Catches spans of a child that wait in memory for an end which never comes."""
    processes = multiprocessing.get_context("spawn")
    with running(tmp_path / "run"), umbrella_span("step", "step"):
        ready = processes.Event()
        process = processes.Process(target=children_work.until_killed, args=(TraceContext.capture(), ready))
        process.start()
        assert ready.wait(60)
        process.kill()
        process.join(60)
    run = load_run(tmp_path / "run")
    assert [row.truncated for row in rows(run, "finished")] == [False] * 5
    assert [row.truncated for row in rows(run, "unfinished")] == [True]


def test_programs_of_the_tests_are_files():
    """Catches children that import this module, and run it again."""
    assert Path(children_work.__file__).name == "children_work.py"
