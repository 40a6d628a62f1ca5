"""A run on bad ground: one clear warning, everything lost is counted, the run goes on, and recovers where it can."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from raytrace_rl import _process, _state, setup
from raytrace_rl.instrumentation import iteration_scope, managed_span, umbrella_span
from raytrace_rl.monitor import load_run
from raytrace_rl.spool import place, seal, segment
from raytrace_rl.spool import writer as writers
from tests.disks import Disk, may_mount, mounted, read_only, small_disk, warnings_of
from tests.readback import wait_until
from tests.running import Telemetry, child, running, wait_for
from tests.writers import worker

pytest_plugins = ["tests.telemetry_fixtures"]


def write(count: int, first: int = 0) -> None:
    """Spans of about 1 KiB, numbered."""
    for n in range(first, first + count):
        with managed_span("generation", "s", n=n, note="x" * 900):
            pass


def numbers(run_dir: Path) -> list[int]:
    """The numbers of the spans that are to be read; a span that is there twice, or damage, is an error."""
    run = load_run(run_dir)
    assert run.damage == []
    assert run.duplicates == 0
    found = [row.attributes["n"] for row in run.spans if row.name == "s"]
    return sorted(n for n in found if isinstance(n, int))


def heartbeat() -> None:
    """Does what the heartbeat does, at once."""
    assert _process.current is not None
    assert _process.current.writer is not None
    assert _process.current._heartbeat is not None
    _process.current._heartbeat.beat()
    _process.current.writer.prepare_next()
    _process.current.writer.seal_full()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mock of the clock by which the writer waits before it tries again."""

    class Clock:
        now = 1000.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(writers, "monotonic", clock)
    return clock


# -- directories that are none -----------------------------------------------------------------------------------------


def hold(telemetry: Telemetry, caplog: pytest.LogCaptureFixture, run_dir: str) -> None:
    """What holds of a run whose directory cannot be used."""
    assert not telemetry.handle.is_exporting
    with iteration_scope(1), umbrella_span("job", "job") as job:
        write(100)
        assert job is not None
        assert trace.get_current_span() is job
        with trace.get_tracer("theirs").start_as_current_span("foreign"):
            pass
    assert telemetry.handle.dropped["spans"] == 103  # and the job's ".started"
    assert telemetry.handle.dropped["bytes"] > 90_000
    (warning,) = warnings_of(caplog)
    assert run_dir in warning
    assert "RAYTRACE_RL_RUN_DIR" in warning
    setup.shutdown_telemetry()
    assert len(warnings_of(caplog)) == 1
    assert '"spans": 103' in caplog.text


@pytest.mark.parametrize("run_dir", ["file", "file/below", "/proc/raytrace/run", "/dev/null", "dangling"])
def test_run_dir_that_is_none(tmp_path: Path, run_dir: str, caplog: pytest.LogCaptureFixture):
    """A mistake in the run directory ends the run, warns at every span, or nobody learns that nothing is kept."""
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "file" / "nowhere")
    path = str(tmp_path / run_dir)
    with running(Path(path)) as telemetry:
        hold(telemetry, caplog, path)


def test_read_only_run_dir(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A read-only file system ends the run, or leaves half a spool in the tmpfs."""
    with read_only(tmp_path / "disk") as disk, running(disk / "run") as telemetry:
        hold(telemetry, caplog, str(disk / "run"))


def test_worker_on_an_unusable_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """A worker on a node where the run directory cannot be used dies, or is silent about it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYTRACE_RL_ENABLED", "1")
    monkeypatch.setenv("RAYTRACE_RL_SPAN_GROUPS", "all")
    monkeypatch.setenv("RAYTRACE_RL_RUN_DIR", str(tmp_path / "file"))
    handle = setup.init_telemetry_worker(rank=0)
    assert handle is not None
    hold(Telemetry(handle), caplog, str(tmp_path / "file"))


def test_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A driver whose working directory was deleted under it does not start."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        for config in ({"run_id": "r"}, {"run_dir": "relative"}):
            handle = setup.init_telemetry_driver({"enabled": True, **config})
            assert handle is not None
            assert handle.is_exporting
            assert handle.run_dir is not None
            assert handle.run_dir.startswith(str(tmp_path))
            setup.shutdown_telemetry()
    finally:
        os.chdir(tmp_path)


def test_no_home_to_go_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A container's user without a home (a mock of the answer) has no telemetry inside a Ray session."""
    inside = tmp_path / "session_2026-01-02_03-04-05_1"
    inside.mkdir()
    monkeypatch.chdir(inside)

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handle = setup.init_telemetry_driver({"enabled": True, "run_id": "r"})
    assert handle is not None
    assert handle.run_dir == str(tmp_path / "raytrace_runs" / "r")
    assert handle.is_exporting


# -- a full disk -------------------------------------------------------------------------------------------------------


def run_until_full(
    telemetry: Telemetry, disk: Disk, clock: Any, caplog: pytest.LogCaptureFixture, run_dir: Path
) -> int:
    """Fills the disk in the midst of a run, gives it room again; returns how many spans were written."""
    written = 0

    def turn(count: int) -> None:
        nonlocal written
        write(count, written)
        written += count
        heartbeat()

    for _ in range(3):
        turn(100)
    assert telemetry.drops == {}
    disk.fill()
    for _ in range(30):
        turn(100)
        clock.now += 0.2
    lost = telemetry.drops["spans"]
    assert 0 < lost < written
    assert len(numbers(run_dir)) + lost == written
    (warning,) = warnings_of(caplog)
    assert "No space left" in warning
    disk.release()
    clock.now += writers.RETRY_S
    for _ in range(5):
        turn(100)
    assert telemetry.drops["spans"] == lost  # not one more
    assert len(numbers(run_dir)) + lost == written
    assert len(warnings_of(caplog)) == 1
    return written


def test_disk_of_all_files_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any, caplog):
    """A full disk under run directory and active files ends the run, or goes on costing spans when it has room."""
    with small_disk(tmp_path / "disk", monkeypatch, mib=8) as disk:
        run_dir = disk.path / "run"
        with running(run_dir, spool_dir=str(disk.path / "active")) as telemetry:
            written = run_until_full(telemetry, disk, clock, caplog, run_dir)
            lost = telemetry.drops["spans"]
        assert len(numbers(run_dir)) + lost == written
        run = load_run(run_dir)
        assert run.processes[0].drops["spans"] == lost
        assert run.processes[0].state == "closed"
        assert not list((disk.path / "active").iterdir())


def test_disk_of_the_active_files_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """The object store fills ``/dev/shm``, and spans are dropped beside a disk with room for all of them."""
    monkeypatch.setattr(writers, "is_local", lambda path: True)
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        with running(tmp_path / "run", spool_dir=str(disk.path)) as telemetry:
            for turn in range(40):
                write(100, 100 * turn)
                heartbeat()
                if turn == 3:
                    disk.fill()
            assert telemetry.drops == {}
            assert len(numbers(tmp_path / "run")) == 4000
        assert len(numbers(tmp_path / "run")) == 4000
        disk.release()
        assert disk.free == disk.size
    assert warnings_of(caplog) == []


def test_active_files_on_a_small_disk_beside_a_network_run_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any, caplog
):
    """Where the run directory must not be mapped (a mock: it is NFS), a full local disk ends the run."""
    monkeypatch.setattr(writers, "is_local", lambda path: False)
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        with running(tmp_path / "run", spool_dir=str(disk.path)) as telemetry:
            written = run_until_full(telemetry, disk, clock, caplog, tmp_path / "run")
            lost = telemetry.drops["spans"]
        assert len(numbers(tmp_path / "run")) + lost == written
        assert disk.free == disk.size


def test_run_directory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any, caplog):
    """A full run directory beside a large tmpfs fills the memory, or loses what the tmpfs holds at the end."""
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        run_dir = disk.path / "run"
        with running(run_dir, spool_dir=str(tmp_path / "active"), spool_max_mib=16) as telemetry:
            write(500)
            heartbeat()
            disk.fill()
            for turn in range(5, 30):
                write(100, 100 * turn)
                heartbeat()
                clock.now += 0.2
            lost = telemetry.drops.get("spans", 0)
            assert len(numbers(run_dir)) + lost == 3000
            assert len(warnings_of(caplog)) == 1
            disk.release()
            clock.now += writers.RETRY_S
            heartbeat()
            write(100, 3000)
            assert telemetry.drops.get("spans", 0) == lost
        assert len(numbers(run_dir)) + lost == 3100
        assert not list((tmp_path / "active").iterdir())
    assert len(warnings_of(caplog)) == 1


def test_disk_that_is_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """A driver on a full disk does not start, or leaves files behind that keep it full."""
    monkeypatch.setattr(writers, "is_local", lambda path: False)
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        disk.fill()
        with running(tmp_path / "run", spool_dir=str(disk.path / "below")) as telemetry:
            write(50)
            if telemetry.drops:  # a mock of the quota lets the directory be made
                assert telemetry.drops["spans"] == 50
        assert len(warnings_of(caplog)) == 1
        disk.release()
        assert disk.free == disk.size or not disk.real


def test_full_at_the_end_and_room_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any):
    """What could not be brought home at the end of a run is lost with the tmpfs."""
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        run_dir = disk.path / "run"
        with running(run_dir, spool_dir=str(tmp_path / "active")):
            write(300)
            disk.fill()
        assert numbers(run_dir) == list(range(300))  # still to be read, where it lies
        (node,) = (run_dir / "spool").iterdir()
        assert any(path.is_symlink() for path in node.iterdir())
        disk.release()
        with running(run_dir, spool_dir=str(tmp_path / "active")):
            write(1, 300)
        assert numbers(run_dir) == list(range(301))
        assert not any(path.is_symlink() for path in node.iterdir())
        assert not list((tmp_path / "active").iterdir())


def test_bound_is_kept_on_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """``spool_max_mib`` is reached, and everything from then on is dropped instead of the oldest."""
    with small_disk(tmp_path / "disk", monkeypatch, mib=4) as disk:
        run_dir = disk.path / "run"
        with running(run_dir, spool_dir=str(tmp_path / "active"), spool_max_mib=2) as telemetry:
            for turn in range(80):
                write(100, 100 * turn)
                heartbeat()
            # The heartbeat's own thread may be at it: a file goes before it is counted, not in one instant.
            wait_until(lambda: len(numbers(run_dir)) + telemetry.drops["spans"] == 8000, "what went to be counted")
            lost = telemetry.drops["spans"]
        found = numbers(run_dir)
        assert len(found) + lost == 8000
        assert found == list(range(8000 - len(found), 8000))
        assert load_run(run_dir).processes[0].drops["spans"] == lost
    (warning,) = warnings_of(caplog)
    assert "spool_max_mib" in warning


# -- what happens in the midst of a run --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tmpfs", "direct"])
def test_run_directory_vanishes(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, clock: Any, caplog):
    """Somebody cleans up under a running run: it ends, or makes the directory again, or lies about what it lost."""
    settings: dict[str, Any] = {"spool_dir": str(tmp_path / "active")}
    if mode == "direct":
        monkeypatch.setattr(place, "_roomy_tmpfs", lambda path: False)  # mocks: /dev/shm is small, the disk is local
        monkeypatch.setattr(place, "is_local", lambda path: True)
        settings = {}
    with running(tmp_path / "run", **settings) as telemetry:
        with umbrella_span("job", "job"):
            write(100)
            heartbeat()
            shutil.rmtree(telemetry.run_dir)
            for turn in range(1, 40):
                write(100, 100 * turn)
                heartbeat()
                clock.now += 0.1
        assert telemetry.drops["spans"] > 1000
        setup.shutdown_telemetry()
        assert telemetry.handle.dropped["spans"] == 4002
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "active").iterdir()) if mode == "tmpfs" else True
    (warning,) = warnings_of(caplog)
    assert "No such file" in warning
    assert '"spans": 4002' in caplog.text


def test_run_directory_becomes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any, caplog):
    """A disk that the kernel makes read-only after an error ends the run, or what the tmpfs holds is lost with it."""
    disk = tmp_path / "disk"
    with (
        mounted(disk, "size=8m") if may_mount() else contextlib.nullcontext(),
        running(disk / "run", spool_dir=str(tmp_path / "active")) as telemetry,
    ):
        write(100)
        heartbeat()
        with being_read_only(disk, monkeypatch):
            for turn in range(1, 20):
                write(100, 100 * turn)
                heartbeat()
                clock.now += 0.2
            lost = telemetry.drops.get("spans", 0)
            assert len(numbers(disk / "run")) + lost == 2000
        clock.now += writers.RETRY_S
        write(100, 2000)
        setup.shutdown_telemetry()
        assert len(numbers(disk / "run")) + lost == 2100
        assert not list((tmp_path / "active").iterdir())
    assert len(warnings_of(caplog)) == 1


@contextlib.contextmanager
def being_read_only(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system is read-only; where mounting is not allowed, a mock of what it answers then."""
    if may_mount():

        def remounted() -> bool:
            done = subprocess.run(["mount", "-o", "remount,ro", disk], check=False, timeout=30, capture_output=True)
            assert done.returncode == 0 or b"busy" in done.stderr, done.stderr
            return done.returncode == 0  # busy: the heartbeat's own thread is sealing a segment

        wait_until(remounted, "the disk to be idle")
        try:
            yield
        finally:
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True, timeout=30)
        return

    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(segment.os, "symlink", refuse)
        patch.setattr(seal, "_bring_home", refuse)
        yield


def test_tmpfs_files_are_deleted_under_a_run(tmp_path: Path, clock: Any, caplog):
    """A clean-up of ``/dev/shm`` (systemd's at a logout) ends the run, or costs spans that the mapping still has."""
    with running(tmp_path / "run", spool_dir=str(tmp_path / "active")) as telemetry:
        write(100)
        shutil.rmtree(tmp_path / "active")
        for turn in range(1, 30):
            write(100, 100 * turn)
            heartbeat()
            clock.now += 0.2
        setup.shutdown_telemetry()
        assert telemetry.handle.dropped["spans"] == 0
        assert numbers(tmp_path / "run") == list(range(3000))
    assert warnings_of(caplog) == []


def test_everything_at_once(tmp_path: Path):
    """Mistakes that are each survived end the run together."""
    code = """
    import os, sys
    os.environ.update(
        RAYTRACE_RL_SPOOL_DIR="/dev/null/x", RAYTRACE_RL_HEARTBAET_S="2", RAYTRACE_RL_CAPTURE_CONTENT="perhaps",
        OTEL_RESOURCE_ATTRIBUTES="no pair", OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT="many", RANK="first",
    )
    from raytrace_rl import setup
    from raytrace_rl.instrumentation import *
    class Odd:
        def __str__(self): raise ValueError
        __repr__ = __hash__ = __bool__ = __len__ = __iter__ = __float__ = __index__ = __str__
    setup.init_telemetry_driver(
        {"enabled": True, "span_groups": "all,nobody's", "run_dir": sys.argv[1], "export_rank": 3}, algorithm=3.5
    )
    setup.init_telemetry_worker(rank=Odd(), gpus=[Odd()], resource_attributes={"odd": Odd()})
    with remote_trace_context({"traceparent": "rubbish", "raytrace": 5}), iteration_scope(Odd()):
        for n in range(100):
            with managed_span("generation", "s", n=n, odd=Odd(), prompt=Odd(), bytes=b"x", nan=float("nan")) as span:
                span.set_attribute(Odd, Odd())
                safe_set_span_attributes(span, Odd())
                span.add_event(5, {"x": Odd()})
                span.set_status("bad")
    print("done")
    """
    done = child(code, tmp_path / "run")
    assert done.stdout == "done\n"
    assert "Traceback" not in done.stderr
    repeated = {line: n for line, n in Counter(done.stderr.splitlines()).items() if n > 1}
    assert repeated == {}
    run = load_run(tmp_path / "run")
    assert run.damage == []
    rows = [row for row in run.spans if row.name == "s"]
    assert [row.attributes["n"] for row in rows] == list(range(100))
    assert run.processes[0].drops["attributes"] >= 200


def test_killed_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that is killed while its disk is full takes the count of what it dropped with it."""
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        limit = {} if disk.real else {"spool_max_mib": 1}  # another process does not know the mock: its own bound then
        run_dir = disk.path / "run"
        with worker(run_dir, spool_dir=str(disk.path / "active"), **limit) as victim:
            for _ in range(60):
                answer = victim.tell("write 100")
            victim.tell("beat")
            lost = answer["drops"]["spans"]
            assert lost > 0
            victim.kill()
        run = load_run(run_dir)
        assert run.processes[0].state == "dead"
        assert run.processes[0].drops["spans"] == lost
        assert len(run.spans) + lost == 6000


def test_two_runs_under_one_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any, caplog):
    """A second start after a full disk does not begin afresh: it warns of nothing, or counts the first run's losses."""
    monkeypatch.setattr(writers, "is_local", lambda path: False)
    for name in ("one", "two"):
        caplog.clear()
        with small_disk(tmp_path / name, monkeypatch) as disk:
            with running(tmp_path / f"run {name}", spool_dir=str(disk.path)) as telemetry:
                write(1)
                disk.fill()
                write(3000, 1)
                lost = telemetry.drops["spans"]
            assert len(numbers(tmp_path / f"run {name}")) + lost == 3001
        assert len(warnings_of(caplog)) == 1
    assert wait_for(lambda: _state.writer is None, "the end", 5)
