"""Forks: ids never repeat, a child has files of its own, a span open across the fork belongs to the parent alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl import _ids
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.model import Run
from tests.running import child, read_records

pytest_plugins = ["tests.telemetry_fixtures"]

PRELUDE = """
import json, multiprocessing, os, random, sys, threading, time
from raytrace_rl import _ids, _process, _state, setup
from raytrace_rl.instrumentation import iteration_scope, managed_span, umbrella_span
from raytrace_rl.monitor import load_run

run_dir = sys.argv[1]


def start(**settings):
    return setup.init_telemetry_driver(
        {"enabled": True, "span_groups": "all", "run_dir": run_dir, "heartbeat_s": 0.05, **settings}
    )


def forked(function, *arguments):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            function(*arguments)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def wait(*pids):
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def some(name, n=5):
    for k in range(n):
        with managed_span("generation", name, n=k):
            pass

"""


def forking(run_dir: Path, code: str) -> Run:
    """Runs ``code`` behind the prelude as a program, and reads what it left."""
    child(PRELUDE + textwrap.dedent(code), run_dir)
    run = load_run(run_dir)
    assert run.damage == []
    assert run.duplicates == 0
    return run


def names(run: Run, **columns: Any) -> dict[str, list[str]]:
    """Names of spans by the role of their process."""
    found: dict[str, list[str]] = {}
    for row in run.spans:
        if all(getattr(row, key) == value for key, value in columns.items()):
            found.setdefault(str(row.process.role), []).append(row.name)
    return {role: sorted(listed) for role, listed in found.items()}


def test_ids_of_a_child_are_not_its_parents():
    """A forked child goes on in its parent's sequence: the same ids, in the same order."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write_end, b"".join(_ids.new_span_id() for _ in range(100)))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    data = os.read(read_end, 1 << 16)
    os.close(read_end)
    theirs = {data[n : n + 8] for n in range(0, len(data), 8)}
    ours = {_ids.new_span_id() for _ in range(100)}
    assert len(theirs) == len(ours) == 100
    assert not theirs & ours


def test_child_writes_files_of_its_own(tmp_path: Path):
    """Parent and child write into one mapped file; or the child's spans go nowhere."""
    run = forking(
        tmp_path / "run",
        """
        start()
        with umbrella_span("job", "job"), iteration_scope(7):
            some("before")
            wait(forked(some, "child"))
            some("after")
        """,
    )
    assert names(run) == {
        "driver": sorted(["job", "job.started", *["before"] * 5, *["after"] * 5]),
        "worker": ["child"] * 5,
    }
    parent, forked = sorted(run.processes, key=lambda process: process.start_ns)
    assert parent.pid != forked.pid
    assert forked.resource["process.pid"] == forked.pid
    assert forked.resource["process.parent_pid"] == parent.pid
    assert forked.resource["service.instance.id"] != parent.resource["service.instance.id"]
    assert forked.resource["rl.run.id"] == parent.resource["rl.run.id"]
    # the tree goes on across the fork, scopes included
    (job,) = [row for row in run.spans if row.name == "job"]
    for row in run.spans:
        if row.name == "child":
            assert (row.trace_id, row.parent_span_id, row.iteration) == (job.trace_id, job.span_id, 7)


def test_span_open_across_the_fork_is_the_parents(tmp_path: Path):
    """Its end comes twice under one id: from the child, and from the parent."""
    run = forking(
        tmp_path / "run",
        """
        start()
        pid = 0
        with umbrella_span("job", "job"):
            with managed_span("generation", "across"):
                pid = os.fork()
                with managed_span("reward", "inside"):
                    pass
            some("later", 1)
        if not pid:
            setup.shutdown_telemetry()
            os._exit(0)
        wait(pid)
        """,
    )
    assert names(run) == {
        "driver": ["across", "inside", "job", "job.started", "later"],
        "worker": ["inside", "later"],
    }
    assert not any(row.truncated for row in run.spans)
    assert len({row.span_id for row in run.spans}) == len(run.spans)


@pytest.mark.parametrize("recorded_before", [False, True])
def test_child_of_a_child(tmp_path: Path, recorded_before: bool):
    """A child that had recorded nothing yet forks: both write the span that was open then."""
    run = forking(
        tmp_path / "run",
        f"""
        start()

        def grandchild():
            some("grandchild", 2)

        def child():
            if {recorded_before}:
                some("first", 1)
            with managed_span("generation", "across"):
                pid = os.fork()
                with managed_span("reward", "inside"):
                    pass
            if not pid:
                some("grandchild", 2)
                os._exit(0)
            wait(pid)
            some("child", 1)

        wait(forked(child))
        """,
    )
    expected = ["across", "child", "grandchild", "grandchild", "inside", "inside"]
    assert names(run) == {"worker": sorted([*expected, *["first"] * recorded_before])}
    assert len({row.process.pid for row in run.spans}) == 2
    assert {row.process.pid for row in run.spans if row.name == "across"} == {
        row.process.pid for row in run.spans if row.name == "child"
    }


def test_fork_while_four_threads_write(tmp_path: Path):
    """The fork takes a copy of a lock that another thread holds, and the child hangs; or counts go wrong."""
    run = forking(
        tmp_path / "run",
        """
        from raytrace_rl.spool import writer
        writer.LARGEST_SIZE = 64 << 10
        start(spool_max_mib=1000)
        over = False
        counts = [0] * 4

        def write(thread):
            while not over:
                with managed_span("generation", f"thread{thread}"):
                    counts[thread] += 1
                if counts[thread] % 100 == 0:
                    time.sleep(0)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for n in range(20):
            before = sum(counts)
            wait(forked(some, f"child{n}", 3))
            while sum(counts) < before + 50:
                time.sleep(0.001)
        over = True
        for thread in threads:
            thread.join()
        with open(run_dir + "/counts.json", "w") as file:
            json.dump(counts, file)
        """,
    )
    counts = json.loads((tmp_path / "run" / "counts.json").read_text())
    found = Counter(row.name for row in run.spans)
    assert found == {**{f"thread{n}": counts[n] for n in range(4)}, **{f"child{n}": 3 for n in range(20)}}
    assert len(run.processes) == 21


def test_telemetry_of_a_child(tmp_path: Path):
    """A child says that nothing is exported though it is; begins with its parent's losses; or ends its parent's run."""
    child(
        PRELUDE
        + """
handle = start()
with managed_span("generation", "bad", bad=object()):
    pass
assert handle.dropped["attributes"] == 1

def idle():
    pass  # no spool of its own, for a child that records nothing

def active():
    assert _state.drops["attributes"] == 0
    some("child", 1)
    mine = setup.get_telemetry_handle()
    assert mine is not None and mine.is_exporting and mine.role == "worker"
    assert mine.run_dir == run_dir
    setup.shutdown_telemetry()
    setup.shutdown_telemetry()
    assert setup.get_telemetry_handle() is None
    assert os.environ["RAYTRACE_RL_RUN_DIR"] == run_dir

def worker():
    mine = setup.init_telemetry_worker(rank=3, worker_group="policy")
    assert mine is not None and mine.is_exporting
    some("worker", 2)

def late():
    some("late", 1)
    assert setup.init_telemetry_worker(rank=4, worker_group="policy") is not None
    some("late", 1)

for function in (idle, active, worker, late):
    wait(forked(function))
some("parent", 1)
assert handle.is_exporting
assert _process.current is not None
""",
        tmp_path / "run",
    )
    run = load_run(tmp_path / "run")
    assert names(run) == {"driver": ["bad", "parent"], "worker": ["child", "late", "late", "worker", "worker"]}
    assert Counter(process.state for process in run.processes) == {"closed": 2, "dead": 2}
    ranks = {row.name: (row.rank, row.worker_group) for row in run.spans}
    assert ranks["worker"] == (3, "policy")
    assert ranks["late"] == (4, "policy")


def test_parent_is_alive_when_its_child_has_ended(tmp_path: Path):
    """The end of a child releases the parent's lock: a living run reads as dead, its open spans as truncated."""
    run = forking(
        tmp_path / "run",
        """
        start()
        with umbrella_span("job", "job"):
            wait(forked(some, "child"))
            pid = os.fork()
            if not pid:
                run = load_run(run_dir)
                states = {process.role: process.state for process in run.processes}
                assert states == {"driver": "alive", "worker": "dead"}, states
                (job,) = [row for row in run.spans if row.name == "job"]
                assert job.end_ns is None and not job.truncated
                os._exit(0)
            wait(pid)
        """,
    )
    assert names(run)["worker"] == ["child"] * 5


@pytest.mark.parametrize("before", [[], ["done"]])
@pytest.mark.parametrize("inside", [[], ["inside"]])
def test_killed_child_leaves_its_open_span(tmp_path: Path, before: list[str], inside: list[str]):
    """A child that is killed in its first span after the fork leaves no trace of it."""
    run = forking(
        tmp_path / "run",
        f"""
        start()
        import signal
        read_end, write_end = os.pipe()

        def work():
            for name in {before}:
                some(name, 1)
            with managed_span("generation", "open"):
                for name in {inside}:
                    some(name, 1)
                os.write(write_end, b"x")
                time.sleep(60)

        pid = forked(work)
        os.read(read_end, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        """,
    )
    assert sorted((row.name, row.truncated) for row in run.spans) == sorted(
        [(name, False) for name in before + inside] + [("open", True)]
    )
    assert len({row.parent_span_id for row in run.spans if row.name == "inside"} - {None}) == len(inside)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(tmp_path: Path, method: str):
    """Spans of a multiprocessing child are lost at its exit, which runs no exit handlers after a fork."""
    script = tmp_path / "program.py"
    script.write_text(
        PRELUDE
        + f"""
def work(n):
    setup.init_telemetry_worker(rank=n, worker_group="pool")
    some(f"child{{n}}", 3)

if __name__ == "__main__":
    start()
    context = multiprocessing.get_context("{method}")
    children = [context.Process(target=work, args=(n,)) for n in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join()
        assert process.exitcode == 0
"""
    )
    child(
        "import runpy, sys; script = sys.argv.pop(1); runpy.run_path(script, run_name='__main__')",
        script,
        tmp_path / "r",
    )
    run = load_run(tmp_path / "r")
    assert run.damage == []
    assert names(run) == {"worker": ["child0"] * 3 + ["child1"] * 3}
    assert sorted({(row.rank, row.worker_group) for row in run.spans}) == [(0, "pool"), (1, "pool")]
    assert multiprocessing.active_children() == []


def test_child_of_a_process_without_telemetry_records_nothing(tmp_path: Path):
    """A fork starts what nobody asked for."""
    child(
        PRELUDE
        + """
wait(forked(some, "child"))
assert not os.path.exists(run_dir)
start()
setup.shutdown_telemetry()
wait(forked(some, "child"))
""",
        tmp_path / "run",
    )
    assert load_run(tmp_path / "run").spans == []
    assert read_records(tmp_path / "run")[1] == []
