"""verl's own worker group, by real Ray: one trace in every dispatch mode, and its data as without us.

Runs where verl is installed: ``make test-verl`` makes an environment for it.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl import dispatch_with_trace_context, managed_span, traced
from raytrace_rl.actors import FlushReport, flush_group
from raytrace_rl.integrations import verl as integration
from tests.readback import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.readback import TracedTest

pytest.importorskip("verl", reason="make test-verl installs it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's and its requirements' own, at import
    import ray
    from verl.protocol import DataProto, DataProtoFuture
    from verl.single_controller.base.decorator import DISPATCH_MODE_FN_REGISTRY
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls, create_colocated_worker_cls_fused

    from tests import verl_workers
    from tests.verl_workers import Trainer, batch_of, method_name

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),
]

MODES = list(DISPATCH_MODE_FN_REGISTRY)


def pool() -> RayResourcePool:
    """Two bundles of one CPU."""
    return RayResourcePool([2], use_gpu=False, max_colocate_count=1)


def made(cls: Any, **kwargs: Any) -> Any:
    """A group of two workers of an actor class."""
    return RayWorkerGroup(
        resource_pool=pool(), ray_cls_with_init=RayClassWithInitArgs(cls=cls), device_name="cpu", **kwargs
    )


@pytest.fixture(scope="module")
def group(cluster: Any) -> Iterator[Any]:
    """Two trainers."""
    wg = made(ray.remote(Trainer), worker_env=integration.worker_env("actor"))
    yield wg
    end(wg)


def end(wg: Any) -> None:
    """Kills the workers and gives their room back."""
    for worker in wg.workers:
        ray.kill(worker)
    for placement_group in wg.resource_pool.pgs:
        ray.util.remove_placement_group(placement_group)


def arguments(mode: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Data as the mode wants it, made anew: verl pads batches in place."""
    if mode == "ONE_TO_ALL":
        return (3, [1]), {"k": 2}
    if mode == "ALL_TO_ALL":
        return ([1, 2],), {"k": [3, 4]}
    if mode == "DP_COMPUTE":
        return ([1, 2],), {"k": ["a", "b"]}
    if mode == "DP_COMPUTE_PROTO":
        return (batch_of(1, 2, 3, padded=True),), {"other": batch_of(10, 20, 30, padded=True)}
    if mode == "DP_COMPUTE_PROTO_WITH_FUNC":
        return (verl_workers.apply, batch_of(1, 2, 3, 4)), {"other": batch_of(10, 20, 30, 40)}
    if mode == "DP_COMPUTE_METRIC":
        return (batch_of(1, 2, 3, 4),), {}
    if mode == "DIRECT_ROLLOUT_METHOD":
        return (1,), {}
    raise AssertionError(f"verl has a dispatch mode that is not tested: {mode}")


def plain(result: Any) -> Any:
    """A result, waited for if it is one to come, in a form that can be compared."""
    if isinstance(result, ray.ObjectRef):
        return plain(ray.get(result, timeout=60))
    if isinstance(result, DataProtoFuture):
        return plain(result.get())
    if isinstance(result, DataProto):
        values = {} if result.batch is None else {key: tensor.tolist() for key, tensor in result.batch.items()}
        return "DataProto", values, dict(result.non_tensor_batch), result.meta_info
    if isinstance(result, (list, tuple)):
        return type(result)(map(plain, result))
    return result


def assert_under_root(traced_test: TracedTest, name: str, ranks: list[int]) -> None:
    """One span on each of these ranks, right under the root of the test."""
    spans = sorted(traced_test.named(name, len(ranks)), key=lambda span: span.rank or 0)
    assert [span.rank for span in spans] == ranks
    assert {span.parent_span_id for span in spans} == {traced_test.root_id}
    assert all(span.queued_ns is not None for span in spans)


@pytest.mark.parametrize("above", [True, False], ids=["above", "below"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "future"])
@pytest.mark.parametrize("way", ["proxy", "dispatch"])
@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_a_mode_s_data_is_as_without_us_and_its_spans_are_one_trace(
    group: Any, traced_test: TracedTest, mode: Any, way: str, blocking: bool, above: bool
) -> None:
    """Catches a carrier that a mode slices, pads, length-checks or returns; and ranks whose spans are traces apart."""
    name = method_name(mode, blocking, above)

    def call() -> Any:
        args, kwargs = arguments(mode.name)
        if way == "proxy":
            return plain(getattr(traced(group), name)(*args, **kwargs))
        return plain(dispatch_with_trace_context(getattr(group, name), *args, **kwargs))

    args, kwargs = arguments(mode.name)
    if mode.name == "DIRECT_ROLLOUT_METHOD":  # verl forbids it on groups; it is for the workers' own handles
        with pytest.raises(NotImplementedError):
            getattr(group, name)(*args, **kwargs)
        with pytest.raises(NotImplementedError):
            call()
        refs = [dispatch_with_trace_context(getattr(worker, name), *args, **kwargs) for worker in group.workers]
        assert plain(refs) == [(0, (1,), []), (1, (1,), [])]
    else:
        untraced = plain(getattr(group, name)(*args, **kwargs))
        assert call() == untraced
        assert "_otel_carrier" not in str(untraced)
    assert_under_root(traced_test, name, [0, 1])


def test_results_are_what_they_ought_to_be(group: Any, traced_test: TracedTest) -> None:
    """Catches a comparison of two calls that are wrong alike."""
    view = traced(group)
    assert view.one_to_all(3, k=2) == [(0, (3,), [("k", 2)]), (1, (3,), [("k", 2)])]
    assert view.dp_compute([1, 2], k=["a", "b"]) == [(0, (1,), [("k", "a")]), (1, (2,), [("k", "b")])]
    assert plain(view.dp_compute_proto(batch_of(1, 2, 3, padded=True)))[1] == {"x": [2, 4, 6]}
    assert isinstance(view.dp_compute_proto_future(batch_of(1, 2)), DataProtoFuture)
    assert all(isinstance(ref, ray.ObjectRef) for ref in view.one_to_all_future(1))


def test_the_lazily_asked_mesh(group: Any, traced_test: TracedTest) -> None:
    """Catches a stand-in on which what verl remembers of a group is forgotten: it would ask for the mesh each time."""
    assert plain(traced(group).on_mesh(batch_of(1, 2)))[1] == {"x": [2, 4]}
    assert group._dispatch_info == {verl_workers.MESH: [0, 1]}
    assert plain(group.on_mesh(batch_of(1, 2)))[1] == {"x": [2, 4]}
    assert_under_root(traced_test, "verl.on_mesh", [0, 1])


def test_rank_zero_and_coroutines(group: Any, traced_test: TracedTest) -> None:
    """Catches a call that goes to more workers than verl's, and a coroutine method left without its carrier."""
    assert plain(traced(group).first_only(5)) == plain(group.first_only(5))
    assert traced(group).coroutine(5) == [5, 6]
    assert_under_root(traced_test, "verl.first_only", [0])
    assert_under_root(traced_test, "verl.coroutine", [0, 1])


def test_execute_and_its_kin(group: Any, traced_test: TracedTest) -> None:
    """Catches lists that are no longer dealt out because a carrier among the keywords is none."""
    view = traced(group)
    assert plain(view.execute_all("called", [1, 2], k=[3, 4])) == [(0, 1, 3), (1, 2, 4)]
    assert plain(view.execute_all_async("called", 7)) == [(0, 7, 0), (1, 7, 0)]
    assert view.execute_all_sync("called", x=[1, 2]) == [(0, 1, 0), (1, 2, 0)]
    assert view.execute_rank_zero_sync("called", 7) == (0, 7, 0)
    assert plain(view.execute_rank_zero("called", 7)) == (0, 7, 0)
    assert plain(dispatch_with_trace_context(group.execute_rank_zero_async, "called", 7)) == (0, 7, 0)
    spans = traced_test.named("verl.called", 9)
    assert {span.parent_span_id for span in spans} == {traced_test.root_id}


def test_a_method_that_does_not_name_the_carrier_gets_none(group: Any, traced_test: TracedTest) -> None:
    """Catches a carrier among a user's ``**kwargs``."""
    assert traced(group).swallows(a=1) == [["a"], ["a"]]
    assert traced(group).execute_all_sync("swallows", a=1) == [["a"], ["a"]]


def test_two_threads_dispatch_on_one_group(group: Any, traced_test: TracedTest) -> None:
    """Catches a carrier in the group that the next thread's call takes for its own."""
    parents: dict[str, str] = {}
    together = threading.Barrier(2)

    def dispatch(tag: str) -> None:
        with managed_span("policy_update", f"thread.{tag}") as span:
            parents[tag] = span.span_id.hex()
            together.wait()
            for _ in range(10):
                assert traced(group).tagged(tag) == [tag, tag]

    threads = [threading.Thread(target=dispatch, args=(tag,)) for tag in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    spans = wait_until(
        lambda: (found := [s for s in traced_test.all() if s.name.startswith("verl.tagged.")])[39:] and found,
        "40 spans of both threads",
    )
    assert {(s.name.rpartition(".")[2], s.parent_span_id) for s in spans} == set(parents.items())


def test_the_group_is_left_as_it_was(group: Any, traced_test: TracedTest) -> None:
    """Catches something of ours left on verl's object or class, which users copy and pickle."""
    before = dict(vars(group))
    in_class = dict(vars(type(group)))
    traced(group).one_to_all(1)
    assert vars(group) == before
    assert dict(vars(type(group))) == in_class


def test_the_workers_know_their_group_and_hang_from_who_made_them(cluster: Any, traced_test: TracedTest) -> None:
    """Catches start-up spans that are a trace apart, and workers named by verl's random prefix."""
    wg = made(ray.remote(Trainer), worker_env=integration.worker_env("critic", {"MINE": "1"}))
    assert wg.execute_all_sync("called") == [(0, 0, 0), (1, 0, 0)]
    spans = traced_test.named("verl.init", 2)
    assert {(span.worker_group, span.parent_span_id) for span in spans} == {("critic", traced_test.root_id)}
    assert flush_group(wg, timeout_s=20) == FlushReport(flushed=tuple(wg.workers))
    end(wg)


@pytest.mark.parametrize("make", [create_colocated_worker_cls, create_colocated_worker_cls_fused])
def test_roles_that_share_a_process(cluster: Any, traced_test: TracedTest, make: Any) -> None:
    """Catches roles whose actor takes any keyword and names none: their calls would go without a carrier."""
    roles = {
        "actor": RayClassWithInitArgs(cls=ray.remote(verl_workers.Actor)),
        "critic": RayClassWithInitArgs(cls=ray.remote(verl_workers.Critic)),
    }
    wg = RayWorkerGroup(
        resource_pool=pool(),
        ray_cls_with_init=make(class_dict=roles),
        device_name="cpu",
        worker_env=integration.worker_env("shared"),
    )
    spawned = wg.spawn(prefix_set=roles.keys())
    for role, name in (("actor", "verl.Actor.update"), ("critic", "verl.Critic.update")):
        untraced = plain(spawned[role].update(batch_of(1, 2)))
        assert plain(traced(spawned[role]).update(batch_of(1, 2))) == untraced
        assert untraced[1] == {"x": [2, 4]}
        assert traced(spawned[role]).untraced(a=1) == [["a"], ["a"]]
        assert_under_root(traced_test, name, [0, 1])
    wg.fuse(roles.keys())
    assert plain(traced(wg).actor.update(batch_of(1, 2))) == plain(wg.actor.update(batch_of(1, 2)))
    traced_test.named("verl.Actor.update", 4)
    assert flush_group(wg, timeout_s=20) == FlushReport(flushed=tuple(wg.workers))
    end(wg)


def test_nothing_is_added_with_telemetry_off(group: Any) -> None:
    """Catches a call that differs from verl's own in a driver that traces nothing."""
    assert traced(group).one_to_all(1) == [(0, (1,), []), (1, (1,), [])]
