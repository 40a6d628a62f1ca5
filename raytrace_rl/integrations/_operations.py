"""What one operation on a data plane says of itself: its name, partition and keys, read off its arguments and result.

By name, so that any client will do: NeMo-RL's ``DataPlaneClient``, TransferQueue's, a replay buffer of one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt

_PARTITIONS: Final = frozenset({"partition_id", "partition", "partition_name"})
_KEYS: Final = frozenset({"keys", "key", "sample_ids", "uids", "uid", "indexes", "global_indexes", "sample_indices"})
#: Arguments that say where data is, and hold none.
_METAS: Final = frozenset({"meta", "metadata", "batch_meta"})
#: Where such an object has its keys.
_META_KEYS: Final = ("sample_ids", "keys", "global_indexes", "uids")


T = TypeVar("T")


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
    """Reads the arguments of a call, each for itself: one that cannot be looked at costs what it would say.

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
        if value is None and (name in _PARTITIONS or name in _KEYS):
            continue
        if name in _PARTITIONS:
            partition = guarded(str, None, value)
        elif name in _KEYS:
            num_keys = guarded(_count, None, value)
        elif name in _METAS or guarded(_is_meta, False, value):
            meta = guarded(of_result, Facts(None, None, []), value)
            partition, num_keys = partition or meta.partition, num_keys if num_keys is not None else meta.num_keys
        else:
            payload.append(value)
    return Facts(partition, num_keys, payload)


def of_result(value: Any) -> Facts:
    """Reads what an operation returned: where data is, or the data."""
    if not guarded(_is_meta, False, value):
        return Facts(None, None, [value])
    keys = next((n for name in _META_KEYS if (n := guarded(_count, None, _attribute(value, name))) is not None), None)
    if keys is None and isinstance(size := _attribute(value, "size"), int):
        keys = size
    return Facts(_partition(value), keys, [])


def guarded(read: Callable[..., T], otherwise: T, *args: Any) -> T:
    """Reads the user's objects: what fails in them costs attributes, and not the operation."""
    try:
        return read(*args)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.count_drop("attributes")
        _state.warn_once("data-plane-facts", "An operation on a data plane could not be described: %r", error)
        return otherwise


def _read(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    )


# Both hold weakly what they are asked about: a function of one client's own, or a bound method of C code, holds it.
_of_functions: WeakKeyDictionary[Callable[..., Any], tuple[str, ...]] = WeakKeyDictionary()
_of_types: WeakKeyDictionary[type, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def parameters_of(method: Any) -> tuple[str, ...]:
    """Returns the names of a method's positional parameters; none where they cannot be told."""
    try:
        function = method.__func__ if inspect.ismethod(method) else method
        if type(function) is FunctionType:
            names = _of_functions.get(function)
            if names is None:
                names = _of_functions[function] = _read(function)
            return names if function is method else names[1:]
        owner = type(getattr(method, "__self__", None))
        if not inspect.isbuiltin(method) or issubclass(owner, (ModuleType, type)):
            return _read(method)
        known = _of_types.setdefault(owner, {})
        if (names := known.get(method.__name__)) is None:
            names = known[method.__name__] = _read(method)
    except (TypeError, ValueError):
        return ()
    return names


def parameter_names(parameters: Iterable[Any] | inspect.Signature | None) -> tuple[str, ...]:
    """Returns the names in a table of parameters, such as the handle of a Ray actor has of its methods."""
    found = parameters.parameters.values() if isinstance(parameters, inspect.Signature) else parameters or ()
    return tuple(parameter.name for parameter in found)


def _is_meta(value: Any) -> bool:
    """True for an object that says where samples are, and in which partition."""
    return _partition(value) is not None


def _partition(meta: Any) -> str | None:
    named = _attribute(meta, "partition_id")
    if isinstance(named, str):
        return named
    several = _attribute(meta, "partition_ids")  # TransferQueue's: one for each sample
    if isinstance(several, (list, tuple)) and all(isinstance(each, str) for each in several):
        return ",".join(sorted(set(several))) or None
    return None


def _attribute(value: Any, name: str) -> Any:
    """Returns an attribute that is there; None without asking a ``__getattr__``, which may load what it stands for."""
    if inspect.getattr_static(value, name, None) is None:
        return None
    return getattr(value, name, None)


def _count(keys: Any) -> int | None:
    if keys is None or callable(keys):
        return None
    if isinstance(keys, (str, bytes, int)):
        return 1
    try:
        return len(keys)
    except TypeError:  # it has no length
        return None
