"""Worker groups without Ray: seats by node, environments, which worker gets what."""

from __future__ import annotations

from collections import UserDict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raytrace_rl import _env_carrier, managed_span, setup
from raytrace_rl._workers import env as environments
from raytrace_rl._workers import layout, placement
from raytrace_rl._workers.sharded_calls import ShardedCalls, dealt
from raytrace_rl.resources import process_resource
from raytrace_rl.worker_groups import (
    MultiWorkerFuture,
    NamedSharding,
    RayVirtualCluster,
    RayWorkerGroup,
    ResourceInsufficientError,
)


@pytest.fixture
def nodes(monkeypatch):
    """Placement groups of 4 and 2 bundles, the first one's on two nodes by turns."""
    where = {(0, 0): "a", (0, 1): "b", (0, 2): "a", (0, 3): "b", (1, 0): "b", (1, 1): "b"}
    monkeypatch.setattr(placement, "bundle_nodes", lambda _groups: where)
    return [SimpleNamespace(bundle_count=4), SimpleNamespace(bundle_count=2)]


def test_ranks_of_a_node_are_neighbours_and_local_ranks_count_by_node(nodes):
    """Catches a local rank taken from the bundle's number: two workers of a node would want the same device."""
    seats = layout.seats(nodes, None, None)
    assert [seat.bundle for seat in seats] == [(0, 0), (0, 2), (0, 1), (0, 3), (1, 0), (1, 1)]
    assert [(seat.node_rank, seat.local_rank, seat.local_world_size) for seat in seats] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 4),
        (1, 1, 4),
        (1, 2, 4),
        (1, 3, 4),
    ]
    assert [seat.name("policy") for seat in seats][:2] == ["policy-0-0", "policy-0-2"]
    assert [seat.rank for seat in seats if seat.is_leader] == list(range(6))


def test_fewer_workers_than_bundles(nodes):
    """Catches workers put into bundles that were not asked for."""
    assert [seat.bundle for seat in layout.seats(nodes, 1, None)] == [(0, 0), (1, 0)]
    assert [seat.bundle for seat in layout.seats(nodes, [2, 0], None)] == [(0, 0), (0, 1)]


def test_tied_workers_keep_the_order_given(nodes):
    """Catches a second worker of a tied group that takes itself for the owner of the model."""
    seats = layout.seats(nodes, None, [(0, [0, 1]), (1, [0])])
    assert [seat.bundle_indices for seat in seats] == [(0, [0, 1]), None, (1, [0])]
    assert [seat.name("g") for seat in seats] == ["g-grp0-0", "g-grp0-1", "g-1-0"]
    assert [seat.metadata("g")["dp_shard_idx"] for seat in seats] == [0, 0, 1]
    assert layout.leaders(seats, None) == [0, 2]
    assert layout.leaders(seats, [2]) == [2]
    for wrong in ([1], [2, 0], [5]):
        with pytest.raises(ValueError, match="ascending choice"):
            layout.leaders(seats, wrong)


@pytest.mark.parametrize(
    ("per_node", "tied"), [([1], None), (5, None), ([3, 3], None), ([0, 0], None), (None, [(0, [7])]), (None, [])]
)
def test_workers_that_fit_nowhere(nodes, per_node, tied):
    """Catches a worker that Ray would let wait for ever, without a word."""
    with pytest.raises(ValueError, match=r"bundle|placement group|at least one"):
        layout.seats(nodes, per_node, tied)


def test_a_bundle_is_shared_by_so_many_groups_and_no_more(nodes):
    """Catches an account that lets one too many in, keeps places of groups that ended, or takes half of a claim."""
    cluster = RayVirtualCluster([4, 2], use_gpus=False, max_colocated_worker_groups=2)
    cluster._placement_groups = nodes
    cluster.claim([(0, 0), (0, 1)])
    cluster.claim([(0, 0)])
    with pytest.raises(ResourceInsufficientError, match=r"\(0, 0\) holds 2 workers .* 2 are there, 1 more"):
        cluster.claim([(0, 1), (0, 0)])
    with pytest.raises(ResourceInsufficientError, match="no bundle"):
        cluster.claim([(3, 0)])
    cluster.release([(0, 0)])
    cluster.claim([(0, 1), (0, 0)])
    assert (cluster.world_size(), cluster.node_count()) == (6, 2)


@pytest.mark.parametrize("counts", [[], [0, 0], [2, -1]])
def test_clusters_without_bundles(counts):
    """Catches a placement group that Ray would refuse in words of its own, later."""
    with pytest.raises(ValueError, match="no bundles"):
        RayVirtualCluster(counts)
    with pytest.raises(ValueError, match="at least 1"):
        RayVirtualCluster([1], max_colocated_worker_groups=0)


def test_the_environment_of_a_worker(tmp_path, monkeypatch):
    """Catches a worker without telemetry's settings, its group, its axes or a carrier; and users' variables lost."""
    setup.init_telemetry_driver({"enabled": True, "run_dir": str(tmp_path), "run_id": "r", "span_groups": "all"})
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=rl")
    sharding = NamedSharding.of(data_parallel=2, tensor_parallel=4, other=1)
    with managed_span("setup", "parent") as span:
        env = environments.group_environment("policy", {"RAYTRACE_RL_HEARTBEAT_S": "9", "MINE": "1"}, sharding)
    assert env["RAYTRACE_RL_ENABLED"] == "1"
    assert env["RAYTRACE_RL_RUN_DIR"] == str(tmp_path)
    assert (env["RAYTRACE_RL_HEARTBEAT_S"], env["MINE"]) == ("9", "1")
    assert env["RAYTRACE_RL_WORKER_GROUP"] == "policy"
    assert env["TRACEPARENT"].split("-")[2] == span.span_id.hex()
    assert _env_carrier.inherited(env)["traceparent"] == env["TRACEPARENT"]
    assert "raytrace" not in _env_carrier.inherited(env)
    config: Any = setup.get_telemetry_handle()._process.config
    resource = process_resource(config, role="worker", environ=env)
    assert resource["team"] == "rl"
    assert resource["nv.dl.topology.size.dp"] == 2
    assert resource["nv.dl.topology.size.tp"] == 4


def test_sizes_that_the_user_named_hold(tmp_path):
    """Catches a group that overrules what its user says of it."""
    base = {"OTEL_RESOURCE_ATTRIBUTES": "nv.dl.topology.size.dp=8"}
    env = environments.group_environment("", base, NamedSharding.of(data_parallel=2, tensor_parallel=1))
    assert env["OTEL_RESOURCE_ATTRIBUTES"] == "nv.dl.topology.size.dp=8,nv.dl.topology.size.tp=1"
    assert "RAYTRACE_RL_WORKER_GROUP" not in env


def test_with_telemetry_off_the_environment_is_the_user_s():
    """Catches settings or a carrier sent by a driver that traces nothing."""
    assert environments.group_environment("", {"MINE": "1"}) == {"MINE": "1"}


def test_who_gets_what_and_whose_output_counts():
    """Catches data on the wrong axis, a free axis served, and replicated outputs counted twice."""
    sharding = NamedSharding.of(pipeline_parallel=2, data_parallel=2, tensor_parallel=2)
    calls = ShardedCalls(sharding, ["data_parallel"], ["tensor_parallel"], ["tensor_parallel"])
    coords = [sharding.get_worker_coords(rank) for rank in range(8)]
    assert [rank for rank in range(8) if calls.receives(coords[rank])] == [0, 1, 2, 3]
    assert [rank for rank in range(4) if calls.returns(coords[rank])] == [0, 2]
    assert [calls.slice(["a", "b"], at) for at in coords[:4]] == ["a", "a", "b", "b"]
    nested = ShardedCalls(sharding, ["data_parallel", "pipeline_parallel"], [], [])
    data = nested.prepared("x", (["0 0", "0 1"], ["1 0", "1 1"]))
    assert nested.slice(data, coords[4]) == "0 1"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([1, 2, 3], "3 slices for the 2 places of data_parallel"),
        (1, "a list of slices for the 2 places of data_parallel, not int"),
        ("ab", "not str"),
        ({0: 1, 1: 2}, "not dict"),
    ],
)
def test_data_that_does_not_fit_is_refused(data, why):
    """Catches a slice too many that would vanish without a word, and a text dealt out by the letter."""
    calls = ShardedCalls(NamedSharding.of(data_parallel=2), ["data_parallel"], [], [])
    with pytest.raises(ValueError, match=why):
        calls.prepared("x", data)


def test_axes_of_a_call_that_cannot_be():
    """Catches a misspelt axis taken for a free one: half of the workers would sit idle."""
    sharding = NamedSharding.of(data_parallel=2, tensor_parallel=2)
    wrong: list[list[list[str]]] = [[["dp"], [], []], [[], ["tp"], []], [[], [], ["pp"]]]
    for axes in wrong:
        with pytest.raises(ValueError, match="no axis"):
            ShardedCalls(sharding, *axes)
    with pytest.raises(ValueError, match="both sharded and replicated"):
        ShardedCalls(sharding, ["data_parallel"], ["data_parallel"], [])


@pytest.mark.parametrize("place", range(3))
def test_axes_that_stand_there_twice_or_are_a_text(place):
    """Catches data sharded twice along one axis, of which only the diagonal is sent; and axes named by letters."""
    sharding = NamedSharding.of(data_parallel=2, tensor_parallel=2)
    for axes, why in ((["data_parallel"] * 2, "there twice"), ("data_parallel", "a list of names")):
        given: list[Any] = [[], [], []]
        given[place] = axes
        with pytest.raises(ValueError, match=why):
            ShardedCalls(sharding, *given)
        with pytest.raises(ValueError, match=why):
            sharding.check_axes(axes)


class Unindexed:
    """Two values, by name."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize(
    "data",
    [
        {0: 1, 1: 2},
        UserDict({0: 1, 1: 2}),
        "ab",
        b"ab",
        bytearray(b"ab"),
        memoryview(b"ab"),
        {1, 2},
        iter([1, 2]),
        7,
        None,
        np.array(7),
        Unindexed(),
    ],
    ids=lambda data: type(data).__name__,
)
def test_what_cannot_be_dealt_out_is_refused_by_name(data):
    """Catches a text dealt out by the letter, and a mapping that fails with ``KeyError: 0``."""
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    group._workers, group.sharding_annotations = [SimpleNamespace()] * 2, NamedSharding.of(data_parallel=2)
    kind = type(data).__name__
    with pytest.raises(ValueError, match=f"^batch is to be a list of values for the 2 workers.*{kind}"):
        group.run_all_workers_multiple_data("train", batch=data)
    with pytest.raises(ValueError, match=f"^argument 0 is to be a list of slices for the 2 places.*{kind}"):
        group.run_all_workers_sharded_data("train", data, in_sharded_axes=["data_parallel"])


@pytest.mark.parametrize("data", [[1, 2], (1, 2), np.array([1, 2]), range(1, 3), deque([1, 2])], ids=repr)
def test_what_can_be_dealt_out(data):
    """Catches a refusal of what has a length and an order."""
    assert dealt("x", data, 2, each="values", places="workers") == [1, 2]


def test_whose_futures_count():
    """Catches results by position where workers were left out, and dummies among them."""
    future = MultiWorkerFuture(["r1", "r3", "dummy"], return_from_workers=[3, 9], called_workers=[1, 3, 5])
    assert future.get_results(None, return_generators_as_proxies=True) == ["r3"]
    assert MultiWorkerFuture(["a", "b"]).get_results(return_generators_as_proxies=True) == ["a", "b"]
    assert MultiWorkerFuture(["a", "b"], [1]).get_results(return_generators_as_proxies=True) == ["b"]
