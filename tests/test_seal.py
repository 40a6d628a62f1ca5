"""Files that are no longer written: brought home whole, cut to their length, and never while their writer lives."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raytrace_rl import _process
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.monitor import load_run
from raytrace_rl.spool import exclusive, seal
from raytrace_rl.spool.format import Kind, pack_header, pack_record
from raytrace_rl.spool.liveness import Liveness
from tests import spooling
from tests.disks import small_disk
from tests.running import child, running
from tests.writers import place_of, record, worker, writing, written

MODES = ["tmpfs", "direct"]


def placed(tmp_path: Path, mode: str, records: bytes, *, number: int = 0, room: int = 5000) -> tuple[Path, Path]:
    """A segment of a process that is gone: where it lies, and its name in the run directory."""
    place = place_of(tmp_path, mode)
    name = f"7-1.{number}.rts"
    path, link = Path(place.active) / name, Path(place.directory) / name
    header = pack_header(spooling.header(pid=7, start_ns=1, number=number))
    path.write_bytes(header + records + bytes(room))
    if path != link:
        link.symlink_to(path)
    return path, link


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("told", [True, False])
def test_sealed_file(tmp_path: Path, mode: str, told: bool):
    """A sealed file lacks records, keeps the room that was allocated, is not marked, or the tmpfs keeps a copy."""
    records = record(1) + pack_record(Kind.LOGS, b"log") + pack_record(Kind.SCOPE_SPANS, b"") + record(2)
    path, link = placed(tmp_path, mode, records)
    end = path.stat().st_size - 5000
    before = path.read_bytes()
    seal.seal_file(str(path), str(link), end if told else None)
    header = seal.read_header(str(link))
    assert (header.sealed, header.span_count) == (True, 3)
    assert not link.is_symlink()
    assert path == link or not path.exists()
    after = link.read_bytes()
    assert after[header.size :] == before[header.size : end]
    assert written(tmp_path) == [1, 2]
    assert [one.name for one in link.parent.iterdir()] == [link.name]
    assert link.stat().st_mode & 0o777 == 0o600 or mode == "direct"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [0, 1])
def test_empty_segment(tmp_path: Path, mode: str, number: int):
    """Segments made ahead of need and never used litter the run; or the first one, which has the identity, goes too."""
    path, link = placed(tmp_path, mode, b"", number=number)
    seal.seal_file(str(path), str(link))
    assert link.exists() is (number == 0)
    assert not link.is_symlink()
    assert path == link or not path.exists()


def test_torn_record_at_the_end(tmp_path: Path):
    """A record that a kill cut off is sealed as a span that nobody can read: damage, where there is none."""
    torn = bytearray(record(3))
    torn[-20:] = bytes(20)
    path, link = placed(tmp_path, "tmpfs", record(1) + record(2) + bytes(torn))
    seal.seal_file(str(path), str(link))
    assert seal.read_header(str(link)).span_count == 2
    assert written(tmp_path) == [1, 2]


def test_hole_in_the_middle(tmp_path: Path):
    """What lies behind a hole is cut off, or not counted."""
    path, link = placed(tmp_path, "tmpfs", record(1) + bytes(77) + record(2))
    seal.seal_file(str(path), str(link))
    assert seal.read_header(str(link)).span_count == 2
    assert record(2) in link.read_bytes()


@pytest.mark.parametrize("content", [b"", b"rubbish", bytes(5000), b"RTSPOOL\n" + b"\xff" * 200])
def test_what_is_no_segment_stays(tmp_path: Path, content: bytes):
    """A damaged file is deleted or cut although nobody knows what is in it."""
    path, link = placed(tmp_path, "tmpfs", b"")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"spool|bytes"):
        seal.seal_file(str(path), str(link))
    assert link.is_symlink()
    assert path.read_bytes() == content


def test_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A segment that does not fit on the disk is cut short, or gone from the tmpfs."""
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        records = b"".join(record(n, 1000) for n in range(1, 3001))
        place = place_of(tmp_path, "tmpfs")
        shutil.rmtree(place.directory)
        Path(place.directory).parent.rmdir()
        (disk.path / "node").mkdir()
        path, link = Path(place.active) / "7-1.0.rts", disk.path / "node" / "7-1.0.rts"
        path.write_bytes(pack_header(spooling.header(pid=7, start_ns=1)) + records)
        link.symlink_to(path)
        before = path.read_bytes()
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            seal.seal_file(str(path), str(link))
        assert link.is_symlink()
        assert path.read_bytes() == before
        assert [one.name for one in link.parent.iterdir()] == [link.name]
        disk.release()
        seal.seal_file(str(path), str(link))
        assert seal.read_header(str(link)).span_count == 3000


# -- what the dead leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
def test_what_killed_processes_leave_comes_home_with_the_driver(tmp_path: Path, direct: bool):
    """Spans of killed workers stay in the tmpfs, which is memory, until the next reboot takes them."""
    with worker(tmp_path, direct=direct, run_id="r") as driver:
        active = Path(driver.about["active"])
        for _ in range(2):
            with worker(tmp_path, direct=direct, run_id="r", spool_max_mib=8) as victim:
                victim.tell("write 1500")
                victim.tell("open")
                victim.tell("beat")
                assert Path(victim.about["active"]) == active
                victim.kill()
        (node,) = (tmp_path / "spool").iterdir()
        before = load_run(tmp_path)
        assert not direct or not [path for path in node.iterdir() if path.is_symlink()]
        driver.tell("stop")
        assert not [path for path in node.iterdir() if path.is_symlink()]
        assert direct or not active.exists()
    after = load_run(tmp_path)
    assert after.damage == before.damage == []
    assert sorted(row.span_id for row in after.spans) == sorted(row.span_id for row in before.spans)
    assert sorted(process.state for process in after.processes) == ["closed", "dead", "dead"]
    assert [row.truncated for row in after.spans if row.name == "open"] == [True, True]
    assert sum(row.name == "s" for row in after.spans) == 3000
    for path in node.glob("*.rts"):
        if ".open." in path.name:
            continue
        assert seal.read_header(str(path)).sealed
        assert path.stat().st_blocks * 512 < path.stat().st_size + 8192


def test_living_writers_are_left_alone(tmp_path: Path):
    """Somebody else's shutdown takes the files of a process that works: its next write is SIGBUS, or is lost."""
    with worker(tmp_path, run_id="r") as living, worker(tmp_path, run_id="r") as other:
        living.tell("write 200")
        living.tell("open")
        (node,) = (tmp_path / "spool").iterdir()
        mine = {path: (path.is_symlink(), path.stat().st_size) for path in node.glob(f"{living.about['pid']}-*")}
        assert len(mine) >= 3
        assert seal.adopt_orphans(str(node)) == 0
        other.tell("stop")
        assert {path: (path.is_symlink(), path.stat().st_size) for path in mine} == mine
        assert Path(living.about["active"]).exists()
        living.tell("write 3000")
        living.tell("stop")
    run = load_run(tmp_path)
    assert run.damage == []
    assert sum(row.name == "s" for row in run.spans) == 3200


def test_own_files_are_left_alone(tmp_path: Path):
    """A process that looks for orphans takes its own files for some."""
    with running(tmp_path / "run") as telemetry:
        with managed_span("generation", "one"):
            pass
        (node,) = (telemetry.run_dir / "spool").iterdir()
        assert seal.adopt_orphans(str(node)) == 0
        assert _process.current is not None
        assert _process.current.writer is not None
        seal.remove_leftovers(_process.current.writer.place)
        with managed_span("generation", "two"):
            pass
        assert [span.name for span in telemetry.spans()] == ["one", "two"]


@pytest.mark.parametrize("case", ["another boot", "no live file there", "no header"])
def test_what_is_not_proven_dead_is_left_alone(tmp_path: Path, case: str):
    """Files of another host, or of a container with its own tmpfs, are taken while their writer works."""
    path, link = placed(tmp_path, "tmpfs", record(1))
    live = link.parent / "7-1.live"
    if case == "another boot":
        live.touch()
        path.write_bytes(pack_header(spooling.header(boot_id=bytes(range(16)))) + record(1))
    elif case == "no live file there":
        live.symlink_to(tmp_path / "elsewhere" / "7-1.live")
    else:
        live.touch()
        path.write_bytes(b"rubbish")
    before = path.read_bytes()
    assert seal.adopt_orphans(str(link.parent)) == 0
    assert link.is_symlink()
    assert path.read_bytes() == before


def test_lost_segments_are_survived(tmp_path: Path):
    """One dangling link keeps everything else from coming home."""
    placed(tmp_path, "tmpfs", record(1))
    path, link = placed(tmp_path, "tmpfs", record(2), number=1)
    _, lost = placed(tmp_path, "tmpfs", record(3), number=2)
    (link.parent / "7-1.live").touch()
    lost.resolve().unlink()
    assert seal.adopt_orphans(str(link.parent)) == 2
    assert written_but_lost(tmp_path) == [1, 2]
    assert not path.exists()
    assert lost.is_symlink()


def written_but_lost(run_dir: Path) -> list[int]:
    """The spans' numbers, where some segments cannot be reached."""
    run = load_run(run_dir)
    assert {damage.kind for damage in run.damage} == {"unreachable"}
    return sorted(int(row.span_id, 16) for row in run.spans)


def test_adopting_twice_and_where_there_is_nothing(tmp_path: Path):
    """A second look harms what the first has brought home."""
    _, link = placed(tmp_path, "tmpfs", record(1))
    (link.parent / "7-1.live").touch()
    assert seal.adopt_orphans(str(link.parent)) == 1
    before = link.read_bytes()
    assert seal.adopt_orphans(str(link.parent)) == 0
    assert link.read_bytes() == before
    assert seal.adopt_orphans(str(tmp_path / "nowhere")) == 0


def test_two_adopt_at_once(tmp_path: Path):
    """Two drivers that end at the same moment destroy what both bring home."""
    for number in range(20):
        _, link = placed(tmp_path, "tmpfs", record(number + 1), number=number)
    (link.parent / "7-1.live").touch()
    code = "import sys; from raytrace_rl.spool import seal; sys.stdin.read(); print(seal.adopt_orphans(sys.argv[1]))"
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code, link.parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(3)
        ]
        for process in processes:
            process.stdin.close()
        counts = [int(process.stdout.read()) for process in processes]
    assert sum(counts) == 20
    assert sorted(written(tmp_path)) == list(range(1, 21))
    assert list((tmp_path / "active").iterdir()) == []


def test_files_in_the_making_go_with_their_process(tmp_path: Path):
    """A process killed while it makes a segment leaves up to 8 MiB of the tmpfs that no name leads to."""
    place = place_of(tmp_path, "tmpfs")
    active = Path(place.active)
    for name in ("7-1.3.rts.new", "7-1.4.rts", "7-1.open.new", "7-1.open.2.rts", "8-1.0.rts.new", "8-1.1.rts"):
        (active / name).write_bytes(b"x")
    (active / "7-1.9.rts").write_bytes(b"killed before this went, and after its copy was home")
    home = Path(place.directory)
    for name in ("7-1.9.rts", "7-1.8.rts.7.new", "7-1.8.rts.66.new", "8-1.8.rts.8.new"):
        (home / name).write_bytes(b"x")
    (active / "7-1.live").touch()
    (active / "theirs.txt").touch()
    living = Liveness(str(active / "8-1.live"))
    code = """
    import sys
    from raytrace_rl.spool import seal
    from raytrace_rl.spool.place import Place
    seal.remove_leftovers(Place(*sys.argv[1:]))
    """
    try:
        child(code, place.directory, place.active)
        left = sorted(path.name for path in active.iterdir())
        assert left == ["7-1.live", "8-1.0.rts.new", "8-1.1.rts", "8-1.live", "theirs.txt"]
        left = sorted(path.name for path in home.iterdir())
        assert left == ["7-1.8.rts.66.new", "7-1.9.rts", "8-1.8.rts.8.new"]  # a sibling seals the first of them
    finally:
        living.release()
    child(code, place.directory, place.active)
    assert sorted(path.name for path in active.iterdir()) == ["7-1.live", "theirs.txt"]
    assert sorted(path.name for path in home.iterdir()) == ["7-1.8.rts.66.new", "7-1.9.rts"]
    seal.remove_leftovers(place.__class__(place.directory, str(tmp_path / "nowhere")))


def test_empty_directory_goes_and_a_used_one_stays(tmp_path: Path):
    """The tmpfs keeps a directory for every run; or the files of a sibling go with it."""
    place = place_of(tmp_path, "tmpfs")
    (Path(place.active) / "8-1.0.rts").touch()
    Path(place.directory, "8-1.0.rts").symlink_to(Path(place.active) / "8-1.0.rts")
    seal.remove_leftovers(place)
    assert Path(place.active).exists()
    (Path(place.active) / "8-1.0.rts").unlink()
    seal.remove_leftovers(place)
    assert not Path(place.active).exists()
    direct = place_of(tmp_path / "other", "direct")
    seal.remove_leftovers(direct)
    assert Path(direct.directory).exists()


def test_reader_and_adopter_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A report made while files come home misses spans, or has them twice."""
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        for n in range(1, 2001):
            writer.append_record(record(n))
        directory = writer.place.directory
        for path in list(Path(directory).iterdir()):  # copies that look like a dead process's
            stem, _, suffix = path.name.partition(".")
            copy = Path(writer.place.active) / f"9-{stem.partition('-')[2]}.{suffix}"
            shutil.copy(path.resolve(), copy)
            (Path(directory) / copy.name).symlink_to(copy)
        original = seal.seal_file
        seen = []

        def sealed(path: str, link: str, end: int | None = None) -> None:
            original(path, link, end)
            run = load_run(tmp_path)
            assert run.damage == []
            seen.append(len(run.spans))

        monkeypatch.setattr(seal, "seal_file", sealed)
        assert seal.adopt_orphans(directory) > 5
        assert set(seen) == {2000}


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_one_at_a_time(tmp_path: Path):
    """Two look through the directory at once; or one that cannot wait is held up."""
    with exclusive.alone(str(tmp_path), 0.0) as one:
        with exclusive.alone(str(tmp_path), 0.01) as two:
            assert (one, two) == (True, False)
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(0)"], os.environ)
        os.waitpid(pid, 0)
    with exclusive.alone(str(tmp_path), 0.0) as again:
        assert again
    with exclusive.alone(str(tmp_path / "nowhere"), 0.0) as gone:
        assert gone


def test_forked_child_does_not_keep_the_lock(tmp_path: Path):
    """A child forked at the wrong moment holds the lock for as long as it lives, and no bound holds any more."""
    code = """
    import os, sys
    from raytrace_rl.spool import exclusive
    with exclusive.alone(sys.argv[1], 0.0) as one:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
    with exclusive.alone(sys.argv[1], 0.0) as again:
        print(one, again)
    os.close(write_end)
    os.waitpid(pid, 0)
    """
    assert child(code, tmp_path).stdout.split() == ["True", "True"]
