from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
from opentelemetry import metrics as otel
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from raytrace_rl import (
    TracedActor,
    _cardinality,
    _env_signals,
    _metrics_api,
    _metrics_pipeline,
    _metrics_rounds,
    _state,
    managed_span,
)
from raytrace_rl._metrics_pipeline import meter
from raytrace_rl.monitor import load_run
from tests.running import child, wait_for
from tests.signals_running import names, points, scope_metrics, signals, values


@pytest.fixture
def run(tmp_path):
    """Telemetry with metrics."""
    with signals(tmp_path / "run") as started:
        yield started


@pytest.fixture(autouse=True)
def _observables():
    """Forgets the observable instruments of a test."""
    before = list(_metrics_api.observables)
    yield
    _metrics_api.observables[:] = before


def collect(seconds=5.0):
    """Collects everything, as a flush does."""
    return _metrics_pipeline.collect(time.monotonic() + seconds)


# -- instruments ------------------------------------------------------------------------------------------------------


def test_every_kind_of_instrument_reaches_the_spool(run):
    """Catches an instrument that is recorded and never collected, or as another kind."""
    mine = meter("mine", "1.2")
    mine.create_counter("a.counter", "1", "counted").add(2, {"k": "v"})
    mine.create_up_down_counter("a.updown").add(-3)
    mine.create_gauge("a.gauge").set(1.5)
    mine.create_histogram("a.histogram", "s").record(0.5)
    mine.create_observable_gauge("o.gauge", [lambda _: [Observation(7, {"x": 1})]])
    mine.create_observable_counter("o.counter", [lambda _: [Observation(8)]])
    mine.create_observable_up_down_counter("o.updown", [lambda _: [Observation(-9)]])
    assert collect()
    assert points(run.run_dir, "a.counter") == [({"k": "v"}, 2)]
    assert points(run.run_dir, "o.gauge") == [({"x": 1}, 7)]
    assert [values(run.run_dir, name) for name in ("a.updown", "a.gauge", "o.counter", "o.updown")] == [
        [-3], [1.5], [8], [-9],
    ]  # fmt: skip
    (scope,) = scope_metrics(run.run_dir)
    assert (scope.scope.name, scope.scope.version) == ("mine", "1.2")
    (histogram,) = [metric for metric in scope.metrics if metric.name == "a.histogram"]
    assert (histogram.unit, histogram.histogram.data_points[0].sum) == ("s", 0.5)
    assert run.drops == {}


def test_a_flush_that_is_not_final_collects_and_goes_on(run):
    """Catches a checkpoint's flush that leaves what was recorded so far to the next interval, or ends metrics."""
    counter = meter("m").create_counter("c")
    meter("m").create_observable_gauge("o", [lambda _: [Observation(7)]])
    counter.add(1)
    assert load_run(run.run_dir).metrics == []
    assert TracedActor().flush_telemetry(5, final=False) is True
    assert (values(run.run_dir, "c"), values(run.run_dir, "o")) == ([1], [7])
    counter.add(1)
    assert collect()
    assert values(run.run_dir, "c") == [1, 2]


def test_bucket_boundaries_that_are_advised_hold(run):
    """Catches an advice that is taken and not passed on."""
    made = meter("m").create_histogram("h", explicit_bucket_boundaries_advisory=[1.0, 2.0])
    made.record(1.5)
    collect()
    (row,) = load_run(run.run_dir).metrics
    assert (row.bounds, row.bucket_counts, row.count) == ((1.0, 2.0), (0, 1, 0), 1)


def test_equal_instruments_are_one_series(run, caplog):
    """Catches two modules that make the same counter and count separately, or are complained of."""
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            meter("m").create_counter("c").add(1)
    collect()
    assert values(run.run_dir, "c") == [2]
    assert not caplog.records


def test_an_instrument_lives_through_shutdown_and_restart(tmp_path):
    """Catches an instrument made at import that is dead, or goes on counting for the last run, after a restart."""
    counter = meter("m").create_counter("c")
    counter.add(100)  # telemetry is off: nobody counts
    for attempt in range(2):
        with signals(tmp_path / str(attempt)) as started:
            counter.add(attempt + 1)
        assert _metrics_api.backend is None
        counter.add(50)
        assert values(started.run_dir, "c") == [attempt + 1]


def test_what_is_no_fit_value_is_dropped_counted_and_named(run, caplog):
    """Catches a NaN loss that raises, floods the log, or vanishes without a count."""
    mine = meter("m")
    with caplog.at_level(logging.WARNING):
        for bad in (float("nan"), float("inf"), "1", None):
            mine.create_gauge("g").set(bad)
            mine.create_gauge("g").set(bad)
        mine.create_counter("c").add(-1)
        mine.create_histogram("h").record(-1)
        mine.create_gauge("g").set(2)
    collect()
    assert (names(run.run_dir), values(run.run_dir, "g")) == ({"g"}, [2])
    assert run.drops == {"metrics": 10}
    assert len(caplog.records) == 4


def test_an_instrument_that_the_sdk_refuses_does_no_harm(run, caplog):
    """Catches an unusable name that raises in the middle of a step."""
    made = meter("m").create_counter("1 not a name")
    made.add(1)
    made.add(1)
    assert run.drops == {"metrics": 2}
    assert "1 not a name" in caplog.text


def test_a_signal_handler_that_records_in_the_midst_of_recording(run, monkeypatch):
    """Catches the deadlock of a handler that waits for a lock which its own thread holds."""
    counter = meter("m").create_counter("c")
    counter.add(1)

    flushed = []

    def handler(_signum, _frame):
        counter.add(10)
        flushed.append(collect(0.2))

    before = signal.signal(signal.SIGUSR1, handler)
    inner = counter._emitter

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGUSR1)
        inner(*args)

    counter._emitter = interrupted
    try:
        counter.add(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    collect()
    assert flushed == [False]
    assert values(run.run_dir, "c") == [2]
    assert run.drops == {"metrics": 2}


def test_labels_are_bounded(run, caplog):
    """Catches a request id as a label that makes a series for every request, here and in every backend."""
    counter = meter("m").create_counter("c")
    for i in range(_cardinality.MAX_VALUES + 40):
        counter.add(1, {"id": f"r{i}", "kind": "k"})
    collect()
    found = {labels["id"]: value for labels, value in points(run.run_dir, "c")}
    assert len(found) == _cardinality.MAX_VALUES + 1
    assert found["other"] == 40
    assert all(labels["kind"] == "k" for labels, _ in points(run.run_dir, "c"))
    assert [record.args[0] for record in caplog.records] == ["id"]


def test_the_bound_is_of_a_series_and_its_label_and_of_a_run(run):
    """Catches one series whose labels use up another's bound, and a bound that outlives its run."""
    for i in range(_cardinality.MAX_VALUES):
        assert _cardinality.bounded("a", {"x": i}) == {"x": i}
    assert _cardinality.bounded("a", {"x": 0, "y": [1]}) == {"x": 0, "y": [1]}
    given = {"x": "new", "z": 1}
    assert _cardinality.bounded("a", given) == {"x": "other", "z": 1}
    assert given == {"x": "new", "z": 1}
    assert _cardinality.bounded("b", {"x": "new"}) == {"x": "new"}
    assert _cardinality.bounded("a", None) is None
    _cardinality.forget()
    assert _cardinality.bounded("a", {"x": "new"}) == {"x": "new"}


# -- when it is collected ---------------------------------------------------------------------------------------------


def test_the_beat_collects_when_it_is_time(run, monkeypatch):
    """Catches a collection at every beat, or at none."""
    now = time.monotonic()
    monkeypatch.setattr(_metrics_pipeline, "monotonic", lambda: now)
    meter("m").create_counter("c").add(1)
    _metrics_pipeline.tick()
    assert values(run.run_dir, "c") == []
    now += _metrics_pipeline.current.interval_s + 1
    _metrics_pipeline.tick()
    _metrics_pipeline.tick()
    assert values(run.run_dir, "c") == [1]


@pytest.mark.parametrize(("text", "seconds"), [("2500", 2.5), ("", 10.0), ("0", 10.0), ("soon", 10.0), ("-1", 10.0)])
def test_the_interval_is_opentelemetrys_variable(text, seconds, monkeypatch, caplog):
    """Catches milliseconds taken for seconds, and a value that cannot be used going unnoticed."""
    assert _env_signals.metric_interval_s({"OTEL_METRIC_EXPORT_INTERVAL": text}) == seconds
    assert bool(caplog.records) == (text not in ("2500", ""))


def test_each_step_is_collected_as_it_is_recorded(run):
    """Catches a gauge of which only the last step within an interval is ever seen."""
    gauge = meter("m").create_gauge("g")
    for step in range(3):
        gauge.set(step)
        _metrics_pipeline.current._step_from = 0.0  # as after a while
        _metrics_pipeline.collect_step()
    assert values(run.run_dir, "g") == [0, 1, 2]


def test_steps_that_follow_fast_leave_it_to_the_next_beat(run):
    """Catches steps of a millisecond that spend most of their time on collecting."""
    gauge = meter("m").create_gauge("g")
    gauge.set(1)
    _metrics_pipeline.current._step_from = time.monotonic() + 60
    _metrics_pipeline.collect_step()
    assert values(run.run_dir, "g") == []
    _metrics_pipeline.tick()
    assert values(run.run_dir, "g") == [1]


def test_nothing_is_imported_before_the_first_measurement(tmp_path):
    """Catches every worker paying for the SDK's metrics at its start, and at its end, whether or not it has any."""
    child(
        """
        import sys, time
        from raytrace_rl import _metrics_pipeline, _state, setup
        import raytrace_rl.metrics, raytrace_rl.logs, raytrace_rl.timer, raytrace_rl.efficiency
        assert "opentelemetry.sdk" not in sys.modules
        handle = setup.init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1]})
        _metrics_pipeline.start(_state.config)
        _metrics_pipeline.meter("m").create_counter("c")
        _metrics_pipeline.tick()
        _metrics_pipeline.collect(time.monotonic() + 1)
        assert "opentelemetry.sdk.metrics" not in sys.modules
        _metrics_pipeline.meter("m").create_counter("c").add(1)
        assert "opentelemetry.sdk.metrics" in sys.modules
        """,
        tmp_path / "run",
    )


@pytest.mark.parametrize("settings", [{"metrics_enabled": False}, {"exporter": "none"}])
def test_switched_off_nothing_is_recorded_or_counted(tmp_path, settings):
    """Catches metrics that are kept, or counted as lost, though nobody wants them."""
    with signals(tmp_path / "run", **settings) as started:
        assert not _metrics_pipeline.recording()
        meter("m").create_counter("c").add(1)
        assert started.drops == {}


def test_what_the_spool_refuses_is_counted(run, monkeypatch):
    """Catches points that vanish without a count when the disk is full."""
    meter("m").create_counter("c").add(1, {"k": 1})
    meter("m").create_counter("c").add(1, {"k": 2})
    with monkeypatch.context() as patch:
        patch.setattr(_state, "writer", None)
        collect()
    assert run.drops.pop("bytes") > 0
    assert run.drops["metrics"] == 2


def test_delta_temporality_and_exponential_histograms_on_request(tmp_path, monkeypatch):
    """Catches the two standard variables of the OTLP exporter having no effect."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "Delta")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "base2_exponential_bucket_histogram")
    with signals(tmp_path / "run") as started:
        counter, up_down = meter("m").create_counter("c"), meter("m").create_up_down_counter("u")
        meter("m").create_histogram("h").record(3)
        for _ in range(2):
            counter.add(1)
            up_down.add(1)
            collect()
        assert values(started.run_dir, "c") == [1, 1]
        assert values(started.run_dir, "u") == [1, 2]
        rows = [row for row in load_run(started.run_dir).metrics if row.name == "h"]
        assert [(row.kind, row.temporality, row.count) for row in rows] == [("exponential_histogram", "delta", 1)]


@pytest.mark.parametrize("function", [_env_signals.temporality, _env_signals.histogram_aggregation])
def test_a_variable_with_an_unknown_value_warns(function, caplog):
    """Catches a misspelt preference that is silently another."""

    class Environ(dict):
        def get(self, name, default=None):
            return "sometimes"

    assert function(Environ()) in ("cumulative", "explicit_bucket_histogram")
    assert "sometimes" in caplog.text


def test_exemplars_lead_to_the_span(run):
    """Catches a histogram whose slow values cannot be traced."""
    with managed_span("generation", "rl.x.y") as span:
        meter("m").create_histogram("h").record(3)
    collect()
    (scope,) = scope_metrics(run.run_dir)
    (exemplar,) = scope.metrics[0].histogram.data_points[0].exemplars
    assert (exemplar.trace_id, exemplar.span_id) == (span.trace_id, span.span_id)


# -- callbacks --------------------------------------------------------------------------------------------------------


class Hanging:
    """A callback that hangs until it is let go."""

    def __init__(self):
        self.entered = threading.Event()
        self.release = threading.Event()
        self.calls = 0

    def __call__(self, _options):
        self.calls += 1
        call = self.calls
        self.entered.set()
        self.release.wait(30)
        return [Observation(call)]


@pytest.fixture
def hanging():
    """A callback that hangs until the end of the test."""
    callback = Hanging()
    yield callback
    callback.release.set()


def test_a_callback_that_hangs_costs_its_own_values_alone(run, hanging, caplog):
    """Catches one hanging callback that takes every metric of the process with it, or a shutdown that waits for it."""
    mine = meter("m")
    mine.create_observable_gauge("first", [lambda _: [Observation(1)]])
    mine.create_observable_gauge("stuck", [hanging])
    mine.create_observable_gauge("last", [lambda _: [Observation(3)]])
    mine.create_counter("c").add(1)
    before = time.monotonic()
    assert not collect(0.4)
    assert time.monotonic() - before < 3
    assert names(run.run_dir) == {"c", "first"}
    assert run.drops == {"metrics": 1}
    assert [record.args for record in caplog.records] == [("stuck",)]
    assert collect()  # it is left out until it returns
    assert names(run.run_dir) == {"c", "first", "last"}
    assert hanging.calls == 1
    hanging.release.set()
    wait_for(lambda: all(t.name != "raytrace_rl-metrics" for t in threading.enumerate()), "the callback to return")
    # What a round brings in the end that was given up is out of date.
    assert [source.pending for source in _metrics_api.observables[-3:]] == [[], [], []]
    assert collect()
    assert names(run.run_dir) == {"c", "first", "stuck", "last"}
    assert values(run.run_dir, "stuck") == [2]


def test_the_beat_never_waits_for_a_callback(run, hanging, monkeypatch):
    """Catches a heartbeat that stops because a callback hangs: the process would look dead, and its spans stay open."""
    meter("m").create_observable_gauge("stuck", [hanging])
    meter("m").create_counter("c").add(1)
    pipeline = _metrics_pipeline.current
    pipeline._due = 0.0
    _metrics_pipeline.tick()
    assert hanging.entered.wait(10)
    _metrics_pipeline.tick()  # it runs: nothing to do
    assert values(run.run_dir, "c") == []
    monkeypatch.setattr(_metrics_pipeline, "CALLBACK_S", 0.0)
    pipeline._due = 0.0
    _metrics_pipeline.tick()
    wait_for(lambda: values(run.run_dir, "c") == [1], "the counter")
    assert run.drops == {"metrics": 1}


def test_no_lock_is_held_while_a_callback_runs(run, hanging):
    """Catches a program that hangs because it makes or uses an instrument while a callback does."""
    meter("m").create_observable_gauge("stuck", [hanging])
    _metrics_pipeline.current._due = 0.0
    _metrics_pipeline.tick()
    assert hanging.entered.wait(10)
    meter("m").create_counter("c").add(1)
    meter("m").create_observable_counter("o", [lambda _: []])
    _metrics_pipeline.collect_step()
    assert values(run.run_dir, "c") == [1]


def test_a_callback_may_record_and_flush(run):
    """Catches a callback that deadlocks with the collection it is part of."""
    counter = meter("m").create_counter("c")
    answers = []

    def callback(_options):
        counter.add(1)
        answers.append(collect(0.5))
        return [Observation(1)]

    meter("m").create_observable_gauge("o", [callback])
    assert collect()
    assert answers == [True]
    assert run.drops == {}
    assert values(run.run_dir, "c")[-1] == 1
    assert values(run.run_dir, "o") == [1]


def test_a_callback_that_fails_costs_its_own_values_alone(run, caplog):
    """Catches a callback whose error ends the round, or is repeated at every interval."""

    def failing(_options):
        raise RuntimeError("no GPU")

    mine = meter("m")
    mine.create_observable_gauge("bad", [failing, lambda _: [Observation(1), Observation(float("nan"))]])
    mine.create_observable_gauge("good", [lambda _: [Observation(2)]])
    collect()
    collect()
    assert values(run.run_dir, "bad") == [1, 1]
    assert values(run.run_dir, "good") == [2, 2]
    assert caplog.text.count("no GPU") == 1
    assert run.drops == {"metrics": 2}


def test_callbacks_may_be_generators(run):
    """Catches the other form of callback that the API allows."""

    def generator():
        n = 0
        options = yield
        while n < 2:
            assert options.timeout_millis > 0
            n += 1
            options = yield [Observation(n)]

    meter("m").create_observable_gauge("o", [generator()])
    for _ in range(3):
        collect()
    assert values(run.run_dir, "o") == [1, 2]


def test_labels_of_observations_are_bounded(run):
    """Catches a callback that makes a series for every request."""
    many = [Observation(i, {"id": i}) for i in range(_cardinality.MAX_VALUES + 3)]
    meter("m").create_observable_gauge("o", [lambda _: many])
    collect()
    assert len(points(run.run_dir, "o")) == _cardinality.MAX_VALUES + 1


# -- the provider that is installed -----------------------------------------------------------------------------------


def test_the_provider_is_installed_where_there_is_none(tmp_path):
    """Catches instrumentation of other libraries that records nowhere, also where it came before telemetry."""
    child(
        """
        import sys, time
        from opentelemetry import metrics
        early = metrics.get_meter("early").create_counter("early")
        early.add(100)
        from raytrace_rl import _metrics_pipeline, _state, setup
        setup.init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1]})
        _metrics_pipeline.start(_state.config)
        early.add(1)
        metrics.get_meter("late").create_counter("late").add(2)
        _metrics_pipeline.stop(time.monotonic() + 5)
        """,
        tmp_path / "run",
    )
    assert (values(tmp_path / "run", "early"), values(tmp_path / "run", "late")) == ([1], [2])


def test_a_provider_that_was_there_first_stays_and_is_joined(tmp_path):
    """Catches a provider that is replaced, loses its own readers, or whose metrics never reach the spool."""
    done = child(
        """
        import sys, time
        from opentelemetry import metrics
        from opentelemetry.metrics import Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader])
        metrics.set_meter_provider(provider)
        from raytrace_rl import _metrics_pipeline, _state, setup
        for attempt in ("one", "two"):
            setup.init_telemetry_driver({"enabled": True, "run_dir": f"{sys.argv[1]}/{attempt}"})
            _metrics_pipeline.start(_state.config)
            assert metrics.get_meter_provider() is provider
            metrics.get_meter("theirs").create_counter(f"theirs.{attempt}").add(2)
            _metrics_pipeline.meter("ours").create_counter(f"ours.{attempt}").add(1)
            _metrics_pipeline.stop(time.monotonic() + 5)
            setup.shutdown_telemetry()
        names = [m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics]
        print(names)
        """,
        tmp_path,
    )
    assert done.stdout.strip() == "['theirs.one', 'theirs.two']"
    assert names(tmp_path / "one") == {"theirs.one", "ours.one"}
    assert names(tmp_path / "two") == {"theirs.two", "ours.two"}


class Old:
    """A provider that takes no further reader, as those of older SDKs."""


def test_a_provider_that_cannot_be_joined_is_named(tmp_path, monkeypatch, caplog):
    """Catches silence about metrics that will never reach the spool."""
    monkeypatch.setattr(_metrics_pipeline.metrics, "get_meter_provider", Old)
    with signals(tmp_path / "run") as started:
        meter("m").create_counter("c").add(1)
        collect()
        assert values(started.run_dir, "c") == [1]
    assert "Old" in caplog.text


def test_a_callback_that_hangs_in_their_provider(tmp_path, monkeypatch, hanging):
    """Catches a shutdown that waits for the lock which the SDK holds while somebody's callback hangs."""
    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    provider.get_meter("x").create_observable_gauge("stuck", [hanging])
    monkeypatch.setattr(_metrics_pipeline.metrics, "get_meter_provider", lambda: provider)
    with signals(tmp_path / "run") as started:
        meter("m").create_counter("c").add(1)
        _metrics_pipeline.current._due = 0.0
        _metrics_pipeline.tick()
        assert hanging.entered.wait(10)
        (installed,) = _metrics_pipeline.current._installed
        before = time.monotonic()
        _metrics_pipeline.stop(before + 0.5)
        assert time.monotonic() - before < 1.5
        assert values(started.run_dir, "c") == [1]
        assert started.drops == {"metrics": 1}
        hanging.release.set()
        wait_for(lambda: not installed.running, "the callback to return")
        assert names(started.run_dir) == {"c"}  # what comes after the end is nobody's


def test_starting_while_it_runs_changes_nothing(run):
    """Catches a second start that forgets what was recorded since the first."""
    counter = meter("m").create_counter("c")
    counter.add(1)
    _metrics_pipeline.start(_state.config)
    counter.add(1)
    collect()
    assert values(run.run_dir, "c") == [2]


def test_a_failure_to_start_does_not_reach_the_program(tmp_path, monkeypatch, caplog):
    """Catches a broken OTEL_PYTHON_METER_PROVIDER that ends the run."""

    def broken():
        raise RuntimeError("no such provider")

    monkeypatch.setattr(_metrics_pipeline.metrics, "get_meter_provider", broken)
    with signals(tmp_path / "run") as started:
        meter("m").create_counter("c").add(1)
        collect()
        assert values(started.run_dir, "c") == [1]
    assert "no such provider" in caplog.text


def test_a_failing_collection_is_counted_and_named(run, monkeypatch, caplog):
    """Catches a collection that fails for ever in silence, or raises into a step or a beat."""
    meter("m").create_counter("c").add(1)

    def broken(*_args, **_kwargs):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(_metrics_pipeline.current._sdk["sdk"].reader, "_collect", broken)
        assert not collect()
        _metrics_pipeline.collect_step()
    assert run.drops == {"metrics": 2}
    assert caplog.text.count("broken") == 1
    assert collect()


# -- forks and the end of the interpreter -----------------------------------------------------------------------------


def test_a_forked_child_counts_from_zero_under_its_own_process(tmp_path):
    """Catches the parent's counts being reported by each child too, and a child that hangs on a lock it inherited."""
    child(
        """
        import os, sys, time
        from raytrace_rl import _metrics_pipeline, _state, setup
        setup.init_telemetry_driver({"enabled": True, "run_dir": sys.argv[1]})
        _metrics_pipeline.start(_state.config)
        counter = _metrics_pipeline.meter("m").create_counter("c")
        counter.add(100)
        pid = os.fork()
        if pid == 0:
            counter.add(1)
            ok = _metrics_pipeline.collect(time.monotonic() + 5)
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        counter.add(5)
        _metrics_pipeline.stop(time.monotonic() + 5)
        """,
        tmp_path / "run",
    )
    rows = [row for row in load_run(tmp_path / "run").metrics if row.name == "c"]
    assert {row.value for row in rows} == {1, 105}
    assert len({row.process.pid for row in rows}) == 2


def test_without_new_threads_callbacks_are_left_out_and_the_rest_is_kept(run, monkeypatch):
    """Catches the last collection, at interpreter exit (3.12 starts no threads there), failing or hanging."""
    meter("m").create_observable_gauge("o", [lambda _: [Observation(1)]])
    meter("m").create_counter("c").add(1)

    def no_more(_self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_metrics_rounds.threading.Thread, "start", no_more)
    collect()
    assert names(run.run_dir) == {"c"}


def test_meters_and_instruments_are_those_of_the_api(run):
    """Catches instruments that are no instruments to code that asks."""
    mine = meter("m")
    assert isinstance(mine, otel.Meter)
    assert isinstance(mine.create_counter("c"), otel.Counter)
    assert isinstance(mine.create_histogram("h"), otel.Histogram)
    assert isinstance(mine.create_up_down_counter("u"), otel.UpDownCounter)
    assert isinstance(mine.create_observable_gauge("g"), otel.ObservableGauge)
    assert meter("m") is mine
    assert meter("m", "2") is not mine
    assert _metrics_api.provider.get_meter("m", attributes={"k": [1]}) is not mine
