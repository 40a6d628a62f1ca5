"""Workers of test_verl, as verl's users write them: one method for each of verl's dispatch modes. Needs verl."""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

from raytrace_rl import TracedActor, accepts_trace_context, managed_span, setup

MESH = "train"


def doubled(batch: DataProto, **more: DataProto) -> DataProto:
    """A new batch of twice the values, plus those of the others."""
    values = batch.batch["x"] * 2
    for other in more.values():
        values = values + other.batch["x"]
    return DataProto.from_single_dict({"x": values}, meta_info={"seen": sorted(more)})


def apply(worker: Any, batch: DataProto, **more: DataProto) -> DataProto:
    """What DP_COMPUTE_PROTO_WITH_FUNC sends along with the data."""
    return doubled(batch, **more)


def plain(worker: Any, *args: Any, **kwargs: Any) -> Any:
    """What a worker got, and who it is."""
    return worker.rank, args, sorted(kwargs.items())


def with_function(worker: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """What the function makes of the rest."""
    return function(worker, *args, **kwargs)


def on_batches(worker: Any, *args: Any, **kwargs: Any) -> Any:
    """A batch made of the batches."""
    return doubled(*args, **kwargs)


def measured(worker: Any, batch: DataProto) -> Any:
    """A number a rank, which verl collects without concatenating."""
    return {"rank": worker.rank, "sum": float(batch.batch["x"].sum())}


#: What a worker does in each mode of verl's registry.
BODIES: dict[str, Any] = {
    "ONE_TO_ALL": plain,
    "ALL_TO_ALL": plain,
    "DP_COMPUTE": plain,
    "DP_COMPUTE_PROTO": on_batches,
    "DP_COMPUTE_PROTO_WITH_FUNC": with_function,
    "DP_COMPUTE_METRIC": measured,
    "DIRECT_ROLLOUT_METHOD": plain,
}


def method_name(mode: Dispatch, blocking: bool, above: bool) -> str:
    """The name of the method for a mode, blocking or not, our decorator above verl's or below it."""
    return f"{mode.name.lower()}{'' if blocking else '_future'}{'_above' if above else ''}"


def _method(name: str, body: Any, above: bool, **how: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with managed_span("policy_update", name):
            return body(self, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    registered = register(**how)
    return accepts_trace_context(registered(method)) if above else registered(accepts_trace_context(method))


class Trainer(TracedActor, Worker):
    """A rank with a method for each mode; see the end of this module."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info(MESH, dp_rank=self.rank, is_collect=True)
        with managed_span("setup", "verl.init"):
            self.group = os.environ.get("RAYTRACE_RL_WORKER_GROUP")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def swallows(self, **kwargs: Any) -> Any:
        """Not ours: it must not find a carrier among its keywords."""
        return sorted(kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @accepts_trace_context
    async def coroutine(self, x: int) -> int:
        with managed_span("policy_update", "verl.coroutine"):
            return x + int(self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    @accepts_trace_context
    def first_only(self, x: int) -> int:
        with managed_span("policy_update", "verl.first_only"):
            return x

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH))
    @accepts_trace_context
    def on_mesh(self, batch: DataProto) -> DataProto:
        with managed_span("policy_update", "verl.on_mesh"):
            return doubled(batch)

    @accepts_trace_context
    def called(self, x: int = 0, *, k: int = 0) -> Any:
        """For ``execute_all`` and its like, which need no ``@register``."""
        with managed_span("policy_update", "verl.called"):
            return self.rank, x, k

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @accepts_trace_context
    def tagged(self, tag: str) -> str:
        with managed_span("policy_update", f"verl.tagged.{tag}"):
            return tag


for _mode in DISPATCH_MODE_FN_REGISTRY:
    for _blocking in (True, False):
        for _above in (True, False):
            _name = method_name(_mode, _blocking, _above)
            _how = {"dispatch_mode": _mode, "blocking": _blocking}
            setattr(Trainer, _name, _method(_name, BODIES[_mode.name], _above, **_how))


class Actor(Worker):
    """A role that shares its process with others, and is no `TracedActor`."""

    def __init__(self) -> None:
        super().__init__()
        setup.init_telemetry_worker()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @accepts_trace_context
    def update(self, batch: DataProto) -> DataProto:
        with managed_span("policy_update", f"verl.{type(self).__name__}.update"):
            return doubled(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def untraced(self, **kwargs: Any) -> Any:
        return sorted(kwargs)


class Critic(Actor):
    """The other role."""


def batch_of(*rows: int, padded: bool = False) -> DataProto:
    """A batch with these values under ``x``."""
    batch = DataProto.from_single_dict({"x": torch.tensor(rows)}, auto_padding=padded)
    assert len(batch) == len(rows)
    return batch
