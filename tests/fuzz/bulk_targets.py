"""Fuzz targets of what reads large runs: records found a piece at a time, and spans decoded many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from raytrace_rl.monitor.bulk import decoding, framing
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool import reader
from tests import decoded, spooling
from tests.fuzz import reference
from tests.fuzz.checking import check, scratch

_REPAIR, _SMALL = 1, 2
#: The longest record of a small piece, and its size; header included.
_SHORT: Final = 100
_PIECE: Final = 256


def frames(data: bytes) -> None:
    """A segment framed piece by piece, with whatever is out of order left to the cursor: all is found, once."""
    flags, whole = data[0] if data else 0, data[1:]
    if flags & _REPAIR:
        whole = reference.repaired(whole)
    path = scratch() / "7-8.0.rts"
    path.write_bytes(whole)
    kept = framing._PIECE, framing._RECORD_MAX, reader._FIRST_PIECE, reader._PIECE, reader._RECORD_MAX
    if flags & _SMALL:
        framing._PIECE, framing._RECORD_MAX = _PIECE, _SHORT  # type: ignore[misc]
        reader._FIRST_PIECE, reader._PIECE, reader._RECORD_MAX = 50, _PIECE, _SHORT  # type: ignore[misc]
    try:
        found = reference.read(whole, reader._RECORD_MAX)
        file = framing.SegmentFile(str(path), final=True)
        got = [
            reader.Record(int(lot.kind[n]), lot.payload(n), int(lot.offset[n]))
            for lot in file.frames()
            for n in range(len(lot.kind))
        ]
    finally:
        (framing._PIECE, framing._RECORD_MAX, reader._FIRST_PIECE, reader._PIECE, reader._RECORD_MAX) = kept  # type: ignore[misc]
    check(got == found.records, "the records", got, found.records)
    check(file.header == found.header, "the header", file.header, found.header)
    skipped = sum(one.skipped for one in file.damage)
    check(skipped == found.skipped, "bytes passed over", skipped, found.skipped)
    check(file.last_offset == (found.records[-1].offset if found.records else -1), "the last one", file.last_offset)


def alike(data: bytes) -> None:
    """Records that differ in a few bytes, decoded by what they have in common: the same as one by one.

    The first byte says how many of the following pairs (a place, a byte) there are, each of which makes a record of the
    rest with another byte in that place.
    """
    changes, body = (data[0] % 16 if data else 0), data[1:]
    pairs, payload = body[: 3 * changes], body[3 * changes :]
    payloads = [payload] * 4
    for n in range(0, len(pairs) - 2, 3):
        at = int.from_bytes(pairs[n : n + 2], "little") % max(1, len(payload))
        payloads.append(payload[:at] + pairs[n + 2 : n + 3] + payload[at + 1 :])
    worth, decoding._WORTH = decoding._WORTH, 2  # type: ignore[misc]
    try:
        many = decoded.many_at_once(payloads)
    finally:
        decoding._WORTH = worth  # type: ignore[misc]
    one_by_one = decoded.one_by_one(payloads)
    check(many == one_by_one, "the spans", many, one_by_one)


def seeds(files: dict[str, bytes], payloads: dict[int, list[bytes]]) -> dict[str, dict[str, bytes]]:
    """Returns the first inputs of these targets, of whole files and of the payloads of records by their kind."""
    about = {"count": 3, "age_s": 0.5, "made_ns": 1 << 60, "node": "node-a", "lag": 1}
    links = [(7, {f"rl.trajectory.{key}": value for key, value in about.items()}), (8, {"rl.weight_version": 3})]
    spans = [*payloads[fmt.Kind.SPAN], spooling.span(1, 2, 3, parent=4, links=links)]
    change = b"".join(at.to_bytes(2, "little") + b"\x01" for at in (1, 30, 60, 90, 120, 150))
    return {
        "frames": {f"{name}-{flags}": bytes((flags,)) + data for name, data in files.items() for flags in range(4)},
        "alike": {str(n): bytes((6,)) + change + payload for n, payload in enumerate(spans)},
    }


TARGETS: Final[dict[str, Callable[[bytes], Any]]] = {"frames": frames, "alike": alike}
