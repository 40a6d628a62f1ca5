"""What the tests of the relay read out of batches."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl.relay import cursors
from raytrace_rl.relay.batch import Batch
from raytrace_rl.relay.tail import Tail
from raytrace_rl.spool.format import Kind


def read_all(tail: Tail, *, max_bytes: int = 4 << 20, max_records: int = 1000) -> list[Batch]:
    """Reads and acknowledges until there is nothing more; the batches that hold something."""
    batches = []
    while True:
        batch = tail.read(max_bytes, max_records)
        tail.acknowledge(batch)
        if not batch.empty:
            batches.append(batch)
        if not batch.full:
            return batches


def numbers(batches: Iterable[Batch]) -> list[int]:
    """The numbers (`tests.spooling.span`) of the spans in batches."""
    return [
        int.from_bytes(Span.FromString(payload).span_id, "big")
        for batch in batches
        for portion in batch.portions
        for payload in portion.payloads[Kind.SPAN]
    ]


def tallies(node_dir):
    """What the relays of a node have noted, by signal."""
    return {one.signal: one.tally for one in cursors.noted(node_dir) if one.current}
