"""Worker groups: one Ray actor a rank over named parallel axes, on placement groups, called together.

The names, call shapes and meanings are NeMo-RL's, so that its policies can run on this group and its engineers know
what they see. How a call gets the trace context is `dispatch`'s business: ``traced(group)``,
``dispatch_with_trace_context(group.run_all_workers_sharded_data, "train", ...)``, or ``trace_context_kwargs()`` as
``common_kwargs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from raytrace_rl import _carrier, _flush
from raytrace_rl._workers import end, env, layout
from raytrace_rl._workers.builder import RayWorkerBuilder
from raytrace_rl._workers.futures import MultiWorkerFuture
from raytrace_rl._workers.placement import RayVirtualCluster, ResourceInsufficientError
from raytrace_rl._workers.sharded_calls import ShardedCalls, dealt, shared
from raytrace_rl._workers.sharding import NamedSharding

__all__ = [
    "MultiWorkerFuture",
    "NamedSharding",
    "RayVirtualCluster",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "ResourceInsufficientError",
]

#: Seconds that the flush of a shutdown may take of its own.
_FLUSH_S: Final = 15.0
#: One of a bundle's CPUs for each worker in it.
_WORKER_CPUS: Final = 1


class RayWorkerGroup:
    """A group of workers, one a rank, that are called together.

    Each worker finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` (by node), ``NODE_RANK``,
    ``MASTER_ADDR``, ``MASTER_PORT`` and ``RAYTRACE_RL_WORKER_GROUP`` in its environment, telemetry's settings, and the
    trace context of whoever makes the group: what the workers do in ``__init__`` hangs from there.

    Args:
        cluster: Where the workers run: a `RayVirtualCluster`, or NeMo-RL's.
        remote_worker_builder: What they are made of.
        workers_per_node: Workers in each placement group, one number or a list; by default one in each bundle.
        name_prefix: Name of the group; its workers are named actors then.
        bundle_indices_list: Tied workers, ``(placement group, [bundles])`` each, ranks in this order;
            ``workers_per_node`` does not count then.
        sharding_annotations: Named axes over the ranks; needed for sharded calls and ``run_rank_0_only_axes``.
        env_vars: Further variables of the workers' environment.
        dp_leader_worker_indices: The worker that answers for each data-parallel shard; by default the first of each
            tied group.

    Raises:
        ResourceInsufficientError: The cluster, or a bundle of it, has no room.
        ValueError: The arguments do not fit each other.
    """

    def __init__(
        self,
        cluster: Any,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        dp_leader_worker_indices: Sequence[int] | None = None,
    ) -> None:
        self._workers: list[Any] = []
        self.cluster = cluster
        self.name_prefix = name_prefix
        self.sharding_annotations = sharding_annotations
        seats = layout.seats(cluster.get_placement_groups(), workers_per_node, bundle_indices_list)
        self.world_size = len(seats)
        if sharding_annotations is not None and sharding_annotations.ranks != list(range(len(seats))):
            raise ValueError(f"{sharding_annotations} does not lay out the {len(seats)} ranks of this group")
        self.dp_leader_worker_indices = layout.leaders(seats, dp_leader_worker_indices)
        self._worker_metadata = [seat.metadata(name_prefix) for seat in seats]
        self._claimed = [seat.bundle for seat in seats] if isinstance(cluster, RayVirtualCluster) else []
        if self._claimed:
            cluster.claim(self._claimed)
        try:
            self._start(remote_worker_builder, seats, env_vars)
        except BaseException:
            self._kill()
            raise

    @property
    def workers(self) -> list[Any]:
        """The workers' handles, by rank; empty after `shutdown`."""
        return self._workers

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """For each worker: node_idx, local_rank, global_rank, name, bundle_indices, dp_shard_idx."""
        return self._worker_metadata

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shards."""
        return len(self.dp_leader_worker_indices)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Returns the worker that answers for a data-parallel shard; IndexError if there is no such shard."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"there are {self.dp_size} data-parallel shards, none is {dp_shard_idx}")
        return self.dp_leader_worker_indices[dp_shard_idx]

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Calls a method on one worker; returns its ``ObjectRef``, of a generator method its ``ObjectRefGenerator``."""
        return getattr(self._workers[worker_idx], method_name).remote(*args, **kwargs)

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Calls a method on all workers with the same arguments.

        Args:
            method_name: The method.
            args, kwargs: The method's own; what is no small value goes to the object store once.
            run_rank_0_only_axes: Axes along which only the first is called.

        Returns:
            One future a worker called, by rank.
        """
        ranks = self._ranks(run_rank_0_only_axes)
        if len(ranks) > 1:
            args = tuple(map(shared, args))
            kwargs = {name: value if name == _carrier.KEYWORD else shared(value) for name, value in kwargs.items()}
        return [getattr(self._workers[rank], method_name).remote(*args, **kwargs) for rank in ranks]

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Sequence[Any],
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[Any]:
        """Calls a method on all workers, each with its own arguments.

        Args:
            method_name: The method.
            args, kwargs: A list each, with one value a worker called.
            run_rank_0_only_axes: Axes along which only the first is called.
            common_kwargs: Keywords that go to every worker as they are.

        Returns:
            One future a worker called, by rank.

        Raises:
            ValueError: A list is not as long as there are workers to call, there is none, or it is no list.
        """
        ranks = self._ranks(run_rank_0_only_axes)
        if not args and not kwargs:
            raise ValueError("no data: run_all_workers_single_data calls every worker alike")
        deal = partial(dealt, size=len(ranks), each="values", places="workers")
        own = [deal(f"argument {i}", value) for i, value in enumerate(args)]
        named = {name: deal(name, value) for name, value in kwargs.items()}
        common = dict(common_kwargs or {})
        futures = []
        for at, rank in enumerate(ranks):
            kept = {name: value[at] for name, value in named.items()}
            futures.append(getattr(self._workers[rank], method_name).remote(*(v[at] for v in own), **kept, **common))
        return futures

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str] | None = None,
        replicate_on_axes: Sequence[str] | None = None,
        output_is_replicated: Sequence[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Calls a method on the workers that share the data, each with its slice of it.

        Args:
            method_name: The method.
            args, kwargs: Each nested as deep as ``in_sharded_axes``: a list with one value a place on the first of
                them, in each a list for the second, and so on.
            in_sharded_axes: Axes along which the data is split, outermost first.
            replicate_on_axes: Axes along which every worker gets the same slice. Along axes in neither list (free
                axes) only the first worker is called.
            output_is_replicated: Axes along which outputs are equal and only the first one's is returned.
            make_dummy_calls_to_free_axes: Call the others of the free axes too, with None for each argument, for
                methods that are collective; their results are left out.
            common_kwargs: Keywords that go to every worker called as they are, dummy calls included.

        Raises:
            ValueError: The group has no axes, there is no axis of that name, one stands there twice or is both sharded
                and replicated, or data does not fit the axes.
        """
        sharding = self._sharding()
        calls = ShardedCalls(sharding, in_sharded_axes or (), replicate_on_axes or (), output_is_replicated or ())
        args = tuple(calls.prepared(f"argument {i}", value) for i, value in enumerate(args))
        kwargs = {name: calls.prepared(name, value) for name, value in kwargs.items()}
        common = dict(common_kwargs or {})
        futures, called, returning = [], [], []
        for rank, worker in enumerate(self._workers):
            coords = sharding.get_worker_coords(rank)
            if calls.receives(coords):
                own = [calls.slice(value, coords) for value in args]
                named = {name: calls.slice(value, coords) for name, value in kwargs.items()}
                if calls.returns(coords):
                    returning.append(rank)
            elif make_dummy_calls_to_free_axes:
                own, named = [None] * len(args), dict.fromkeys(kwargs)
            else:
                continue
            futures.append(getattr(worker, method_name).remote(*own, **named, **common))
            called.append(rank)
        return MultiWorkerFuture(futures=futures, return_from_workers=returning, called_workers=called)

    def get_all_worker_results(
        self,
        future_bundle: MultiWorkerFuture,
        return_generators_as_proxies: bool = False,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Waits for the results of a sharded call; see `MultiWorkerFuture.get_results`."""
        return future_bundle.get_results(self, return_generators_as_proxies, timeout=timeout)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """Cleans the workers up, flushes their telemetry, then kills them, whatever has died or hangs.

        Args:
            cleanup_method: Called on every worker first.
            timeout: Seconds for the clean-up of all workers; None waits without end. The flush takes at most 15
                seconds of its own, and asks only workers that answered.
            force: Neither clean up nor flush. Finished spans are safe; metrics and logs of the last interval are not.

        Returns:
            True if every worker was cleaned up and killed.
        """
        fine = True
        try:
            if self._workers and not force:
                answering = self._workers
                if cleanup_method is not None:
                    answering, fine = end.clean_up(self._workers, cleanup_method, timeout)
                _flush.flush_workers(answering, _FLUSH_S)
        finally:
            fine = self._kill() and fine
        return fine

    def _start(
        self, builder: RayWorkerBuilder, seats: Sequence[layout.Seat], env_vars: Mapping[str, str] | None
    ) -> None:
        groups = self.cluster.get_placement_groups()
        where = seats[0].bundle if isinstance(self.cluster, RayVirtualCluster) else ()
        self.master_address, self.master_port = self.cluster.get_master_address_and_port(*where)
        common = env.group_environment(self.name_prefix, env_vars, self.sharding_annotations)
        num_gpus = 1 / self.cluster.max_colocated_worker_groups if self.cluster.use_gpus else 0
        for seat in seats:
            own = env.rank_environment(seat, self.world_size, (self.master_address, self.master_port))
            options = {"name": seat.name(self.name_prefix)} if self.name_prefix else {}
            worker = builder(
                groups[seat.bundle[0]],
                seat.bundle[1],
                num_gpus,
                seat.bundle_indices,
                self.cluster.num_gpus_per_node,
                num_cpus=_WORKER_CPUS,
                runtime_env={"env_vars": {**common, **own}},
                **options,
            )
            self._workers.append(worker)

    def _kill(self) -> bool:
        """Kills every worker and gives its place back; returns whether Ray took each."""
        fine = end.kill(self._workers)
        if self._claimed:
            self.cluster.release(self._claimed)
        self._workers, self._worker_metadata, self._claimed = [], [], []
        return fine

    def _sharding(self) -> NamedSharding:
        if self.sharding_annotations is None:
            raise ValueError("the group has no named axes: give it sharding_annotations")
        return self.sharding_annotations

    def _ranks(self, rank_0_only_axes: Sequence[str] | None) -> list[int]:
        """Returns the workers that are the first along all of these axes."""
        if not rank_0_only_axes:
            return list(range(len(self._workers)))
        sharding = self._sharding()
        sharding.check_axes(rank_0_only_axes)
        return [
            rank
            for rank in range(len(self._workers))
            if sharding.is_axis_zero(sharding.get_worker_coords(rank), rank_0_only_axes)
        ]
