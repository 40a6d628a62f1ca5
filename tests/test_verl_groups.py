"""verl's shape of a worker group without verl: what the stand-in of a call shares with the group, and what it does not.

test_verl has the same against the real package.
"""

from __future__ import annotations

import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raytrace_rl import _verl_groups, dispatch_with_trace_context, managed_span, setup, traced
from raytrace_rl.integrations import verl
from tests.shaped_workers import Worker, score, train


@pytest.fixture(autouse=True)
def _tracing():
    """Telemetry on, and nothing written."""
    setup.init_telemetry_driver({"enabled": True, "exporter": "none", "span_groups": "all"})


def bound(group: Any, method_name: str, execute_fn: Any) -> Any:
    """A worker's method as verl binds it: an object whose class closes over the group."""

    class Functor:
        def __call__(this, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in verl
            group.seen = (*group.seen, method_name)  # dispatch functions keep things on their group
            return execute_fn(method_name, *args, **kwargs)

    return type(method_name, (Functor,), {})()


class Group:
    """A group of verl's shape; a call returns what would have been sent to each worker."""

    def __init__(self, *workers: Any) -> None:
        self._workers = list(workers)
        self.seen: tuple[str, ...] = ()
        self.train = bound(self, "train", self.execute_all)
        self.score = bound(self, "score", self.execute_all)

    @property
    def workers(self) -> list[Any]:
        return self._workers

    def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return method_name, args, kwargs

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        length = len(self._workers)
        if kwargs and all(isinstance(value, list) and len(value) == length for value in kwargs.values()):
            each = [{name: value[i] for name, value in kwargs.items()} for i in range(length)]
        else:
            each = [kwargs] * length
        return [
            self._execute_remote_single_worker(worker, method_name, *args, **own)
            for worker, own in zip(self._workers, each, strict=True)
        ]

    def execute_in_threads(self, method_name: str) -> Any:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda w: self._execute_remote_single_worker(w, method_name), self._workers))

    def describe(self) -> str:
        return "no call of the workers"


def group_of_two(cls: Any = Group) -> Any:
    """A group of two workers."""
    return cls(Worker(train, score), Worker(train, score))


@pytest.mark.parametrize("way", ["functor", "execute", "view"])
def test_the_carrier_joins_behind_the_dealing_out_of_data(way):
    """Catches a carrier among the keywords that are dealt out: none of them would be, then."""
    group = group_of_two()
    with managed_span("generation", "x") as span:
        if way == "functor":
            sent = dispatch_with_trace_context(group.train, 1, k=[2, 3])
        elif way == "execute":
            sent = dispatch_with_trace_context(group.execute_all, "train", 1, k=[2, 3])
        else:
            sent = traced(group).train(1, k=[2, 3])
    for (method, args, kwargs), k in zip(sent, (2, 3), strict=True):
        assert (method, args, kwargs.pop("k")) == ("train", (1,), k)
        assert kwargs.pop("_otel_carrier")["traceparent"].split("-")[2] == span.span_id.hex()
        assert kwargs == {}


def test_an_older_group_binds_plain_functions():
    """Catches verl before its functors: what it bound was a function, by the same names."""
    group = group_of_two()

    def make(self: Any, method_name: str, execute_fn: Any) -> Any:
        def func(*args: Any, k: int = 7) -> Any:
            return self.seen, execute_fn(method_name, *args, k=k)

        return func

    with managed_span("generation", "x"):
        seen, sent = dispatch_with_trace_context(make(group, "train", group.execute_all), 1)
    assert seen == ()
    assert [(kwargs["k"], "_otel_carrier" in kwargs) for _, _, kwargs in sent] == [(7, True), (7, True)]


def test_what_does_not_name_the_carrier_goes_as_it_is(caplog):
    """Catches a carrier in a user's ``**kwargs``, and a stand-in where none is needed."""
    group = group_of_two()
    with managed_span("generation", "x"):
        assert traced(group).score(a=1) == [("score", (), {"a": 1})] * 2
        assert traced(group).execute_all("unknown") == [("unknown", (), {})] * 2
        assert traced(group).describe() == "no call of the workers"
        assert traced(group).train(1, _otel_carrier={"mine": "1"})[0][2] == {"_otel_carrier": {"mine": "1"}}
    assert not caplog.records


def test_without_anything_to_carry_nothing_is_added():
    """Catches an empty carrier that is sent all the same."""
    assert traced(group_of_two()).train(1) == [("train", (1,), {})] * 2


def test_what_a_call_leaves_on_the_group_is_on_the_group():
    """Catches a dispatch function that remembers something on an object which is gone with the call."""
    group = group_of_two()
    with managed_span("generation", "x"):
        traced(group).train(1)
        dispatch_with_trace_context(group.train, 2)
    assert group.seen == ("train", "train")
    assert "_raytrace_carrier" not in vars(group)
    assert type(group) is Group


def test_the_end_of_a_call_is_not_the_end_of_the_group():
    """Catches a group's finalizer run for the stand-in: it may take the workers down."""
    ended = []

    class Owner(Group):
        def __del__(self) -> None:
            ended.append(1)

    group = group_of_two(Owner)
    with managed_span("generation", "x"):
        assert all("_otel_carrier" in kwargs for _, _, kwargs in traced(group).train(1))
    gc.collect()
    assert ended == []
    del group
    gc.collect()
    assert ended == [1]


def test_a_group_that_overrides_the_one_place_itself():
    """Catches a user's override that is passed over, or a second class served by the first one's stand-in."""

    class Logging(Group):
        def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
            return "logged", super()._execute_remote_single_worker(worker, method_name, *args, **kwargs)

    with managed_span("generation", "x"):
        for _ in range(2):
            assert [word for word, _ in traced(group_of_two(Logging)).train(1)] == ["logged", "logged"]
            assert all("_otel_carrier" in kwargs for _, _, kwargs in traced(group_of_two()).train(1))


def test_a_group_that_calls_from_threads_of_its_own_keeps_the_parent():
    """Catches workers called without a carrier because the context stayed in the dispatching thread."""
    group = group_of_two()
    with managed_span("generation", "x") as span:
        sent = traced(group).execute_in_threads("train")
    assert {kwargs["_otel_carrier"]["traceparent"].split("-")[2] for _, _, kwargs in sent} == {span.span_id.hex()}


def test_threads_that_dispatch_on_one_group_keep_apart():
    """Catches one thread's carrier in another one's call."""
    group = group_of_two()
    together = threading.Barrier(4)

    def dispatch(_: int) -> bool:
        with managed_span("generation", "x") as span:
            together.wait(timeout=30)
            return all(
                kwargs["_otel_carrier"]["traceparent"].split("-")[2] == span.span_id.hex()
                for _ in range(200)
                for _, _, kwargs in traced(group).train(1)
            )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(dispatch, range(4)))


def test_a_group_no_stand_in_can_be_made_for_is_called_as_it_is(caplog):
    """Catches a group without a dictionary, whose call would fail because of us."""

    class Slotted:
        __slots__ = ("workers",)

        def __init__(self) -> None:
            self.workers = [Worker(train)]

        def _execute_remote_single_worker(self, worker: Any, method_name: str, **kwargs: Any) -> Any:
            return method_name, kwargs

        def execute_all(self, method_name: str, **kwargs: Any) -> Any:
            return [self._execute_remote_single_worker(worker, method_name, **kwargs) for worker in self.workers]

    with managed_span("generation", "x"):
        assert dispatch_with_trace_context(Slotted().execute_all, "train", a=1) == [("train", {"a": 1})]
    assert [r for r in caplog.records if "takes no trace context" in r.getMessage()]


def test_a_view_of_a_group_is_the_group():
    """Catches a view that is no group to verl's own checks, and roles of a fused group that are not traced."""
    group = group_of_two()
    group.actor = group_of_two()
    view = traced(group)
    assert isinstance(view, Group)
    assert view == group
    with managed_span("generation", "x"):
        assert all("_otel_carrier" in kwargs for _, _, kwargs in view.actor.train(1))
    assert not _verl_groups.is_group(object())


def test_the_environment_of_verl_s_workers(monkeypatch):
    """Catches verl's workers without a group's name, and a failure of ours that ends the making of a group."""
    env = verl.worker_env("actor", {"MINE": "1"})
    assert (env["RAYTRACE_RL_WORKER_GROUP"], env["MINE"]) == ("actor", "1")
    # verl refuses variables that it sets itself.
    assert not {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "WG_PREFIX", "WG_BACKEND"} & env.keys()
    assert pickle.loads(pickle.dumps(env)) == env

    def broken(*_: object) -> None:
        raise LookupError("ours")

    monkeypatch.setattr("raytrace_rl._workers.env.group_environment", broken)
    assert verl.worker_env("actor", {"MINE": "1"}) == {"MINE": "1"}
