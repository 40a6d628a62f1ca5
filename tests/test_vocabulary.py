from __future__ import annotations

import enum
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from raytrace_rl import vocabulary
from raytrace_rl.vocabulary import TeedMetric, as_scalar, register_teed_metrics, registry_key, teed_metrics

REWARD = TeedMetric("reward", "rl.reward.mean", description="Mean reward of the rollouts.")


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    monkeypatch.setattr(vocabulary, "_rows", {})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rl.reward.mean", "reward_mean"),
        ("rl.grad_norm", "grad_norm"),
        ("rl.vllm.prompt_length.mean", "vllm_prompt_length_mean"),
        ("other.thing", "other_thing"),
    ],
)
def test_the_registry_key_comes_from_the_series_name(name, key):
    """Catches a row that names its series one thing and is recorded under another."""
    assert registry_key(name) == key
    assert not name.startswith("rl.") or TeedMetric("k", name).key == key


def test_the_same_row_again_is_no_clash():
    """Catches a module that is imported twice, or under two names, failing the run at import."""
    register_teed_metrics([REWARD])
    register_teed_metrics(iter([TeedMetric("reward", "rl.reward.mean", description="Mean reward of the rollouts.")]))
    assert teed_metrics() == (REWARD,)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (TeedMetric("reward", "rl.reward.total"), "reward"),  # one key, two series
        (TeedMetric("mean_reward", "rl.reward.mean"), "rl.reward.mean"),  # one series, two keys
        (TeedMetric("reward", "rl.reward.mean", unit="1"), "reward"),  # one row, two definitions
        (TeedMetric("other", "rl.reward_mean"), "rl.reward_mean"),  # two series, one registry key
    ],
)
def test_a_clash_is_an_error_and_adds_nothing(row, named):
    """Catches two rows that record into one series, or one that is never reached, without anybody noticing."""
    register_teed_metrics([REWARD])
    with pytest.raises(ValueError, match=named):
        register_teed_metrics([TeedMetric("fine", "rl.fine.one"), row])
    assert teed_metrics() == (REWARD,)


def test_a_clash_within_one_call_is_found():
    """Catches a check against earlier calls only."""
    with pytest.raises(ValueError, match=r"rl\.a\.b"):
        register_teed_metrics([TeedMetric("a", "rl.a.b"), TeedMetric("b", "rl.a.b")])


@pytest.mark.parametrize(
    "fields",
    [
        ("x", "dl.loss"),
        ("x", "loss"),
        ("x", "rl.with space"),
        ("x", "rl.A.B"),
        ("x", "rl.reward.Mean"),
        ("x", "rl.reward-mean.x"),
        ("x", "rl.reward/mean"),
        ("x", "rl.reward..mean"),
        ("x", "rl.reward.mean."),
        ("x", "RL.reward.mean"),
        ("x", "rl."),
        ("x", "rl.reward." + "x" * 250),
        ("x", "rl.goodput"),
        ("x", "rl.goodput.mean"),
        ("x", "rl.bucket.idle"),
        ("", "rl.a.b"),
        ("x", "rl.a.b", "summary"),
    ],
)
def test_a_row_outside_our_names_is_refused(fields):
    """Catches a series that writes into somebody else's name, one of two spellings, or a rolled-up sum of spans."""
    with pytest.raises(ValueError, match=r"series|row|kind"):
        TeedMetric(*fields)


def test_a_name_without_a_subsystem_warns_once_and_the_known_ones_do_not(caplog):
    """Catches the three short names being complained of, and a new one slipping through."""
    with caplog.at_level(logging.WARNING, "raytrace_rl"):
        for name in ("rl.grad_norm", "rl.learning_rate", "rl.entropy"):
            TeedMetric("k", name)
        assert not caplog.records
        TeedMetric("k", "rl.loss")
        TeedMetric("k", "rl.loss")
    assert [record.args for record in caplog.records] == [("rl.loss",)]


class _Level(enum.IntEnum):
    HIGH = 3


class _Hostile:
    dtype = "float32"

    @property
    def shape(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (-2.5, -2.5),
        (_Level.HIGH, 3.0),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(7), 7.0),
        (np.array(3.0), 3.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(4), 4.0),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (True, None),
        (False, None),
        (np.bool_(True), None),
        (torch.tensor(True), None),
        (None, None),
        ("1.0", None),
        (1j, None),
        (np.complex64(1), None),
        (np.array([1.0]), None),
        (torch.zeros(2), None),
        (torch.empty((), device="meta"), None),
        ([1.0], None),
        (10**400, None),
        (_Hostile(), None),
    ],
)
def test_as_scalar(value, expected):
    """Catches a flag logged as 1, a text parsed as a number, and an object that breaks the step by what it answers."""
    found = as_scalar(value)
    assert found == expected
    assert type(found) is (type(None) if expected is None else float)


def test_no_row_is_declared_by_the_vocabulary_itself():
    """Catches rows creeping back into the module that only collects them."""
    for module in ("vocabulary", "metrics", "_tee", "_metric_registry"):
        source = (Path(vocabulary.__file__).parent / f"{module}.py").read_text()
        assert "TeedMetric(" not in source.replace("class TeedMetric(", ""), module
