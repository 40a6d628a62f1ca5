"""Fuzz targets that take the bytes of spool files: segments, sealing, journals and tables of open spans."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from raytrace_rl.relay import follow, truncated
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool import listing, reader, seal
from tests.fuzz import reference
from tests.fuzz.checking import check, scratch
from tests.fuzz.official import parses

#: Bytes in front of what a target takes for a file: how it is to be treated.
CONTROL: Final = 4
_REPAIR, _SMALL, _GROWS = 1, 2, 4
#: How long a segment is made, bytes; and CRC work spent in vain on it that is surely below what a reader allows itself.
_LONG: Final = 128 << 10
_TRIED: Final = 16 << 20
_SPANS: Final = (fmt.Kind.SPAN, fmt.Kind.SCOPE_SPANS)


@contextlib.contextmanager
def _pieces(small: bool) -> Iterator[int]:
    """Has readers take files in small pieces, so that short inputs have seams too; yields the longest record's size."""
    kept = reader._FIRST_PIECE, reader._PIECE, reader._RECORD_MAX, follow._FIRST_PIECE, follow._PIECE
    if small:
        reader._FIRST_PIECE, reader._PIECE, reader._RECORD_MAX = 50, 256, 100  # type: ignore[misc]
        follow._FIRST_PIECE, follow._PIECE = 64, 100  # type: ignore[misc]
    try:
        yield reader._RECORD_MAX
    finally:
        (reader._FIRST_PIECE, reader._PIECE, reader._RECORD_MAX, follow._FIRST_PIECE, follow._PIECE) = kept  # type: ignore[misc]


def segment(data: bytes) -> None:
    """A segment read whole, from within, while it grows, and as the relay does: all find what is there, once."""
    control, whole = data[:CONTROL].ljust(CONTROL, b"\0"), data[CONTROL:]
    flags = control[0]
    if flags & _REPAIR:
        whole = reference.repaired(whole)
    path = scratch() / "7-8.0.rts"
    path.write_bytes(whole)
    with _pieces(bool(flags & _SMALL)) as most:
        found = reference.read(whole, most)
        _read_whole(path, found)
        _read_from_within(path, found, control[3])
        _followed(path, found)
        if found.header is not None and not found.header.sealed:
            _read_growing(path, whole, found, control[1:3], in_place=not flags & _GROWS)


def segment_long(data: bytes) -> None:
    """A segment of which one part follows itself many times: work must not grow by the square."""
    control, body = data[:CONTROL].ljust(CONTROL, b"\0"), data[CONTROL:]
    at, size = int.from_bytes(control[1:3], "little") % (len(body) + 1), control[3] + 1
    whole = body[:at] + body[at : at + size] * (_LONG // size) + body[at:]
    if control[0] & _REPAIR:
        whole = reference.repaired(whole)
    path = scratch() / "7-8.0.rts"
    path.write_bytes(whole)
    with reader.Cursor(path) as cursor:
        got = list(cursor.poll(final=True))
        if cursor._crc_spent < _TRIED:  # beyond it, records may be given up: that is what bounds the work
            found = reference.read(whole)
            check(got == found.records, "the records", got[:9], found.records[:9])
            _followed(path, found)


def _read_whole(path: Path, found: reference.Found) -> None:
    with reader.Cursor(path) as cursor:
        got = list(cursor.poll(final=True))
        check(got == found.records, "the records", got, found.records)
        check(cursor.header == found.header, "the header", cursor.header, found.header)
        skipped = sum(one.skipped for one in cursor.damage)
        check(skipped == found.skipped, "bytes passed over", skipped, found.skipped)
        check(all(one.count > 0 and one.reason for one in cursor.damage), "damage says what it is", cursor.damage)
        check(list(cursor.poll(final=True)) == [], "nothing comes twice")


def _read_from_within(path: Path, found: reference.Found, which: int) -> None:
    if not found.records:
        return
    n = which % len(found.records)
    record = found.records[n]
    offset = record.offset + fmt.RECORD_HEADER.size + len(record.payload)
    with reader.Cursor(path, offset=offset) as cursor:
        got = list(cursor.poll(final=True))
    check(got == found.records[n + 1 :], "the rest", got, found.records[n + 1 :])


def _read_growing(path: Path, whole: bytes, found: reference.Found, cuts: bytes, *, in_place: bool) -> None:
    """What is there of a file at any moment is a prefix of what it holds in the end."""
    assert found.header is not None
    start, room = found.header.size, len(whole) - found.header.size
    got: list[reader.Record] = []
    with reader.Cursor(path, gap_grace_s=3600) as cursor:
        for cut in sorted(start + room * share // 255 for share in cuts):
            path.write_bytes(whole[:cut] + bytes(len(whole) - cut if in_place else 0))
            got += cursor.poll()
            check(got == found.records[: len(got)], "a prefix", got, found.records)
        path.write_bytes(whole)
        got += cursor.poll(final=True)
        skipped = sum(one.skipped for one in cursor.damage)
    check(got == found.records, "the records, followed", got, found.records)
    check(skipped == found.skipped, "bytes passed over, followed", skipped, found.skipped)


def _followed(path: Path, found: reference.Found) -> None:
    """The relay's fast reading finds the same."""
    kinds = {record.kind for record in found.records}
    into = follow.baskets(kinds)
    one = follow.Follower(str(path))
    for _ in range(2 * len(found.records) + 3):
        if one.read(into, follow.Basket(64, 3), final=True) is follow.Reading.DONE:
            break
    else:
        check(False, "the relay comes to an end")
    one.close()
    for kind in kinds:
        wanted = [record.payload for record in found.records if record.kind == kind]
        check(into[kind] == wanted, f"kind {kind} as the relay reads it", into[kind], wanted)


def sealed(data: bytes) -> None:
    """A dead process's segment, sealed for it: what could be read before can be read afterwards, and is counted."""
    control, whole = data[:CONTROL].ljust(CONTROL, b"\0"), data[CONTROL:]
    if control[0] & _REPAIR:
        whole = reference.repaired(whole)
    active, link = scratch() / "active", scratch() / "7-8.0.rts"
    path = active if control[0] & _SMALL else link
    link.unlink(missing_ok=True)
    path.write_bytes(whole)
    if path != link:
        link.symlink_to(path)
    found = reference.read(whole)
    try:
        seal.seal_file(str(path), str(link))
    except ValueError:
        check(found.header is None, "refused for want of a header alone", found.header)
        return
    assert found.header is not None
    if not link.exists():
        check(not found.records and found.header.number > 0, "only what was never used is removed", found.records)
        return
    with reader.Cursor(link) as cursor:
        got = list(cursor.poll(final=True))
        check(got == found.records, "the records, sealed", got, found.records)
        assert cursor.header is not None
        check(cursor.header.sealed, "it is sealed")
        spans = sum(record.kind in _SPANS for record in found.records)
        check(cursor.header.span_count == spans, "spans counted", cursor.header.span_count, spans)


def _parts(data: bytes) -> list[bytes]:
    """Splits an input into three files: each but the last has its length in front, two bytes."""
    parts = []
    for _ in range(2):
        size = int.from_bytes(data[:2], "little")
        parts.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [*parts, data]


def process(data: bytes) -> None:
    """All that a process leaves (segment, journal, table of open spans): a run is read, written out, and read again."""
    from raytrace_rl.monitor import load_run
    from tests.fuzz.otlp_targets import written_and_read_again

    flags, parts = data[0] if data else 0, _parts(data[1:])
    if flags & _REPAIR:
        parts = [reference.repaired(part) for part in parts]
    node = scratch() / "run" / "spool" / "node"
    shutil.rmtree(node, ignore_errors=True)
    node.mkdir(parents=True)
    names = ("7-1700000000000000000.0.rts", "7-1700000000000000000.open.0.rts", "7-1700000000000000000.open")
    for name, part in zip(names, parts, strict=True):
        if part:
            (node / name).write_bytes(part)
    if not any(parts):
        return
    if flags & 2:
        (node / "7-1700000000000000000.live").touch()  # nobody holds it: proven dead
    run = load_run(node.parent.parent)
    for row in run.spans:
        check(len(row.trace_id) == 32 and len(row.span_id) == 16, "a span has its ids", row)
    written_and_read_again(run, scratch())
    (files,) = listing.node_processes(node)
    for payload in truncated.closed_for(files):
        message = parses("Span", payload)
        check(message is not None, "what is closed for a dead process is a span", payload)
        check(message.end_time_unix_nano > 0, "and has ended", message)


TARGETS: Final[dict[str, Callable[[bytes], Any]]] = {
    "segment": segment,
    "segment_long": segment_long,
    "sealed": sealed,
    "process": process,
}
