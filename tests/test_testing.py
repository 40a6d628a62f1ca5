"""The pytest plugin: telemetry in memory for a user's tests, nothing left behind, nothing done to those without it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from opentelemetry import trace

from raytrace_rl import _ids, _process, _recording, _registry, _span, _state, setup
from raytrace_rl.config import ConfigError
from raytrace_rl.instrumentation import (
    iteration_scope,
    managed_span,
    span_attributes,
    span_cm,
    trace_fn,
    umbrella_span,
)
from raytrace_rl.metrics import MetricSpec, record_metrics, register_metric_group
from raytrace_rl.span_groups import RLSpanGroup as G
from raytrace_rl.span_groups import register_span_groups
from raytrace_rl.testing import assert_wired


def _project(directory: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest in a project of its own, as a user does: the plugin comes by its entry point."""
    for name, code in files.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", "-W", "error", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# -- spans ---------------------------------------------------------------------------------------------------------


def test_a_span_has_all_that_a_test_asserts(raytrace_spans):
    """A field of a finished span is missing, or another than the code under test gave it."""
    with umbrella_span(G.U_STEP, "rl.grpo.step"), iteration_scope(3):
        with managed_span(G.GENERATION, "rl.grpo.generation", **{"rl.k": 2}) as span:
            assert span is not None
            span.add_event("refilled", {"n": 1})
            linked = trace.SpanContext(0x11, 0x22, is_remote=True)
            span.add_link(linked, {"why": "retry"})
        with pytest.raises(ValueError, match="broken"), managed_span(G.REWARD, "rl.grpo.reward"):
            raise ValueError("broken")
    assert raytrace_spans.names == ["rl.grpo.generation", "rl.grpo.reward", "rl.grpo.step"]
    step, generation = raytrace_spans.one("rl.grpo.step"), raytrace_spans.one("rl.grpo.generation")
    assert (generation.group, generation.bucket, generation.iteration) == ("generation", "productive", 3)
    assert generation.attributes["rl.k"] == 2
    assert (generation.status, generation.kind) == ("UNSET", "INTERNAL")
    assert generation.parent is step
    assert step.parent is None
    assert (step.group, step.bucket) == ("step", None)
    assert [child.name for child in step.children] == ["rl.grpo.generation", "rl.grpo.reward"]
    assert [(event.name, event.attributes) for event in generation.events] == [("refilled", {"n": 1})]
    assert [(link.span_id.hex(), link.attributes) for link in generation.links] == [("22".zfill(16), {"why": "retry"})]
    reward = raytrace_spans.one("rl.grpo.reward")
    assert (reward.status, reward.status_message) == ("ERROR", "ValueError: broken")
    assert raytrace_spans.tree() == "rl.grpo.step\n  rl.grpo.generation\n  rl.grpo.reward"


def test_spans_are_a_sequence_that_grows(raytrace_spans):
    """A test that looks twice sees what there was at the first look, or things twice."""
    assert len(raytrace_spans) == 0
    assert raytrace_spans.tree() == ""
    for name in ("first", "second", "third"):
        with span_cm(name):
            pass
        assert raytrace_spans[-1].name == name
    assert [span.name for span in raytrace_spans[:2]] == ["first", "second"]
    assert list(raytrace_spans) == list(raytrace_spans)
    raytrace_spans.clear()
    assert raytrace_spans.names == []
    with span_cm("fourth"):
        pass
    assert raytrace_spans.names == ["fourth"]


def test_one_says_what_there_is(raytrace_spans):
    """A failing assertion tells nobody which spans there were instead."""
    with span_cm("outer"), span_cm("inner"), span_cm("inner"):
        pass
    with pytest.raises(AssertionError, match=r"2 finished spans 'inner', not 1, among:\nouter\n  inner\n    inner"):
        raytrace_spans.one("inner")
    with pytest.raises(AssertionError, match="0 finished spans 'missing'"):
        raytrace_spans.one("missing")
    assert len(raytrace_spans.named("inner")) == 2


def test_spans_of_threads_and_of_other_instrumentation(raytrace_spans):
    """What ends on another thread, or comes from an OpenTelemetry tracer, is not there."""

    def work() -> None:
        with trace.get_tracer("their.library").start_as_current_span("theirs"):
            pass

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
    span = raytrace_spans.one("theirs")
    assert span.scope.name == "their.library"
    assert (span.group, span.thread) == (None, "worker")


def test_an_open_span_is_not_finished_until_shutdown(raytrace_telemetry):
    """A span that is never ended passes for one that was, or is gone after a shutdown in the code under test."""
    open_span = managed_span(G.GENERATION, "rl.grpo.generation")
    open_span.__enter__()
    assert raytrace_telemetry.spans.names == []
    setup.shutdown_telemetry()
    assert raytrace_telemetry.spans.one("rl.grpo.generation").truncated


def test_code_that_starts_telemetry_itself(raytrace_spans):
    """A driver under test that shuts telemetry down and starts it anew writes a spool instead."""
    setup.shutdown_telemetry()
    setup.init_telemetry_driver({"enabled": True, "span_groups": "job"})
    with umbrella_span(G.U_JOB, "rl.grpo.job"), managed_span(G.REWARD, "rl.grpo.reward"):
        pass
    assert raytrace_spans.names == ["rl.grpo.job.started", "rl.grpo.job"]


@pytest.mark.raytrace(span_groups="per_step")
class TestMarker:
    """Settings of a class, and of a test in it."""

    def test_settings_of_the_class(self, raytrace_spans):
        """The marker has no effect."""
        with managed_span(G.PER_PROMPT, "rl.grpo.prompt") as span:
            assert span is None
        with managed_span(G.REWARD, "rl.grpo.reward") as span:
            assert span is not None

    @pytest.mark.raytrace(span_groups="default")
    def test_the_nearest_marker_holds(self, raytrace_spans):
        """A test cannot say otherwise than its class."""
        with managed_span(G.REWARD, "rl.grpo.reward") as span:
            assert span is None


# -- metrics and logs ----------------------------------------------------------------------------------------------


def test_metrics(raytrace_telemetry, raytrace_metrics):
    """A data point needs a collection that the test cannot wait for, or lacks its labels."""
    register_metric_group("test.testing", [MetricSpec("depth", "test.queue.depth", unit="{batch}")])
    meter = raytrace_telemetry.handle.meter
    for depth in (3, 5):
        record_metrics(meter, "test.testing", {"depth": depth}, attributes={"queue": "replay"})
        assert raytrace_metrics.latest("test.queue.depth", queue="replay").value == depth
    record_metrics(meter, "test.testing", {"depth": 9}, attributes={"queue": "other"})
    assert raytrace_metrics.latest("test.queue.depth", queue="replay").value == 5
    assert raytrace_metrics.latest("test.queue.depth").unit == "{batch}"
    assert {point.name for point in raytrace_metrics} == {"test.queue.depth"}
    with pytest.raises(AssertionError, match=r"no point of 'test.queue.depth' with .*\ntest.queue.depth"):
        raytrace_metrics.latest("test.queue.depth", queue="none such")


def test_logs(raytrace_spans, raytrace_logs):
    """A log line is not there, or does not know its span."""
    with span_cm("outer"):
        logging.getLogger("their.module").warning("buffer %s is full", "A")
    assert raytrace_logs.messages == ["buffer A is full"]
    (record,) = raytrace_logs
    assert (record.logger, record.severity_text) == ("their.module", "WARNING")
    assert record.span_id == raytrace_spans.one("outer").span_id


# -- determinism ---------------------------------------------------------------------------------------------------


def _ids_and_times(spans) -> list[tuple[str, str | None, int, int]]:
    return [(span.span_id, span.parent_span_id, span.start_ns, span.end_ns) for span in spans]


def test_deterministic(raytrace_deterministic, raytrace_spans):
    """A snapshot of a trace differs from one run to the next."""

    @trace_fn(G.REWARD, "rl.grpo.reward")
    def reward() -> None:
        raytrace_deterministic.advance(2)

    with umbrella_span(G.U_STEP, "rl.grpo.step") as step:
        assert step is not None
        step.add_event("begun")
        reward()
    inner, outer = raytrace_spans
    assert (inner.parent_span_id, inner.span_id) == (outer.span_id, "f728b4fa42485e3a")
    assert outer.trace_id == "e3e70682c2094cac629f6fbed82c07cd"
    start = 1_700_000_000_000_000_000
    assert outer.start_ns == start + 1_000_000
    assert outer.events[0].time_ns == start + 2_000_000
    assert inner.start_ns == start + 3_000_000
    assert inner.duration_ns == 2_001_000_000
    assert outer.duration_ns == 2_004_000_000


def test_deterministic_is_the_same_again_and_then_over(tmp_path):
    """The second run of a test begins where the first left off, or later tests share its ids and clock."""
    runs = []
    for _ in range(2):
        with _recording.recording({"run_dir": str(tmp_path)}) as recorded, _recording.deterministic():
            with span_cm("outer"), span_cm("inner"):
                pass
            runs.append(_ids_and_times(recorded.spans))
    assert runs[0] == runs[1]
    assert _ids.new_span_id() != _ids.new_span_id()
    with _recording.deterministic():
        first = _ids.new_span_id()
    assert first != _ids.new_span_id()
    assert _span.monotonic_ns.__module__ == "time"


# -- nothing is left behind ----------------------------------------------------------------------------------------


def test_everything_is_put_back(tmp_path, monkeypatch, caplog):
    """Groups, drops, warnings, context or environment of one test reach the next."""
    monkeypatch.setenv("RAYTRACE_RL_SPAN_GROUPS", "job")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    before = dict(os.environ)
    with _recording.recording({"run_dir": str(tmp_path)}) as recorded:
        assert "OTEL_SERVICE_NAME" not in os.environ
        assert _state.enabled >= {"generation"}, "the variable of the machine must not reach the test"
        leaked = span_cm("leaked")
        leaked.__enter__()
        shared = span_attributes({"leaked": 1})
        shared.__enter__()
        _state.count_drop("spans")
        assert recorded.dropped == {"spans": 1}
        _state.warn_once("test-testing", "only once")
    assert dict(os.environ) == before
    assert (_state.enabled, _state.tracing, _process.current, _process.sink_override) == (
        frozenset(),
        False,
        None,
        None,
    )
    assert not trace.get_current_span().get_span_context().is_valid
    with _recording.recording({"run_dir": str(tmp_path)}) as recorded:
        assert recorded.dropped == {}
        _state.warn_once("test-testing", "only once")
        with span_cm("clean"):
            pass
        assert recorded.spans.names == ["clean"]
        assert recorded.spans[0].parent_span_id is None
        assert "leaked" not in recorded.spans[0].attributes
    assert [record.getMessage() for record in caplog.records].count("only once") == 2


def test_telemetry_that_runs_already_is_ended(tmp_path):
    """Spans of a test go to the spool of whoever forgot to shut down before it."""
    setup.init_telemetry_driver({"enabled": True, "run_dir": str(tmp_path / "forgotten"), "span_groups": "none"})
    with _recording.recording({"run_dir": str(tmp_path / "run")}) as recorded, span_cm("mine"):
        pass
    assert recorded.spans.names == ["mine"]


def test_nothing_is_written_in_this_process(tmp_path):
    """Telemetry in memory keeps a spool, a heartbeat thread or a lock all the same."""
    with _recording.recording({"run_dir": str(tmp_path / "run")}) as recorded, span_cm("mine"):
        assert recorded.handle.is_exporting
        assert recorded.run_dir == str(tmp_path / "run")
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("raytrace_rl")]
    assert list(tmp_path.glob("run/spool/*/*")) == []


def test_settings_that_cannot_be_used(tmp_path):
    """A mistake in the marker is a test without telemetry, and the next test pays for it."""
    with pytest.raises(ConfigError, match="span_group"), _recording.recording({"span_grups": "all"}):
        pass
    with pytest.raises(ValueError, match="did not start"), _recording.recording({"enabled": False}):
        pass
    assert _process.sink_override is None


def test_registrations(raytrace_telemetry):
    """A test that registers groups leaves them to the next."""
    with _recording.registrations():
        register_span_groups("testing", ["testing.decode"], {"testing_preset": ["testing.decode"]})
        assert "testing.decode" in _state.enabled
    assert "testing.decode" not in _registry.owners
    assert "testing_preset" not in _registry.presets
    assert "testing.decode" not in _state.enabled
    assert "generation" in _state.enabled


# -- in a user's project -------------------------------------------------------------------------------------------

_STEPS = """
    from raytrace_rl import RLSpanGroup as G, managed_span, umbrella_span

    def step():
        with umbrella_span(G.U_STEP, "rl.grpo.step"), managed_span(G.REWARD, "rl.grpo.reward"):
            return 7
"""

_USES_IT = """
    import pytest
    import steps
    from raytrace_rl import get_telemetry_handle

    @pytest.mark.parametrize("again", [1, 2])
    def test_traced(raytrace_spans, again):
        assert steps.step() == 7
        assert raytrace_spans.tree() == "rl.grpo.step\\n  rl.grpo.reward"

    def test_untraced():
        assert get_telemetry_handle() is None
        assert steps.step() == 7

    @pytest.mark.raytrace(span_groups="default")
    def test_marked(raytrace_spans):
        steps.step()
        assert len(raytrace_spans) == 0

    def test_fails(raytrace_spans):
        steps.step()
        raytrace_spans.one("rl.grpo.generation")
"""

_DOES_NOT = """
    import logging
    import sys
    from opentelemetry import trace

    HEAVY = {"ray", "torch", "numpy", "grpc", "opentelemetry.sdk", "raytrace_rl.setup", "raytrace_rl.lint"}

    def test_untouched():
        assert HEAVY & set(STARTED_WITH) == set()
        assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"
        assert "raytrace_rl" not in logging.root.manager.loggerDict

    STARTED_WITH = list(sys.modules)
"""


def test_a_project_that_uses_it(tmp_path):
    """The fixtures are not there without configuration, or the tests of a project see each other's telemetry."""
    done = _project(tmp_path, steps=_STEPS, test_steps=_USES_IT)
    assert "4 passed, 1 failed" in done.stdout or "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert "0 finished spans 'rl.grpo.generation', not 1, among:" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.py", "test_steps.py"]


def test_a_project_that_does_not(tmp_path):
    """Having the package installed slows down, or changes, the tests of projects that never use the plugin."""
    done = _project(tmp_path, test_other=_DOES_NOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_project_without_tests_of_it_can_switch_it_off(tmp_path):
    """Nobody can get rid of the plugin."""
    done = _project(tmp_path, "-p", "no:raytrace_rl", test_other="def test_it(raytrace_spans): pass")
    assert "fixture 'raytrace_spans' not found" in done.stdout, done.stdout + done.stderr


# -- assert_wired --------------------------------------------------------------------------------------------------


def test_assert_wired(tmp_path):
    """The wiring assertion holds of a project with a mistake, or of one without any Python."""
    with pytest.raises(AssertionError, match="nothing was checked"):
        assert_wired([tmp_path])
    (tmp_path / "right.py").write_text(textwrap.dedent(_STEPS))
    assert_wired([tmp_path])
    (tmp_path / "wrong.py").write_text(textwrap.dedent(_STEPS).replace("G.U_STEP", "G.REWARD"))
    with pytest.raises(AssertionError, match="RT201"):
        assert_wired([tmp_path])
