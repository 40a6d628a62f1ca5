"""Named axes over ranks: coordinates, subsets, and layouts that cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from raytrace_rl._workers.sharding import NamedSharding

AXES = ["pipeline_parallel", "data_parallel", "tensor_parallel"]


def test_coordinates_and_ranks_of_a_layout():
    """Catches an axis taken for another, and a NumPy layout read otherwise than nested lists."""
    sharding = NamedSharding(np.arange(12).reshape(2, 3, 2), AXES)
    assert sharding == NamedSharding(np.arange(12).reshape(2, 3, 2).tolist(), AXES)
    assert hash(sharding) == hash(NamedSharding.of(pipeline_parallel=2, data_parallel=3, tensor_parallel=2))
    assert sharding.shape == {"pipeline_parallel": 2, "data_parallel": 3, "tensor_parallel": 2}
    assert (sharding.names, sharding.ndim, sharding.size) == (AXES, 3, 12)
    assert sharding.layout == np.arange(12).reshape(2, 3, 2).tolist()
    assert sharding.get_worker_coords(9) == {"pipeline_parallel": 1, "data_parallel": 1, "tensor_parallel": 1}
    assert sharding.get_ranks_by_coord(data_parallel=1) == [2, 3, 8, 9]
    assert sharding.get_ranks_by_coord(data_parallel=7) == []
    assert sharding.get_ranks(pipeline_parallel=1, tensor_parallel=0) == NamedSharding([6, 8, 10], ["data_parallel"])
    assert sharding.get_ranks(pipeline_parallel=0, data_parallel=2, tensor_parallel=1) == 5
    assert (sharding.get_axis_index("tensor_parallel"), sharding.get_axis_size("data_parallel")) == (2, 3)
    assert sharding.contains_worker_id(11)
    assert not sharding.contains_worker_id(12)


def test_ranks_may_stand_in_any_order():
    """Catches coordinates computed from the rank instead of looked up: Megatron's and DTensor's orders differ."""
    sharding = NamedSharding([[0.0, 2.0], [1.0, 3.0]], ["tensor_parallel", "data_parallel"])
    assert sharding.get_worker_coords(2) == {"tensor_parallel": 0, "data_parallel": 1}
    assert sharding.layout == [[0, 2], [1, 3]]
    assert sharding.ranks == [0, 1, 2, 3]


def test_what_counts_as_the_first_along_some_axes():
    """Catches an axis that a layout lacks being no place at all."""
    assert NamedSharding.is_axis_zero({"data_parallel": 3, "tensor_parallel": 0}, ["tensor_parallel", "other"])
    assert not NamedSharding.is_axis_zero({"data_parallel": 3}, ["data_parallel"])


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ([[0, 1], [2]], ["a", "b"]),
        ([[0, 1], 2], ["a", "b"]),
        ([0, 1], ["a", "b"]),
        ([[0, 1], [2, 3]], ["a"]),
        ([[0, 1], [1, 2]], ["a", "b"]),
        ([[0, 1], [2, 3]], ["a", "a"]),
        ([0.5, 1], ["a"]),
        (["0", "1"], ["a"]),
        ([True, False], ["a"]),
    ],
)
def test_layouts_that_cannot_be(layout, names):
    """Catches a layout that is accepted and then sends two ranks the same slice, or one none."""
    with pytest.raises(ValueError, match=r"layout|rank|axis"):
        NamedSharding(layout, names)


def test_axes_that_are_not_there():
    """Catches a misspelt axis that is taken for a free one."""
    sharding = NamedSharding.of(data_parallel=2)
    for ask in (sharding.get_ranks_by_coord, sharding.get_ranks):
        with pytest.raises(ValueError, match="no axis 'dp'"):
            ask(dp=0)
    with pytest.raises(ValueError, match="no axis 'dp'"):
        sharding.get_axis_size("dp")
    with pytest.raises(IndexError, match="2 places"):
        sharding.get_ranks(data_parallel=2)
    with pytest.raises(ValueError, match="rank 5"):
        sharding.get_worker_coords(5)
