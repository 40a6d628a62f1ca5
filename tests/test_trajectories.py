"""Trajectories with a context of their own: what they take along, the links of who trains on them, and the report."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raytrace_rl import (
    TraceContext,
    _encode,
    cli,
    current_trace_carrier,
    iteration_scope,
    managed_span,
    remote_trace_context,
    span_cm,
    umbrella_span,
)
from raytrace_rl.integrations._trajectories import read_origin
from raytrace_rl.integrations.collector import rollout_links, trajectory_carrier
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.trajectories import trajectories
from tests.spooling import SECOND, T0, Spool, ended, resource, span
from tests.spooling import span_id as id_of

pytest_plugins = ["tests.telemetry_fixtures"]

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Trajectory:
    """A sample with room for a carrier."""

    trace_carrier: Any = field(default_factory=dict)


def made(version: int | None = None, ago_s: float = 0.0, of: str = PARENT) -> dict[str, str]:
    """A carrier as `trajectory_carrier` writes it, made ``ago_s`` seconds ago."""
    scopes = "" if version is None else f"w={version}"
    return {"traceparent": of, "raytrace": f"{scopes}|{time.time_ns() - int(ago_s * 1e9)},here"}


def packed(*values: Any) -> np.ndarray[Any, Any]:
    """An object array, as verl's ``DataProto`` keeps what is no tensor."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


class DataProto:
    """In the shape of verl's: columns, and rows by index. Its row is a class of its own."""

    def __init__(self, non_tensor_batch: dict[str, Any]) -> None:
        self.batch = None
        self.non_tensor_batch = non_tensor_batch

    def __len__(self) -> int:
        return len(next(iter(self.non_tensor_batch.values())))

    def __getitem__(self, item: int) -> Any:
        return SimpleNamespace(batch=None, non_tensor_batch={k: v[item] for k, v in self.non_tensor_batch.items()})


class NonTensorStack:
    """In the shape of TensorDict's: its items are wrappers, ``tolist`` has what is in them."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __iter__(self) -> Any:
        return iter([SimpleNamespace(data=value) for value in self._values])

    def tolist(self) -> list[Any]:
        return list(self._values)


# ----------------------------------------------------------------------------------------------- the carrier and links


def test_a_trajectory_takes_its_rollout_along(telemetry):
    """Catches a carrier that names another span, or brings the step of the rollout wherever it is attached."""
    before = time.time_ns()
    with umbrella_span("rollout", "rollout"), iteration_scope(7):
        carrier = trajectory_carrier(3)
        plain = current_trace_carrier()
    origin = read_origin(carrier)
    assert origin is not None
    assert (origin.traceparent, origin.weight_version) == (plain["traceparent"], 3)
    assert origin.made_ns is not None
    assert before <= origin.made_ns <= time.time_ns()
    assert origin.node
    with remote_trace_context(carrier), managed_span("reward", "child"):
        pass
    child = telemetry.span("child")
    assert child.parent_span_id == telemetry.span("rollout").span_id
    assert {item.key for item in child.attributes}.isdisjoint({"rl.iteration", "rl.queued_ns"})
    assert set(TraceContext(carrier).carrier) == {"traceparent"}


def test_with_nothing_to_carry_a_trajectory_takes_nothing_along(telemetry):
    """Catches a sample that grows by a carrier which leads nowhere."""
    assert trajectory_carrier(3) == {}


def test_off_there_is_neither_carrier_nor_link():
    """Catches samples that carry, and training steps that link, while telemetry is off."""
    assert trajectory_carrier(3) == {}
    assert rollout_links([made(3)]) == []


def test_the_training_span_links_to_the_rollouts(telemetry):
    """Catches links to the wrong span, or without what the report needs."""
    samples = []
    for version in (3, 4):
        with umbrella_span("rollout", f"rollout-{version}"):
            samples.append(Trajectory(trajectory_carrier(version)))
    with managed_span("policy_update", "train", links=rollout_links([*samples, samples[0]], weight_version=5)):
        pass
    (links,) = [row.links for row in telemetry.run().spans if row.name == "train"]
    targets = [telemetry.span(f"rollout-{version}").span_id for version in (4, 3)]
    assert [link.span_id for link in links] == targets
    fields = [(link.attributes["rl.trajectory.count"], link.attributes["rl.weight_version"]) for link in links]
    assert fields == [(1, 4), (2, 3)]
    assert [link.attributes["rl.trajectory.lag"] for link in links] == [1, 2]
    ages = [link.attributes["rl.trajectory.age_s"] for link in links]
    assert 0 <= ages[0] <= ages[1] < 60
    assert all(link.attributes["rl.trajectory.node"] for link in links)


@pytest.mark.parametrize(
    "batch",
    [
        [made()],
        [{"trace_carrier": made()}],
        [Trajectory(made())],
        {"trace_carrier": [made(), made(), {}]},
        [{"trace_carrier": [made()]}, {"other": 1}, Trajectory(), None, 7],
        iter([Trajectory(made())]),
        {"trace_carrier": packed(made(), made())},
        [{"trace_carrier": packed(made())}, Trajectory(np.array(made(), dtype=object))],
        {"trace_carrier": packed([made()], (made(), {}))},
        {"trace_carrier": (carrier for carrier in (made(), made()))},
        {"trace_carrier": {"a": made()}.values()},
        packed(made(), made()),
        DataProto({"trace_carrier": packed(made(), made())}),
        {"trace_carrier": NonTensorStack([made(), made()])},
    ],
    ids=[
        *("carriers", "mappings", "objects", "a batch of columns", "mixed", "an iterator"),
        *("an object array", "arrays of one", "arrays of lists", "a generator", "a view", "an array of carriers"),
        *("verl's batch", "TensorDict's"),
    ],
)
def test_a_carrier_is_found_wherever_a_sample_keeps_it(batch, telemetry, caplog):
    """Catches samples that must be of one particular class, and a batch's carriers that vanish without a word."""
    links = rollout_links(batch)
    assert links
    assert not caplog.records
    for row in batch if isinstance(batch, DataProto) else ():
        assert len(rollout_links([row])) == 1


@pytest.mark.parametrize("kept", ["text", 7, np.zeros(3), torch.zeros(3), [[[[[[{}]]]]]], object()], ids=repr)
def test_what_is_no_carrier_is_a_warning(kept, telemetry, caplog):
    """Catches carriers in a packing that nobody knows, which look like a batch without any."""
    assert rollout_links({"trace_carrier": kept}) == []
    assert "stands where carriers of trajectories should" in caplog.text


def test_a_batch_without_carriers_is_one_warning_and_empty_ones_are_none(telemetry, caplog):
    """Catches a key that is misspelt; and a warning about rollouts that were made with telemetry off."""
    assert rollout_links([{"trace_carrier": {}}, {"trace_carrier": None}]) == []
    assert rollout_links([{"trace_carrier": made()}, {"other": 1}])
    assert rollout_links([]) == []
    assert not caplog.records
    for _ in range(2):
        assert rollout_links([{"trace_carier": made()}] * 3) == []
    assert [record.getMessage() for record in caplog.records] == [
        "None of 3 trajectories has a carrier under 'trace_carrier': none is linked to its rollout."
    ]


def test_a_trajectory_that_fails_costs_itself(telemetry, caplog):
    """Catches a broken sample that takes the links of its whole batch along."""

    class Broken:
        @property
        def trace_carrier(self) -> Any:
            raise LookupError("gone")

    assert len(rollout_links([Broken(), Trajectory(made())])) == 1
    assert "gone" in caplog.text


def test_a_version_that_is_no_number_costs_itself(telemetry, caplog):
    """Catches a rollout that is linked nowhere because its weights have a name."""
    with umbrella_span("rollout", "rollout"):
        carrier = trajectory_carrier(float("nan"))
    (link,) = rollout_links([carrier], weight_version="latest")
    assert dict(link.attributes or {}).keys().isdisjoint({"rl.weight_version", "rl.trajectory.lag"})
    assert "no whole number" in caplog.text


def test_a_carrier_under_another_name(telemetry):
    """Catches a sample whose field may not be called what its authors call it."""
    assert len(rollout_links([{"origin": made()}], carrier="origin")) == 1
    assert len(rollout_links([(1, made())], carrier=lambda sample: sample[1])) == 1


@pytest.mark.parametrize(
    "rubbish",
    [
        {"traceparent": "nonsense"},
        {"traceparent": PARENT, "raytrace": 7},
        {"traceparent": PARENT, "raytrace": "w=x|y,z"},
        {"traceparent": PARENT, "raytrace": "w=" + "9" * 400 + "|" + "9" * 400},
        {"traceparent": PARENT, "tracestate": "§"},
        {"traceparent": 7},
    ],
)
def test_rubbish_never_raises(rubbish, telemetry):
    """Catches a broken carrier that ends a training step; what is good of it still counts."""
    links = rollout_links([rubbish, made(2)])
    assert dict(links[0].attributes or {})["rl.weight_version"] == 2
    assert rollout_links(7) == []


def test_more_rollouts_than_a_span_may_link_to(telemetry, monkeypatch):
    """Catches trajectories that fall off the end: the oldest, the youngest and the number of all must be there."""
    monkeypatch.setattr(_encode, "link_count_limit", 10)
    samples = [made(version, ago_s=100 - version) for version in range(100)]
    links = rollout_links(samples)
    assert len(links) == 10
    attributes = [dict(link.attributes or {}) for link in links]
    assert sum(int(str(each["rl.trajectory.count"])) for each in attributes) == 100
    assert (attributes[0]["rl.weight_version"], attributes[-1]["rl.weight_version"]) == (99, 0)
    monkeypatch.setattr(_encode, "link_count_limit", 1)
    (one,) = rollout_links(samples)
    assert dict(one.attributes or {})["rl.trajectory.count"] == 100


# ---------------------------------------------------------------------------------------------------------- the report


def _linked(count: int, age_s: float, version: int, lag: int | None = None, **more: Any) -> dict[str, Any]:
    found = {"rl.trajectory.count": count, "rl.trajectory.age_s": age_s, "rl.weight_version": version, **more}
    return found if lag is None else {**found, "rl.trajectory.lag": lag}


def _report(tmp_path, *spans: bytes) -> dict[str, Any]:
    spool = Spool(tmp_path / "run")
    spool.segment(10, ended(*spans), heartbeat_ns=T0 + 90 * SECOND, resource=resource(host__name="node-a"))
    return trajectories(load_run(spool.run_dir))


def test_each_steps_ages_and_lags(tmp_path):
    """Catches a median that does not weigh, and steps that are mixed up."""
    found = _report(
        tmp_path,
        span(
            1, 10, 11, name="train", rl__iteration=1, links=[(50, _linked(3, 1.0, 0, 1)), (51, _linked(1, 9.0, 1, 0))]
        ),
        span(2, 20, 21, name="train", rl__iteration=2, links=[(52, _linked(2, 4.0, 1, 2))]),
    )
    assert (found["count"], found["age_s"]) == (6, {"min": 1.0, "median": 1.0, "max": 9.0})
    assert found["lag"] == {"min": 0, "median": 1, "max": 2}
    first, second = found["steps"]
    assert (first["iteration"], first["count"], first["weight_versions"]) == (1, 4, {"0": 3, "1": 1})
    assert (second["iteration"], second["age_s"]["median"], second["lag"]["max"]) == (2, 4.0, 2)
    assert [(each["span_id"], each["age_s"], each["weight_version"]) for each in found["list"]] == [
        (id_of(50).hex(), 1.0, 0),
        (id_of(51).hex(), 9.0, 1),
        (id_of(52).hex(), 4.0, 1),
    ]


def test_links_that_say_nothing_are_filled_from_the_rollouts_span(tmp_path):
    """Catches a plain `current_trace_carrier`, linked by hand, that the report passes over."""
    found = _report(
        tmp_path,
        span(50, 1, 4, name="rollout", rl__span_group="rollout", rl__weight_version=7),
        span(1, 10, 11, name="train", rl__iteration=1, links=[(50, {})]),
        span(2, 12, 13, name="step", rl__iteration=1, links=[(1, {})]),  # a link to what is no rollout
    )
    assert found["count"] == 1
    assert found["list"][0]["age_s"] == 6
    assert found["list"][0]["weight_version"] == 7
    assert found["lag"] is None


def test_trajectories_that_several_spans_of_a_step_link_to_count_once(tmp_path):
    """Catches a count that doubles where the driver and each rank link to the same batch."""
    whole = [(50, _linked(8, 2.0, 1)), (51, _linked(8, 3.0, 1))]
    found = _report(
        tmp_path,
        span(1, 10, 20, name="train", rl__iteration=1, links=whole),
        span(2, 11, 19, parent=1, name="train.rank", rl__iteration=1, links=whole),
        span(3, 21, 22, name="logprobs", rl__iteration=1, links=whole[:1]),
        span(4, 31, 32, name="train", rl__iteration=2, links=whole[:1]),
    )
    assert [(step["iteration"], step["count"]) for step in found["steps"]] == [(1, 16), (2, 8)]


def test_ages_between_nodes_are_marked_and_below_zero_they_count_as_none(tmp_path):
    """Catches an age that two disagreeing clocks made up, and nothing that says so."""
    elsewhere = {"rl.trajectory.node": "node-b"}
    found = _report(
        tmp_path,
        span(
            1,
            10,
            11,
            rl__iteration=1,
            links=[
                (50, _linked(2, -0.5, 1, **elsewhere)),
                (51, _linked(1, 1.0, 1, **elsewhere)),
                (52, _linked(1, 1.0, 1, **{"rl.trajectory.node": "node-a"})),
            ],
        ),
    )
    assert (found["below_zero"], found["other_node"]) == (2, 3)
    assert found["age_s"]["min"] == 0
    assert found["list"][0]["age_s"] == -0.5, "what was measured is there to be read"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rl.trajectory.age_s", age) for age in (math.inf, -math.inf, math.nan, 1e308, -1e18, True, 2**62, "x")),
        *(("rl.trajectory.count", count) for count in (2**62, -5, 0, True, math.inf, 1.5, "x")),
    ],
)
def test_a_number_that_cannot_be_is_not_believed(key, value, tmp_path, capsys):
    """Catches one link of a file that ends the report, makes its JSON none, or makes up a total."""
    said: dict[str, Any] = {"rl.trajectory.count": 1, "rl.trajectory.age_s": 2.0, key: value}
    found = _report(tmp_path, span(1, 10, 11, name="train", rl__iteration=1, links=[(50, said)]))
    assert found["count"] == 1
    assert found["age_s"] == (None if key.endswith("age_s") else {"min": 2.0, "median": 2.0, "max": 2.0})
    run_dir = str(tmp_path / "run")
    assert cli.main(["report", run_dir]) == 0
    assert "1 trained on" in capsys.readouterr().out
    assert cli.main(["report", "--json", run_dir]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_a_number_that_cannot_be_is_taken_from_the_rollouts_span(tmp_path):
    """Catches an age that is not known though both ends of it are in the run."""
    found = _report(
        tmp_path,
        span(50, 1, 4, name="rollout", rl__span_group="rollout"),
        span(1, 10, 11, name="train", rl__iteration=1, links=[(50, {"rl.trajectory.age_s": math.inf})]),
    )
    assert found["list"][0]["age_s"] == 6


def test_a_run_that_links_nothing(tmp_path):
    """Catches a report that divides by zero trajectories."""
    found = _report(tmp_path, span(1, 0, 1))
    assert (found["count"], found["age_s"], found["steps"]) == (0, None, [])


def test_a_real_run_shows_what_its_steps_were_trained_on(telemetry):
    """Catches an attribute that the encoder, the reader and the report spell differently."""
    with span_cm("job"):
        with umbrella_span("rollout", "rollout"):
            sample = Trajectory(trajectory_carrier(2))
        for step in (3, 4):
            links = rollout_links([sample, sample], weight_version=step)
            with iteration_scope(step), managed_span("policy_update", "train", links=links):
                pass
    found = trajectories(telemetry.run())
    assert [(step["iteration"], step["count"], step["lag"]["max"]) for step in found["steps"]] == [(3, 2, 1), (4, 2, 2)]
    assert found["other_node"] == found["below_zero"] == 0
