from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from raytrace_rl import _cardinality, _metric_registry, _metrics_pipeline, _state, _tee, efficiency, vocabulary
from raytrace_rl.efficiency import EfficiencyCategory, register_efficiency_category
from raytrace_rl.metrics import (
    RL_METRIC_GROUP,
    MetricSpec,
    SetupTimingMetrics,
    TeeingLogger,
    map_efficiency_seconds,
    map_setup_seconds,
    map_teed_scalars,
    record_metrics,
    register_metric_group,
    registered_metric_groups,
    setup_phase,
    tee_rl_metrics_to_otel,
)
from raytrace_rl.monitor import load_run
from raytrace_rl.vocabulary import TeedMetric, register_teed_metrics
from tests.running import child
from tests.signals_running import names, points, scope_metrics, signals, values

ROWS = (
    TeedMetric("reward", "rl.reward.mean"),
    TeedMetric("lr", "rl.learning_rate"),
    TeedMetric("vllm/prompt_tokens", "rl.vllm.prompt_tokens", kind="counter", unit="{token}"),
)


@pytest.fixture(autouse=True)
def _registries(monkeypatch):
    """Each test has registries of its own, with three rows in them."""
    groups = {}
    for name, entry in _metric_registry._groups.items():
        groups[name] = _metric_registry._Group()
        groups[name].specs = {
            key: spec for key, spec in entry.specs.items() if key in ("efficiency_seconds", "setup_duration")
        }
    monkeypatch.setattr(_metric_registry, "_groups", groups)
    monkeypatch.setattr(vocabulary, "_rows", {})
    monkeypatch.setattr(vocabulary, "_claims", {})
    monkeypatch.setattr(_tee, "_declared", ())
    monkeypatch.setattr(efficiency, "_categories", dict(efficiency._categories))
    register_teed_metrics(ROWS)
    yield
    _cardinality.forget()


@pytest.fixture
def run(tmp_path):
    """Telemetry with metrics, on the driver, where every tee is collected."""
    with signals(tmp_path / "run") as started:
        yield started


def tee(metrics, prefix="train"):
    """Tees, as after a pause long enough for the collection to be cheap."""
    if _metrics_pipeline.current is not None:
        _metrics_pipeline.current._step_from = 0.0
    tee_rl_metrics_to_otel(metrics, prefix)


@pytest.fixture
def sdk():
    """A meter of somebody else's SDK, and what it has collected by name."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)

    def collected():
        found = reader.get_metrics_data()
        series = [m for r in found.resource_metrics for s in r.scope_metrics for m in s.metrics] if found else []
        return {m.name: [(dict(p.attributes), getattr(p, "value", None)) for p in m.data.data_points] for m in series}

    return provider.get_meter("mine"), collected


# -- the registry -----------------------------------------------------------------------------------------------------


def test_every_kind_is_recorded(sdk):
    """Catches a kind that is recorded by the wrong call, or not at all."""
    meter, collected = sdk
    register_metric_group(
        "mine",
        [
            MetricSpec("a", "mine.a.gauge", unit="s", description="A gauge."),
            MetricSpec("b", "mine.b.counter", "counter"),
            MetricSpec("c", "mine.c.updown", "up_down_counter"),
            MetricSpec("d", "mine.d.histogram", "histogram"),
        ],
    )
    record_metrics(meter, "mine", {"a": 1, "b": 2, "c": -3, "d": 4}, attributes={"k": "v"})
    record_metrics(meter, "mine", {"a": 5}, {"k": "v"}, b=2)
    found = collected()
    assert found["mine.a.gauge"] == [({"k": "v"}, 5)]
    assert found["mine.b.counter"] == [({"k": "v"}, 4)]
    assert found["mine.c.updown"] == [({"k": "v"}, -3)]
    assert set(found) == {"mine.a.gauge", "mine.b.counter", "mine.c.updown", "mine.d.histogram"}


def test_instruments_are_made_once_for_a_meter():
    """Catches an instrument made for every value, which the SDK keeps for ever."""

    class Meter:
        made = 0

        def create_gauge(self, name, unit, description):
            Meter.made += 1
            return self

        def set(self, value, labels=None):
            pass

    register_metric_group("mine", [MetricSpec("a", "mine.a")])
    one, two = Meter(), Meter()
    for meter in (one, one, two, one, two):
        record_metrics(meter, "mine", {"a": 1})
    assert Meter.made == 2


def test_only_numbers_are_recorded(sdk, caplog):
    """Catches None or a flag recorded as 0 or 1, and text that raises."""
    meter, collected = sdk
    register_metric_group("mine", [MetricSpec(key, f"mine.{key}") for key in "abcdef"])
    record_metrics(
        meter,
        "mine",
        {"a": None, "b": True, "c": "3", "d": np.float32(0.5), "e": torch.tensor(2.0), "f": np.int32(7)},
    )
    assert collected() == {"mine.d": [({}, 0.5)], "mine.e": [({}, 2.0)], "mine.f": [({}, 7)]}
    assert [record.args[0] for record in caplog.records] == ["mine.b", "mine.c"]


def test_the_same_series_again_is_no_clash_and_groups_grow(sdk):
    """Catches a module imported twice failing, and a second module's series taking the place of the first's."""
    for _ in range(2):
        register_metric_group("mine", [MetricSpec("a", "mine.a")])
    register_metric_group("mine", [MetricSpec("b", "mine.b")])
    assert [spec.key for spec in registered_metric_groups()["mine"]] == ["a", "b"]


@pytest.mark.parametrize(
    "clash", [MetricSpec("a", "mine.x"), MetricSpec("x", "mine.a"), MetricSpec("a", "mine.a", "counter")]
)
def test_a_clash_is_an_error_and_adds_nothing(clash):
    """Catches two series that record into one without anybody noticing."""
    register_metric_group("mine", [MetricSpec("a", "mine.a")])
    with pytest.raises(ValueError, match="clashes"):
        register_metric_group("mine", [MetricSpec("z", "mine.z"), clash])
    assert [spec.key for spec in registered_metric_groups()["mine"]] == ["a"]
    register_metric_group("mine", [clash], allow_override=True)
    assert registered_metric_groups()["mine"] == (clash,)


@pytest.mark.parametrize("name", ["", "dl.loss", "nv.dl.x", "rl.A.B", "x" * 300, "9.a"])
def test_a_name_that_no_series_can_have_is_refused(name):
    """Catches a series in somebody else's namespace, and one that OpenTelemetry would refuse on the way."""
    with pytest.raises(ValueError, match=r"metric|series"):
        MetricSpec("a", name)


@pytest.mark.parametrize("fields", [("", "mine.a"), ("a", "mine.a", "summary")])
def test_a_series_that_cannot_be_used_is_refused(fields):
    """Catches a declaration that only fails, or does harm, when it is recorded."""
    with pytest.raises(ValueError, match=r"metric|series|kind"):
        MetricSpec(*fields)


def test_a_group_needs_a_name():
    """Catches a group that nobody can record against."""
    with pytest.raises(ValueError, match="name"):
        register_metric_group("", [MetricSpec("a", "mine.a")])


class BadMapping:
    """Values that cannot be read."""

    def keys(self):
        raise RuntimeError("unreadable")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, "mine", {"a": 1}), "mine.a"),
        ((object(), "mine", {"a": 1}), "mine.a"),
        ((None, "nobodys", {"a": 1}), "nobodys"),
        ((None, "mine", {"unknown": 1}), "unknown"),
        ((None, "mine", BadMapping()), "unreadable"),
        ((None, "mine", 5), "mine"),
        ((None, "mine", {"a": 1}, 7), "mine.a"),
    ],
)
def test_recording_never_raises_and_warns_once(arguments, said, caplog):
    """Catches telemetry that ends a training step, or repeats itself at every one."""
    register_metric_group("mine", [MetricSpec("a", "mine.a")])
    for _ in range(3):
        record_metrics(*arguments)
    assert len(caplog.records) == 1
    assert said in caplog.text


def test_labels_are_bounded_on_any_meter(sdk):
    """Catches a request id as a label that makes a series for every request."""
    meter, collected = sdk
    register_metric_group("mine", [MetricSpec("a", "mine.a")])
    for i in range(_cardinality.MAX_VALUES + 5):
        record_metrics(meter, "mine", {"a": i}, {"request": i})
    found = {labels["request"]: value for labels, value in collected()["mine.a"]}
    assert len(found) == _cardinality.MAX_VALUES + 1
    assert found["other"] == _cardinality.MAX_VALUES + 4


# -- pure mappings ----------------------------------------------------------------------------------------------------


def test_map_efficiency_seconds():
    """Catches sums under the same prefix taken for categories, and flags taken for seconds."""
    measurements = {"idle/refit_bubble": "wall_clock", "idle/validation": "wall_clock", "idle/x": "wall_clock"}
    logged = {
        "efficiency/idle/refit_bubble_s": 12,
        "efficiency/idle/validation_s": True,
        "efficiency/idle/x_s": "nan",
        "efficiency/idle/buffer_starvation_s": 4.0,  # not asked for
        "efficiency/total_waste_s": 30.0,
    }
    assert map_efficiency_seconds(logged, measurements) == {"idle/refit_bubble": 12.0}
    assert map_efficiency_seconds({}, measurements) == {}


def test_map_teed_scalars():
    """Catches a row looked up under its series instead of its logger key."""
    assert map_teed_scalars({"reward": 1, "lr": None, "vllm/prompt_tokens": True, "x": 1}) == {"reward_mean": 1.0}


@pytest.mark.parametrize(
    ("key", "phase"),
    [
        ("policy_init_time_s", "policy_init"),
        ("warmup_s", "warmup"),
        ("parallel_init_enabled", None),
        ("_time_s", None),
        ("_s", None),
        ("", None),
    ],
)
def test_setup_phase(key, phase):
    """Catches a flag that becomes a duration, and a phase without a name."""
    assert setup_phase(key) == phase


def test_setup_timing_metrics():
    """Catches phases that a run did not have logged as None, and extras that are left out."""
    timing = SetupTimingMetrics(policy_init_time_s=2.0, total_setup_time_s=0.0, extras={"vllm_nccl_init_time_s": 3})
    logged = timing.to_metrics_dict()
    assert logged == {"policy_init_time_s": 2.0, "total_setup_time_s": 0.0, "vllm_nccl_init_time_s": 3}
    assert map_setup_seconds({**logged, "parallel_init_enabled": 1.0, "x_s": "2"}) == {
        "policy_init": 2.0,
        "total_setup": 0.0,
        "vllm_nccl_init": 3.0,
    }
    assert SetupTimingMetrics().extras is not SetupTimingMetrics().extras


# -- the tee ----------------------------------------------------------------------------------------------------------


def test_every_step_is_teed(run):
    """Catches a step whose values are not in the file when ``log_metrics`` returns, or are the next step's."""
    for step in range(3):
        tee({"reward": step / 2, "vllm/prompt_tokens": 10, "loss": 3.0, "lr": True})
    assert values(run.run_dir, "rl.reward.mean") == [0.0, 0.5, 1.0]
    assert values(run.run_dir, "rl.vllm.prompt_tokens") == [10, 20, 30]
    assert names(run.run_dir) == {"rl.reward.mean", "rl.vllm.prompt_tokens"}
    (unit,) = {m.unit for s in scope_metrics(run.run_dir) for m in s.metrics if m.name == "rl.vllm.prompt_tokens"}
    assert unit == "{token}"


def test_efficiency_seconds_have_their_labels(run):
    """Catches seconds that a dashboard would add to a step's though they are on another clock or of another window."""
    register_efficiency_category(EfficiencyCategory("idle/judge", "idle", "wall_clock", "step"))
    logged = {f"efficiency/{name}_s": i + 1.0 for i, name in enumerate(efficiency.efficiency_categories())}
    tee({**logged, "efficiency/total_waste_s": 99.0})
    found = {
        labels["rl.efficiency.category"]: (labels, value)
        for labels, value in points(run.run_dir, "rl.efficiency.seconds")
    }
    assert set(found) == set(efficiency.efficiency_categories())
    assert found["init/total"] == (
        {
            "rl.efficiency.category": "init/total",
            "rl.efficiency.measurement": "wall_clock",
            "rl.efficiency.window": "run",
            "rl.bucket": "overhead",
        },
        1.0,
    )
    assert found["wasted/failed_trajectory"][0]["rl.efficiency.measurement"] == "thread_seconds"
    assert found["wasted/failed_trajectory"][0]["rl.bucket"] == "wasted"
    assert found["idle/judge"][1] == len(found)


EVERYTHING = {"reward": 1.0, "efficiency/idle/validation_s": 2.0, "policy_init_time_s": 3.0}


@pytest.mark.parametrize(
    ("prefix", "series"),
    [
        ("train", {"rl.reward.mean", "rl.efficiency.seconds"}),
        ("", {"rl.reward.mean", "rl.efficiency.seconds"}),
        (None, {"rl.reward.mean", "rl.efficiency.seconds"}),
        ("timing/setup", {"rl.setup.duration"}),
        ("validation", set()),
        ("performance", set()),
        ("timing", set()),
        ("timing/train", set()),
        ("Train", set()),
    ],
)
def test_prefixes_are_matched_and_never_merged(run, prefix, series):
    """Catches validation's reward recorded as training's, and a phase of startup at every step."""
    tee(EVERYTHING, prefix)
    assert names(run.run_dir) == series


def test_setup_durations_have_their_phase_and_no_bucket(run):
    """Catches startup counted several times in a sum by bucket, since its phases overlap."""
    timing = SetupTimingMetrics(policy_init_time_s=2.0, extras={"odd_time_s": 1.0, "flag": 1.0})
    tee(timing.to_metrics_dict(), "timing/setup")
    assert points(run.run_dir, "rl.setup.duration") == [
        ({"rl.setup.phase": "policy_init"}, 2.0),
        ({"rl.setup.phase": "odd"}, 1.0),
    ]


def test_rows_that_come_after_the_first_tee_take_effect_at_the_next(run):
    """Catches a registry that is frozen by its first use: a module imported late would be silent."""
    tee({"reward": 1.0, "late": 5.0})
    register_teed_metrics([TeedMetric("late", "rl.late.one")])
    tee({"reward": 2.0, "late": 6.0})
    assert values(run.run_dir, "rl.late.one") == [6.0]
    assert values(run.run_dir, "rl.reward.mean") == [1.0, 2.0]


@pytest.mark.parametrize("name", ["rl.setup.duration", "rl.efficiency.seconds"])
def test_a_row_cannot_have_a_series_of_the_tee(name):
    """Catches a user's row that would record into ``rl.setup.duration``."""
    with pytest.raises(ValueError, match="tee's own"):
        TeedMetric("mine", name)


def test_a_series_of_another_group_with_another_kind_or_unit_is_a_clash(sdk):
    """Catches two libraries that write different things under one name, which no backend can tell apart."""
    register_metric_group("liba", [MetricSpec("depth", "rl.buffer.depth", "gauge", "1")])
    for clash in (MetricSpec("d", "rl.buffer.depth", "counter", "1"), MetricSpec("d", "rl.buffer.depth", unit="By")):
        with pytest.raises(ValueError, match=r"'rl\.buffer\.depth' of metric group 'liba' is a gauge"):
            register_metric_group("libb", [MetricSpec("own", "libb.own"), clash])
    assert "libb" not in registered_metric_groups()
    with pytest.raises(ValueError, match="'liba'"):
        register_teed_metrics([TeedMetric("buffer_size", "rl.buffer.depth", "histogram", "s")])
    assert "buffer_size" not in {row.logger_key for row in vocabulary.teed_metrics()}
    register_teed_metrics([TeedMetric("queue", "rl.queue.depth", unit="1")])
    with pytest.raises(ValueError, match="'rl'"):
        register_metric_group("libb", [MetricSpec("d", "rl.queue.depth", "counter", "1")])


def test_a_series_that_two_groups_declare_alike_is_shared(sdk, caplog):
    """Catches an import that fails because two libraries agree, and one of which nobody hears."""
    spec = MetricSpec("depth", "gym.queue.depth", unit="1")
    register_metric_group("liba", [spec])
    for _ in range(2):
        register_metric_group("libb", [spec])
    assert [record.getMessage() for record in caplog.records] == [
        "Metric groups 'liba' and 'libb' both record series 'gym.queue.depth'."
    ]


def test_nothing_is_teed_while_telemetry_is_off(caplog):
    """Catches a tee that needs telemetry, or complains without it."""
    tee(EVERYTHING)
    assert not caplog.records
    assert _state.drops["metrics"] == 0


def test_nothing_is_teed_in_a_worker(tmp_path):
    """Catches every rank of a group recording the driver's series beside it."""
    done = child(
        """
        import time
        from raytrace_rl import _metrics_pipeline, _state, setup
        from raytrace_rl.metrics import record_metrics, tee_rl_metrics_to_otel
        handle = setup.init_telemetry_worker()
        _metrics_pipeline.start(_state.config)
        tee_rl_metrics_to_otel({"efficiency/idle/validation_s": 2.0}, "train")
        assert not _state._warned  # a loop that runs in a worker is no mistake
        for _ in range(2):
            record_metrics(handle.meter, "rl", {"efficiency_seconds": 1.0})
        _metrics_pipeline.meter("own").create_counter("own").add(1)
        _metrics_pipeline.stop(time.monotonic() + 5)
        """,
        RAYTRACE_RL_ENABLED="1",
        RAYTRACE_RL_RUN_DIR=str(tmp_path / "run"),
    )
    assert names(tmp_path / "run") == {"own"}
    assert done.stderr.count("rl.* metrics come from the driver") == 1


class Unreadable(dict):
    """A logged dict that fails when it is read."""

    def get(self, *_):
        raise RuntimeError("no")

    def __bool__(self):
        return True


@pytest.mark.parametrize(
    ("metrics", "prefix"),
    [(Unreadable(), "train"), (None, "train"), (5, "train"), ([1], ""), ({"reward": object()}, "train"), ({}, ["x"])],
)
def test_the_tee_never_raises(run, metrics, prefix):
    """Catches telemetry that ends a training step."""
    tee(metrics, prefix)
    tee({"reward": 1.0})
    assert values(run.run_dir, "rl.reward.mean") == [1.0]


def test_a_broken_family_does_not_cost_the_other(run, monkeypatch, caplog):
    """Catches one bad value that silences every series of a step."""

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(_tee, "map_efficiency_seconds", broken)
    tee(EVERYTHING)
    tee(EVERYTHING)
    assert values(run.run_dir, "rl.reward.mean") == [1.0, 1.0]
    assert caplog.text.count("broken") == 1
    assert run.drops == {"metrics": 2}


def test_a_nan_is_left_out_and_counted(run):
    """Catches a diverged loss that fills the log with the SDK's warning at every step."""
    tee({"reward": float("nan"), "lr": 0.5})
    assert values(run.run_dir, "rl.learning_rate") == [0.5]
    assert run.drops == {"metrics": 1}


def test_no_rolled_up_series(run):
    """Catches goodput summed by a process, which does not know what overlaps."""
    tee({**EVERYTHING, "efficiency/efficiency_pct": 80.0, "goodput": 0.8})
    tee(EVERYTHING, "timing/setup")
    assert names(run.run_dir) == {"rl.reward.mean", "rl.efficiency.seconds", "rl.setup.duration"}


# -- the wrapped logger -----------------------------------------------------------------------------------------------


class Logger:
    """A training loop's own logger."""

    def __init__(self):
        self.logged = []
        self.level = 1

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        if step < 0:
            raise KeyError(step)
        self.logged.append((metrics, step, prefix, step_metric))
        return len(self.logged)

    def close(self):
        return "closed"


def test_the_wrapped_logger_gets_every_call_as_it_is(run):
    """Catches a wrapper that changes arguments, loses the answer, or hides the rest of the logger."""
    inner = Logger()
    logger = TeeingLogger(inner)
    assert logger.log_metrics({"reward": 1.0}, 1) == 1
    assert logger.log_metrics({"reward": 2.0}, step=2, prefix="validation", step_metric="x") == 2
    assert logger.log_metrics({"reward": 3.0}, 3, "train") == 3
    assert inner.logged == [
        ({"reward": 1.0}, 1, "", None),
        ({"reward": 2.0}, 2, "validation", "x"),
        ({"reward": 3.0}, 3, "train", None),
    ]
    _metrics_pipeline.tick()
    assert values(run.run_dir, "rl.reward.mean")[0] == 1.0
    assert values(run.run_dir, "rl.reward.mean")[-1] == 3.0
    assert 2.0 not in values(run.run_dir, "rl.reward.mean")
    logger.level = 2
    assert (inner.level, logger.level, logger.close()) == (2, 2, "closed")
    del logger.level
    assert not hasattr(inner, "level")


def test_what_the_wrapped_logger_raises_is_the_callers(run):
    """Catches a swallowed error of the user's own logger; the step's values are kept all the same."""
    with pytest.raises(KeyError):
        TeeingLogger(Logger()).log_metrics({"reward": 1.0}, -1, prefix="train")
    assert values(run.run_dir, "rl.reward.mean") == [1.0]
    with pytest.raises(AttributeError):
        TeeingLogger(object()).log_metrics({}, 1)


def test_a_wrapped_logger_can_be_pickled_and_copied():
    """Catches endless recursion of ``__getattr__`` in an object that is being made."""
    logger = TeeingLogger(logging.getLogger("x"))
    assert pickle.loads(pickle.dumps(logger)).name == "x"
    assert copy.copy(logger).name == "x"


def test_the_rows_arrive_as_a_person_reads_them(run):
    """Catches a path from logged key to row of the metrics table that breaks anywhere on the way."""
    tee({"reward": 0.25})
    (row,) = load_run(run.run_dir).metrics
    assert (row.name, row.kind, row.value, row.attributes) == ("rl.reward.mean", "gauge", 0.25, {})
    assert row.process.role == "driver"
    assert RL_METRIC_GROUP == "rl"
