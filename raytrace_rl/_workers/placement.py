"""Where the workers of groups run: bundles of Ray placement groups, their nodes, and who has taken which share.

One bundle holds one worker of each group that shares it: a GPU and as many CPUs as groups, or without GPUs the CPUs
alone. Ray lets a worker for which there is no room wait for ever, without a word; so shares are counted here, and one
too many is an error that says so.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final
from uuid import uuid4

from raytrace_rl._interrupts import is_interrupt

#: What a worker is started for may take its time to be scheduled on a busy or growing cluster. Seconds.
_PLACEMENT_TIMEOUT_S: Final = 180.0
_ADDRESS_TIMEOUT_S: Final = 120.0


class ResourceInsufficientError(RuntimeError):
    """The cluster, or a bundle of it, has no room for what was asked for."""


class RayVirtualCluster:
    """Bundles for worker groups, reserved in placement groups: by default one placement group a node.

    Args:
        bundle_ct_per_node_list: Bundles on each node: ``[2, 2]`` is two nodes of two.
        use_gpus: Each bundle has a GPU.
        max_colocated_worker_groups: Worker groups that share a bundle. A worker gets one CPU and, with GPUs, this
            fraction of the bundle's.
        num_gpus_per_node: GPUs of a node; handed on to workers' ``configure_worker``.
        name: Prefix of the placement groups' names, of which Ray allows each once; by default one of its own.
        placement_group_strategy: Ray's strategy for a unified placement group.
        use_unified_pg: One placement group over all nodes, for model parallelism across nodes.
        placement_timeout_s: Seconds to wait for the placement groups.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
        *,
        use_unified_pg: bool = False,
        placement_timeout_s: float = _PLACEMENT_TIMEOUT_S,
    ) -> None:
        if not any(bundle_ct_per_node_list) or min(bundle_ct_per_node_list) < 0:
            raise ValueError(f"bundle_ct_per_node_list {list(bundle_ct_per_node_list)} has no bundles")
        if max_colocated_worker_groups < 1:
            raise ValueError(f"max_colocated_worker_groups must be at least 1, not {max_colocated_worker_groups}")
        self._bundle_counts = [count for count in bundle_ct_per_node_list if count]
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self.placement_group_strategy = placement_group_strategy
        self._unified = use_unified_pg
        self._timeout_s = placement_timeout_s
        self._placement_groups: list[Any] | None = None
        #: Workers in each bundle now.
        self._taken: Counter[tuple[int, int]] = Counter()
        self._ports: set[int] = set()

    def world_size(self) -> int:
        """Returns the number of bundles."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        """Returns the number of nodes that have bundles."""
        return len(self._bundle_counts)

    def get_placement_groups(self) -> list[Any]:
        """Returns the placement groups; the first call reserves them and waits until they are there.

        Raises:
            ResourceInsufficientError: They are not there in time.
            ValueError: Another cluster of this name is there.
        """
        if self._placement_groups is None:
            self._placement_groups = self._reserve()
        return list(self._placement_groups)

    def bundle_nodes(self) -> dict[tuple[int, int], str]:
        """Returns the node id of each bundle, by index of placement group and bundle."""
        return bundle_nodes(self.get_placement_groups())

    def get_master_address_and_port(self, pg_idx: int = 0, bundle_idx: int = 0) -> tuple[str, int]:
        """Returns the address of a bundle's node and a port that is free there, another one at each call."""
        node_id = self.bundle_nodes()[pg_idx, bundle_idx]
        for _ in range(16):
            address, port = _address_and_port(self.get_placement_groups()[pg_idx], bundle_idx, node_id)
            if port not in self._ports:
                self._ports.add(port)
                return address, port
        raise ResourceInsufficientError(f"node {node_id} has no free port")

    def claim(self, bundles: Sequence[tuple[int, int]]) -> None:
        """Takes a share of each bundle for a worker; all of them or none.

        Args:
            bundles: Indices of placement group and bundle, one pair a worker.

        Raises:
            ResourceInsufficientError: There is no such bundle, or it is full.
        """
        wanted = Counter(bundles)
        known = self.bundle_nodes()
        for bundle, workers in wanted.items():
            if bundle not in known:
                raise ResourceInsufficientError(f"there is no bundle {bundle}, only {sorted(known)}")
            if self._taken[bundle] + workers > self.max_colocated_worker_groups:
                raise ResourceInsufficientError(
                    f"bundle {bundle} holds {self.max_colocated_worker_groups} workers "
                    f"(max_colocated_worker_groups), {self._taken[bundle]} are there, {workers} more do not fit"
                )
        self._taken += wanted

    def release(self, bundles: Sequence[tuple[int, int]]) -> None:
        """Gives shares back."""
        self._taken -= Counter(bundles)

    def shutdown(self) -> bool:
        """Removes the placement groups, and with them whatever still runs there; returns whether all went."""
        from ray.util.placement_group import remove_placement_group

        groups, self._placement_groups = self._placement_groups or [], None
        self._taken.clear()
        gone = True
        for group in groups:
            try:
                remove_placement_group(group)
            except Exception as error:  # Ray is down already, or its control store does not answer
                if is_interrupt(error):
                    raise
                gone = False
        return gone

    def _reserve(self) -> list[Any]:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle = {"CPU": self.max_colocated_worker_groups, **({"GPU": 1} if self.use_gpus else {})}
        # NeMo-RL's default is no name, and Ray takes "-node0" for one: the second cluster would not come up.
        prefix = self.name or f"cluster-{uuid4().hex[:12]}"
        if self._unified:
            wanted = [(f"{prefix}-unified", self.placement_group_strategy, self.world_size())]
        else:
            wanted = [(f"{prefix}-node{node}", "PACK", count) for node, count in enumerate(self._bundle_counts)]
        groups: list[Any] = []
        try:
            for name, strategy, count in wanted:
                groups.append(placement_group([dict(bundle) for _ in range(count)], strategy=strategy, name=name))
        except Exception as error:
            for group in groups:
                remove_placement_group(group)
            if "already exists" in str(error) and not is_interrupt(error):
                raise ValueError(f"there is a placement group {name!r}: give this cluster another name") from error
            raise
        deadline = monotonic() + self._timeout_s
        # Not by ready(): that starts a process to find out.
        if all(group.wait(max(0.0, deadline - monotonic())) for group in groups):
            return groups
        for group in groups:
            remove_placement_group(group)
        asking: Any = ray
        raise ResourceInsufficientError(
            f"{self.world_size()} bundles of {bundle} were not there within {self._timeout_s:g} s; the cluster has "
            f"{_amounts(asking.cluster_resources())}, of which {_amounts(asking.available_resources())} are free"
        )


def bundle_nodes(groups: Sequence[Any]) -> dict[tuple[int, int], str]:
    """Returns the node id of each bundle of placement groups, by index of placement group and bundle."""
    from ray.util.placement_group import placement_group_table

    tables = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
    return {(at, int(bundle)): node for at, table in enumerate(tables) for bundle, node in sorted(table.items())}


def _address_and_port(group: Any, bundle: int, node_id: str) -> tuple[str, int]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if node_id == ray.get_runtime_context().get_node_id():
        return free_address_and_port()  # a process less to start
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    probe = ray.remote(num_cpus=0, scheduling_strategy=strategy)(free_address_and_port)
    answer: tuple[str, int] = ray.get(probe.remote(), timeout=_ADDRESS_TIMEOUT_S)
    return answer


def free_address_and_port() -> tuple[str, int]:
    """Returns this node's address and a port that is free here now."""
    import ray.util

    asking: Any = ray.util
    address = str(asking.get_node_ip_address()).strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as found:
        found.bind(("", 0))
        return address, int(found.getsockname()[1])


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
