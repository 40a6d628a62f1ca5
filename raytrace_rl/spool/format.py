"""The bytes of a spool file: its header, its records, its table of open spans. Specified in docs/spool-format.md.

A segment is a header followed by records. Everything is little-endian. A header's fixed part is covered by its own
CRC; the fields that are rewritten in place while the file lives (heartbeat, counts, sealed) are not.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAGIC: Final = b"RTSPOOL\n"
VERSION: Final = 1

#: magic, version, header size | heartbeat (wall ns), ended spans (set at seal), spans dropped by this process so far,
#: sealed | CRC, then the fixed part
_PREFIX: Final = struct.Struct("<8sII")
_MUTABLE: Final = struct.Struct("<QQQI")
_CRC: Final = struct.Struct("<I")
#: pid, segment number, start (wall ns), wall anchor, monotonic anchor, boot id, resource length
_FIXED: Final = struct.Struct("<IIQQQ16sI")

HEARTBEAT_OFFSET: Final = _PREFIX.size
SPAN_COUNT_OFFSET: Final = HEARTBEAT_OFFSET + 8
DROPPED_OFFSET: Final = SPAN_COUNT_OFFSET + 8
SEALED_OFFSET: Final = DROPPED_OFFSET + 8
_CRC_OFFSET: Final = HEARTBEAT_OFFSET + _MUTABLE.size
_FIXED_OFFSET: Final = _CRC_OFFSET + _CRC.size
MIN_HEADER_SIZE: Final = _FIXED_OFFSET + _FIXED.size
#: A Resource beyond this is cut by the writer; a reader refuses a larger header: a damaged length costs nothing.
MAX_HEADER_SIZE: Final = 1 << 20

_LONGEST_RESOURCE: Final = MAX_HEADER_SIZE - MIN_HEADER_SIZE - 8

#: 0xF5 never occurs in UTF-8, so no text inside a payload can look like a record.
SYNC: Final = 0x53_54_52_F5
SYNC_BYTES: Final = struct.pack("<I", SYNC)
#: sync, length << 8 | kind, CRC-32 of the payload seeded with the word before it
RECORD_HEADER: Final = struct.Struct("<III")
MAX_PAYLOAD: Final = 1 << 20

#: The table of open spans: one OTLP Span a slot, u16 length first.
SLOT_SIZE: Final = 512
SLOT_COUNT: Final = 256

#: In the place of the ids, in a STACK record: the threads of the process that have no span open.
NO_SPAN: Final = bytes(24)


class Kind(IntEnum):
    """What a record's payload is."""

    SPAN = 1  #: OTLP ``Span`` of this library's own instrumentation scope
    OPEN_SPAN = 2  #: OTLP ``Span`` without an end time
    STACK = 3  #: trace id (16), span id (8), wall ns (u64), UTF-8 text: where an open span's thread or task stands
    METRICS = 4  #: OTLP ``ScopeMetrics``
    LOGS = 5  #: OTLP ``ScopeLogs``
    RESOURCE = 6  #: OTLP ``Resource``: replaces the one in the header from here on
    DROPS = 7  #: UTF-8 JSON object of counts since the process started; the last one holds
    CLOCK = 8  #: wall ns, monotonic ns (two u64): a later anchor
    CLOSE = 9  #: wall ns (u64): the process closed its spool itself
    SCOPE_SPANS = 10  #: OTLP ``ScopeSpans`` of a foreign instrumentation scope
    SPAN_GONE = 11  #: trace id (16), span id (8): an open span noted before has ended
    PEER_CLOCK = 12  #: ns (i64), UTF-8 name of a node: `peer_clock`


@dataclass(frozen=True)
class Header:
    """A spool file's header, decoded.

    Attributes:
        size: Bytes before the first record.
        heartbeat_ns: Wall clock of the writer's last sign of life, ns since the epoch.
        span_count: Ended spans in the segment; 0 until it is sealed.
        dropped_spans: Ended spans that this process could not place, as of the last heartbeat: kept here so that the
            count survives a full disk.
        sealed: True once nothing more will be appended.
        pid: Writer's process id.
        number: Segment number, from 0.
        start_ns: Wall clock at which the writer started; with the pid it names the process.
        wall_anchor_ns, monotonic_anchor_ns: The two clocks read together, at start.
        boot_id: Kernel boot id of the writer's host (16 bytes, zero where unknown).
        resource: OTLP ``Resource`` bytes.
    """

    size: int
    heartbeat_ns: int
    span_count: int
    dropped_spans: int
    sealed: bool
    pid: int
    number: int
    start_ns: int
    wall_anchor_ns: int
    monotonic_anchor_ns: int
    boot_id: bytes
    resource: bytes


def pack_header(header: Header) -> bytes:
    """Returns the header's bytes; ``header.size`` is computed (a multiple of 8), the value given is ignored.

    A resource that does not fit is cut behind the last attribute that does.
    """
    resource = header.resource
    if len(resource) > _LONGEST_RESOURCE:
        resource = _whole_fields(resource, _LONGEST_RESOURCE)
    fixed = (
        _FIXED.pack(
            header.pid,
            header.number,
            header.start_ns,
            header.wall_anchor_ns,
            header.monotonic_anchor_ns,
            header.boot_id,
            len(resource),
        )
        + resource
    )
    size = (_FIXED_OFFSET + len(fixed) + 7) & ~7
    fixed = fixed.ljust(size - _FIXED_OFFSET, b"\0")
    prefix = _PREFIX.pack(MAGIC, VERSION, size)
    mutable = _MUTABLE.pack(header.heartbeat_ns, header.span_count, header.dropped_spans, header.sealed)
    return prefix + mutable + _CRC.pack(zlib.crc32(fixed, zlib.crc32(prefix))) + fixed


def _whole_fields(message: bytes, room: int) -> bytes:
    """Returns the length-delimited protobuf fields at the start of ``message`` that fit ``room`` bytes, all whole."""
    end = at = 0
    while at + 1 < len(message) and message[at] & 0x87 == 2:
        at += 1
        size = shift = 0
        while at < len(message):
            byte = message[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 128:
                break
        else:
            break
        at += size
        if at > min(room, len(message)):
            break
        end = at
    return message[:end]


def parse_header(data: bytes) -> Header:
    """Decodes the header at the start of ``data`` (which may go on behind it).

    Raises:
        ValueError: It is no spool file, of an unknown version, cut short or damaged; the message says which.
    """
    if len(data) < MIN_HEADER_SIZE:
        raise ValueError(f"{len(data)} bytes are too few for a spool header")
    magic, version, size = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("not a spool file (magic missing)")
    if version != VERSION:
        raise ValueError(f"spool format version {version} is not known here (this reader knows {VERSION})")
    if not MIN_HEADER_SIZE <= size <= MAX_HEADER_SIZE or size > len(data):
        raise ValueError(f"spool header is cut short or damaged (size {size})")
    (crc,) = _CRC.unpack_from(data, _CRC_OFFSET)
    if zlib.crc32(data[_FIXED_OFFSET:size], zlib.crc32(data[: _PREFIX.size])) != crc:
        raise ValueError("spool header is damaged (CRC)")
    heartbeat_ns, span_count, dropped, sealed = _MUTABLE.unpack_from(data, HEARTBEAT_OFFSET)
    pid, number, start_ns, wall, monotonic, boot_id, length = _FIXED.unpack_from(data, _FIXED_OFFSET)
    if MIN_HEADER_SIZE + length > size:
        raise ValueError(f"spool header is damaged (resource of {length} bytes)")
    resource = bytes(data[MIN_HEADER_SIZE : MIN_HEADER_SIZE + length])
    return Header(
        size,
        heartbeat_ns,
        span_count,
        dropped,
        bool(sealed),
        pid,
        number,
        start_ns,
        wall,
        monotonic,
        boot_id,
        resource,
    )


def pack_record(kind: int, payload: bytes) -> bytes:
    """Returns one whole record, ready to be placed by a single slice assignment."""
    word = len(payload) << 8 | kind
    return RECORD_HEADER.pack(SYNC, word, zlib.crc32(payload, word)) + payload


def peer_clock(delay_ns: int, node: str) -> bytes:
    """Returns the payload of a `Kind.PEER_CLOCK` record.

    Args:
        delay_ns: This process's wall clock when the answer came, minus the node's when it was sent, ns.
        node: The other node's directory in the spool.
    """
    return delay_ns.to_bytes(8, "little", signed=True) + node.encode("utf-8", "backslashreplace")


def read_peer_clock(payload: bytes) -> tuple[int, str]:
    """Returns delay and node of a `Kind.PEER_CLOCK` record.

    Raises:
        ValueError: It is too short.
    """
    if len(payload) < 9:
        raise ValueError("peer clock record is too short")
    return int.from_bytes(payload[:8], "little", signed=True), payload[8:].decode("utf-8", "replace")
