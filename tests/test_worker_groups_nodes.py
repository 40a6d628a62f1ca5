"""Worker groups over two nodes with GPUs, as Ray counts them: local ranks by node, and fractions of a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from raytrace_rl.worker_groups import RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup, ResourceInsufficientError
from tests import worker_group_actors as actors

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.ray_fixtures"]


def get(refs: Any) -> Any:
    """What the calls returned, within two minutes: workers of two nodes start on this one machine."""
    import ray

    return ray.get(refs, timeout=120)


@pytest.mark.parametrize("unified", [False, True])
def test_local_ranks_count_by_node_and_groups_share_gpus(two_nodes, unified):
    """Catches two workers of a node that want one device, a rendezvous elsewhere, and half GPUs counted as whole."""
    bundles = RayVirtualCluster(
        [2, 2], max_colocated_worker_groups=2, num_gpus_per_node=2, name="two", use_unified_pg=unified
    )
    policy = RayWorkerGroup(bundles, RayWorkerBuilder(actors.Rank), name_prefix="policy")
    reward = RayWorkerGroup(bundles, RayWorkerBuilder(actors.Rank), name_prefix="reward")
    with pytest.raises(ResourceInsufficientError, match="2 are there"):
        RayWorkerGroup(bundles, RayWorkerBuilder(actors.Rank))
    for group in (policy, reward):
        found = get(group.run_all_workers_single_data("environment"))
        where = get(group.run_all_workers_single_data("where"))
        nodes = list(dict.fromkeys(node for node, _ in where))
        assert [node for node, _ in where] == [nodes[0], nodes[0], nodes[1], nodes[1]]
        assert [env["LOCAL_RANK"] for env in found] == ["0", "1", "0", "1"]
        assert [env["NODE_RANK"] for env in found] == ["0", "0", "1", "1"]
        assert {env["LOCAL_WORLD_SIZE"] for env in found} == {"2"}
        assert [sorted(gpus for node, gpus in where if node == at) for at in nodes] == [[[0], [1]], [[0], [1]]]
    assert policy.master_port != reward.master_port
    ports = [bundles.get_master_address_and_port(*bundle)[1] for bundle in bundles.bundle_nodes()]
    assert len({*ports, policy.master_port, reward.master_port}) == 6  # asked for on both nodes
    assert policy.shutdown()
    assert reward.shutdown()
    assert bundles.shutdown()
