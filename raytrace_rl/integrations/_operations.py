"""What one operation on a data plane says of itself: its name, partition and keys, read off its arguments and result.

By name, so that any client will do: NeMo-RL's ``DataPlaneClient``, TransferQueue's, a replay buffer of one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

_PARTITIONS: Final = frozenset({"partition_id", "partition", "partition_name"})
_KEYS: Final = frozenset({"keys", "key", "sample_ids", "uids", "uid", "indexes", "global_indexes", "sample_indices"})
#: Arguments that say where data is, and hold none.
_METAS: Final = frozenset({"meta", "metadata", "batch_meta"})
#: Where such an object has its keys.
_META_KEYS: Final = ("sample_ids", "keys", "global_indexes", "uids")


class Facts(NamedTuple):
    """What is known of an operation; None where it does not say.

    Attributes:
        partition: Name of the partition.
        num_keys: Keys (samples) that it is about.
        payload: The values besides.
    """

    partition: str | None
    num_keys: int | None
    payload: list[Any]


def operation_name(method: str) -> str:
    """Returns the operation behind a method's name: ``async_put`` and ``put`` are one."""
    return method.removeprefix("async_").strip("_") or method


def of_call(parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Facts:
    """Reads the arguments of a call.

    Args:
        parameters: Names of the positional parameters.
        args, kwargs: The arguments.
    """
    named = [*zip(parameters, args, strict=False), *kwargs.items()]
    named += [("", value) for value in args[len(parameters) :]]
    partition: str | None = None
    num_keys: int | None = None
    payload = []
    for name, value in named:
        if name in _PARTITIONS:
            partition = None if value is None else str(value)
        elif name in _KEYS:
            num_keys = _count(value)
        elif name in _METAS or _is_meta(value):
            meta = of_result(value)
            partition, num_keys = partition or meta.partition, num_keys if num_keys is not None else meta.num_keys
        else:
            payload.append(value)
    return Facts(partition, num_keys, payload)


def of_result(value: Any) -> Facts:
    """Reads what an operation returned: where data is, or the data."""
    if not _is_meta(value):
        return Facts(None, None, [value])
    keys = next((found for name in _META_KEYS if (found := _count(getattr(value, name, None))) is not None), None)
    if keys is None and isinstance(size := getattr(value, "size", None), int):
        keys = size
    return Facts(_partition(value), keys, [])


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any], bound: bool) -> tuple[str, ...]:
    names = tuple(
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    )
    return names[1:] if bound else names


def parameters_of(method: Any) -> tuple[str, ...]:
    """Returns the names of a method's positional parameters; none where they cannot be told."""
    try:
        if inspect.ismethod(method):
            return _parameters(method.__func__, True)
        return _parameters(method, False)
    except (TypeError, ValueError):
        return ()


def parameter_names(parameters: Iterable[Any] | inspect.Signature | None) -> tuple[str, ...]:
    """Returns the names in a table of parameters, such as the handle of a Ray actor has of its methods."""
    found = parameters.parameters.values() if isinstance(parameters, inspect.Signature) else parameters or ()
    return tuple(parameter.name for parameter in found)


def _is_meta(value: Any) -> bool:
    """True for an object that says where samples are, and in which partition."""
    return _partition(value) is not None


def _partition(meta: Any) -> str | None:
    named = getattr(meta, "partition_id", None)
    if isinstance(named, str):
        return named
    several = getattr(meta, "partition_ids", None)  # TransferQueue's: one for each sample
    if isinstance(several, (list, tuple)) and all(isinstance(each, str) for each in several):
        return ",".join(sorted(set(several))) or None
    return None


def _count(keys: Any) -> int | None:
    if keys is None or callable(keys):
        return None
    if isinstance(keys, (str, bytes, int)):
        return 1
    try:
        return len(keys)
    except TypeError:  # it has no length
        return None
