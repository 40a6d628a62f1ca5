"""A replay buffer behind a Ray handle: the submission is a span here, the operation one there, in one trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytrace_rl import traced
from raytrace_rl.actors import flush_and_kill
from raytrace_rl.integrations.data_plane import traced_data_plane
from tests import data_plane_actors
from tests.readback import get

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = pytest.mark.ray


@pytest.mark.parametrize("view", [lambda handle: handle, traced], ids=["handle", "traced view"])
def test_a_handle_gives_the_same_references_and_two_spans(view, traced_test):
    """Catches a view that waits for the actor, changes what is returned, or loses the trace on the way."""
    import ray

    handle = ray.remote(num_cpus=0.01)(data_plane_actors.Buffer).remote()
    buffer = traced_data_plane(view(handle))
    batch = {"tokens": np.zeros(1000, dtype=np.int64)}
    ref = buffer.push_with_wait_signal.remote(batch, weight_version=3)
    assert isinstance(ref, ray.ObjectRef)
    assert get(ref) == "success"
    assert get(buffer.size.options(name="looked").remote()) == 1
    submitted = traced_test.one("rl.data_plane.push_with_wait_signal")
    assert submitted.kind == "PRODUCER"
    assert submitted.attributes["rl.data_plane.status"] == "submitted"
    assert submitted.attributes["rl.data_plane.num_bytes"] == 8000
    stored = traced_test.one("rl.data_plane.put")
    assert stored.parent_span_id == submitted.span_id
    assert stored.queued_ns is not None
    assert stored.attributes["rl.data_plane.num_bytes"] == 8000
    assert stored.attributes["rl.data_plane.status"] == "ok"
    assert traced_test.one("rl.data_plane.size")
    with pytest.raises(TypeError):
        buffer.push_with_wait_signal.remote(batch, nothing_of_the_kind=1)
    assert [span.status for span in traced_test.named("rl.data_plane.push_with_wait_signal", 2)] == ["UNSET", "ERROR"]
    flush_and_kill([handle])


def test_a_view_travels_as_the_plain_handle(traced_test):
    """Catches a view that cannot be handed to another actor."""
    import ray

    handle = ray.remote(num_cpus=0.01)(data_plane_actors.Buffer).remote()

    @ray.remote(num_cpus=0.01)
    def use(given: Any) -> int:
        found: int = ray.get(given.size.remote(), timeout=60)
        return found

    assert get(use.remote(traced_data_plane(handle))) == 0
    flush_and_kill([handle])
