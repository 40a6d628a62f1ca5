"""Helpers of the tests that read spools: files made by hand, spans made with the official protobuf classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from raytrace_rl.spool import liveness
from raytrace_rl.spool.format import SLOT_COUNT, SLOT_SIZE, Header, Kind, pack_header, pack_record

TRACE = bytes(range(16))
#: 2023-11-14T22:13:20Z in ns: what every time of these tests counts from.
T0 = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


def any_value(value: Any) -> AnyValue:
    """OTLP AnyValue of a Python value."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, dict):
        return AnyValue(kvlist_value=KeyValueList(values=attributes(value)))
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
    return AnyValue()


def attributes(values: dict[str, Any]) -> list[KeyValue]:
    """OTLP attributes."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


def resource(**values: Any) -> bytes:
    """OTLP Resource bytes; ``rl__role="driver"`` stands for ``rl.role``."""
    return Resource(
        attributes=attributes({key.replace("__", "."): value for key, value in values.items()})
    ).SerializeToString()


def span_id(n: int) -> bytes:
    """The id of span number ``n``."""
    return n.to_bytes(8, "big")


def span(
    n: int,
    start_s: float,
    end_s: float | None,
    *,
    parent: int = 0,
    name: str | None = None,
    trace: bytes = TRACE,
    error: bool = False,
    links: Sequence[tuple[int, dict[str, Any]]] = (),
    **values: Any,
) -> bytes:
    """OTLP Span bytes: number ``n``, seconds from T0; keywords are attributes, ``rl__bucket`` for ``rl.bucket``.

    ``links`` are numbers of spans of the same trace, each with the link's attributes.
    """
    message = Span(
        trace_id=trace,
        span_id=span_id(n),
        parent_span_id=span_id(parent) if parent else b"",
        name=name or f"span {n}",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=T0 + round(start_s * SECOND),
        end_time_unix_nano=0 if end_s is None else T0 + round(end_s * SECOND),
        attributes=attributes({key.replace("__", "."): value for key, value in values.items()}),
        links=[Span.Link(trace_id=trace, span_id=span_id(to), attributes=attributes(of)) for to, of in links],
    )
    if error:
        message.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="it broke"))
    return message.SerializeToString()


def header(**fields: Any) -> Header:
    """A header of this host's; keywords are its fields."""
    base = Header(
        size=0,
        heartbeat_ns=T0,
        span_count=0,
        dropped_spans=0,
        sealed=False,
        pid=77,
        number=0,
        start_ns=T0,
        wall_anchor_ns=T0,
        monotonic_anchor_ns=5,
        boot_id=liveness.boot_id(),
        resource=b"",
    )
    return replace(base, **fields)


def ended(*payloads: bytes) -> bytes:
    """Records of ended spans."""
    return b"".join(pack_record(Kind.SPAN, payload) for payload in payloads)


class Spool:
    """A run directory with one node, to which processes' files are added."""

    def __init__(self, run_dir: Path, node: str = "node-a") -> None:
        self.run_dir = run_dir
        self.node_dir = run_dir / "spool" / node
        self.node_dir.mkdir(parents=True)

    def stem(self, pid: int) -> str:
        return f"{pid}-{T0}"

    def segment(self, pid: int, records: bytes, number: int = 0, *, pad: int = 0, **fields: Any) -> Path:
        """Writes a segment; ``pad`` zero bytes follow, as in a file that was allocated ahead."""
        path = self.node_dir / f"{self.stem(pid)}.{number}.rts"
        path.write_bytes(pack_header(header(pid=pid, number=number, **fields)) + records + bytes(pad))
        return path

    def journal(self, pid: int, records: bytes, number: int = 0, **fields: Any) -> Path:
        path = self.node_dir / f"{self.stem(pid)}.open.{number}.rts"
        path.write_bytes(pack_header(header(pid=pid, number=number, **fields)) + records)
        return path

    def slots(self, pid: int, spans: list[bytes], **fields: Any) -> Path:
        path = self.node_dir / f"{self.stem(pid)}.open"
        slots = [len(data).to_bytes(2, "little") + data for data in spans] + [b""] * (SLOT_COUNT - len(spans))
        path.write_bytes(
            pack_header(header(pid=pid, **fields)) + b"".join(slot.ljust(SLOT_SIZE, b"\0") for slot in slots)
        )
        return path

    def live_file(self, pid: int) -> Path:
        """Makes the liveness file: with no lock on it, its process is proven dead."""
        path = self.node_dir / f"{self.stem(pid)}.live"
        path.touch()
        return path

    def alive(self, pid: int) -> liveness.Liveness:
        """Makes the liveness file and holds it, as a living writer does."""
        return liveness.Liveness(os.fspath(self.node_dir / f"{self.stem(pid)}.live"))
