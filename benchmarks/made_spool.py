"""Makes the spool of a run of any size, without running it: a driver with steps, and ranks with phases below them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl import semconv
from raytrace_rl.spool import liveness
from raytrace_rl.spool.format import Header, Kind, pack_header, pack_record

_T0: Final = 1_700_000_000_000_000_000
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
        start_time_unix_nano=_T0 + start,
        end_time_unix_nano=_T0 + end,
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


def _rank(rank: int, steps: int) -> Iterable[bytes]:
    length = _STEP_NS * 70 // 100 // PHASES
    for step in range(steps):
        at = step * _STEP_NS + _STEP_NS // 10
        for n in range(PHASES):
            number = (rank + 1 << 40) + step * PHASES + n
            start = at + n * length
            about: dict[str, str | int] = {"iteration": step + 1, "span_group": "policy_update", "bucket": "productive"}
            name = f"rl.grpo.phase_{n % 7}"
            yield _span(number, 12 + 10 * step, name, start, start + length * 9 // 10, **about)


def make(run_dir: Path, spans: int) -> int:
    """Makes a run of about so many spans; returns how many there are."""
    steps = max(4, spans // (RANKS * PHASES + 4))
    node = run_dir / "spool" / "node-a"
    node.mkdir(parents=True)
    whole = _write(node, 1000, _driver(steps), {semconv.RL_ROLE: "driver", semconv.RL_RUN_ID: "made"}, steps)
    for rank in range(RANKS):
        about: dict[str, str | int] = {
            semconv.RL_ROLE: "worker",
            semconv.RL_WORKER_GROUP: "training",
            semconv.NV_DL_RANK: rank,
            semconv.RL_RUN_ID: "made",
        }
        whole += _write(node, 2000 + rank, _rank(rank, steps), about, steps)
    return whole


def _write(node: Path, pid: int, records: Iterable[bytes], about: dict[str, str | int], steps: int) -> int:
    resource = Resource(attributes=_attributes(about)).SerializeToString()
    held: list[bytes] = []
    size = number = whole = 0

    def segment() -> None:
        header = Header(
            size=0,
            heartbeat_ns=_T0 + steps * _STEP_NS,
            span_count=len(held),
            dropped_spans=0,
            sealed=True,
            pid=pid,
            number=number,
            start_ns=_T0,
            wall_anchor_ns=_T0,
            monotonic_anchor_ns=0,
            boot_id=liveness.boot_id(),
            resource=resource,
        )
        (node / f"{pid}-{_T0}.{number}.rts").write_bytes(pack_header(header) + b"".join(held))

    for record in records:
        held.append(record)
        size += len(record)
        whole += 1
        if size >= _SEGMENT:
            segment()
            held, size, number = [], 0, number + 1
    if held:
        segment()
    os.sync()
    return whole
