"""The reader of spool files takes any bytes whatever, and says what it skipped."""

from __future__ import annotations

import os
import random
import threading
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrace_rl.relay.follow import Basket, Follower, Reading, baskets
from raytrace_rl.spool import listing
from raytrace_rl.spool import reader as reader_module
from raytrace_rl.spool.format import (
    MAX_PAYLOAD,
    RECORD_HEADER,
    SEALED_OFFSET,
    SYNC,
    SYNC_BYTES,
    Kind,
    pack_header,
    pack_record,
)
from raytrace_rl.spool.reader import Cursor
from tests import spooling

HEAD = pack_header(spooling.header())
PAYLOADS = [bytes((n,)) * (n * 7 % 50) for n in range(20)]
RECORDS = [pack_record(Kind.SPAN, payload) for payload in PAYLOADS]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One file for a whole property test: hypothesis runs a test's body many times in one fixture."""
    return tmp_path_factory.mktemp("reader") / "1-2.0.rts"


def read(path, *, final=True):
    """Reads a file once; returns payloads and the cursor."""
    with Cursor(path) as cursor:
        payloads = [record.payload for record in cursor.poll(final=final)]
    return payloads, cursor


def read_bytes(path, data, *, final=True):
    """Writes ``data`` and reads it as `read` does."""
    path.write_bytes(data)
    return read(path, final=final)


@settings(max_examples=300)
@given(data=st.binary(max_size=2000), prefix=st.sampled_from([b"", HEAD, HEAD + RECORDS[3], SYNC_BYTES]))
def test_any_bytes(scratch, data, prefix):
    """Catches bytes that crash the reader, or that it passes over without a word."""
    payloads, cursor = read_bytes(scratch, prefix + data)
    assert cursor.header is not None or not prefix.startswith(HEAD)
    read_to = len(HEAD) if cursor.header else 0
    accounted = read_to + sum(12 + len(p) for p in payloads) + sum(d.skipped for d in cursor.damage)
    rest = (prefix + data)[accounted:]
    assert not rest.strip(b"\0"), "bytes that were neither read nor reported"


@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(RECORDS),
            st.binary(min_size=1, max_size=40),
            st.just(SYNC_BYTES),
            st.builds(lambda n: bytes(n), st.integers(1, 50)),
        ),
        max_size=12,
    )
)
def test_records_among_rubbish(scratch, parts):
    """Catches a valid record that is lost because rubbish, or a false sync word, stands before it."""
    data = HEAD + b"\0" + b"\0".join(parts)  # never a record at the very place where rubbish claims one to end
    payloads, _ = read_bytes(scratch, data)
    wanted = [part[RECORD_HEADER.size :] for part in parts if part in RECORDS]
    assert [p for p in payloads if p in PAYLOADS] == wanted


@pytest.mark.parametrize("final", [True, False])
def test_every_byte_torn_off(scratch, final):
    """Catches a torn record that is taken for whole, or whole ones that are lost with it."""
    whole = HEAD + b"".join(RECORDS[:3])
    for cut in range(len(HEAD), len(whole)):
        payloads, cursor = read_bytes(scratch, whole[:cut], final=final)
        ends = [len(HEAD) + sum(map(len, RECORDS[:n])) for n in range(4)]
        intact = max(n for n in range(4) if ends[n] <= cut)
        assert payloads == PAYLOADS[:intact]
        torn = len(whole[ends[intact] : cut].rstrip(b"\0"))
        skipped = sum(damage.skipped for damage in cursor.damage)
        # A live file's torn tail means "try again", not damage.
        assert skipped == (torn if final else 0)


def test_header_torn_off(scratch):
    """Catches a crash, or a silent nothing, where the header itself is cut short."""
    for cut in range(1, len(HEAD)):
        payloads, cursor = read_bytes(scratch, HEAD[:cut])
        assert payloads == []
        assert [(d.kind, d.skipped) for d in cursor.damage] == [("header", len(HEAD[:cut].rstrip(b"\0")))]
        assert read_bytes(scratch, HEAD[:cut], final=False)[1].damage == []


@pytest.mark.parametrize("data", [b"", bytes(10), bytes(5000), HEAD, HEAD + bytes(5000)])
def test_nothing_written_is_no_damage(scratch, data):
    """Catches a segment prepared ahead of need that a report calls damaged."""
    payloads, cursor = read_bytes(scratch, data)
    assert payloads == []
    assert cursor.damage == []


@settings(max_examples=200)
@given(st.data())
def test_a_flipped_byte_costs_one_record(scratch, data):
    """Catches a flipped byte that costs more than the record it is in, or goes unreported."""
    records = RECORDS[1:6]
    whole = bytearray(HEAD + b"".join(records))
    at = data.draw(st.integers(len(HEAD), len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    hit, start = 0, len(HEAD)
    while start + len(records[hit]) <= at:
        start += len(records[hit])
        hit += 1
    payloads, cursor = read_bytes(scratch, bytes(whole))
    assert payloads == [p for n, p in enumerate(PAYLOADS[1:6]) if n != hit]
    assert [(d.offset, d.skipped, d.kind) for d in cursor.damage] == [(start, len(records[hit]), "record")]


def test_a_flipped_header_keeps_the_records(scratch):
    """Catches spans given up for lost because their file's header is damaged."""
    data = bytearray(HEAD + RECORDS[1] + RECORDS[2])
    data[50] ^= 1
    payloads, cursor = read_bytes(scratch, bytes(data))
    assert payloads == PAYLOADS[1:3]
    assert cursor.header is None
    assert [(d.kind, d.skipped, d.reason) for d in cursor.damage] == [
        ("header", len(HEAD), "spool header is damaged (CRC)")
    ]


def test_hole_is_passed_over_and_named(scratch):
    """Catches records behind a hole that are taken for unused space."""
    payloads, cursor = read_bytes(scratch, HEAD + RECORDS[1] + bytes(30) + RECORDS[2] + bytes(4000), final=False)
    assert payloads == PAYLOADS[1:3]
    assert [(d.offset, d.skipped) for d in cursor.damage] == [(len(HEAD) + len(RECORDS[1]), 30)]
    assert "hole" in cursor.damage[0].reason


def test_record_that_spans_two_pieces(scratch, monkeypatch):
    """Catches a record lost where the reader's pieces of a file meet, whole, torn, or behind damage."""
    monkeypatch.setattr(reader_module, "_PIECE", 256)
    monkeypatch.setattr(reader_module, "_RECORD_MAX", 100)
    rng = random.Random(5)
    payloads = [rng.randbytes(rng.randrange(88)) for _ in range(400)]
    records = [pack_record(Kind.SPAN, payload) for payload in payloads]
    assert read_bytes(scratch, HEAD + b"".join(records))[0] == payloads
    broken = bytes(rng.randrange(1, 200) for _ in range(999))
    got, cursor = read_bytes(scratch, HEAD + b"".join(records[:200]) + broken + b"".join(records[200:]))
    assert got == payloads
    assert sum(d.skipped for d in cursor.damage) == len(broken)


def test_longest_record_is_read_and_a_longer_one_refused(scratch):
    """Catches a limit that is off by one, and a damaged length that is believed."""
    longest = bytes(MAX_PAYLOAD)
    assert read_bytes(scratch, HEAD + pack_record(Kind.LOGS, longest) + RECORDS[1])[0] == [longest, PAYLOADS[1]]
    payloads, cursor = read_bytes(scratch, HEAD + pack_record(Kind.LOGS, longest + b"x") + RECORDS[1])
    assert payloads == [PAYLOADS[1]]
    assert "beyond the limit" in cursor.damage[0].reason


def test_a_record_torn_inside_an_allocated_file(scratch):
    """Catches zeros behind a torn record that complete it: a bare sync word's CRC holds over eight zeros."""
    for cut in range(1, len(RECORDS[2])):
        payloads, cursor = read_bytes(scratch, HEAD + RECORDS[1] + RECORDS[2][:cut] + bytes(200))
        assert payloads == PAYLOADS[1:2]
        assert [d.skipped for d in cursor.damage] == [len(RECORDS[2][:cut].rstrip(b"\0"))]
        payloads, cursor = read_bytes(scratch, HEAD + RECORDS[2][:cut] + bytes(200) + RECORDS[1])
        assert payloads == PAYLOADS[1:2]
        assert [d.skipped for d in cursor.damage] == [cut + 200]


def test_unknown_kinds_are_handed_on(scratch):
    """Catches a later version's records being called damage."""
    payloads, cursor = read_bytes(scratch, HEAD + pack_record(200, b"new") + RECORDS[1])
    assert payloads == [b"new", PAYLOADS[1]]
    assert cursor.damage == []


def test_overlapping_headers_are_linear_work(scratch):
    """Catches a file of record headers, each claiming a megabyte, that takes hours of CRCs."""
    fake = RECORD_HEADER.pack(SYNC, (MAX_PAYLOAD - 1) << 8 | 1, 0)
    data = HEAD + fake * ((8 << 20) // len(fake)) + RECORDS[1]
    started = time.process_time()
    payloads, cursor = read_bytes(scratch, data)
    assert time.process_time() - started < 30
    assert payloads == [PAYLOADS[1]]
    assert cursor.damage[0].skipped == len(data) - len(HEAD) - len(RECORDS[1])


def test_damage_after_damage_is_linear_work(scratch):
    """Catches a reader that looks at megabytes anew for each byte of rubbish between two records: hours for a file."""
    records = 1 << 16
    data = HEAD + (b"x" + pack_record(Kind.SPAN, b"abc")) * records
    scratch.write_bytes(data)
    started = time.process_time()
    assert len(read(scratch)[0]) == records
    follower, into = Follower(str(scratch)), baskets({Kind.SPAN})
    while follower.read(into, Basket(1 << 20, 1 << 20), final=True) is not Reading.DONE:
        pass
    assert time.process_time() - started < 30
    assert len(into[Kind.SPAN]) == follower.damaged == records


def test_records_behind_a_hole_of_megabytes(scratch):
    """Catches the last records of a file given up because they are a long way behind the damage before them."""
    behind = RECORDS[1] + bytes(5 << 20) + RECORDS[2] + bytes(100)
    payloads, cursor = read_bytes(scratch, HEAD + behind)
    assert payloads == PAYLOADS[1:3]
    assert [d.skipped for d in cursor.damage] == [5 << 20]
    payloads, cursor = read_bytes(scratch, HEAD + RECORDS[1] + bytes((4 << 20) + 100) + RECORDS[2] + RECORDS[3])
    assert payloads == PAYLOADS[1:4]


def test_memory_is_bounded_on_a_huge_sparse_file(scratch):
    """Catches a reader that takes a file into memory whole, or walks through a terabyte of zeros."""
    scratch.write_bytes(HEAD + RECORDS[1])
    os.truncate(scratch, 1 << 40)
    tracemalloc.start()
    try:
        started = time.process_time()
        payloads, _ = read(scratch)
        assert time.process_time() - started < 20
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
        scratch.write_bytes(b"")
    assert payloads == [PAYLOADS[1]]


def test_damages_are_listed_only_so_far(scratch, monkeypatch):
    """Catches a list of damages that grows with a hostile file; the sums must still be right."""
    monkeypatch.setattr(reader_module, "MAX_DAMAGES", 10)
    _, cursor = read_bytes(scratch, HEAD + (b"xyz" + RECORDS[1]) * 100)
    assert len(cursor.damage) == 10
    assert sum(d.count for d in cursor.damage) == 100
    assert sum(d.skipped for d in cursor.damage) == 300


@given(st.lists(st.integers(1, 60), max_size=30))
def test_growth_in_any_portions(scratch, portions):
    """Catches a record lost, repeated or called damaged because it was met half written."""
    whole = HEAD + b"".join(RECORDS)
    payloads = []
    scratch.write_bytes(b"")
    with Cursor(scratch) as cursor:
        position = 0
        for portion in [*portions, len(whole)]:
            with scratch.open("ab") as file:
                file.write(whole[position : position + portion])
            position += portion
            payloads += [record.payload for record in cursor.poll()]
        assert cursor.damage == []
    assert payloads == PAYLOADS


@given(st.lists(st.integers(1, 60), max_size=30))
def test_growth_inside_an_allocated_file(scratch, portions):
    """Catches the zeros behind the last record being taken for its continuation (as `test_growth_in_any_portions`)."""
    whole = HEAD + b"".join(RECORDS)
    payloads = []
    scratch.write_bytes(bytes(len(whole) + 500))
    with Cursor(scratch, gap_grace_s=60) as cursor:
        position = 0
        for portion in [*portions, len(whole)]:
            with scratch.open("r+b") as file:
                file.seek(position)
                file.write(whole[position : position + portion])
            position += portion
            payloads += [record.payload for record in cursor.poll()]
        assert cursor.damage == []
    assert payloads == PAYLOADS


def test_breaking_off_loses_nothing(scratch):
    """Catches a cursor that counts records as read which its user has not taken."""
    scratch.write_bytes(HEAD + b"".join(RECORDS))
    got: list[bytes] = []
    with Cursor(scratch) as cursor:
        while len(got) < len(RECORDS):
            for record in cursor.poll():
                got.append(record.payload)
                break
    assert got == PAYLOADS


def test_a_gap_in_a_live_file_is_waited_for(scratch):
    """Catches a follower that passes over a place which another thread fills a moment later."""
    gap = len(HEAD) + len(RECORDS[1])
    scratch.write_bytes(HEAD + RECORDS[1] + bytes(len(RECORDS[2])) + RECORDS[3])
    with Cursor(scratch, gap_grace_s=60) as cursor:
        assert [record.payload for record in cursor.poll()] == [PAYLOADS[1]]
        with scratch.open("r+b") as file:
            file.seek(gap)
            file.write(RECORDS[2])
        assert [record.payload for record in cursor.poll()] == PAYLOADS[2:4]
        assert cursor.damage == []


def test_a_gap_that_stays_is_given_up(scratch):
    """Catches a follower that stands before a hole for ever."""
    scratch.write_bytes(HEAD + bytes(20) + RECORDS[3])
    with Cursor(scratch, gap_grace_s=0.05) as cursor:
        got: list[bytes] = []
        deadline = time.monotonic() + 30
        while not got and time.monotonic() < deadline:
            got += [record.payload for record in cursor.poll()]
        assert got == [PAYLOADS[3]]
        assert [d.skipped for d in cursor.damage] == [20]


def test_follows_a_segment_from_memory_to_disk(tmp_path):
    """Catches records lost when the link to a segment in tmpfs is replaced by the sealed file."""
    active, link = tmp_path / "active", tmp_path / "1-2.0.rts"
    active.write_bytes(HEAD + RECORDS[1] + bytes(100))
    link.symlink_to(active)
    with Cursor(link) as cursor:
        assert [record.payload for record in cursor.poll()] == [PAYLOADS[1]]
        sealed = bytearray(HEAD + RECORDS[1] + RECORDS[2])
        sealed[SEALED_OFFSET] = 1
        (tmp_path / "new").write_bytes(sealed)
        (tmp_path / "new").replace(link)
        active.unlink()
        assert [record.payload for record in cursor.poll()] == [PAYLOADS[2]]
        assert cursor.sealed
        assert cursor.damage == []


def test_sealed_between_listing_and_opening(tmp_path, monkeypatch):
    """Catches "unreachable" for a segment whose link was replaced while it was being opened."""
    link = tmp_path / "1-2.0.rts"
    link.symlink_to(tmp_path / "gone")
    real_open = os.open

    def seal_first(path, flags, *rest):
        if link.is_symlink():
            try:
                return real_open(path, flags, *rest)
            finally:
                link.unlink()
                link.write_bytes(HEAD + RECORDS[1])
        return real_open(path, flags, *rest)

    monkeypatch.setattr(reader_module.os, "open", seal_first)
    payloads, cursor = read(link)
    assert payloads == [PAYLOADS[1]]
    assert cursor.damage == []


def test_dangling_link_is_reported(tmp_path):
    """Catches a segment lost with its node that nobody hears of."""
    link = tmp_path / "1-2.0.rts"
    link.symlink_to("/nowhere/1-2.0.rts")
    payloads, cursor = read(link)
    assert payloads == []
    assert [(d.kind, d.count) for d in cursor.damage] == [("unreachable", 1)]
    assert "/nowhere/1-2.0.rts" in cursor.damage[0].reason


def test_vanished_file(tmp_path):
    """Catches a crash on a file that was deleted after it was listed (a journal begun anew, the node's bound)."""
    payloads, cursor = read(tmp_path / "1-2.0.rts", final=False)
    assert (payloads, cursor.damage) == ([], [])
    assert [d.kind for d in read(tmp_path / "1-2.0.rts")[1].damage] == ["vanished"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_refused(tmp_path, make):
    """Catches a reader that hangs on a pipe, or runs in a circle of links."""
    path = tmp_path / "1-2.0.rts"
    make(path)
    payloads, cursor = read(path)
    assert payloads == []
    assert [d.kind for d in cursor.damage] == ["unreachable"]


def test_a_file_that_shrinks_is_survived(scratch):
    """Catches SIGBUS or a crash where a file is cut under its reader."""
    scratch.write_bytes(HEAD + RECORDS[5] * 1000)
    with Cursor(scratch) as cursor:
        records = cursor.poll()
        next(records)
        os.truncate(scratch, 10)
        assert len(list(records)) <= 1000
        assert list(cursor.poll(final=True)) == []


def test_following_a_thread_that_writes(tmp_path):
    """Catches records lost or repeated while a file really grows under a follower."""
    path = tmp_path / "1-2.0.rts"
    payloads = [str(n).encode() * (n % 9) for n in range(5000)]
    path.write_bytes(HEAD)

    def write():
        with path.open("ab", buffering=0) as file:
            for payload in payloads:
                file.write(pack_record(Kind.SPAN, payload))

    thread = threading.Thread(target=write)
    thread.start()
    got: list[bytes] = []
    with Cursor(path) as cursor:
        while thread.is_alive():
            got += [record.payload for record in cursor.poll()]
        thread.join()
        got += [record.payload for record in cursor.poll(final=True)]
        assert cursor.damage == []
    assert got == payloads


def test_a_record_placed_while_its_file_is_read(scratch, monkeypatch):
    """Catches a record skipped because it was placed, and another behind it, between two bytes of one read."""
    scratch.write_bytes(HEAD + b"".join(RECORDS[1:4]))
    hole = len(HEAD) + len(RECORDS[1]), len(RECORDS[2])
    real_pread = os.pread
    torn: list[int] = []

    def pread(fd, size, offset):
        data = real_pread(fd, size, offset)
        start = hole[0] - offset
        if not torn and 0 <= start < len(data) and offset:
            torn.append(offset)
            data = data[:start] + bytes(hole[1]) + data[start + hole[1] :]
        return data

    monkeypatch.setattr(reader_module.os, "pread", pread)
    payloads, cursor = read(scratch, final=False)
    assert len(torn) == 1
    assert payloads == PAYLOADS[1:4]
    assert cursor.damage == []


def test_listing_finds_each_process(tmp_path):
    """Catches a file attributed to no process or the wrong one, and strange names that stop a listing."""
    spool = spooling.Spool(tmp_path)
    spool.segment(7, b"", 0)
    spool.segment(7, b"", 12)
    spool.journal(7, b"", 3)
    spool.slots(7, [])
    spool.live_file(7)
    (spool.node_dir / f"8-{spooling.T0}.0.rts").symlink_to("/nowhere/x")
    for name in ("notes.txt", "7-8.0.rts.new", "x-1.0.rts", "7.rts", f"9-{spooling.T0}.live.1.rts", "7-8"):
        (spool.node_dir / name).touch()
    (tmp_path / "spool" / "stray-file").touch()
    first, second = listing.processes(tmp_path / "spool")
    assert (first.node, first.pid, first.start_ns) == ("node-a", 7, spooling.T0)
    assert sorted(first.segments) == [0, 12]
    assert list(first.journals) == [3]
    assert first.slots == str(spool.node_dir / f"{spool.stem(7)}.open")
    assert first.live == str(spool.node_dir / f"{spool.stem(7)}.live")
    assert (second.pid, list(second.segments), second.slots) == (8, [0], None)


@given(data=st.binary(max_size=3000), keep_header=st.booleans())
def test_table_of_any_bytes(scratch, data, keep_header):
    """Catches a table of open spans whose bytes crash its reader."""
    path = scratch.with_suffix(".open")
    path.write_bytes((HEAD if keep_header else b"") + data)
    header, spans, damage = listing.read_slots(str(path))
    assert all(0 < len(span) <= 510 for span in spans)
    assert (header is not None) == keep_header
    assert keep_header or damage is not None or not data.strip(b"\0")
