"""Named axes over the ranks of a worker group: which rank stands where on the data, tensor or pipeline axis.

Plain nested lists, so that a driver without NumPy can describe a group; a NumPy array is taken as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final

DATA_PARALLEL: Final = "data_parallel"
CONTEXT_PARALLEL: Final = "context_parallel"
TENSOR_PARALLEL: Final = "tensor_parallel"
PIPELINE_PARALLEL: Final = "pipeline_parallel"
EXPERT_PARALLEL: Final = "expert_parallel"


class NamedSharding:
    """Ranks laid out on named axes.

    ``NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])`` has ranks 0 and 1 in the first
    data-parallel group. `of` makes the usual row-major layout from sizes alone.

    Args:
        layout: Rank ids, nested as deep as there are axes, outermost axis first; a NumPy array will do.
        names: The axes' names, outermost first.

    Raises:
        ValueError: The layout is ragged or of another depth, a name or rank occurs twice, or an id is no whole number.
    """

    def __init__(self, layout: Any, names: Sequence[str]) -> None:
        self._names = tuple(names)
        if len(set(self._names)) != len(self._names):
            raise ValueError(f"axis names occur twice: {list(self._names)}")
        nested = layout.tolist() if hasattr(layout, "tolist") else layout
        self._sizes = tuple(_sizes(nested))
        if len(self._sizes) != len(self._names):
            raise ValueError(f"a layout of {len(self._sizes)} dimensions has no axes {list(self._names)}")
        # By coordinates, in the order of the layout.
        self._ranks: dict[tuple[int, ...], int] = dict(_flatten(nested, self._sizes))
        self._coords = {rank: coords for coords, rank in self._ranks.items()}
        if len(self._coords) != len(self._ranks):
            raise ValueError(f"ranks occur twice in {nested}")

    @classmethod
    def of(cls, **sizes: int) -> NamedSharding:
        """Returns ranks 0, 1, 2, … in row-major order: ``NamedSharding.of(data_parallel=2, tensor_parallel=4)``.

        Args:
            **sizes: Size of each axis, outermost first.
        """
        ranks = iter(range(prod(sizes.values())))
        return cls(_nest(ranks, list(sizes.values())), list(sizes))

    @property
    def names(self) -> list[str]:
        """The axes, outermost first."""
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return dict(zip(self._names, self._sizes, strict=True))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._names)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    def layout(self) -> Any:
        """The rank ids as nested lists."""
        return _nest(iter(self._ranks.values()), list(self._sizes))

    @property
    def ranks(self) -> list[int]:
        """All rank ids, ascending."""
        return sorted(self._coords)

    def get_axis_index(self, name: str) -> int:
        """Returns where the axis stands among `names`; ValueError if there is none of that name."""
        self.check_axes([name])
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Returns the size of an axis; ValueError if there is none of that name."""
        return self._sizes[self.get_axis_index(name)]

    def contains_worker_id(self, worker_id: int) -> bool:
        """True if the rank is in the layout."""
        return worker_id in self._coords

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Returns a rank's place on each axis; ValueError if it is not in the layout."""
        if worker_id not in self._coords:
            raise ValueError(f"rank {worker_id} is not in the layout {self.layout}")
        return dict(zip(self._names, self._coords[worker_id], strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Returns the ranks at these places, ascending; an axis that is not given matches all of its places."""
        self.check_axes(coords)
        wanted = {self._names.index(name): index for name, index in coords.items()}
        return sorted(rank for at, rank in self._ranks.items() if all(at[axis] == i for axis, i in wanted.items()))

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """Returns the layout over the axes that are not given; with all of them given, the one rank there.

        Raises:
            ValueError: There is no axis of that name.
            IndexError: The axis is shorter.
        """
        self.check_axes(coords)
        for name, index in coords.items():
            if not 0 <= index < self.get_axis_size(name):
                raise IndexError(f"{name} has {self.get_axis_size(name)} places, none is {index}")
        left = {name: size for name, size in self.shape.items() if name not in coords}
        fixed = {self._names.index(name): index for name, index in coords.items()}
        ranks = [rank for at, rank in self._ranks.items() if all(at[axis] == i for axis, i in fixed.items())]
        if not left:
            return ranks[0]
        return NamedSharding(_nest(iter(ranks), list(left.values())), list(left))

    def check_axes(self, names: Iterable[str]) -> None:
        """Raises ValueError if one of ``names`` is no axis of this layout, or stands there twice."""
        if isinstance(names, (str, bytes)):
            raise ValueError(f"axes are a list of names: [{names!r}], not {names!r}")
        names = list(names)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"axes stand there twice: {twice}")
        for name in names:
            if name not in self._names:
                raise ValueError(f"there is no axis {name!r}, only {self.names}")

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Iterable[str]) -> bool:
        """True if ``coords`` is 0 on each of ``axes``; an axis that it lacks counts as 0."""
        return all(coords.get(axis, 0) == 0 for axis in axes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and self._ranks == other._ranks

    def __hash__(self) -> int:
        return hash((self._names, tuple(self._ranks.items())))

    def __repr__(self) -> str:
        return f"NamedSharding({self.layout}, {self.names})"


def _sizes(nested: Any) -> Iterator[int]:
    """Yields the length of each level, along the first element of each."""
    while isinstance(nested, Sequence) and not isinstance(nested, str):
        yield len(nested)
        if not nested:
            return
        nested = nested[0]


def _flatten(nested: Any, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    for coords in product(*map(range, sizes)):
        value = nested
        for size, index in zip(sizes, coords, strict=True):
            if not isinstance(value, Sequence) or len(value) != size:
                raise ValueError(f"the layout is ragged: {nested}")
            value = value[index]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise ValueError(f"rank {value!r} is no whole number, or the layout is ragged: {nested}")
        yield coords, int(value)


def _nest(values: Iterator[int], sizes: list[int]) -> Any:
    if not sizes:
        return next(values)
    return [_nest(values, sizes[1:]) for _ in range(sizes[0])]
