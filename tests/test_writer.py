"""The spool of one process: nothing is lost at a roll, while files are sealed, or once there is room again."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl import _state
from raytrace_rl.monitor import load_run
from raytrace_rl.spool import bound as bounding
from raytrace_rl.spool import seal
from raytrace_rl.spool import writer as module
from raytrace_rl.spool.format import MAX_PAYLOAD, Kind, pack_record, parse_header
from raytrace_rl.spool.liveness import Liveness
from raytrace_rl.spool.place import Place
from raytrace_rl.spool.reader import Cursor
from raytrace_rl.spool.segment import create_segment
from raytrace_rl.spool.writer import SpoolWriter
from tests import spooling
from tests.disks import small_disk, warnings_of
from tests.running import wait_for
from tests.writers import SEGMENT, place_of, record, worker, writing, written

MODES = ["tmpfs", "direct"]


def names(run_dir: Path) -> list[str]:
    """What lies in the node's directory, without the process's name."""
    (node,) = (run_dir / "spool").iterdir()
    return sorted(path.name.partition(".")[2] for path in node.iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_eight_threads_roll(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch):
    """Two threads roll at once: a segment with spans in it is dropped, or its spans are there twice."""
    before = sys.getswitchinterval()
    done = threading.Event()
    with writing(tmp_path, mode, monkeypatch) as writer:

        def write(thread: int) -> None:
            for n in range(1000):
                assert writer.append_record(record(thread * 1000 + n + 1))

        def keep() -> None:
            while not done.is_set():
                writer.prepare_next()
                writer.seal_full()

        keeper = threading.Thread(target=keep)
        threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in [keeper, *threads]:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
            done.set()
            keeper.join()
        assert sorted(written(tmp_path)) == list(range(1, 8001))
    assert sorted(written(tmp_path)) == list(range(1, 8001))
    assert len(names(tmp_path)) > 20
    assert _state.drops["spans"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_reader_sees_each_span_once_while_files_are_sealed(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch):
    """A span is missing, or there twice, for a report that is made in the midst of a run."""
    with writing(tmp_path, mode, monkeypatch) as writer:
        placed = 0
        stop = threading.Event()

        def write() -> None:
            nonlocal placed
            while not stop.wait(0.0002):  # leaves time to read
                assert writer.append_record(record(placed + 1, 1000))
                placed += 1
                if placed % 50 == 0:
                    writer.prepare_next()
                    writer.seal_full()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(6):
                least = placed
                run = load_run(tmp_path)
                assert run.damage == []
                assert run.duplicates == 0
                found = [int(row.span_id, 16) for row in run.spans]
                assert len(found) == len(set(found))
                assert set(range(1, least + 1)) <= set(found)
                wait_for(lambda: placed > least + 100, "more spans")  # noqa: B023
        finally:
            stop.set()
            thread.join()
    assert written(tmp_path) == list(range(1, placed + 1))


@pytest.mark.parametrize("mode", MODES)
def test_next_segment_is_made_ahead_of_need(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch):
    """Each roll allocates megabytes on the path of a span; or a file is made that nobody needed yet."""
    with writing(tmp_path, mode, monkeypatch) as writer:
        writer.prepare_next()
        assert names(tmp_path) == ["0.rts", "live"]
        n = 0
        while writer.segment.position <= SEGMENT // 2:
            writer.append_record(record(n := n + 1))
        writer.prepare_next()
        writer.prepare_next()
        assert names(tmp_path) == ["0.rts", "1.rts", "live"]
        woken: list[bool] = []
        writer.wake = lambda: woken.append(True)
        monkeypatch.setattr(module, "create_segment", None)  # a roll that makes a file now fails
        while not woken:
            n += 1
            assert writer.append_record(record(n))
        assert writer.segment.number == 1
        assert written(tmp_path) == list(range(1, n + 1))
        monkeypatch.setattr(module, "create_segment", create_segment)
        while writer.segment.position <= SEGMENT // 2:
            writer.append_record(record(n := n + 1))
        writer.prepare_next()
        assert names(tmp_path) == ["0.rts", "1.rts", "2.rts", "live"]
    # the third was never needed
    assert names(tmp_path) == ["0.rts", "1.rts"]
    assert written(tmp_path) == list(range(1, n + 1))
    assert mode == "direct" or list((tmp_path / "active").iterdir()) == []


def test_prepared_segment_is_seen_as_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A segment made ahead of need is damage to a reader, or a torn-off record."""
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        while writer.segment.position <= SEGMENT // 2:
            writer.append_record(record(1))
        writer.prepare_next()
        link = str(Path(writer.place.directory) / f"{writer.stem}.1.rts")
        with Cursor(link) as cursor:
            assert list(cursor.poll(final=True)) == []
            assert cursor.damage == []


def test_records_of_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A record larger than a segment is dropped, or goes beyond the file's end."""
    with writing(tmp_path, "direct", monkeypatch) as writer:
        sizes = [10, 3 * SEGMENT, SEGMENT, 5, MAX_PAYLOAD, 7, SEGMENT - 200]
        for n, size in enumerate(sizes):
            assert writer.append(Kind.LOGS, bytes([n + 1]) * size)
        assert not writer.append(Kind.LOGS, bytes(MAX_PAYLOAD + 1))
        writer.seal_full()
    (node,) = (tmp_path / "spool").iterdir()
    found = []
    for path in sorted(node.iterdir(), key=lambda path: int(path.name.split(".")[1])):
        with Cursor(str(path)) as cursor:
            found += [(len(one.payload), one.payload[0]) for one in cursor.poll() if one.kind == Kind.LOGS]
            assert cursor.damage == []
    assert found == [(size, n + 1) for n, size in enumerate(sizes)]


def test_resource_of_later_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a process learnt of itself is lost with its first segment."""
    with writing(tmp_path, "direct", monkeypatch) as writer:
        writer.resource = spooling.resource(rl__role="worker", rl__worker_group="policy")
        while writer.segment.number == 0:
            writer.append_record(record(1))
        assert parse_header(bytes(writer.segment.buffer[:4096])).resource == writer.resource


def test_closed_writer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A record after the close record makes new files, or is taken and lost."""
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        writer.append_record(record(1))
    before = names(tmp_path)
    assert not writer.append_record(record(2))
    assert not writer.append(Kind.LOGS, b"x" * 10 * SEGMENT)
    writer.beat()
    writer.prepare_next()
    writer.seal_full()
    writer.close()
    assert names(tmp_path) == before == ["0.rts"]
    assert written(tmp_path) == [1]


def test_close_while_threads_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A record in the midst of being placed when the spool closes is neither kept nor refused."""
    kept: list[list[int]] = [[] for _ in range(6)]
    started = threading.Barrier(7)

    def write(thread: int) -> None:
        started.wait(30)
        for n in range(100_000):
            if not writer.append_record(record(thread * 100_000 + n + 1)):
                return
            kept[thread].append(thread * 100_000 + n + 1)

    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        started.wait(30)
        wait_for(lambda: all(len(numbers) > 200 for numbers in kept), "spans of every thread")
    for thread in threads:
        thread.join()
    assert sorted(written(tmp_path)) == sorted(number for numbers in kept for number in numbers)


# -- no room -----------------------------------------------------------------------------------------------------------


def test_full_tmpfs_goes_on_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """Ray's object store fills ``/dev/shm``, and every span is dropped beside a disk with room for all."""
    monkeypatch.setattr(module, "is_local", lambda path: True)
    with small_disk(tmp_path / "active", monkeypatch) as disk:
        with writing(tmp_path, "tmpfs", monkeypatch) as writer:
            writer.append_record(record(1))
            disk.fill()
            n = 1
            while writer.segment.number == 0:
                n += 1
                assert writer.append_record(record(n))
            assert writer.segment.path == writer.segment.link
            writer.seal_full()
            disk.release()
            while writer.segment.path == writer.segment.link:
                n += 1
                assert writer.append_record(record(n))
            assert written(tmp_path) == list(range(1, n + 1))
        assert written(tmp_path) == list(range(1, n + 1))
        assert disk.free == disk.size
    assert warnings_of(caplog) == []
    assert _state.drops["spans"] == 0


def test_small_rest_of_a_tmpfs_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """8 MiB are asked for again and again where 3 MiB are free: spans are dropped for the rest of the run."""
    monkeypatch.setattr(module, "is_local", lambda path: False)
    with (
        small_disk(tmp_path / "active", monkeypatch) as disk,
        writing(tmp_path, "tmpfs", monkeypatch, segment=8 << 20) as writer,
    ):
        assert disk.size // 4 < writer.segment.capacity <= disk.size // 2
        n = 0
        while writer.segment.number < 6:
            n += 1
            assert writer.append_record(record(n, 1000))
            writer.prepare_next()
            writer.seal_full()
        assert writer.segment.capacity > disk.size // 4
        assert written(tmp_path) == list(range(1, n + 1))


@pytest.mark.parametrize("mode", MODES)
def test_full_disk(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, caplog):
    """A full disk ends the run, floods the log, is not counted, or goes on costing spans once there is room again."""
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)  # a mock: time passes when the test says so
    with small_disk(tmp_path / "disk", monkeypatch) as disk, writing(disk.path, mode, monkeypatch) as writer:
        n = 0
        disk.fill()
        while writer.append_record(record(n := n + 1)):
            writer.prepare_next()
        lost = [n]
        for _ in range(100):
            n += 1
            assert not writer.append_record(record(n))
            writer.prepare_next()
            writer.seal_full()
            lost.append(n)
        assert writer.segment.number == 0
        (warning,) = warnings_of(caplog)
        assert "No space left" in warning
        assert str(disk.path) in warning
        disk.release()
        now += module.RETRY_S
        while writer.segment.number < 3:
            n += 1
            assert writer.append_record(record(n))
            writer.seal_full()
        writer.settle()
        expected = [number for number in range(1, n + 1) if number not in set(lost)]
        assert written(disk.path) == expected
        assert len(warnings_of(caplog)) == 1


def test_run_directory_without_room_for_sealed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """Where segments cannot be brought home the tmpfs, which is memory, fills up without end."""
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)  # a mock
    full = True

    def bring_home(data: bytes, link: str, *args: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(data, link, *args)

    real = seal._bring_home
    monkeypatch.setattr(seal, "_bring_home", bring_home)  # a mock: links are made, files are not
    bound = 8 * SEGMENT
    with writing(tmp_path, "tmpfs", monkeypatch, bound=bound) as writer:
        n = 0
        while writer.segment.number < 30:
            n += 1
            assert writer.append_record(record(n))
            writer.seal_full()
            now += 0.3
            assert sum(path.stat().st_size for path in (tmp_path / "active").iterdir()) <= bound + 2 * SEGMENT
        found = written(tmp_path)
        assert len(found) + _state.drops["spans"] == n
        assert found == list(range(n - len(found) + 1, n + 1))  # the oldest went
        full = False
        now += module.RETRY_S
        writer.seal_full()
        found = written(tmp_path)
        assert len(found) + _state.drops["spans"] == n
        assert len([path for path in (tmp_path / "active").iterdir() if path.suffix == ".rts"]) <= 2
    assert len(written(tmp_path)) + _state.drops["spans"] == n
    assert list((tmp_path / "active").iterdir()) == []
    assert len(warnings_of(caplog)) == 2  # no room, and the bound


@pytest.mark.parametrize("mode", MODES)
def test_vanished_directory(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, caplog):
    """Somebody deletes the run directory: the run ends, spans vanish uncounted, or the tmpfs keeps files for ever."""
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)  # a mock
    with writing(tmp_path / "run", mode, monkeypatch) as writer:
        active = Path(writer.place.active)
        if mode == "tmpfs":
            writer.place = writer.place._replace(active=str(tmp_path / "active"))
            active = tmp_path / "active"
            active.mkdir()
            while writer.segment.number == 0:
                writer.append_record(record(1))
            writer.seal_full()
        kept = len(written(tmp_path / "run"))
        n = 0
        refused = 0
        for _ in range(20):
            n += 1
            refused += not writer.append_record(record(n))
        shutil.rmtree(tmp_path / "run")
        for _ in range(2000):
            n += 1
            refused += not writer.append_record(record(n))
            writer.prepare_next()
            writer.seal_full()
            now += 0.01
        assert 0 < refused < n
        assert not (tmp_path / "run").exists()
    counted = _state.drops["spans"]
    # what the last segment holds of the time before is lost with it
    assert n - refused <= counted <= n - refused + kept
    assert not active.exists() or list(active.iterdir()) == []
    assert not (tmp_path / "run").exists()
    (warning,) = warnings_of(caplog)
    assert "No such file" in warning


def test_sealing_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """One error of the disk (a mock) leaves a segment in the tmpfs for good; or a reader loses it meanwhile."""
    now = 1000.0
    calls = 0
    real = seal.seal_file
    monkeypatch.setattr(module, "monotonic", lambda: now)  # a mock

    def sometimes(path: str, link: str, end: int | None = None) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, link, end)

    monkeypatch.setattr(seal, "seal_file", sometimes)
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        n = 0
        while writer.segment.number < 3:
            n += 1
            assert writer.append_record(record(n))
        for _ in range(5):
            writer.seal_full()
            assert written(tmp_path) == list(range(1, n + 1))
        assert calls == 1  # not at every beat
        now += module.RETRY_S
        writer.seal_full()
        assert calls == 2
        now += module.RETRY_S
        writer.seal_full()
        assert calls == 5
        links = [path for path in Path(writer.place.directory).iterdir() if path.is_symlink()]
        assert sorted(path.name.partition(".")[2] for path in links) == ["3.rts", "live"]
        assert written(tmp_path) == list(range(1, n + 1))
    assert len(warnings_of(caplog)) == 1


# -- the bound ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_oldest_go_and_are_counted(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, caplog):
    """A full node drops the newest spans, drops without counting, or counts what it keeps."""
    bound = 10 * SEGMENT
    with writing(tmp_path, mode, monkeypatch, bound=bound) as writer:
        n = 0
        while writer.segment.number < 40:
            n += 1
            assert writer.append_record(record(n))
            writer.prepare_next()
            writer.seal_full()
            # in front of the bound, what is allocated ahead of need counts too
        directory = Path(writer.place.directory)
        assert sum(path.stat().st_size for path in directory.glob("*.rts")) <= bound
        found = written(tmp_path)
        assert found == list(range(n - len(found) + 1, n + 1))
        assert len(found) + _state.drops["spans"] == n
        assert len(found) * 300 > bound // 2
        (run,) = load_run(tmp_path).processes
        assert run.drops["spans"] == _state.drops["spans"]  # in the header already, should it be killed now
    found = written(tmp_path)
    assert len(found) + _state.drops["spans"] == n
    assert len(warnings_of(caplog)) == 1
    assert "spool_max_mib" in warnings_of(caplog)[0]


def test_segments_are_small_where_many_write(tmp_path: Path):
    """Many writers' segments, allocated ahead, take several times the node's bound together; or the dead count."""
    place = place_of(tmp_path, "direct")
    bound = 16 << 20
    (Path(place.directory) / "5-5.live").touch()  # nobody holds it
    living = [Liveness(f"{place.directory}/{n}-7.live") for n in range(15)]
    writer = SpoolWriter(place, b"", bound_bytes=bound)
    living.append(Liveness(writer.paths(".live")[0]))
    try:
        writer.open()
        assert 3 * 16 * writer.segment.capacity <= bound
        for one in living[:15]:
            one.release()
        while writer.segment.number < 2:
            writer.append_record(record(1))
            writer.prepare_next()
        assert writer.segment.capacity == bound // 8
    finally:
        writer.close()
        living[-1].release()


def test_journals_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Spans that are open for long push ended ones out of the spool, or are themselves dropped."""
    with writing(tmp_path, "direct", monkeypatch, bound=4 * SEGMENT) as writer:
        journal = Path(writer.place.directory) / f"{writer.stem}.open.0.rts"
        journal.write_bytes(Path(writer.segment.path).read_bytes()[:200] + bytes(10 * SEGMENT))
        old = Path(writer.place.directory) / "5-5.open.3.rts"
        old.write_bytes(pack_header_sealed())
        os.utime(old, ns=(1, 1))
        n = 0
        while writer.segment.number < 2:
            n += 1
            assert writer.append_record(record(n))
            writer.seal_full()
        assert len([number for number in written(tmp_path) if number]) == n
        assert _state.drops["spans"] == 0
        while writer.segment.number < 8:
            n += 1
            assert writer.append_record(record(n))
            writer.seal_full()
        assert _state.drops["spans"] > 0
        assert old.exists()
        journal.unlink()


def pack_header_sealed() -> bytes:
    """A sealed journal of a dead process."""
    from raytrace_rl.spool.format import pack_header

    return pack_header(spooling.header(pid=5, start_ns=5, number=3, sealed=True)) + pack_record(
        Kind.OPEN_SPAN, spooling.span(9, 0, None)
    )


def test_what_a_closed_process_had_counted_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A node drops the files of a process that has ended, and with them its count of what it had dropped itself."""
    place = place_of(tmp_path, "direct")
    spool = spooling.Spool.__new__(spooling.Spool)
    spool.run_dir, spool.node_dir = tmp_path, Path(place.directory)
    for number, dropped in ((0, 3), (1, 5)):
        path = spool.segment(
            5,
            spooling.ended(*(spooling.span(n, 0, 1) for n in range(1, 11))),
            number,
            sealed=True,
            span_count=10,
            dropped_spans=dropped,
        )
        os.utime(path, ns=(number + 1, number + 1))
    size = path.stat().st_size
    assert bounding.enforce_bound(place, size) <= 0
    assert _state.drops["spans"] == 10  # its second segment still says 5
    assert bounding.enforce_bound(place, 0) <= 0
    assert _state.drops["spans"] == 10 + 10 + 5
    assert _state.drops["bytes"] == 2 * size
    assert list(Path(place.directory).iterdir()) == []


@pytest.mark.parametrize("direct", [False, True])
def test_two_processes_share_the_nodes_bound(tmp_path: Path, direct: bool):
    """Each process of a node takes the whole bound, or what one drops of the other's is counted twice or never."""
    written_spans = 0
    with (
        worker(tmp_path, spool_max_mib=2, direct=direct, run_id="r") as one,
        worker(tmp_path, spool_max_mib=2, direct=direct, run_id="r") as two,
    ):
        for turn in range(6):
            for process in (one, two):
                process.tell(f"write {500 + 100 * turn}")
                written_spans += 500 + 100 * turn
        (node,) = (tmp_path / "spool").iterdir()
        assert sum(path.stat().st_size for path in node.glob("*.rts")) <= (2 << 20) + (1 << 20)
        lost = [process.tell("stop")["drops"]["spans"] for process in (one, two)]
    run = load_run(tmp_path)
    assert run.damage == []
    assert all(lost)
    assert len(run.spans) + sum(lost) == written_spans
    assert sum(process.drops.get("spans", 0) for process in run.processes) == sum(lost)
    assert sum(path.stat().st_size for path in node.iterdir()) <= 2 << 20


def test_dead_processes_do_not_use_the_bound_up(tmp_path: Path):
    """Workers that are killed and restarted leave unsealed files which nobody may drop: the living have no room."""
    counted = 0
    with worker(tmp_path, spool_max_mib=1, run_id="r") as living:
        for _ in range(8):
            with worker(tmp_path, spool_max_mib=1, run_id="r") as victim:
                victim.tell("write 300")
                counted += 300
                victim.kill()
        for _ in range(4):
            living.tell("write 500")
            counted += 500
        (node,) = (tmp_path / "spool").iterdir()
        sizes = [path.stat().st_size for path in node.glob("*.rts") if ".open." not in path.name]
        assert sum(sizes) <= (1 << 20) + (1 << 18)
        assert living.tell("stop")["drops"]["spans"] > 1000
    run = load_run(tmp_path)
    assert run.damage == []
    assert len(run.spans) + sum(process.drops.get("spans", 0) for process in run.processes) == counted


def test_stem_names_process_and_start():
    """Two processes, or two starts of one, write the same file."""
    writer = SpoolWriter(Place("a", "b"), b"", bound_bytes=1)
    assert writer.stem == f"{os.getpid()}-{writer.start_ns}"
    assert writer.paths(".open") == (f"b/{writer.stem}.open", f"a/{writer.stem}.open")
