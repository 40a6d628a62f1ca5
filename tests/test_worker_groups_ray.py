"""Worker groups on real Ray: what workers find, who is called with what, one trace, and every end of a group."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl import dispatch_with_trace_context, traced
from raytrace_rl.actors import FlushReport, flush_group
from raytrace_rl.context import current_trace_carrier
from raytrace_rl.dispatch import trace_context_kwargs
from raytrace_rl.worker_groups import (
    NamedSharding,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    ResourceInsufficientError,
)
from tests import worker_group_actors as actors
from tests.readback import get, gone, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = pytest.mark.ray

SHARDING = NamedSharding.of(data_parallel=2, tensor_parallel=2)


@pytest.fixture(scope="module")
def bundles(cluster) -> Iterator[RayVirtualCluster]:
    """Four bundles for two groups each, on the machine's one node."""
    virtual = RayVirtualCluster([2, 2], use_gpus=False, max_colocated_worker_groups=2, name="test")
    yield virtual
    virtual.shutdown()


@pytest.fixture(scope="module")
def group(bundles) -> Iterator[RayWorkerGroup]:
    """Four ranks: two data-parallel times two tensor-parallel."""
    made = RayWorkerGroup(
        bundles, RayWorkerBuilder(actors.Rank, 7), name_prefix="policy", sharding_annotations=SHARDING
    )
    yield made
    made.shutdown()


def small(bundles: RayVirtualCluster, what: Any, workers: int = 1, **kwargs: Any) -> RayWorkerGroup:
    """A group of a worker or two beside the other."""
    return RayWorkerGroup(bundles, RayWorkerBuilder(what), workers_per_node=[workers, 0], **kwargs)


def test_every_worker_finds_its_place(group):
    """Catches a rank, rendezvous or group that a worker cannot tell from its environment."""
    found = get(group.run_all_workers_single_data("environment"))
    assert [env["RANK"] for env in found] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1", "2", "3"]  # one node, two placement groups
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["NODE_RANK"]) for env in found} == {("4", "4", "0")}
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found} == {
        (group.master_address, str(group.master_port))
    }
    assert {env["RAYTRACE_RL_WORKER_GROUP"] for env in found} == {"policy"}
    assert [entry["global_rank"] for entry in group.worker_metadata] == [0, 1, 2, 3]
    assert (group.world_size, group.dp_size, group.get_dp_leader_worker_idx(3)) == (4, 4, 3)
    with pytest.raises(IndexError, match="4 data-parallel shards"):
        group.get_dp_leader_worker_idx(4)


def test_single_and_same_data(group):
    """Catches arguments that reach another rank, and axes whose others are called all the same."""
    assert get(group.run_single_worker_single_data("add", 2, 3, y=4)) == 241
    assert get(group.run_all_workers_single_data("add", 1, y=2)) == [19, 119, 219, 319]
    only = group.run_all_workers_single_data("add", x=1, run_rank_0_only_axes=["tensor_parallel"])
    assert get(only) == [17, 217]
    with pytest.raises(ValueError, match="no axis 'tp'"):
        group.run_all_workers_single_data("add", x=1, run_rank_0_only_axes=["tp"])
    with pytest.raises(AttributeError, match="no_such_method"):
        group.run_all_workers_single_data("no_such_method")


def test_the_same_data_is_in_the_object_store_once(group, monkeypatch):
    """Catches a batch that is stored anew for every worker, and references that Ray refuses to store again."""
    import ray

    stored: list[Any] = []
    put = ray.put

    def counting(value: Any) -> Any:
        stored.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", counting)
    replicated = {"in_sharded_axes": ["data_parallel"], "replicate_on_axes": ["tensor_parallel"]}
    future = group.run_all_workers_sharded_data("train", data=[[1], [2]], **replicated)
    assert group.get_all_worker_results(future, timeout=60) == [(0, [1]), (1, [1]), (2, [2]), (3, [2])]
    assert stored == [[1], [2]]
    assert get(group.run_all_workers_single_data("train", data=[5], scale=2))[3] == (3, [10])
    assert get(group.run_all_workers_single_data("train", data=put([6])))[0] == (0, [6])
    assert stored == [[1], [2], [5]]


def test_a_value_for_each_worker(group):
    """Catches values that go to the wrong worker, and lists of the wrong length that Ray would never complain of."""
    assert get(group.run_all_workers_multiple_data("add", [1, 2, 3, 4], common_kwargs={"y": 5})) == [22, 132, 242, 352]
    only = group.run_all_workers_multiple_data("add", x=[1, 2], run_rank_0_only_axes=["tensor_parallel"])
    assert get(only) == [17, 227]
    with pytest.raises(ValueError, match="x has 2 values for the 4 workers"):
        group.run_all_workers_multiple_data("add", x=[1, 2])
    with pytest.raises(ValueError, match="no data"):
        group.run_all_workers_multiple_data("add")


def test_sharded_data_over_named_axes(group):
    """Catches slices on the wrong axis, free axes that are called, and replicated outputs returned twice."""
    data = [[1, 2], [3, 4]]
    both = group.run_all_workers_sharded_data(
        "train", data=data, in_sharded_axes=["data_parallel"], replicate_on_axes=["tensor_parallel"]
    )
    assert group.get_all_worker_results(both, timeout=60) == [(0, [1, 2]), (1, [1, 2]), (2, [3, 4]), (3, [3, 4])]
    one = group.run_all_workers_sharded_data(
        "train",
        data=data,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        output_is_replicated=["tensor_parallel"],
        common_kwargs={"scale": 10},
    )
    assert one.called_workers == [0, 1, 2, 3]
    assert group.get_all_worker_results(one, timeout=60) == [(0, [10, 20]), (2, [30, 40])]
    free = group.run_all_workers_sharded_data("train", data, in_sharded_axes=["data_parallel"])
    assert free.called_workers == [0, 2]
    assert group.get_all_worker_results(free, timeout=60) == [(0, [1, 2]), (2, [3, 4])]
    dummy = group.run_all_workers_sharded_data(
        "train", data=data, in_sharded_axes=["data_parallel"], make_dummy_calls_to_free_axes=True
    )
    assert dummy.called_workers == [0, 1, 2, 3]
    assert get(dummy.futures) == [(0, [1, 2]), (1, None), (2, [3, 4]), (3, None)]
    assert group.get_all_worker_results(dummy, timeout=60) == [(0, [1, 2]), (2, [3, 4])]
    nested = group.run_all_workers_sharded_data(
        "train", data=[[[1], [2]], [[3], [4]]], in_sharded_axes=["data_parallel", "tensor_parallel"]
    )
    assert group.get_all_worker_results(nested, timeout=60) == [(0, [1]), (1, [2]), (2, [3]), (3, [4])]


def test_streams_pass_as_streams(group):
    """Catches a stream read to its end before its consumer has seen the first item, and items out of order."""
    import ray

    call = {"in_sharded_axes": ["data_parallel"], "n": [2, 3]}
    streams = group.get_all_worker_results(group.run_all_workers_sharded_data("stream", **call), True)
    assert all(isinstance(stream, ray.ObjectRefGenerator) for stream in streams)
    assert get(next(streams[1])) == (2, 0)
    assert [get(ref) for ref in streams[0]] == [(0, 0), (0, 1)]
    assert [get(ref) for ref in streams[1]] == [(2, 1), (2, 2)]
    read = group.get_all_worker_results(group.run_all_workers_sharded_data("stream", **call), timeout=60)
    assert read == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    assert isinstance(group.run_single_worker_single_data("stream", 0, n=1), ray.ObjectRefGenerator)


def test_results_that_do_not_come(bundles, tmp_path):
    """Catches a time-out that only the first result, or the first item of a stream, respects."""
    import ray

    made = small(bundles, actors.Rank, sharding_annotations=NamedSharding.of(data_parallel=1))
    get(made.run_all_workers_single_data("pid"))
    made.run_all_workers_single_data("wedge", mark=str(tmp_path / "mark"))
    wait_until((tmp_path / "mark").exists, "the worker to be stuck")
    for method in ("train", "stream"):
        late = made.run_all_workers_sharded_data(method, [[1]], in_sharded_axes=["data_parallel"])
        with pytest.raises(ray.exceptions.GetTimeoutError):
            made.get_all_worker_results(late, timeout=0.5)
    made.shutdown(force=True)


@pytest.mark.parametrize("way", ["proxy", "dispatch", "keyword"])
def test_each_rank_s_span_hangs_from_the_driver_s(group, traced_test, way):
    """Catches a carrier that is sliced like data, lost on some ranks, or that changes the data."""
    axes = {"in_sharded_axes": ["data_parallel"], "replicate_on_axes": ["tensor_parallel"]}
    if way == "proxy":
        future = traced(group).run_all_workers_sharded_data("train", data=[[1], [2, 2]], **axes)
    elif way == "dispatch":
        future = dispatch_with_trace_context(group.run_all_workers_sharded_data, "train", data=[[1], [2, 2]], **axes)
    else:
        future = group.run_all_workers_sharded_data(
            "train", data=[[1], [2, 2]], **axes, common_kwargs=trace_context_kwargs()
        )
    assert group.get_all_worker_results(future, timeout=60) == [(0, [1]), (1, [1]), (2, [2, 2]), (3, [2, 2])]
    spans = sorted(traced_test.named("worker.train", 4), key=lambda span: span.rank)
    assert [(span.rank, span.attributes["rows"]) for span in spans] == [(0, 1), (1, 1), (2, 2), (3, 2)]
    assert {span.parent_span_id for span in spans} == {traced_test.root_id}
    assert {span.worker_group for span in spans} == {"policy"}
    assert {span.resource["nv.dl.topology.size.tp"] for span in spans} == {2}
    assert all((span.queued_ns is None) == (way == "keyword") for span in spans)


def test_the_other_calls_of_a_group_are_traced_too(group, traced_test):
    """Catches a call shape whose plain keywords, or whose object store, lose the carrier."""
    view = traced(group)
    get(view.run_single_worker_single_data("add", 1, x=1))
    get(view.run_all_workers_single_data("add", x=1))
    get(view.run_all_workers_multiple_data("add", x=[1, 2, 3, 4]))
    assert view.get_all_worker_results(
        view.run_all_workers_sharded_data("stream", n=[1, 1], in_sharded_axes=["data_parallel"]), timeout=60
    ) == [(0, 0), (2, 0)]
    assert {span.parent_span_id for span in traced_test.named("worker.add", 9)} == {traced_test.root_id}
    assert {span.parent_span_id for span in traced_test.named("worker.stream", 2)} == {traced_test.root_id}


def test_constructors_hang_from_whoever_makes_the_group(bundles, traced_test):
    """Catches workers whose start-up is a trace of its own."""
    made = small(bundles, actors.Rank, 2, name_prefix="init")
    found = get(made.run_all_workers_single_data("environment"))
    spans = traced_test.named("worker.init", 2)
    assert {span.parent_span_id for span in spans} == {traced_test.root_id}
    assert all(span.queued_ns is not None for span in spans)  # the carrier came with the call
    assert {env["TRACEPARENT"] for env in found} == {current_trace_carrier()["traceparent"]}
    made.shutdown()
    other = small(bundles, "tests.worker_group_actors.Accepting")
    get(other.run_all_workers_single_data("pid"))
    traced_test.assert_dispatched("plain.init")
    other.shutdown()


def test_a_traced_actor_that_a_framework_makes_looks_into_its_environment(traced_test):
    """Catches start-up spans without a parent where the group is not ours and only hands an environment on."""
    import ray

    env = {"RANK": "0", "TRACEPARENT": current_trace_carrier()["traceparent"]}
    actor: Any = ray.remote(num_cpus=0)(actors.Rank).options(runtime_env={"env_vars": env}).remote()
    get(actor.pid.remote())
    span = traced_test.one("worker.init")
    assert span.parent_span_id == traced_test.root_id
    get(traced(actor).add.remote(1))
    assert traced_test.one("worker.add").parent_span_id == traced_test.root_id
    ray.kill(actor)


def test_a_worker_class_may_ask_for_things_of_its_own(bundles):
    """Catches ``configure_worker`` of NeMo-RL's workers being passed over, or beaten by the group."""
    made = RayWorkerGroup(bundles, RayWorkerBuilder(actors.Configured), bundle_indices_list=[(1, [0, 1])])
    assert get(made.run_all_workers_single_data("told")) == [(1, [0, 1]), None]
    assert {env["USERS_OWN"] for env in get(made.run_all_workers_single_data("environment"))} == {"configured"}
    assert made.dp_leader_worker_indices == [0]
    made.shutdown()


def test_a_full_bundle_is_an_error_and_not_a_wait(bundles, group):
    """Catches a worker that waits for ever for room that another group has taken, and room that is never given back."""
    with pytest.raises(ValueError, match="does not lay out the 1 ranks"):
        small(bundles, actors.Rank, sharding_annotations=SHARDING)
    second = small(bundles, actors.Rank)
    with pytest.raises(ResourceInsufficientError, match="do not fit"):
        small(bundles, actors.Rank)
    second.shutdown()
    third = small(bundles, actors.Rank)
    assert get(third.run_all_workers_single_data("add", x=0)) == [0]
    assert third.shutdown()
    assert third.workers == []
    assert third.shutdown()


def test_a_cluster_without_room_says_so():
    """Catches a placement group that is waited for without end."""
    virtual = RayVirtualCluster([1], use_gpus=True, name="none", placement_timeout_s=0.5)
    with pytest.raises(ResourceInsufficientError, match=r"'GPU': 1.* 0 GPUs"):
        virtual.get_placement_groups()


def test_clusters_need_no_names_and_a_name_that_is_taken_is_said_to_be(cluster):
    """Catches a second cluster that Ray refuses, in words of its own, because both are nameless; and half a cluster."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    def impossible(counts: list[int], name: str = "", *, unified: bool = False) -> RayVirtualCluster:
        """One for which there is no room: that it was let in by its name is all that is asked."""
        return RayVirtualCluster(counts, use_gpus=True, name=name, use_unified_pg=unified, placement_timeout_s=0.1)

    others = [placement_group([{"GPU": 1}], name=name) for name in ("-node0", "-unified", "half-node1")]
    try:
        for unified in (False, True):
            with pytest.raises(ResourceInsufficientError):
                impossible([1], unified=unified).get_placement_groups()
        with pytest.raises(ValueError, match="a placement group 'half-node1': give this cluster another name"):
            impossible([1, 1], "half").get_placement_groups()
        table = placement_group_table().values()
        assert {row["state"] for row in table if row["name"] == "half-node0"} == {"REMOVED"}
        names = [row["name"] for row in table if row["name"].startswith("cluster-")]
        assert len(set(names)) == len(names) == 2
    finally:
        for other in others:
            remove_placement_group(other)


def test_a_shutdown_cleans_up_flushes_and_kills(bundles, traced_test, tmp_path):
    """Catches a clean-up that is left out, spans that look truncated afterwards, and names that stay taken."""
    for _ in range(2):  # the second group bears the same names
        made = small(bundles, actors.Rank, 2, name_prefix="ending", env_vars={"USERS_OWN": str(tmp_path)})
        pids = get(made.run_all_workers_single_data("pid"))
        get(traced(made).run_all_workers_single_data("add", x=1))
        handles = list(made.workers)
        assert made.shutdown(cleanup_method="clean_up")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
        for handle in handles:
            wait_until(lambda: gone(handle), "the worker to be gone")  # noqa: B023
        for path in tmp_path.iterdir():
            path.unlink()
        assert closed_cleanly(traced_test.run_dir, pids)
    assert not any(span.truncated for span in traced_test.named("worker.add", 4))


def closed_cleanly(run_dir: Path, pids: list[int]) -> bool:
    """Whether the spools of these processes end as those of processes do that shut telemetry down."""
    from raytrace_rl.monitor import load_run

    states = {process.pid: process.state for process in load_run(run_dir).processes}
    return all(str(states[pid]).endswith("closed") for pid in pids)


def test_one_dead_worker_does_not_keep_the_others_alive(bundles, traced_test, tmp_path, caplog):
    """Catches an error of one worker that escapes before the rest have been cleaned up and killed."""
    made = small(bundles, actors.Rank, 2, env_vars={"USERS_OWN": str(tmp_path)})
    get(made.run_all_workers_single_data("pid"))
    kill_and_wait(made.workers[0])
    left = made.workers[1]
    assert not made.shutdown(cleanup_method="clean_up", timeout=20)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    wait_until(lambda: gone(left), "the other worker to be gone")
    assert [r for r in caplog.records if "of rank 0 failed: it is dead" in r.getMessage()]


def test_a_wedged_worker_ends_with_its_group(bundles, traced_test, tmp_path, caplog):
    """Catches a shutdown that waits past its time for a worker that never answers, or spares it."""
    made = small(bundles, actors.Rank, 2, env_vars={"USERS_OWN": str(tmp_path)})
    pid = get(made.run_single_worker_single_data("pid", 0))
    made.run_single_worker_single_data("wedge", 0, mark=str(tmp_path / "mark"))
    wait_until((tmp_path / "mark").exists, "the worker to be stuck")
    begun = time.monotonic()
    assert not made.shutdown(cleanup_method="clean_up", timeout=2)
    assert time.monotonic() - begun < 10
    assert (tmp_path / "1").exists()
    wait_until(lambda: not alive(pid), "the stuck worker to be gone")
    assert [r for r in caplog.records if "of rank 0 failed: it did not answer in time" in r.getMessage()]


def test_a_clean_up_that_fails_or_is_not_there(bundles, cluster, caplog):
    """Catches a user's error in the clean-up, or a misspelt name, that leaves the workers running."""
    made = small(bundles, actors.Rank, env_vars={"USERS_OWN": "/nowhere"})
    handle = made.workers[0]
    get(handle.pid.remote())
    assert not made.shutdown(cleanup_method="clean_up", timeout=20)
    assert "FileNotFoundError" in caplog.text
    wait_until(lambda: gone(handle), "the worker to be gone")
    made = small(bundles, actors.Rank)
    assert not made.shutdown(cleanup_method="no_such_method", timeout=20)
    assert "no_such_method() of rank 0 failed" in caplog.text


def kill_and_wait(actor: Any) -> None:
    """Kills the actor; returns when its death is known here."""
    import ray

    ray.kill(actor)
    wait_until(lambda: gone(actor), "the actor to be gone")


def alive(pid: int) -> bool:
    """Whether the process runs; as a zombie it may stay until Ray collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_group_s_flush_keeps_its_deadline_and_says_who_did_not_answer(bundles, traced_test, tmp_path):
    """Catches one wedged and one dead worker that keep the flush past its deadline, or that it does not tell apart."""
    made = RayWorkerGroup(bundles, RayWorkerBuilder(actors.Rank), workers_per_node=[2, 1])
    well, wedged, dead = made.workers
    get(made.run_all_workers_single_data("pid"))
    made.run_single_worker_single_data("wedge", 1, mark=str(tmp_path / "mark"))
    wait_until((tmp_path / "mark").exists, "the worker to be stuck")
    kill_and_wait(dead)
    begun = time.monotonic()
    report = flush_group(made, timeout_s=3)
    took = time.monotonic() - begun
    assert report == FlushReport(flushed=(well,), timed_out=(wedged,), dead=(dead,))
    assert 2.5 < took < 3.5
    assert flush_group(traced(made), timeout_s=1).flushed == (well,)
    made.shutdown(force=True)


def test_workers_that_are_no_traced_actors_are_flushed_by_their_process(bundles, traced_test):
    """Catches a framework's workers, whose class is none of ours, that end without their last metrics."""
    made = small(bundles, actors.Plain, 2)
    pids = get(made.run_all_workers_single_data("pid"))
    assert flush_group(made, timeout_s=20).flushed == tuple(made.workers)
    assert closed_cleanly(traced_test.run_dir, pids)
    made.shutdown()
    untraced = small(bundles, actors.Untraced)
    assert flush_group(untraced, timeout_s=20) == FlushReport()
    untraced.shutdown()


def test_a_group_that_cannot_be_started_leaves_nothing(bundles, cluster):
    """Catches workers that go on living, and room that stays taken, after a later worker could not be made."""
    started: list[Any] = []

    class Failing(RayWorkerBuilder):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if started:
                raise LookupError("the second one")
            started.append(super().__call__(*args, **kwargs))
            return started[0]

    with pytest.raises(LookupError, match="the second one"):
        RayWorkerGroup(bundles, Failing(actors.Rank), workers_per_node=[2, 0])
    wait_until(lambda: gone(started[0]), "the first worker to be gone")
    made = small(bundles, actors.Rank, 2)
    assert len(set(get(made.run_all_workers_single_data("pid")))) == 2
    assert os.getpid() not in get(made.run_all_workers_single_data("pid"))
    made.shutdown()
