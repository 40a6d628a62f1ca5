"""For the tests of code that uses the library: a pytest plugin with telemetry in memory, and `assert_wired`.

Installed with the package, so that a test names a fixture and has it::

    def test_a_step_is_traced(raytrace_spans):
        train_step()
        assert raytrace_spans.one("rl.grpo.generation").parent.name == "rl.grpo.step"

Tests that name none of the fixtures are left alone: until one does, nothing but pytest is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from raytrace_rl._recorder import LogRecorder, MetricRecorder, SpanRecorder
    from raytrace_rl._recording import DeterministicClock, Recording

_MARKER: Final = "raytrace(**settings): fields of TelemetryConfig for the raytrace_* fixtures of the test"


def assert_wired(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Asserts that `raytrace_rl.lint` finds no mistake; what is for information only does not fail.

    Args:
        paths: Files and directories of source code. It is read, not imported.

    Raises:
        AssertionError: There are findings; the message has one a line. Or ``paths`` hold no Python at all, and the
            assertion would hold of nothing.
        UnreadablePathError: A path does not exist or may not be read.
    """
    from raytrace_rl.lint import lint

    report = lint(paths)
    if not report.files:
        raise AssertionError("no Python file at or below the paths: nothing was checked")
    if report.errors:
        raise AssertionError("\n".join(["wired or named wrongly:", *map(str, report.errors)]))


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker, for projects that are strict about theirs."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def raytrace_telemetry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recording]:
    """Telemetry for the length of the test, kept in memory: its handle, spans, metrics, logs, and what was dropped.

    All three signals are on, and every span group. ``@pytest.mark.raytrace(span_groups="per_step")`` changes any
    setting. Variables that telemetry reads are taken out of the environment meanwhile. Processes that the test starts
    (Ray's workers) write spools as usual, below ``run_dir``. What code registers (groups, categories, metrics) stays
    registered: modules do so once, when they are imported; see `raytrace_registrations`.
    """
    from raytrace_rl import _recording

    settings: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("raytrace"))):  # the nearest last
        settings.update(marker.kwargs)
    with _recording.recording({"run_dir": str(tmp_path / "raytrace_run"), **settings}) as started:
        yield started


@pytest.fixture
def raytrace_spans(raytrace_telemetry: Recording) -> SpanRecorder:
    """The finished spans of the test, in the order in which they finished. Starts telemetry."""
    return raytrace_telemetry.spans


@pytest.fixture
def raytrace_metrics(raytrace_telemetry: Recording) -> MetricRecorder:
    """The data points of the test's metrics; looking at them collects. Starts telemetry."""
    return raytrace_telemetry.metrics


@pytest.fixture
def raytrace_logs(raytrace_telemetry: Recording) -> LogRecorder:
    """What the test logs, each with its span, from the levels that its loggers let pass. Starts telemetry."""
    return raytrace_telemetry.logs


@pytest.fixture
def raytrace_deterministic(raytrace_telemetry: Recording) -> Iterator[DeterministicClock]:  # noqa: ARG001 - started first
    """The same ids and times at each run of the test: ids from a seed, a clock that goes on by 1 ms when it is read.

    Times of metrics and logs stay real: they come from OpenTelemetry's SDK and from ``logging``. Starts telemetry.
    """
    from raytrace_rl import _recording

    with _recording.deterministic() as clock:
        yield clock


@pytest.fixture
def raytrace_registrations() -> Iterator[None]:
    """Puts the registry of span groups back as it was, after a test that registers some of its own."""
    from raytrace_rl import _recording

    with _recording.registrations():
        yield
