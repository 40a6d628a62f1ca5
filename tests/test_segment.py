"""One mapped file: made whole or not at all, filled to its last byte, closed once."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from raytrace_rl.spool import segment as module
from raytrace_rl.spool.format import Header, parse_header
from raytrace_rl.spool.segment import Segment, create_mapping, create_segment, no_segment
from tests import spooling
from tests.disks import small_disk

HEADER = spooling.header()


def make(tmp_path: Path, size: int = 16384, header: Header = HEADER) -> Segment:
    """A segment in the run directory itself."""
    path = str(tmp_path / "7-1.0.rts")
    return create_segment(path, path, size, header)


def place(segment: Segment, record: bytes) -> None:
    """What the span path does."""
    start = segment.position
    segment.position = stop = start + len(record)
    segment.buffer[start:stop] = record


def test_file_is_whole_when_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader meets a file without its header, or one that is not allocated to its end."""
    seen = []
    rename = os.rename

    def renamed(old: str, new: str) -> None:
        seen.append((Path(old).read_bytes(), Path(old).stat().st_blocks * 512))
        rename(old, new)

    monkeypatch.setattr(module.os, "rename", renamed)
    segment = make(tmp_path)
    ((data, allocated),) = seen
    assert parse_header(data) == replace(HEADER, size=segment.position)
    assert len(data) == segment.capacity == 16384
    assert allocated >= 16384
    assert [path.name for path in tmp_path.iterdir()] == ["7-1.0.rts"]
    assert Path(segment.path).stat().st_mode & 0o777 == 0o600
    segment.close()


def test_filled_to_the_last_byte(tmp_path: Path):
    """The last record that fits is refused, or one byte too many is written beyond the end."""
    segment = make(tmp_path)
    place(segment, bytes([1]) * (segment.capacity - segment.position - 3))
    place(segment, b"abc")
    assert segment.position == segment.capacity
    with pytest.raises((IndexError, ValueError)):
        place(segment, b"x")
    assert segment.close() == segment.capacity
    assert Path(segment.path).read_bytes()[-3:] == b"abc"


def test_nothing_is_placed_behind_a_record_that_did_not_fit(tmp_path: Path):
    """A small record is placed behind the hole that a large one left: readers would report damage."""
    segment = make(tmp_path)
    before = segment.position
    with pytest.raises((IndexError, ValueError)):
        place(segment, bytes(segment.capacity))
    with pytest.raises((IndexError, ValueError)):
        place(segment, b"small")
    segment.end = before  # as the writer notes it
    assert segment.close() == before
    assert not Path(segment.path).read_bytes()[before:].strip(b"\0")


def test_closing(tmp_path: Path):
    """A closed file is written to, or loses its length when it is closed again."""
    segment = make(tmp_path)
    place(segment, b"record")
    end = segment.position
    assert segment.stop() == end
    with pytest.raises((IndexError, ValueError)):
        place(segment, b"late")
    assert segment.close() == segment.close() == end
    with pytest.raises(ValueError, match=r"closed|invalid"):
        place(segment, b"late")
    with pytest.raises(ValueError, match=r"closed|invalid"):
        segment.beat(1, 2)
    assert Path(segment.path).read_bytes()[end:] == bytes(segment.capacity - end)


def test_beat_touches_its_two_fields_alone(tmp_path: Path):
    """A sign of life destroys the header."""
    segment = make(tmp_path)
    before = Path(segment.path).read_bytes()
    segment.beat(123456789, 42)
    after = Path(segment.path).read_bytes()
    header = parse_header(after)
    assert (header.heartbeat_ns, header.dropped_spans) == (123456789, 42)
    assert replace(header, heartbeat_ns=HEADER.heartbeat_ns, dropped_spans=0, size=0) == HEADER
    assert struct.pack("<Q", 42) in after
    assert len(before) == len(after)
    segment.close()


def test_no_segment_refuses_everything():
    """What a process has before its spool is open takes records."""
    segment = no_segment()
    for record in (b"", b"x", bytes(100)):
        if record:
            with pytest.raises((IndexError, ValueError)):
                place(segment, record)
    segment.close()


def test_header_larger_than_the_segment(tmp_path: Path):
    """A huge resource leaves no room for records, or is cut off."""
    header = replace(HEADER, resource=spooling.resource(note="x" * 100_000))
    segment = make(tmp_path, 4096, header)
    assert segment.capacity - segment.position >= 4096
    assert parse_header(bytes(segment.buffer[:])).resource == header.resource
    segment.close()


def test_file_system_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file system that cannot allocate (a mock of its answer) gives a sparse file, and SIGBUS when it is full."""

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(module.os, "posix_fallocate", refuse)
    segment = make(tmp_path, 100_001)
    found = Path(segment.path).stat()
    assert (found.st_size, segment.capacity) == (100_001, 100_001)
    assert found.st_blocks * 512 >= 100_001
    segment.close()


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk is noticed at the first write to the mapping, which is SIGBUS, or leaves half a file."""
    with small_disk(tmp_path / "disk", monkeypatch) as disk:
        with pytest.raises(OSError, match="No space left"):
            make(disk.path, 8 << 20)
        assert list(disk.path.iterdir()) == []
        assert disk.free == disk.size
        make(disk.path, 1 << 20).close()


@pytest.mark.parametrize("directory", ["missing", "file"])
def test_no_directory(tmp_path: Path, directory: str):
    """What is no directory is an error of another kind than OSError, which nobody expects."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"directory"):
        make(tmp_path / directory)


def test_name_that_is_taken(tmp_path: Path):
    """A file of that name, another process's, is written over; or the mapping stays without a name."""
    active = tmp_path / "active"
    active.mkdir()
    taken = tmp_path / "7-1.0.rts"
    taken.write_text("theirs")
    with pytest.raises(FileExistsError):
        create_segment(str(active / "7-1.0.rts"), str(taken), 16384, HEADER)
    assert list(active.iterdir()) == []
    (active / "8-1.open.new").touch()
    with pytest.raises(FileExistsError):
        create_mapping(str(active / "8-1.open"), 4096, b"head")


@pytest.mark.parametrize("call", ["rename", "symlink", "posix_fallocate"])
def test_exception_out_of_a_handler_leaves_nothing(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C in the midst of making a file leaves megabytes in the tmpfs that nobody knows of."""

    class CtrlC(BaseException):
        pass

    def interrupted(*args: object) -> None:
        raise CtrlC

    active = tmp_path / "active"
    active.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, call, interrupted)
        with pytest.raises(CtrlC):
            create_segment(str(active / "7-1.0.rts"), str(tmp_path / "7-1.0.rts"), 16384, HEADER)
    assert [path for path in tmp_path.rglob("*") if path != active] == []


def test_link_in_the_run_directory(tmp_path: Path):
    """Readers do not find a segment that lies in the tmpfs."""
    active = tmp_path / "active"
    active.mkdir()
    link = tmp_path / "7-1.0.rts"
    segment = create_segment(str(active / "7-1.0.rts"), str(link), 16384, HEADER)
    assert link.is_symlink()
    assert (segment.path, segment.link) == (str(active / "7-1.0.rts"), str(link))
    place(segment, b"record")
    assert b"record" in link.read_bytes()
    segment.close()
