"""Which worker gets which part of the data of a sharded call, and whose output counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        ValueError: There is no axis of that name, or one is both sharded and replicated.
    """

    def __init__(
        self,
        sharding: NamedSharding,
        sharded: Iterable[str],
        replicated: Iterable[str],
        output_replicated: Iterable[str],
    ) -> None:
        self._sharded, self._replicated = list(sharded), list(replicated)
        self._output_replicated = list(output_replicated)
        sharding.check_axes([*self._sharded, *self._replicated, *self._output_replicated])
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
        if isinstance(data, (str, bytes, Mapping)) or not hasattr(data, "__len__"):
            raise ValueError(f"{name} is to be a list of {size} slices along {axis}, not {type(data).__name__}")
        if len(data) != size:
            raise ValueError(f"{name} has {len(data)} slices for the {size} places of {axis}")
        return [self._prepared(name, data[at], axes[1:]) for at in range(size)]

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


def shared(value: Any) -> Any:
    """Returns ``value`` as a reference into the object store, so that many workers get it for one copy; small stays."""
    import ray

    if value is None or isinstance(value, (bool, int, float, ray.ObjectRef, ray.ObjectRefGenerator)):
        return value
    if isinstance(value, (str, bytes)) and len(value) <= _SMALL:
        return value
    return ray.put(value)
