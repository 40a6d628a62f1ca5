"""``kill -9`` of plain processes at random moments: what had finished is kept, what was open is there once, truncated.

One process forks the victims and kills them: a fork of a process in which telemetry never ran is as good as a new
one, and costs a hundredth of its start. The count is kept by a pipe, into which a victim writes the number of each
span after its ``__exit__`` has returned.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl.monitor import load_run
from raytrace_rl.spool import listing, seal
from raytrace_rl.spool.format import Kind
from tests.running import child, read_records, spans_of

pytest_plugins = ["tests.telemetry_fixtures"]

KILLER = """
import json, os, random, select, signal, struct, sys, threading, time
from raytrace_rl import instrumentation, setup
from raytrace_rl.instrumentation import iteration_scope, managed_span, umbrella_span
from raytrace_rl.spool import place, writer

base, mode, rounds, seed, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
if mode == "direct":
    place._SHM = "/nonexistent"
writer.LARGEST_SIZE = 64 << 10  # many rolls


def work(fd, thread):
    n = 0
    while True:
        n += 1
        with managed_span("generation", "work", n=n, thread=thread):
            if n % 3 == 0:
                with managed_span("reward", "inner", n=n, thread=thread):
                    pass
        os.write(fd, struct.pack("<II", thread, n))


def victim(fd, run_dir):
    setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": run_dir, "heartbeat_s": 0.02})
    with umbrella_span("job", "job", why="test"), iteration_scope(7):
        for thread in range(1, threads):
            threading.Thread(target=work, args=(fd, thread), daemon=True).start()
        work(fd, 0)


rng = random.Random(seed)
for round_ in range(rounds):
    run_dir = f"{base}/{round_}"
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read_end)
            victim(write_end, run_dir)
        finally:
            os._exit(1)
    os.close(write_end)
    data = bytearray()
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        if select.select([read_end], [], [], 0.002)[0]:
            data += os.read(read_end, 1 << 16)
            if deadline is None:
                deadline = time.monotonic() + rng.uniform(0, 0.12)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while chunk := os.read(read_end, 1 << 16):
        data += chunk
    os.close(read_end)
    last = {}
    for thread, n in struct.iter_unpack("<II", data[: len(data) // 8 * 8]):
        last[thread] = n
    print(json.dumps({"run_dir": run_dir, "pid": pid, "last": last}))
"""


@pytest.mark.parametrize(
    ("mode", "rounds", "threads"), [("tmpfs", 20, 1), ("tmpfs", 10, 4), ("direct", 12, 1), ("direct", 6, 4)]
)
def test_kill_at_random_moments(tmp_path: Path, mode: str, rounds: int, threads: int):
    """A finished span dies with its process; an open one is missing, there twice, or passes for finished."""
    done = child(KILLER, tmp_path, mode, rounds, rounds * threads, threads)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == rounds
    assert sum(sum(report["last"].values()) for report in reports) > 20 * rounds
    for report in reports:
        check(Path(report["run_dir"]), {int(thread): n for thread, n in report["last"].items()}, threads)


def check(run_dir: Path, last: dict[int, int], threads: int) -> None:
    """Holds a killed run to what its pipe says, before and after its files are brought home."""
    first = look(run_dir, last, threads)
    (node,) = (run_dir / "spool").iterdir()
    seal.adopt_orphans(str(node))
    assert not [path for path in node.iterdir() if path.is_symlink()]
    assert look(run_dir, last, threads) == first


def look(run_dir: Path, last: dict[int, int], threads: int) -> Any:
    """Checks one reading of the run; returns what it read."""
    run = load_run(run_dir)
    assert run.damage == []
    assert [process.state for process in run.processes] == ["dead"]
    names: Counter[tuple[str, Any, Any]] = Counter()
    open_names: Counter[str] = Counter()
    for row in run.spans:
        if row.truncated:
            open_names[row.name] += 1
            assert row.end_ns is not None
            assert row.end_ns >= row.start_ns
        names[row.name, row.attributes.get("thread"), row.attributes.get("n")] += 1
        if row.attributes.get("thread") == 0:  # other threads do not inherit the scope
            assert row.attributes["rl.iteration"] == 7
    # every span whose end was reported is there, ended
    ended = {
        (row.attributes.get("thread"), row.attributes.get("n"))
        for row in run.spans
        if row.name == "work" and not row.truncated
    }
    for thread, n in last.items():
        assert {(thread, k) for k in range(1, n + 1)} <= ended, (run_dir, thread, n)
        assert not {(thread, k) for k in range(n + 2, n + 10)} & ended
    # none twice; a slot of the table of open spans has no attributes, hence no number
    assert all(times == 1 for (_, _, n), times in names.items() if n is not None)
    # what was open: the job, and at most one chain a thread
    assert open_names["job"] == 1
    assert open_names["work"] <= threads
    assert open_names["inner"] <= threads
    assert set(open_names) <= {"job", "work", "inner"}
    assert len({(row.trace_id, row.span_id) for row in run.spans}) == len(run.spans)
    (job,) = [row for row in run.spans if row.name == "job"]
    assert job.attributes["rl.truncated"] is True
    assert job.parent_span_id is None
    assert all(row.trace_id == job.trace_id for row in run.spans if row.attributes.get("thread") == 0)
    assert run.processes[0].drops.get("spans", 0) == 0
    return sorted((row.name, row.span_id, row.truncated, row.start_ns) for row in run.spans)


EXITS = """
import os, signal, sys, time
from raytrace_rl import setup
from raytrace_rl.instrumentation import managed_span, umbrella_span

base, way = sys.argv[1:3]
setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": base, "heartbeat_s": 3600})
with umbrella_span("job", "job"):
    for n in range(50):
        with managed_span("generation", "work", n=n):
            pass
    if way == "_exit":
        os._exit(3)
    if way == "abort":
        os.abort()
    if way == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if way == "sys.exit":
        sys.exit(3)
    if way == "exception":
        raise ValueError
    if way == "exec":
        os.execv("/bin/true", ["/bin/true"])
    if way == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    if way == "closed":
        setup.shutdown_telemetry()
        os._exit(0)
"""


@pytest.mark.parametrize(
    ("way", "state", "truncated"),
    [
        ("_exit", "dead", True),
        ("abort", "dead", True),
        ("sigterm", "dead", True),
        ("segfault", "dead", True),
        ("exec", "dead", True),
        ("sys.exit", "closed", False),
        ("exception", "closed", False),
        ("closed", "closed", True),
    ],
)
def test_each_way_to_end(tmp_path: Path, way: str, state: str, truncated: bool):
    """50 spans before an exit are not 50 spans after it."""
    child(EXITS, tmp_path / "run", way, check=False)
    run = load_run(tmp_path / "run")
    assert run.damage == []
    assert [process.state for process in run.processes] == [state]
    assert sorted(row.attributes["n"] for row in run.spans if row.name == "work") == list(range(50))  # type: ignore[type-var]
    (job,) = [row for row in run.spans if row.name == "job"]
    assert job.truncated is truncated
    records, damage = read_records(tmp_path / "run")
    assert not damage
    assert (Kind.CLOSE in {record.kind for record in records}) is (state == "closed")
    assert len(spans_of(records)) == 51 + (1 if state == "closed" else 0)  # the job's ".started" among them
    left = [path.name for path in (tmp_path / "run" / "spool").rglob("*") if path.is_file()]
    if state == "closed":
        assert [name for name in left if not name.endswith(".rts")] == []
        assert not any(path.is_symlink() for path in (tmp_path / "run" / "spool").rglob("*"))


def test_next_driver_brings_home_what_a_killed_one_left(tmp_path: Path):
    """The spans of a killed process stay in a tmpfs, and are gone with the next reboot."""
    child(EXITS, tmp_path / "run", "_exit", check=False)
    before = load_run(tmp_path / "run")
    child(EXITS, tmp_path / "run", "sys.exit", check=False)
    (node,) = (tmp_path / "run" / "spool").iterdir()
    assert not [path for path in node.iterdir() if path.is_symlink()]
    after = load_run(tmp_path / "run")
    known = {row.span_id for row in before.spans}
    assert known <= {row.span_id for row in after.spans}
    assert sum(row.truncated for row in after.spans) == 1
    assert sorted(process.attempt for process in after.processes) == [1, 2]
    assert len(list(listing.processes(tmp_path / "run" / "spool"))) == 2
