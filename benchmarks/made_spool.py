"""Makes the spool of a run of any size, without running it: a driver with steps, and ranks with phases below them."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl import semconv
from raytrace_rl.spool import liveness
from raytrace_rl.spool.format import RECORD_HEADER, SYNC, Header, Kind, pack_header, pack_record

T0: Final = 1_700_000_000_000_000_000
_STEP_NS: Final = 10_000_000_000
_TRACE: Final = bytes(range(16))
_SEGMENT: Final = 8 << 20
RANKS: Final = 32
#: Spans that a rank has in a step.
PHASES: Final = 100


def _attributes(values: dict[str, str | int]) -> list[KeyValue]:
    return [
        KeyValue(key=key, value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value))
        for key, value in values.items()
    ]


def _span(number: int, parent: int, name: str, start: int, end: int, **values: str | int) -> bytes:
    """A record; keywords are ``rl.*`` attributes."""
    about = {f"rl.{key}": value for key, value in values.items()}
    message = Span(
        trace_id=_TRACE,
        span_id=number.to_bytes(8, "big"),
        parent_span_id=parent.to_bytes(8, "big") if parent else b"",
        name=name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=T0 + start,
        end_time_unix_nano=T0 + end,
        attributes=_attributes({**about, "thread.id": 1, "thread.name": "MainThread"}),
    )
    return pack_record(Kind.SPAN, message.SerializeToString())


def _driver(steps: int) -> Iterable[bytes]:
    yield _span(1, 0, "rl.grpo.job", 0, steps * _STEP_NS, span_group="job")
    for step in range(steps):
        at, own, about = step * _STEP_NS, 10 + 10 * step, {"iteration": step + 1}
        yield _span(own, 1, "rl.grpo.step", at, at + _STEP_NS * 95 // 100, span_group="step", **about)
        for n, (name, bucket, start, end) in enumerate(
            (
                ("rl.idle.buffer_starvation", "idle", 0, 10),
                ("rl.grpo.policy_training", "productive", 10, 80),
                ("rl.grpo.weight_sync", "overhead", 80, 94),
            )
        ):
            times = at + _STEP_NS * start // 100, at + _STEP_NS * end // 100
            yield _span(own + 1 + n, own, name, *times, span_group="work", bucket=bucket, **about)


class _Pattern:
    """Records of spans that differ in their id and times alone; made in place, for there are millions."""

    _ID: Final = 0x0123456789ABCDEF
    _START: Final = 1 << 40
    _END: Final = 1 << 41

    def __init__(self, parent: int, name: str, **values: str | int) -> None:
        self._record = bytearray(_span(self._ID, parent, name, self._START, self._END, **values))
        self._word = RECORD_HEADER.unpack_from(self._record)[1]
        self._id = self._record.index(self._ID.to_bytes(8, "big"))
        self._times = [self._record.index((T0 + time).to_bytes(8, "little")) for time in (self._START, self._END)]

    def record(self, number: int, start: int, end: int) -> bytes:
        """Returns the record of one of them."""
        record = self._record
        struct.pack_into(">Q", record, self._id, number)
        struct.pack_into("<Q", record, self._times[0], T0 + start)
        struct.pack_into("<Q", record, self._times[1], T0 + end)
        payload = memoryview(record)[RECORD_HEADER.size :]
        RECORD_HEADER.pack_into(record, 0, SYNC, self._word, zlib.crc32(payload, self._word))
        return bytes(record)


def _rank(rank: int, steps: int) -> Iterable[bytes]:
    """Of each step the call that the driver sent, and what it did in there."""
    length = _STEP_NS * 70 // 100 // PHASES
    for step in range(steps):
        at = step * _STEP_NS + _STEP_NS // 10
        about: dict[str, str | int] = {"iteration": step + 1, "span_group": "policy_update"}
        call = (rank + 1 << 40) + step * PHASES
        yield _span(call, 12 + 10 * step, "rl.grpo.train", at, at + length * PHASES, queued_ns=1000 * rank, **about)
        phases = [_Pattern(call, f"rl.grpo.phase_{n}", bucket="productive", **about) for n in range(7)]
        for n in range(1, PHASES):
            start = at + n * length
            # One rank in each step takes longer, another one each time, so that none is slow.
            part = 9 if rank != step % RANKS else 10
            yield phases[n % 7].record(call + n, start, start + length * part // 10)


def make(run_dir: Path, spans: int) -> int:
    """Makes a run of about so many spans; returns how many there are."""
    steps = max(4, spans // (RANKS * PHASES + 4))
    length = steps * _STEP_NS
    about: dict[str, str | int] = {semconv.RL_ROLE: "driver", semconv.RL_RUN_ID: "made"}
    whole = write(run_dir, "node-a", 1000, _driver(steps), about, length)
    for rank in range(RANKS):
        about = {
            semconv.RL_ROLE: "worker",
            semconv.RL_WORKER_GROUP: "training",
            semconv.NV_DL_RANK: rank,
            semconv.RL_RUN_ID: "made",
        }
        whole += write(run_dir, "node-a", 2000 + rank, _rank(rank, steps), about, length)
    return whole


def write(
    run_dir: Path, node_name: str, pid: int, records: Iterable[bytes], about: dict[str, str | int], length_ns: int
) -> int:
    """Writes the segments of one process; returns how many spans they hold.

    Args:
        run_dir: Of the run.
        node_name: Of its node.
        pid: Of the process.
        records: Of its spans, as they are in the file.
        about: Its resource.
        length_ns: How long it ran, ns.
    """
    node = run_dir / "spool" / node_name
    node.mkdir(parents=True, exist_ok=True)
    resource = Resource(attributes=_attributes(about)).SerializeToString()
    held: list[bytes] = []
    size = number = whole = 0

    def segment() -> None:
        header = Header(
            size=0,
            heartbeat_ns=T0 + length_ns,
            span_count=len(held),
            dropped_spans=0,
            sealed=True,
            pid=pid,
            number=number,
            start_ns=T0,
            wall_anchor_ns=T0,
            monotonic_anchor_ns=0,
            boot_id=liveness.boot_id(),
            resource=resource,
        )
        (node / f"{pid}-{T0}.{number}.rts").write_bytes(pack_header(header) + b"".join(held))

    for record in records:
        held.append(record)
        size += len(record)
        whole += 1
        if size >= _SEGMENT:
            segment()
            held, size, number = [], 0, number + 1
    if held:
        segment()
    os.sync()  # not while something is measured
    return whole
