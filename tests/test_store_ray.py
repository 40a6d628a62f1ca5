"""Conversion by Ray tasks on real clusters: done elsewhere, the same tables, and no failure of Ray's is one of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

import pyarrow.parquet as pq

from benchmarks import made_spool
from raytrace_rl.monitor import converting, ray_conversion, store
from tests.readback import wait_until
from tests.store_tables import tables

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.ray_fixtures"]

SPANS = 60_000
TASK = "ray::raytrace_rl.convert"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run, and the tables that this process alone makes of it."""
    run_dir = tmp_path_factory.mktemp("made") / "run"
    made_spool.make(run_dir, SPANS)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(converting, "_cluster_is_up", lambda: False)
        store.Store(run_dir).close()
    return run_dir, tables(run_dir / "cache")


@pytest.fixture
def run(made: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, of which nothing is cached, as one that is large enough for tasks."""
    run_dir, _ = made
    for path in (run_dir / "cache").iterdir():
        path.unlink()
    monkeypatch.setattr(converting, "ALONE_BYTES", 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return run_dir


def read(path: Path) -> store.Store:
    """The store, which has let go of everything."""
    opened = store.Store(path)
    opened.close()
    return opened


def writers(run_dir: Path) -> set[int]:
    """The processes that wrote the cache."""
    found = (run_dir / "cache").glob("*.processes.parquet")
    return {int(pq.read_schema(path).metadata[b"pid"]) for path in found}


def command(pid: int | str) -> str:
    """The command line of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextmanager
def at_the_first_task(act: Any) -> Iterator[list[int]]:
    """Does something to the process of the first conversion task that is seen; yields whom it was done to."""
    over = threading.Event()
    done: list[int] = []

    def watch() -> None:
        while not over.is_set() and not done:
            for name in [path.name for path in Path("/proc").iterdir()]:
                if name.isdecimal() and command(name).startswith(TASK):
                    act(int(name))
                    done.append(int(name))
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def kill(pid: int) -> None:
    """Kills a process as the OOM killer does."""
    os.kill(pid, signal.SIGKILL)


def test_tasks_convert_elsewhere_while_training_has_all_cpus(two_nodes, made, run, caplog):
    """Catches conversion that stays in this process, waits for CPUs that it will not get, or makes other tables."""
    import ray

    @ray.remote(num_cpus=4)
    class Training:
        def pid(self) -> int:
            return os.getpid()

    training = [Training.remote() for _ in range(2)]
    ray.get([actor.pid.remote() for actor in training], timeout=120)
    opened = read(run)
    assert opened.read == opened.read_by_ray == made_spool.RANKS + 1
    assert all(command(pid).startswith("ray::") for pid in writers(run))
    assert os.getpid() not in writers(run)
    assert tables(run / "cache") == made[1]
    assert caplog.records == []
    assert {path.suffix for path in (run / "cache").iterdir()} == {".parquet"}
    for actor in training:
        ray.kill(actor)


def test_a_worker_that_is_killed_midway_costs_nothing(two_nodes, made, run, caplog):
    """Catches a query that fails, or lacks spans, because a task's worker died."""
    with at_the_first_task(kill) as killed:
        opened = read(run)
    assert len(killed) == 1
    assert opened.read == made_spool.RANKS + 1
    assert opened.read_by_ray < opened.read
    assert tables(run / "cache") == made[1]
    assert ["this machine does" in record.getMessage() for record in caplog.records] == [True]


def test_a_directory_that_workers_do_not_see(two_nodes, made, run, monkeypatch, caplog):
    """Catches tasks that read another directory of the same name, or write where nobody looks."""
    monkeypatch.chdir(run.parent)
    opened = read(Path("/proc/self/cwd/run"))  # of this process and its children, but not of Ray's workers
    assert (opened.read, opened.read_by_ray) == (made_spool.RANKS + 1, 0)
    assert tables(run / "cache") == made[1]
    assert caplog.records == []


def test_a_source_that_workers_see_otherwise(two_nodes, made, run, monkeypatch):
    """Catches a task that takes a file of the same name for the one that is meant, since the cache is the same."""
    monkeypatch.setattr(ray_conversion.sight, "seen", lambda _: [("elsewhere", 1, 2, 3)])
    assert read(run).read_by_ray == 0
    assert tables(run / "cache") == made[1]


def test_tasks_that_are_late_are_not_waited_for(two_nodes, made, run, monkeypatch, caplog):
    """Catches a query that stands still because a node never starts a worker."""
    monkeypatch.setattr(ray_conversion, "LIMIT_S", -1e9)
    opened = read(run)
    assert opened.read == made_spool.RANKS + 1
    assert tables(run / "cache") == made[1]
    assert ["in time" in record.getMessage() for record in caplog.records] == [True]


ASK = """
import sys
from raytrace_rl.monitor import converting, store
if __name__ == "__main__":
    converting.ALONE_BYTES = 0
    opened = store.Store(sys.argv[1])
    count = opened.connection.execute("SELECT count(*) FROM spans").fetchone()[0]
    opened.close()
    ray = sys.modules.get("ray")
    print(count, opened.read, opened.read_by_ray, ray is not None and ray.is_initialized())
"""


def ask(run_dir: Path, address: str) -> subprocess.Popen[str]:
    """A process that is not connected, and is told of a cluster."""
    script = run_dir.parent / "ask.py"
    script.write_text(ASK)
    return subprocess.Popen(
        [sys.executable, str(script), str(run_dir)],
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_is_told_of_a_cluster_connects_to_it_for_the_time(two_nodes, made, run):
    """Catches RAY_ADDRESS ignored, Ray's own words in a query's output, or a connection that stays."""
    import ray

    address = ray.get_runtime_context().gcs_address
    asking = ask(run, address)
    out, err = asking.communicate(timeout=120)
    sources = made_spool.RANKS + 1
    assert (out, err) == (f"{len_of(made)} {sources} {sources} False\n", "")
    assert asking.pid not in writers(run)
    assert tables(run / "cache") == made[1]
    wait_until(lambda: [job["IsDead"] for job in jobs()].count(False) == 1, "the child's job to end")


def jobs() -> list[dict[str, Any]]:
    """The drivers that the cluster knows of."""
    from ray._private import state

    found: list[dict[str, Any]] = state.jobs()
    return found


def len_of(made: tuple[Path, dict[str, Any]]) -> int:
    """How many spans the run has."""
    return sum(len(table) for name, table in made[1].items() if ".spans." in name)


def test_a_cluster_that_is_not_there(made, run):
    """Catches a query that fails, or waits, for a cluster that is long over."""
    start = time.monotonic()
    out, err = ask(run, "127.0.0.1:1").communicate(timeout=120)
    assert time.monotonic() - start < ray_conversion.CONNECT_S
    assert out == f"{len_of(made)} {made_spool.RANKS + 1} 0 False\n"
    assert len(err.splitlines()) == 1
    assert "this machine does" in err
    assert tables(run / "cache") == made[1]


def test_a_cluster_that_dies_midway(made, run):
    """Catches a driver that Ray ends with its cluster, and the query with it; or one that waits for it to come back."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    try:
        with at_the_first_task(lambda _: cluster.head_node.kill_all_processes(check_alive=False)) as killed:
            out, err = ask(run, cluster.address).communicate(timeout=200)
    finally:
        cluster.shutdown()
    assert len(killed) == 1
    count, sources, by_ray, connected = out.split()
    assert (int(count), int(sources), connected) == (len_of(made), made_spool.RANKS + 1, "False")
    assert int(by_ray) < int(sources)
    assert len(err.splitlines()) == 1
    assert tables(run / "cache") == made[1]


def test_nothing_starts_a_cluster(made, run):
    """Catches a query that starts Ray on a machine that has no cluster."""
    out, err = ask(run, "local").communicate(timeout=120)
    assert (out, err) == (f"{len_of(made)} {made_spool.RANKS + 1} 0 False\n", "")
