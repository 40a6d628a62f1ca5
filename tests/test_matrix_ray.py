"""The matrix on real Ray: every kind of method, by every way in, with every ending.

Each cell holds parentage (the method's span under its caller's), number (one span a call, none for a call that did
not run), and cleanliness (the caller's context as before, nothing current in the actor's next call). The last tests
count the cells and read every log of the cluster.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
from opentelemetry import trace

from raytrace_rl import dispatch_with_trace_context, managed_span, traced
from raytrace_rl.worker_groups import NamedSharding, RayVirtualCluster, RayWorkerBuilder, RayWorkerGroup
from tests import matrix_actors
from tests.readback import TracedTest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.ray_fixtures"]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Ray derives its actor class from a generic class and the user's; pydantic warns of that, with us or without.
    pytest.mark.filterwarnings("ignore:Classes should inherit from `BaseModel` before generic classes"),
]

KINDS: Final = ("sync", "coroutine", "generator", "async_generator", "static")
ACTOR_ROUTES: Final = ("direct", "options", "passed", "get_actor", "proxy")
GROUP_ROUTES: Final = ("single", "multiple", "sharded")
ROUTES: Final = ACTOR_ROUTES + GROUP_ROUTES
ENDINGS: Final = ("abandoned", "cancelled", "raising", "finished")
FLAVOURS: Final = tuple(matrix_actors.CLASSES)
CELLS: Final = tuple(itertools.product(KINDS, ROUTES, ENDINGS))
#: Ray does not interrupt a sync method that runs: ``ray.cancel`` of its task takes it out of the actor's queue. There,
#: the call is cancelled in the queue. Ray tells nobody whether that came in time, and the caller sees a cancelled task
#: in either case: the method has run, with its span, or has not, without one.
QUEUED: Final = frozenset(cell for cell in CELLS if cell[0] in ("sync", "static") and cell[2] == "cancelled")
IDS: Final = ["-".join(cell) for cell in CELLS]
_ran: Final[set[tuple[str, str, str]]] = set()


def is_async(kind: str) -> bool:
    """True for the kinds that live on an async actor."""
    return kind in ("coroutine", "async_generator")


def flavour_of(kind: str, route: str, ending: str) -> str:
    """Which constructor the actor of a cell has: each kind meets each of them."""
    turn = KINDS.index(kind) + ACTOR_ROUTES.index(route) + ENDINGS.index(ending)
    return FLAVOURS[turn % len(FLAVOURS)]


@pytest.fixture(scope="module")
def actors(cluster: Any) -> SimpleNamespace:
    """An actor of each flavour, sync and async, named after it; and one that calls others."""
    import ray

    made: dict[str, Any] = {}
    for flavour, pair in matrix_actors.CLASSES.items():
        for kind, cls in zip(("sync", "async"), pair, strict=True):
            name = f"{flavour}-{kind}"
            made[name] = ray.remote(cls).options(num_cpus=0.1, name=name).remote(x=1)
    return SimpleNamespace(caller=ray.remote(matrix_actors.Caller).options(num_cpus=0.1).remote(), **made)


@pytest.fixture(scope="module")
def groups(cluster: Any) -> Iterator[SimpleNamespace]:
    """A worker group of two over one data-parallel axis, of sync and of async workers."""
    virtual = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2, name="matrix")
    made = {
        kind: RayWorkerGroup(
            virtual,
            RayWorkerBuilder(cls, x=1),
            name_prefix=f"matrix-{kind}",
            sharding_annotations=NamedSharding.of(data_parallel=2),
        )
        for kind, cls in zip(("sync", "async"), matrix_actors.CLASSES["plain"], strict=True)
    }
    yield SimpleNamespace(**made)
    for group in made.values():
        group.shutdown(timeout=10)
    virtual.shutdown()


def hold(workers: list[Any], names: list[str], marks: str) -> list[Any]:
    """Keeps each worker busy, so that what is called next waits in its queue."""
    held = [worker.hold.remote(name, marks) for worker, name in zip(workers, names, strict=True)]
    for name in names:
        matrix_actors.wait_for(marks, f"{name}.held")
    return held


def dispatched(route: str, actor: Any, group: Any, kind: str, names: list[str], ending: str, marks: str) -> list[Any]:
    """Makes the call of a cell, one result a worker."""
    if route == "direct":
        return [dispatch_with_trace_context(getattr(actor, kind), names[0], ending, marks)]
    if route == "options":
        return [dispatch_with_trace_context(getattr(actor, kind).options(name="renamed"), names[0], ending, marks)]
    if route == "proxy":
        return [getattr(traced(actor), kind).remote(names[0], ending, marks)]
    if route == "get_actor":
        import ray

        return [dispatch_with_trace_context(getattr(ray.get_actor(actor), kind), names[0], ending, marks)]
    if route == "single":
        call = group.run_single_worker_single_data
        return [dispatch_with_trace_context(call, kind, 0, names[0], ending, marks)]
    if route == "multiple":
        common = {"ending": ending, "marks": marks}
        return list(dispatch_with_trace_context(group.run_all_workers_multiple_data, kind, names, common_kwargs=common))
    future = dispatch_with_trace_context(
        group.run_all_workers_sharded_data,
        kind,
        names,
        in_sharded_axes=["data_parallel"],
        common_kwargs={"ending": ending, "marks": marks},
    )
    return list(future.futures)


SEEN: Final = {"abandoned": "abandoned", "cancelled": "cancelled", "raising": "raised", "finished": "finished"}


@pytest.mark.parametrize(("kind", "route", "ending"), CELLS, ids=IDS)
def test_cell(
    kind: str,
    route: str,
    ending: str,
    actors: SimpleNamespace,
    request: pytest.FixtureRequest,
    traced_test: TracedTest,
    tmp_path: Path,
) -> None:
    """Catches a span under the wrong parent, twice or missing, and a context left behind on either side."""
    import ray

    side = "async" if is_async(kind) else "sync"
    group = getattr(request.getfixturevalue("groups"), side) if route in GROUP_ROUTES else None
    cell = f"{kind}-{route}-{ending}"
    if group is None:
        name = f"{flavour_of(kind, route, ending)}-{side}"
        workers, names = [getattr(actors, name)], [cell]
    else:
        name = ""
        workers = list(group.workers)[: 1 if route == "single" else 2]
        names = [f"{cell}.{rank}" for rank in range(len(workers))]
    marks = str(tmp_path)
    held = hold(workers, names, marks) if (kind, route, ending) in QUEUED else []
    before = trace.get_current_span()
    if route == "passed":
        seen = ray.get(
            dispatch_with_trace_context(actors.caller.forward, workers[0], kind, names[0], ending, marks), timeout=60
        )
        parent = traced_test.one(f"{cell}.caller").span_id
    else:
        with managed_span("reward", f"{cell}.caller") as span:
            given = name if route == "get_actor" else workers[0]
            results = dispatched(route, given, group, kind, names, ending, marks)
            assert trace.get_current_span() is span
        assert len(results) == len(names)
        parent = traced_test.one(f"{cell}.caller").span_id
        seen = matrix_actors.conclude(kind, names, ending, marks, results)
    assert trace.get_current_span() is before
    assert seen == SEEN[ending]
    ray.get(held, timeout=60)
    # The actor's next call, of no carrier, is behind the cell's: by then a sync one has ended, or never will begin.
    assert ray.get([worker.current.remote() for worker in workers], timeout=60) == [False] * len(workers)
    queued = (kind, route, ending) in QUEUED
    cancelled_stream = ending == "cancelled" and kind.endswith("generator")  # in a step (an error), or between two
    failed = ending == "raising" or (ending == "cancelled" and kind == "coroutine")
    for each in names:
        if queued and not [span for span in traced_test.all() if span.name == each]:
            continue
        found = traced_test.one(each)
        assert found.parent_span_id == parent
        assert cancelled_stream or (found.status == "ERROR") == failed
        assert not found.truncated
        assert len([span for span in traced_test.all() if span.name == each]) == 1  # in no other trace either
    _ran.add((kind, route, ending))


def test_every_cell_ran(request: pytest.FixtureRequest) -> None:
    """Catches a cell that fell out of the matrix."""
    assert len(CELLS) == 5 * 8 * 4
    assert len(QUEUED) == 2 * 8
    met = {(kind, flavour_of(kind, route, ending)) for kind, route, ending in CELLS if route in ACTOR_ROUTES}
    assert met == set(itertools.product(KINDS, FLAVOURS))
    if all(f"test_cell[{each}]" in {item.name for item in request.session.items} for each in IDS):
        assert set(CELLS) == _ran


def test_nothing_failed_to_detach(cluster: Path) -> None:
    """Catches OpenTelemetry's "Failed to detach context" in the log of any process of the cluster."""
    import ray

    logs = Path(ray._private.worker._global_node.get_session_dir_path(), "logs")
    assert list(logs.glob("worker-*"))
    found = [path.name for path in logs.rglob("*") if path.is_file() and b"Failed to detach" in path.read_bytes()]
    assert not found
