"""Actors as people hold them: concurrency groups, pools, Ray Client drivers, classes pickled before telemetry.

What a constructor may look like is in test_actors_ray, methods and handles in test_dispatch_ray and test_matrix_ray.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl import (
    TracedActor,
    accepts_trace_context,
    dispatch_with_trace_context,
    managed_span,
    setup,
    traced,
    umbrella_span,
)
from raytrace_rl.monitor import load_run
from tests.readback import TracedTest, get, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from raytrace_rl.monitor.model import SpanRow

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = pytest.mark.ray


def ended(run_dir: Path, name: str) -> list[SpanRow]:
    """The ended spans of the run with that name, of whatever trace."""
    return [span for span in load_run(run_dir).spans if span.name == name and span.end_ns is not None]


def test_threads_of_a_concurrency_group_keep_to_their_own_parents(traced_test: TracedTest) -> None:
    """Catches Ray's method options lost under our decorator, in either order, and a context on the wrong thread."""
    import ray

    class Grouped(TracedActor):
        def __init__(self) -> None:
            self.both = threading.Barrier(2)

        @ray.method(concurrency_group="io")
        @accepts_trace_context
        def below(self, name: str) -> str:
            return self.meet(name)

        @accepts_trace_context
        @ray.method(concurrency_group="io")
        def above(self, name: str) -> str:
            return self.meet(name)

        @accepts_trace_context
        def elsewhere(self, name: str) -> str:
            return self.meet(name)

        def meet(self, name: str) -> str:
            with managed_span("generation", name):
                self.both.wait(30)  # comes through only if two calls are inside at once
                return threading.current_thread().name

    options: dict[str, Any] = {"concurrency_groups": {"io": 2}, "num_cpus": 0.1}
    actor = ray.remote(**options)(Grouped).remote()
    refs = []
    calls = {
        "below": actor.below,
        "above": actor.above,
        "optional.1": actor.elsewhere.options(concurrency_group="io"),
        "optional.2": actor.elsewhere.options(concurrency_group="io"),
    }
    for name, call in calls.items():
        with managed_span("reward", f"{name}.caller"):
            refs.append(dispatch_with_trace_context(call, name))
    get(refs)
    for name in calls:
        assert traced_test.one(name).parent_span_id == traced_test.one(f"{name}.caller").span_id


def test_an_actor_pool_of_handles_and_of_views(traced_test: TracedTest) -> None:
    """Catches a view that a pool cannot hold, and calls of a pool that lose their parent."""
    import ray
    from ray.util import ActorPool

    class Member(TracedActor):
        @accepts_trace_context
        def work(self, name: str) -> str:
            with managed_span("reward", name):
                return name

    members = [ray.remote(num_cpus=0.1)(Member).remote() for _ in range(2)]
    plain = [f"plain.{n}" for n in range(5)]
    assert list(ActorPool(members).map(lambda a, v: dispatch_with_trace_context(a.work, v), plain)) == plain
    views = [f"view.{n}" for n in range(5)]
    pool = ActorPool([traced(member) for member in members])
    assert sorted(pool.map_unordered(lambda a, v: a.work.remote(v), views)) == views
    for name in plain + views:
        assert traced_test.one(name).parent_span_id == traced_test.root_id


def test_a_class_pickled_while_telemetry_was_off(cluster: Path) -> None:
    """Catches a decision made where the class was defined or exported: it belongs to each call, where it runs."""
    import ray

    assert setup.get_telemetry_handle() is None

    class Early(TracedActor):
        @accepts_trace_context
        def work(self, name: str) -> str:
            with managed_span("reward", name):
                return name

    @accepts_trace_context
    def function(name: str) -> str:
        with managed_span("reward", name):
            return name

    actor = ray.remote(num_cpus=0.1)(Early).remote()
    remote = ray.remote(num_cpus=0.1)(function)
    assert get(dispatch_with_trace_context(actor.work, "early.off")) == "early.off"
    assert get(dispatch_with_trace_context(remote, "function.off")) == "function.off"
    for turn in range(2):  # off again in between, and on again
        settings = {"enabled": True, "run_dir": str(cluster), "run_id": "test", "span_groups": "all"}
        setup.init_telemetry_driver(settings)
        try:
            with umbrella_span("step", f"early.root.{turn}") as root:
                traced_test = TracedTest(cluster, root)
                get(dispatch_with_trace_context(actor.work, f"early.{turn}"))
                get(dispatch_with_trace_context(remote, f"function.{turn}"))
        finally:
            setup.shutdown_telemetry()
        assert get(dispatch_with_trace_context(actor.work, f"between.{turn}")) == f"between.{turn}"
        for name in (f"early.{turn}", f"function.{turn}"):
            assert traced_test.one(name).parent_span_id == traced_test.root_id
        (between,) = wait_until(lambda: ended(cluster, f"between.{turn}"), "the span of an untraced call")  # noqa: B023
        assert between.parent_span_id is None


CLIENT = """
import sys
import ray
from raytrace_rl import (TracedActor, accepts_trace_context, dispatch_with_trace_context, managed_span, setup, traced,
                         umbrella_span)

address, run_dir = sys.argv[1:]
setup.init_telemetry_driver({"enabled": True, "run_dir": run_dir, "run_id": "test", "span_groups": "all"})
ray.init(address)
assert ray.util.client.ray.is_connected()

@ray.remote(num_cpus=0.1)
class Member(TracedActor):
    @accepts_trace_context
    def work(self, name):
        with managed_span("reward", name):
            return name

    def swallows(self, **kwargs):
        return sorted(kwargs)

    @accepts_trace_context
    def stream(self, name):
        with managed_span("reward", name):
            yield name

@ray.remote(num_cpus=0.1)
@accepts_trace_context
def function(name):
    with managed_span("reward", name):
        return name

with umbrella_span("step", "client.root") as root:
    actor = Member.options(name="client-member").remote()
    found = [
        ray.get(dispatch_with_trace_context(actor.work, "client.direct"), timeout=60),
        ray.get(dispatch_with_trace_context(actor.work.options(name="n"), "client.options"), timeout=60),
        ray.get(dispatch_with_trace_context(ray.get_actor("client-member").work, "client.looked_up"), timeout=60),
        ray.get(traced(actor).work.remote("client.proxy"), timeout=60),
        ray.get(dispatch_with_trace_context(function, "client.function"), timeout=60),
        ray.get(dispatch_with_trace_context(actor.swallows, a=1), timeout=60),
    ]
    print(root.trace_id.hex(), root.span_id.hex(), found)
setup.shutdown_telemetry()
ray.shutdown()
"""


def test_a_driver_of_ray_client(cluster: Path, tmp_path: Path) -> None:
    """Catches handles of Ray Client, which keep their signatures elsewhere, called without the carrier."""
    from ray.util.client.server.server import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = serve("127.0.0.1", port)
    try:
        script = tmp_path / "client.py"
        script.write_text(textwrap.dedent(CLIENT), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script), f"ray://127.0.0.1:{port}", str(cluster)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "RAYTRACE_RL_ENABLED": "1"},
        )
    finally:
        server.stop(0)
    assert done.returncode == 0, done.stderr
    trace_id, span_id, found = done.stdout.strip().splitlines()[-1].split(" ", 2)
    names = [f"client.{how}" for how in ("direct", "options", "looked_up", "proxy", "function")]
    assert found == str([*names, ["a"]])
    root = type("Root", (), {"trace_id": bytes.fromhex(trace_id), "span_id": bytes.fromhex(span_id)})
    traced_test = TracedTest(cluster, root)
    for name in names:
        assert traced_test.one(name).parent_span_id == span_id
