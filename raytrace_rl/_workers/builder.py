"""Starting one worker of a group: the actor class, its constructor's arguments, and the options it runs with."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from raytrace_rl import _handles, _targets, dispatch


class RayWorkerBuilder:
    """What a group makes its workers of.

    Args:
        ray_actor_class: A class decorated with ``@ray.remote``, a plain class, or the dotted name of either.
        *args, **kwargs: Its constructor's, the same for every worker.
    """

    def __init__(self, ray_actor_class: Any, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class = _found(ray_actor_class)
        self.args = args
        self.kwargs = kwargs

    def __call__(
        self,
        placement_group: Any,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, list[int]] | None = None,
        num_gpus_per_node: int | None = None,
        **extra_options: Any,
    ) -> Any:
        """Starts one worker and returns its handle, without waiting for its constructor.

        Where the constructor names the carrier (a `TracedActor`'s does), what it does hangs from the caller's span.

        Args:
            placement_group: Where it runs.
            placement_group_bundle_index: Its bundle there.
            num_gpus: GPUs that it takes, a fraction where several share one.
            bundle_indices: Placement group and bundles of a tied group, given to its first worker; handed on to the
                class's ``configure_worker``.
            num_gpus_per_node: Handed on to ``configure_worker`` as well.
            **extra_options: Options of the actor; those that the class's ``configure_worker`` asks for beat them.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = self._configuration(num_gpus, bundle_indices, num_gpus_per_node)
        options = dict(extra_options)
        options["num_gpus"] = wanted.resources.get("num_gpus", num_gpus)
        environment = dict(options.get("runtime_env") or {})
        variables = {**(environment.get("env_vars") or {}), **wanted.env_vars}
        options["runtime_env"] = {**environment, **wanted.runtime_env, "env_vars": variables}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement_group,
            placement_group_bundle_index=placement_group_bundle_index,
            placement_group_capture_child_tasks=True,
        )
        actor_class = self.ray_actor_class.options(**options)
        kwargs = {**self.kwargs, **wanted.init_kwargs}
        known = _targets.resolve(actor_class)
        if known is not None and known.names_carrier:
            return dispatch.dispatch_with_trace_context(actor_class, *self.args, **kwargs)
        worker = actor_class.remote(*self.args, **kwargs)
        _handles.register(worker)
        return worker

    def _configuration(
        self, num_gpus: float, bundle_indices: tuple[int, list[int]] | None, num_gpus_per_node: int | None
    ) -> _Configuration:
        """Asks the class's ``configure_worker``, if it has one, with those of its parameters that it takes."""
        configure = getattr(_user_class(self.ray_actor_class), "configure_worker", None)
        if configure is None:
            return _Configuration()
        offered = {
            "num_gpus": num_gpus,
            "bundle_indices": bundle_indices,
            "num_gpus_per_node": num_gpus_per_node,
        }
        taken = inspect.signature(configure).parameters
        return _Configuration(*configure(**{name: value for name, value in offered.items() if name in taken}))


class _Configuration:
    """What a class's ``configure_worker`` returns, in NeMo-RL's order; each part may be missing or None."""

    def __init__(
        self,
        resources: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self.resources = dict(resources or {})
        self.env_vars = dict(env_vars or {})
        self.init_kwargs = dict(init_kwargs or {})
        self.runtime_env = dict(runtime_env or {})


def _found(actor_class: Any) -> Any:
    """Returns the actor class that is meant by a class or its dotted name."""
    if isinstance(actor_class, str):
        module, _, name = actor_class.rpartition(".")
        actor_class = getattr(importlib.import_module(module), name)
    if inspect.isclass(actor_class):
        import ray

        return ray.remote(actor_class)
    return actor_class


def _user_class(actor_class: Any) -> Any:
    """Returns the user's class behind an actor class."""
    return getattr(actor_class, "__ray_actor_class__", actor_class)
