from __future__ import annotations

import logging
import threading

import pytest

from raytrace_rl import timer as timer_module
from raytrace_rl.span_groups import RLSpanGroup as G
from raytrace_rl.timer import ThreadSafeTimer, Timer
from tests.running import attributes

pytest_plugins = ["tests.telemetry_fixtures"]


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of the timers of a test."""
    clock = Clock()
    monkeypatch.setattr(timer_module, "perf_counter", clock)
    return clock


def timed(timer, clock, label, *seconds):
    """Times durations under a label."""
    for each in seconds:
        with timer.time(label):
            clock.now += each


def test_start_and_stop(clock):
    """Catches a duration that is not the time between the two calls, or is not kept."""
    timer = Timer()
    timer.start("a")
    clock.now += 2
    timer.start("b")
    clock.now += 1
    assert timer.stop("a") == 3
    assert timer.stop("b") == 1
    assert timer.get_elapsed("a") == [3]
    assert timer.totals() == {"a": 3, "b": 1}


def test_wrong_order_is_an_error():
    """Catches a second start that overwrites the first, and a stop that invents a duration."""
    timer = Timer()
    timer.start("a")
    with pytest.raises(ValueError, match="'a' is running"):
        timer.start("a")
    timer.stop("a")
    with pytest.raises(ValueError, match="'a' is not running"):
        timer.stop("a")
    with pytest.raises(KeyError, match="b"):
        timer.get_elapsed("b")


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("mean", 2.5), ("median", 2.0), ("min", 1), ("max", 5), ("sum", 10), ("count", 4), ("std", 1.5)],
)
def test_reductions(clock, operation, expected):
    """Catches a reduction that is another one; ``std`` is the population's, as NumPy's."""
    timer = Timer()
    timed(timer, clock, "a", 1, 2, 5, 2)
    assert timer.reduce("a", operation) == pytest.approx(expected)
    assert timer.get_timing_metrics(operation) == {"a": pytest.approx(expected)}


def test_reduce_defaults_to_the_mean_and_refuses_what_it_does_not_know(clock):
    """Catches another default, and a misspelt operation that returns something."""
    timer = Timer()
    timed(timer, clock, "a", 1, 3)
    assert timer.reduce("a") == 2
    for ask in (lambda: timer.reduce("a", "avg"), lambda: timer.get_timing_metrics({"a": "avg"})):
        with pytest.raises(ValueError, match="avg"):
            ask()
    with pytest.raises(KeyError):
        timer.reduce("b")


def test_timing_metrics_label_by_label(clock):
    """Catches labels that are left out of the mapping being dropped instead of listed."""
    timer = Timer()
    timed(timer, clock, "a", 1, 3)
    timed(timer, clock, "b", 4)
    assert timer.get_timing_metrics({"a": "sum", "unknown": "sum"}) == {"a": 4, "b": [4]}
    assert timer.get_timing_metrics() == {"a": 2, "b": 4}


def test_reset_and_drain(clock):
    """Catches a step that starts with the last one's seconds."""
    timer = Timer()
    timed(timer, clock, "a", 1, 3)
    timed(timer, clock, "b", 4)
    timer.start("c")
    assert timer.get_latest_elapsed("a") == 3
    assert timer.drain("a") == 4
    assert timer.drain("a") == 0
    timer.reset("b")
    assert timer.get_timing_metrics() == {}
    timed(timer, clock, "b", 4)
    timer.reset()
    timer.start("c")
    assert timer.totals() == {}


def test_an_exception_is_timed_and_goes_on(clock):
    """Catches a failing phase whose seconds are missing, or whose failure is."""
    timer = Timer()

    def failing():
        with timer.time("a"):
            clock.now += 7
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert timer.get_elapsed("a") == [7]


def test_one_label_on_several_threads_and_nested():
    """Catches threads that refuse or overwrite each other's durations."""
    timer = ThreadSafeTimer()
    together = threading.Barrier(4)

    def work():
        with timer.time("a"), timer.time("a"):
            together.wait(10)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.reduce("a", "count") == 8


def test_what_is_read_is_a_copy(clock):
    """Catches a caller that changes the timer by changing what it was given."""
    timer = Timer()
    timed(timer, clock, "a", 1)
    timer.get_elapsed("a").append(5)
    timer.get_timing_metrics({})["a"].append(5)
    assert timer.get_elapsed("a") == [1]


def test_debug_lines_carry_the_context_and_can_be_left_out(caplog):
    """Catches ``should_log`` and ``context`` without effect."""
    timer = Timer({"rank": 3})
    with caplog.at_level(logging.DEBUG, "raytrace_rl.timer"):
        timer.start("a", should_log=False)
        timer.stop("a", should_log=False)
        with timer.time("a", False):
            pass
        timer.record("a", 1.0, False)
        assert not caplog.records
        timer.start("b")
        timer.stop("b")
    assert [record.getMessage().startswith("rank=3 b") for record in caplog.records] == [True, True]


def test_the_span_has_the_labels_name(telemetry):
    """Catches a label and a span of different names, a bucket lost on the way, and a span that is not the body's."""
    timer = Timer(span_prefix="rl.grpo")
    with timer.time("policy_training", group=G.POLICY_UPDATE, **{"rl.loss": 0.5}) as span:
        span.set_attribute("rl.late", 1)
    with timer.time("a/b", group=G.ADVANTAGE):
        pass
    found = attributes(telemetry.span("rl.grpo.policy_training"))
    assert (found["rl.loss"], found["rl.late"], found["rl.bucket"]) == (0.5, 1, "productive")
    assert telemetry.span("rl.grpo.a.b")
    assert timer.reduce("policy_training", "count") == 1


def test_without_telemetry_the_body_runs_and_is_timed():
    """Catches a timer that needs telemetry to be on."""
    timer = Timer(span_prefix="rl.grpo")
    with timer.time("policy_training", group=G.POLICY_UPDATE) as span:
        assert span is None
    with timer.time("plain") as span:
        assert span is None
    assert set(timer.totals()) == {"policy_training", "plain"}


class Swallowing:
    """A context manager that swallows, and notes what came."""

    def __init__(self):
        self.came = []

    def __enter__(self):
        return "inside"

    def __exit__(self, *exc):
        self.came.append(exc[0])
        return True


def test_any_context_manager_may_stand_around_the_body(clock):
    """Catches a ``span=`` that is entered and not left, or whose word on the exception is ignored."""
    timer, manager = Timer(), Swallowing()
    found: list[object] = []

    def failing():
        with timer.time("a", span=manager) as inside:
            found.append(inside)
            clock.now += 1
            raise KeyError

    failing()
    assert found == ["inside"]
    assert manager.came == [KeyError]
    assert timer.get_elapsed("a") == [1]
