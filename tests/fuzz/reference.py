"""What a spool reader has to find in a file, said as plainly as can be: the fuzzer holds the real readers against it.

Slow, without pieces, limits of work, or files: one loop over bytes in memory, after docs/spool-format.md.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.reader import Record


class Found(NamedTuple):
    """What a file holds.

    Attributes:
        header: Its header, None where there is none that can be read.
        records: Its records in order.
        skipped: Bytes passed over: in front of records, and behind the last one but for zeros.
        begun: The file is more than room that was allocated ahead.
    """

    header: fmt.Header | None
    records: list[Record]
    skipped: int
    begun: bool


def read(data: bytes, most: int = fmt.RECORD_HEADER.size + fmt.MAX_PAYLOAD) -> Found:
    """Reads a file that nobody writes to any more; ``most`` is the size of the longest record, header included."""
    if not data[: fmt.MIN_HEADER_SIZE].strip(b"\0"):
        return Found(None, [], 0, False)
    try:
        header = fmt.parse_header(data)
    except ValueError:
        header = None
    at = header.size if header is not None else 0
    records: list[Record] = []
    skipped = 0
    while True:
        record = _first(data, at, most)
        if record is None:
            return Found(header, records, skipped + len(data[at:].rstrip(b"\0")), True)
        skipped += record.offset - at
        records.append(record)
        at = record.offset + fmt.RECORD_HEADER.size + len(record.payload)


def _first(data: bytes, start: int, most: int) -> Record | None:
    """The first valid record from ``start`` on."""
    at = data.find(fmt.SYNC_BYTES, start)
    while at >= 0:
        record = _record(data, at, most)
        if record is not None:
            return record
        at = data.find(fmt.SYNC_BYTES, at + 1)
    return None


def _record(data: bytes, at: int, most: int) -> Record | None:
    if len(data) - at < fmt.RECORD_HEADER.size:
        return None
    _, word, crc = fmt.RECORD_HEADER.unpack_from(data, at)
    begin = at + fmt.RECORD_HEADER.size
    stop = begin + (word >> 8)
    if not word & 0xFF or stop > len(data) or stop - at > most or zlib.crc32(data[begin:stop], word) != crc:
        return None
    return Record(word & 0xFF, data[begin:stop], at)


def repaired(data: bytes) -> bytes:
    """Returns ``data`` with right CRCs in its header and its records, wherever those could be meant: a change of one
    byte would else only ever be met as damage, and what lies behind a CRC never be tried.
    """
    whole = bytearray(data)
    at = 0
    if len(whole) >= fmt.MIN_HEADER_SIZE:
        size = int.from_bytes(whole[12:16], "little")
        if fmt.MIN_HEADER_SIZE <= size <= len(whole):
            whole[:12] = fmt.MAGIC + struct.pack("<I", fmt.VERSION)
            crc = zlib.crc32(whole[fmt.SEALED_OFFSET + 8 : size], zlib.crc32(whole[: fmt.HEARTBEAT_OFFSET]))
            whole[fmt.SEALED_OFFSET + 4 : fmt.SEALED_OFFSET + 8] = struct.pack("<I", crc)
            at = size
    while (at := whole.find(fmt.SYNC_BYTES, at)) >= 0 and len(whole) - at >= fmt.RECORD_HEADER.size:
        _, word, _ = fmt.RECORD_HEADER.unpack_from(whole, at)
        begin = at + fmt.RECORD_HEADER.size
        stop = begin + (word >> 8)
        if stop > len(whole):
            at += 1
            continue
        whole[at + 8 : begin] = struct.pack("<I", zlib.crc32(whole[begin:stop], word))
        at = stop
    return bytes(whole)
