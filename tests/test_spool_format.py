"""The byte format: golden files, headers, records."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.format import MAX_HEADER_SIZE, MIN_HEADER_SIZE, Header, Kind, pack_header, parse_header
from raytrace_rl.spool.listing import read_slots
from raytrace_rl.spool.reader import Cursor
from tests import golden_spool, spooling

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    size=st.just(0),
    heartbeat_ns=u64,
    span_count=u64,
    dropped_spans=u64,
    sealed=st.booleans(),
    pid=u32,
    number=u32,
    start_ns=u64,
    wall_anchor_ns=u64,
    monotonic_anchor_ns=u64,
    boot_id=st.binary(min_size=16, max_size=16),
    resource=st.binary(max_size=300),
)


@pytest.mark.parametrize("name", sorted(golden_spool.files()))
def test_golden_bytes_are_still_written(name):
    """Catches a change of the format without a new version: runs already on disk would not be read right."""
    assert golden_spool.files()[name] == (golden_spool.GOLDEN / name).read_bytes()


def test_golden_segment_is_read():
    """Catches a reader that has moved on from what version 1 put on disk."""
    with Cursor(golden_spool.GOLDEN / "segment-v1.rts") as cursor:
        records = [(record.kind, record.payload) for record in cursor.poll()]
    assert records == [(int(kind), payload) for kind, payload in golden_spool.RECORDS]
    assert cursor.header is not None
    assert replace(cursor.header, size=0) == golden_spool.HEADER
    assert cursor.damage == []


def test_golden_table_is_read():
    """Catches a table of open spans whose slots are looked for in another place."""
    header, spans, damage = read_slots(str(golden_spool.GOLDEN / "table-v1.open"))
    assert header is not None
    assert spans == [golden_spool.OPEN_SPAN, golden_spool.ENDED_SPAN]
    assert damage is None


@given(headers)
def test_header_comes_back(header):
    """Catches a field that is packed and parsed differently."""
    packed = pack_header(header)
    parsed = parse_header(packed + b"what follows")
    assert parsed == replace(header, size=len(packed))
    assert len(packed) % 8 == 0


@given(headers, st.data())
def test_fixed_part_is_covered_by_its_crc(header, data):
    """Catches a flipped bit in a header that goes unnoticed: wrong pid, wrong anchor, wrong resource."""
    packed = bytearray(pack_header(header))
    fixed = [at for at in range(len(packed)) if not fmt.HEARTBEAT_OFFSET <= at < fmt.SEALED_OFFSET + 4]
    packed[data.draw(st.sampled_from(fixed))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=r"spool|bytes"):
        parse_header(bytes(packed))


def test_mutable_fields_are_where_the_writer_rewrites_them():
    """Catches an offset constant that no longer matches the struct: heartbeats would destroy the header."""
    packed = bytearray(pack_header(golden_spool.HEADER))
    struct.pack_into("<Q", packed, fmt.HEARTBEAT_OFFSET, 11)
    struct.pack_into("<Q", packed, fmt.SPAN_COUNT_OFFSET, 22)
    struct.pack_into("<Q", packed, fmt.DROPPED_OFFSET, 33)
    struct.pack_into("<I", packed, fmt.SEALED_OFFSET, 0)
    parsed = parse_header(bytes(packed))
    assert (parsed.heartbeat_ns, parsed.span_count, parsed.dropped_spans, parsed.sealed) == (11, 22, 33, False)


@given(st.binary(max_size=400))
def test_any_header_bytes(data):
    """Catches bytes that make the header parser raise anything but ValueError."""
    for candidate in (data, fmt.MAGIC + data):
        with pytest.raises(ValueError, match=r"spool|bytes"):
            parse_header(candidate)


def test_header_size_beyond_the_limit_is_refused():
    """Catches a damaged length that makes a reader fetch gigabytes."""
    packed = bytearray(pack_header(golden_spool.HEADER))
    struct.pack_into("<I", packed, 12, MAX_HEADER_SIZE + 8)
    with pytest.raises(ValueError, match="damaged"):
        parse_header(bytes(packed) + bytes(2 * MAX_HEADER_SIZE))


def test_a_resource_that_does_not_fit_is_cut_between_attributes():
    """Catches a process with much to say of itself whose whole header, and so its identity, no reader takes."""
    values = {f"key{n}": "x" * 60_000 for n in range(30)}
    packed = pack_header(replace(golden_spool.HEADER, resource=spooling.resource(**values)))
    assert len(packed) <= MAX_HEADER_SIZE
    kept = Resource.FromString(parse_header(packed).resource).attributes
    assert [(one.key, len(one.value.string_value)) for one in kept] == [(f"key{n}", 60_000) for n in range(17)]


def test_a_resource_longer_than_its_header_is_damage():
    """Catches records taken for a part of the resource, and a header that depends on how much of the file was read."""
    packed = bytearray(pack_header(golden_spool.HEADER))
    struct.pack_into("<I", packed, MIN_HEADER_SIZE - 4, 5000)
    crc = zlib.crc32(packed[fmt.SEALED_OFFSET + 8 :], zlib.crc32(packed[: fmt.HEARTBEAT_OFFSET]))
    struct.pack_into("<I", packed, fmt.SEALED_OFFSET + 4, crc)
    with pytest.raises(ValueError, match="5000"):
        parse_header(bytes(packed) + bytes(9000))


def test_unknown_version_is_named():
    """Catches a file of a later version being called damaged instead of too new."""
    packed = bytearray(pack_header(golden_spool.HEADER))
    struct.pack_into("<I", packed, 8, 2)
    with pytest.raises(ValueError, match="version 2"):
        parse_header(bytes(packed))


@given(st.sampled_from(list(Kind)), st.binary(max_size=300))
def test_record_layout(kind, payload):
    """Catches a record that differs from docs/spool-format.md, which readers in other languages follow."""
    record = fmt.pack_record(kind, payload)
    word = len(payload) * 256 + kind
    assert record[:4] == b"\xf5RTS"
    assert int.from_bytes(record[4:8], "little") == word
    assert int.from_bytes(record[8:12], "little") == zlib.crc32(payload, word)
    assert record[12:] == payload


def test_specification_names_every_kind_and_constant():
    """Catches a kind or limit that was added to the code and not to the specification."""
    text = (Path(__file__).parents[1] / "docs" / "spool-format.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| `([A-Z_]+)`", text, re.MULTILINE))
    assert rows == {str(int(kind)): kind.name for kind in Kind}
    for value in (fmt.MIN_HEADER_SIZE, fmt.MAX_HEADER_SIZE, fmt.MAX_PAYLOAD, fmt.SLOT_SIZE, fmt.SLOT_COUNT):
        assert f"{value:,}" in text
