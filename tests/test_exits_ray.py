"""Each way in which a Ray actor can end, against the promise: what was finished is read, what was open is there once.

The count is kept by another channel: a file that the actor writes to after each span has ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from raytrace_rl.monitor import load_run
from tests.conftest import start_cluster
from tests.exit_actors import SPANS, AsyncActor, SyncActor, ThreadedActor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from raytrace_rl.monitor import Run

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "sync": (SyncActor, {}),
    "threaded": (ThreadedActor, {"max_concurrency": 4}),
    "async": (AsyncActor, {}),
}
EXITS = (
    "handle dropped",
    "exit_actor",
    "sys.exit",
    "__ray_terminate__",
    "SIGTERM",
    "ray.kill",
    "os._exit",
    "SIGKILL",
)


def telemetry_env(run_dir: Path) -> dict[str, Any]:
    """A runtime_env that switches telemetry on in workers, without a driver."""
    return {
        "env_vars": {
            "RAYTRACE_RL_ENABLED": "1",
            "RAYTRACE_RL_RUN_DIR": str(run_dir),
            "RAYTRACE_RL_SPAN_GROUPS": "per_step",
            "RAYTRACE_RL_HEARTBEAT_S": "0.1",
        }
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cluster for the module, with telemetry on in its workers alone."""
    import ray

    directory = tmp_path_factory.mktemp("run")
    start_cluster(runtime_env=telemetry_env(directory))
    yield directory
    ray.shutdown()


def create(kind: str, channel: Path) -> Any:
    """Makes an actor that notes its spans in ``channel``."""
    import ray

    cls, options = KINDS[kind]
    return ray.remote(cls).options(num_cpus=0.1, **options).remote(str(channel))


def end_actor(actor: Any, how: str, pid: int) -> None:
    """Ends the actor in the way named."""
    import ray

    if how == "ray.kill":
        ray.kill(actor)
    elif how in {"SIGKILL", "SIGTERM"}:
        os.kill(pid, getattr(signal, how))
    elif how == "__ray_terminate__":
        actor.__ray_terminate__.remote()
    elif how != "handle dropped":  # that is done by the caller, who holds the last one
        with contextlib.suppress(Exception):
            ray.get(actor.leave.remote(how), timeout=10)
        # Ray 2.60 (with or without us): sys.exit in a coroutine ends the actor's event loop and not its process,
        # which answers nothing from then on and outlives its last handle. What is left to end it is a kill.
        if how == "sys.exit" and not gone(pid):
            ray.kill(actor)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Waits for the thing itself, and fails with its name if it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Whether the whole process has ended: of a killed one the first thread may be a zombie before the others end."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return not tasks.exists()
    return all(state in "ZX" for state in states)


def spans_of(run: Run, pid: int) -> list[Any]:
    """The spans that process ``pid`` left."""
    return [span for span in run.spans if span.pid == pid]


@pytest.mark.parametrize("how", EXITS)
@pytest.mark.parametrize("kind", KINDS)
def test_50_spans_before_the_exit_are_50_spans_after_it(kind, how, run_dir, tmp_path):
    """Catches a span lost with its process, a span read twice, and an open span that vanishes or is doubled."""
    import ray

    channel = tmp_path / "channel"
    actor = create(kind, channel)
    pid = ray.get(actor.work.remote(), timeout=60)
    noted = channel.read_text().split()
    assert len(noted) == SPANS
    end_actor(actor, how, pid)
    if how == "handle dropped":
        del actor
    # Otherwise the handle is kept until the end: Ray 2.60 (with or without us) leaves an async actor hanging in
    # threading._shutdown if its last handle is dropped while it ends by SIGTERM.
    wait_for(lambda: gone(pid), f"process {pid} to end by {how}")

    spans = spans_of(load_run(run_dir), pid)

    finished = [span.name for span in spans if not span.truncated]
    assert sorted(finished) == sorted(noted)
    left = [span for span in spans if span.truncated]
    assert [span.name for span in left] == ["left-open"]
    assert left[0].end_ns is not None
    assert left[0].end_ns >= left[0].start_ns


@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_moment_loses_no_finished_span(kind, how, run_dir, tmp_path):
    """Catches a window in which a finished span is not yet in the kernel's hands, or is torn or doubled."""
    import ray

    moments = random.Random(f"{kind} {how}")
    for round_ in range(4):
        channel = tmp_path / f"channel-{round_}"
        actor = create(kind, channel)
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
        actor.run.remote()
        wait_for(lambda: channel.exists() and channel.stat().st_size > 0, "the first span")  # noqa: B023
        time.sleep(moments.uniform(0, 0.4))  # the random moment itself
        end_actor(actor, how, pid)
        del actor
        wait_for(lambda: gone(pid), f"process {pid} to end by {how}")  # noqa: B023

        noted = channel.read_text().split("\n")[:-1]
        run = load_run(run_dir)
        finished = [span.name for span in spans_of(run, pid) if not span.truncated]
        assert len(finished) == len(set(finished))
        assert set(noted) <= set(finished)
        # Finished, and killed before it was noted: at most one in each thread or task.
        assert len(finished) - len(noted) <= 4
        open_then = [span for span in spans_of(run, pid) if span.truncated]
        assert len(open_then) <= 4
        assert not {span.name for span in open_then} & set(finished)


def test_ray_shutdown_with_the_actors_alive_loses_nothing(tmp_path):
    """Catches the commonest end of all: the driver leaves, and no actor's exit handler ever runs."""
    import ray

    ray.shutdown()  # the module's cluster, if a test before this one started it
    run = tmp_path / "run"
    start_cluster(runtime_env=telemetry_env(run))
    try:
        actors = {kind: create(kind, tmp_path / kind) for kind in KINDS}
        pids = {kind: ray.get(actor.work.remote(), timeout=60) for kind, actor in actors.items()}
    finally:
        ray.shutdown()
    for kind, pid in pids.items():
        wait_for(lambda: gone(pid), f"the {kind} actor to end")  # noqa: B023
    read = load_run(run)
    for kind, pid in pids.items():
        spans = spans_of(read, pid)
        noted = (tmp_path / kind).read_text().split()
        assert sorted(span.name for span in spans if not span.truncated) == sorted(noted), kind
        assert [span.name for span in spans if span.truncated] == ["left-open"], kind
