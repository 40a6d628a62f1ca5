"""Which worker gets which part of the data of a sharded call, and whose output counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

from raytrace_rl._workers.sharding import NamedSharding

#: A text up to this size costs less beside the call than in the object store. Bytes.
_SMALL: Final = 4096


class ShardedCalls:
    """One sharded call over a group's axes.

    Args:
        sharding: The axes.
        sharded: Axes along which the data is split, outermost first.
        replicated: Axes along which every worker gets the same.
        output_replicated: Axes along which the outputs are equal.

    Raises:
        ValueError: There is no axis of that name, it stands there twice, or it is both sharded and replicated.
    """

    def __init__(
        self,
        sharding: NamedSharding,
        sharded: Sequence[str],
        replicated: Sequence[str],
        output_replicated: Sequence[str],
    ) -> None:
        for axes in (sharded, replicated, output_replicated):
            sharding.check_axes(axes)
        self._sharded, self._replicated = list(sharded), list(replicated)
        self._output_replicated = list(output_replicated)
        both = set(self._sharded) & set(self._replicated)
        if both:
            raise ValueError(f"axes cannot be both sharded and replicated: {sorted(both)}")
        self._free = [name for name in sharding.names if name not in self._sharded and name not in self._replicated]
        self._sizes = [sharding.get_axis_size(name) for name in self._sharded]
        self._copies = prod(sharding.get_axis_size(name) for name in self._replicated)

    def prepared(self, name: str, data: Any) -> Any:
        """Returns ``data`` with each slice that several workers get in the object store, once.

        Args:
            name: What to call it in an error.
            data: Nested as deep as there are sharded axes.

        Raises:
            ValueError: It is not as long as an axis. A slice too many would vanish without a word.
        """
        return self._prepared(name, data, list(zip(self._sharded, self._sizes, strict=True)))

    def _prepared(self, name: str, data: Any, axes: Sequence[tuple[str, int]]) -> Any:
        if not axes:
            return shared(data) if self._copies > 1 else data
        axis, size = axes[0]
        slices = dealt(name, data, size, each="slices", places=f"places of {axis}")
        return [self._prepared(name, each, axes[1:]) for each in slices]

    def receives(self, coords: Mapping[str, int]) -> bool:
        """True if the worker there gets data: it is the first along every free axis."""
        return NamedSharding.is_axis_zero(coords, self._free)

    def returns(self, coords: Mapping[str, int]) -> bool:
        """True if the output of the worker there, which gets data, counts."""
        return NamedSharding.is_axis_zero(coords, self._output_replicated)

    def slice(self, prepared: Any, coords: Mapping[str, int]) -> Any:
        """Returns the part of `prepared` data for the worker there."""
        for axis in self._sharded:
            prepared = prepared[coords[axis]]
        return prepared


def dealt(name: str, data: Any, size: int, *, each: str, places: str) -> list[Any]:
    """Returns the ``size`` parts of ``data``.

    Args:
        name: What to call it in an error.
        data: A list, an array, or anything else with a length that is indexed from 0.
        size: How many there must be.
        each, places: What they are, and who gets one, for the error.

    Raises:
        ValueError: There are others than so many, or nothing can be dealt out: a text is no list of its letters, and
            a mapping none of its keys.
    """
    kind = type(data)
    wanted = f"{name} is to be a list of {each} for the {size} {places}"
    if isinstance(data, (str, bytes, bytearray, memoryview, Mapping)) or not hasattr(kind, "__getitem__"):
        raise ValueError(f"{wanted}, not {kind.__name__}")
    try:
        found = len(data)
    except TypeError as error:  # an array without dimensions, an object without a length
        raise ValueError(f"{wanted}; {kind.__name__} has no length") from error
    if found != size:
        raise ValueError(f"{name} has {found} {each} for the {size} {places}")
    try:
        return [data[at] for at in range(size)]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{wanted}; {kind.__name__} is not indexed from 0") from error


def shared(value: Any) -> Any:
    """Returns ``value`` as a reference into the object store, so that many workers get it for one copy; small stays."""
    import ray

    if value is None or isinstance(value, (bool, int, float, ray.ObjectRef, ray.ObjectRefGenerator)):
        return value
    if isinstance(value, (str, bytes)) and len(value) <= _SMALL:
        return value
    return ray.put(value)
