"""What the files in tests/golden hold, as code. ``python -m tests.golden_spool`` writes them anew after a new version.

A change of these bytes is a change of the format: it needs a new VERSION, and the old files stay readable.
"""

from __future__ import annotations

from pathlib import Path

from raytrace_rl.spool.format import SLOT_SIZE, Header, Kind, pack_header, pack_record

GOLDEN = Path(__file__).parent / "golden"

#: OTLP Resource {rl.role: "worker"}.
RESOURCE = bytes.fromhex("0a130a07726c2e726f6c6512080a06776f726b6572")
TRACE_ID = bytes.fromhex("0af7651916cd43dd8448eb211c80319c")
SPAN_ID = bytes.fromhex("b7ad6b7169203331")
OPEN_ID = bytes.fromhex("00f067aa0ba902b7")


def _span(span_id: bytes, name: bytes, start_ns: int, end_ns: int) -> bytes:
    """OTLP Span by hand, so that the golden bytes depend on no library."""
    body = b"\x0a\x10" + TRACE_ID + b"\x12\x08" + span_id + b"\x2a" + bytes((len(name),)) + name + b"\x30\x01"
    body += b"\x39" + start_ns.to_bytes(8, "little")
    return body + (b"\x41" + end_ns.to_bytes(8, "little") if end_ns else b"")


ENDED_SPAN = _span(SPAN_ID, b"rl.grpo.step", 1_700_000_000_000_000_000, 1_700_000_001_500_000_000)
OPEN_SPAN = _span(OPEN_ID, b"rl.vllm.generate", 1_700_000_001_000_000_000, 0)
#: Every kind of record, in the order of their numbers.
RECORDS = (
    (Kind.SPAN, ENDED_SPAN),
    (Kind.OPEN_SPAN, OPEN_SPAN),
    (Kind.STACK, TRACE_ID + OPEN_ID + (1_700_000_002_000_000_000).to_bytes(8, "little") + b'File "a.py", line 1'),
    (Kind.METRICS, b""),
    (Kind.LOGS, b""),
    (Kind.RESOURCE, RESOURCE),
    (Kind.DROPS, b'{"spans": 3, "bytes": 512}'),
    (Kind.CLOCK, (1_700_000_002_000_000_000).to_bytes(8, "little") + (42_000_000_000).to_bytes(8, "little")),
    (Kind.CLOSE, (1_700_000_003_000_000_000).to_bytes(8, "little")),
    (Kind.SCOPE_SPANS, b"\x0a\x05\x0a\x03lib"),
    (Kind.SPAN_GONE, TRACE_ID + OPEN_ID),
)

HEADER = Header(
    size=0,
    heartbeat_ns=1_700_000_003_000_000_000,
    span_count=2,
    dropped_spans=3,
    sealed=True,
    pid=4242,
    number=7,
    start_ns=1_699_999_999_000_000_000,
    wall_anchor_ns=1_699_999_998_000_000_000,
    monotonic_anchor_ns=40_000_000_000,
    boot_id=bytes(range(0xA0, 0xB0)),
    resource=RESOURCE,
)


def files() -> dict[str, bytes]:
    """The golden files by name, as this version writes them."""
    head = pack_header(HEADER)
    slots = b"".join(
        (len(data).to_bytes(2, "little") + data).ljust(SLOT_SIZE, b"\0") for data in (OPEN_SPAN, b"", ENDED_SPAN)
    )
    return {
        "segment-v1.rts": head + b"".join(pack_record(kind, payload) for kind, payload in RECORDS),
        "table-v1.open": head + slots,
    }


if __name__ == "__main__":
    for file_name, content in files().items():
        (GOLDEN / file_name).write_bytes(content)
