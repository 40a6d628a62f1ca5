"""Who sits where in a worker group: the rank, bundle and node of each worker.

Ranks on one node are neighbours, and local ranks count by node: what the bundles of a placement group are numbered says
nothing of where they lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrace_rl._workers import placement


@dataclass(frozen=True)
class Seat:
    """A worker's place.

    Attributes:
        rank: Rank in the group.
        bundle: Indices of placement group and bundle.
        node_rank, local_rank, local_world_size: Which of the group's nodes, which of its workers there, and of how
            many.
        tied_group: Which group of tied workers; each worker is one of its own where none are tied.
        tied_rank: Which of these.
        tied_bundles: The bundles of all of these.
    """

    rank: int
    bundle: tuple[int, int]
    node_rank: int
    local_rank: int
    local_world_size: int
    tied_group: int
    tied_rank: int
    tied_bundles: tuple[int, ...]

    @property
    def is_leader(self) -> bool:
        """True for the first of tied workers, which owns their model."""
        return self.tied_rank == 0

    @property
    def bundle_indices(self) -> tuple[int, list[int]] | None:
        """What a leader's ``configure_worker`` is told of its tied workers."""
        return (self.bundle[0], list(self.tied_bundles)) if self.is_leader else None

    def name(self, prefix: str) -> str:
        """Returns the actor's name."""
        if len(self.tied_bundles) > 1:
            return f"{prefix}-grp{self.tied_group}-{self.tied_rank}"
        return f"{prefix}-{self.bundle[0]}-{self.bundle[1]}"

    def metadata(self, prefix: str) -> dict[str, Any]:
        """Returns what a group tells of its worker."""
        return {
            "node_idx": self.bundle[0],
            "local_rank": self.local_rank,
            "global_rank": self.rank,
            "name": self.name(prefix),
            "bundle_indices": self.bundle_indices,
            "dp_shard_idx": self.tied_group,
        }


def seats(
    placement_groups: Sequence[Any],
    workers_per_node: int | Sequence[int] | None,
    bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None,
) -> list[Seat]:
    """Returns every worker's place, by rank.

    Args:
        placement_groups: Those of the cluster.
        workers_per_node: Workers in each placement group; by default one a bundle.
        bundle_indices_list: Tied workers instead, with ranks in this order.

    Raises:
        ValueError: Something does not fit the placement groups.
    """
    nodes = placement.bundle_nodes(placement_groups)
    tied: list[tuple[int, tuple[int, ...]]]
    if bundle_indices_list is None:
        tied = [(at, (bundle,)) for at, bundle in _one_each(nodes, _counts(placement_groups, workers_per_node))]
    else:
        only = len(placement_groups) == 1
        tied = [(0 if only else at, tuple(bundles)) for at, bundles in bundle_indices_list]
    places = [(group, i, (at, bundle)) for group, (at, bundles) in enumerate(tied) for i, bundle in enumerate(bundles)]
    if not places:
        raise ValueError("a worker group needs at least one worker")
    for _, _, bundle in places:
        if bundle not in nodes:
            raise ValueError(f"there is no bundle {bundle} (placement group, index), only {sorted(nodes)}")
    on_node = Counter(nodes[bundle] for _, _, bundle in places)
    node_ranks = {node: i for i, node in enumerate(on_node)}
    seen: Counter[str] = Counter()
    result = []
    for rank, (group, tied_rank, bundle) in enumerate(places):
        node = nodes[bundle]
        result.append(
            Seat(
                rank=rank,
                bundle=bundle,
                node_rank=node_ranks[node],
                local_rank=seen[node],
                local_world_size=on_node[node],
                tied_group=group,
                tied_rank=tied_rank,
                tied_bundles=tied[group][1],
            )
        )
        seen[node] += 1
    return result


def _counts(placement_groups: Sequence[Any], workers_per_node: int | Sequence[int] | None) -> list[int]:
    bundles = [group.bundle_count for group in placement_groups]
    if workers_per_node is None:
        return bundles
    counts = [workers_per_node] * len(bundles) if isinstance(workers_per_node, int) else list(workers_per_node)
    if len(counts) != len(bundles):
        raise ValueError(f"workers_per_node has {len(counts)} numbers for {len(bundles)} placement groups")
    for at, (count, room) in enumerate(zip(counts, bundles, strict=True)):
        if not 0 <= count <= room:
            raise ValueError(f"placement group {at} has {room} bundles, not {count}")
    return counts


def _one_each(nodes: dict[tuple[int, int], str], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the bundles to take, a node's after one another."""
    taken = [(at, bundle) for at, bundle in nodes if bundle < counts[at]]
    order = {node: i for i, node in enumerate(dict.fromkeys(nodes[bundle] for bundle in taken))}
    return sorted(taken, key=lambda bundle: (order[nodes[bundle]], bundle))


def leaders(of: Sequence[Seat], wanted: Sequence[int] | None) -> list[int]:
    """Returns the workers that answer for the data-parallel shards: the leaders of tied workers, or a choice of them.

    Raises:
        ValueError: The choice has others in it, who own no model, or is not ascending.
    """
    every = [seat.rank for seat in of if seat.is_leader]
    if wanted is None:
        return every
    if list(wanted) != sorted(set(wanted) & set(every)):
        raise ValueError(f"dp_leader_worker_indices {list(wanted)} is no ascending choice of the leaders {every}")
    return list(wanted)
