"""What `dispatch_with_trace_context` may be given, and whether the function behind it names the carrier.

Ray is looked at from outside: nothing here imports it, and what it keeps private may be missing in another version; the
call then goes out without a carrier.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from raytrace_rl import _carrier, _verl_groups

#: What ``.options()`` of an actor class and of a remote function return, and where ``remote`` has what is behind it.
_OPTION_WRAPPERS: Final = {"ActorOptionWrapper": "actor_cls", "FuncWrapper": "func_cls"}
#: Module and name of the classes that `resolve` takes.
_CALLABLE: Final = (
    ("ray.actor", "ActorMethod"),
    ("ray.actor", "ActorClass"),
    ("ray.remote_function", "RemoteFunction"),
    ("ray.util.client.common", "ClientRemoteMethod"),
    ("ray.util.client.common", "ClientActorClass"),
    ("ray.util.client.common", "ClientRemoteFunc"),
)


class Target(NamedTuple):
    """How to call what was given.

    Attributes:
        call: Takes the user's arguments.
        names_carrier: The callee's signature names the carrier.
        actor: The handle of an actor that the call goes to, if it does.
        creates: The call returns the handle of a new actor.
    """

    call: Callable[..., Any]
    names_carrier: bool
    actor: Any = None
    creates: bool = False


def resolve(target: Any) -> Target | None:
    """Returns how to call an actor's method, actor class or remote function, ``.options(...)`` included.

    Returns:
        None if ``target`` is none of these.
    """
    if "ray" not in sys.modules:
        return None
    inner = _behind(target)
    if isinstance(inner, _class("ray.actor", "ActorMethod")):
        actor = _actor_of(inner)
        return Target(target.remote, _names(method_signature(actor, inner._method_name)), actor)
    if isinstance(inner, _class("ray.actor", "ActorClass")):
        signatures = inner.__ray_metadata__.method_meta.signatures
        return Target(target.remote, _names(signatures.get("__init__")), creates=True)
    if isinstance(inner, _class("ray.remote_function", "RemoteFunction")):
        signature = inner._function_signature or inspect.signature(inner._function)
        return Target(target.remote, _names(signature))
    client = "ray.util.client.common"
    if isinstance(inner, _class(client, "ClientRemoteMethod")):
        return Target(target.remote, _names(inner._signature), inner._actor_handle)
    if isinstance(inner, _class(client, "ClientActorClass")):
        return Target(target.remote, _names(inner._init_signature), creates=True)
    if isinstance(inner, _class(client, "ClientRemoteFunc")):
        return Target(target.remote, _names(inner._signature))
    return None


def is_target(target: Any) -> bool:
    """True for what `resolve` knows how to call; for less than its price."""
    if "ray" not in sys.modules:
        return False
    return isinstance(_behind(target), tuple(_class(module, name) for module, name in _CALLABLE))


def plain_call(target: Any) -> Callable[..., Any]:
    """Returns what calls ``target`` as if we were not here."""
    remote = getattr(target, "remote", None)
    call: Callable[..., Any] = remote if callable(remote) else target
    return call


def is_actor(target: Any) -> bool:
    """True for the handle of an actor, Ray Client's included."""
    return hasattr(target, "_ray_method_signatures") or isinstance(
        target, _class("ray.util.client.common", "ClientActorHandle")
    )


def method_signature(actor: Any, method: str) -> Any:
    """Returns the parameters of an actor's method, from the table in its handle; None if it is not there."""
    table = getattr(actor, "_ray_method_signatures", None)
    if table is None:
        table = getattr(actor, "_method_signatures", None)  # a Ray Client handle
    return table.get(method) if table else None


def _class(module: str, name: str) -> Any:
    """Returns a class of Ray's if its module is loaded, else what nothing is an instance of."""
    return getattr(sys.modules.get(module), name, ())


def _actor_of(method: Any) -> Any:
    """Returns the handle that an ``ActorMethod`` belongs to; earlier versions of Ray hold it weakly."""
    actor = getattr(method, "_actor", None)
    return method._actor_ref() if actor is None else actor


def _behind(target: Any) -> Any:
    """Returns what an object that ``.options()`` returned stands for; ``target`` itself if it is none."""
    if isinstance(target, _class("ray.actor", "_ActorMethodOptionsWrapper")):
        return target._actor_method
    if isinstance(target, _class("ray.util.client.common", "OptionWrapper")):
        return target._remote_stub
    if type(target).__name__ in _OPTION_WRAPPERS:  # classes of Ray's inside its functions, hence without a path
        remote = target.remote.__func__
        cells = dict(zip(remote.__code__.co_freevars, remote.__closure__, strict=True))
        return cells[_OPTION_WRAPPERS[type(target).__name__]].cell_contents
    return target


def _names(parameters: Iterable[Any] | inspect.Signature | None) -> bool:
    """True if one of ``parameters`` is the carrier: a ``**kwargs`` would swallow it into the user's data."""
    if parameters is None:
        return False
    if isinstance(parameters, inspect.Signature):
        parameters = parameters.parameters.values()
    return _carrier.KEYWORD in [parameter.name for parameter in parameters]


# ------------------------------------------------------------------------------------------------------ worker groups


def is_group(target: Any) -> bool:
    """True for a worker group: an object with the handles of its workers under ``workers``."""
    workers = getattr(target, "workers", None)
    return isinstance(workers, (list, tuple)) and bool(workers) and all(map(is_actor, workers))


def is_subgroup(value: Any) -> bool:
    """True for a worker group that is an attribute of another: verl's fused groups have one a role."""
    return _verl_groups.is_group(value) and is_group(value)


def is_group_call(name: str, value: Any) -> bool:
    """True if ``value``, a worker group's attribute of that name, calls its workers."""
    if _verl_groups.is_call(name, value):
        return True
    return name.startswith("run_") and group_workers(value) is not None


def group_workers(target: Any) -> list[Any] | None:
    """Returns the worker handles behind a method of a worker group; None if ``target`` is no such method."""
    group = _verl_groups.group_of(target)
    if group is None and inspect.ismethod(target):
        group = target.__self__
    return list(group.workers) if is_group(group) else None


def group_method(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the workers' method that a call of a group's method leads to: a name, or anything if that is none."""
    if _verl_groups.group_of(target) is not None:
        return _verl_groups.method_name(target, args, kwargs)
    return args[0] if args else kwargs.get("method_name")


def workers_name_carrier(workers: list[Any], method: str) -> bool:
    """True if ``method`` names the carrier on every worker. Workers of one class share one table, asked once."""
    tables = {id(getattr(worker, "_ray_method_signatures", worker)): worker for worker in workers}
    return all(_names(method_signature(worker, method)) for worker in tables.values())


def group_call(
    target: Any, workers: list[Any], method: str, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a group's method, and the keywords for it, so that the workers get the carrier if ``method`` names it."""
    group = _verl_groups.group_of(target)
    if group is not None:
        if workers_name_carrier(workers, method) or _verl_groups.colocated_names_carrier(group, method):
            return _verl_groups.carrying(target, functools.partial(_names_on, group)), kwargs
        return target, kwargs
    if workers_name_carrier(workers, method):
        carrier = _carrier.sent()
        if carrier:
            return target, _with_group_carrier(target, kwargs, carrier)
    return target, kwargs


def _names_on(group: Any, worker: Any, method: str) -> bool:
    return _names(method_signature(worker, method)) or _verl_groups.colocated_names_carrier(group, method)


def _with_group_carrier(target: Any, kwargs: dict[str, Any], carrier: dict[str, str]) -> dict[str, Any]:
    """Returns the keywords of a group call with the carrier in the slot that reaches every worker as it is.

    NeMo-RL's sharded and multiple-data calls slice plain keywords per worker and broadcast ``common_kwargs``; its
    single-data calls broadcast plain keywords. A method with room for neither is called without a carrier.
    """
    parameters = _parameters(target.__func__)
    if "common_kwargs" in parameters:
        return {**kwargs, "common_kwargs": {_carrier.KEYWORD: carrier, **(kwargs.get("common_kwargs") or {})}}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {_carrier.KEYWORD: carrier, **kwargs}
    return kwargs


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a group's method, remembered: `inspect` takes as long as all else about a call."""
    return inspect.signature(function).parameters
