"""What the decoded spans of one lot are: columns, with numbers for what comes up again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from raytrace_rl import semconv
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Words
from raytrace_rl.monitor.bulk.links import Links, Trace
from raytrace_rl.monitor.bulk.templates import NUMBERS
from raytrace_rl.monitor.bulk.threads import Threads

if TYPE_CHECKING:
    from raytrace_rl import _decode
    from raytrace_rl.monitor.model import SpanRow

#: A time beyond is no time; with such a one in it a run is read row by row.
LATEST_NS: Final = 1 << 62
_NONE: Final = -1


class Shape(NamedTuple):
    """What many spans have in common: fields of `SpanRow`, the attribute ``queued_from``, and its status, ``error``."""

    name: str
    span_group: str | None
    bucket: str | None
    queued_from: str | None
    error: bool
    truncated: bool
    has_parent: bool


def shape_of(row: SpanRow) -> Shape:
    """Returns the shape of a row."""
    queued_from = row.attributes.get(semconv.RL_QUEUED_FROM)
    return Shape(
        row.name,
        row.span_group,
        row.bucket,
        queued_from if isinstance(queued_from, str) else None,
        row.status == "ERROR",
        row.truncated,
        row.parent_span_id is not None,
    )


@dataclass(slots=True)
class Part:
    """Spans as columns, in the order in which they were read.

    Attributes:
        span, parent: Ids as numbers; a parent of 0 is none, or none that a span could have.
        start, end: ns since the epoch; ``end`` is 0 while it is open.
        shape, trace, thread, iteration: Places in ``shapes``, ``traces``, ``threads`` and ``iterations``; -1
            for no iteration.
        queued, version: Row and value of ``rl.queued_ns`` and ``rl.weight_version``, where they are there.
        links, link_traces, nodes: What they link to, and the traces and nodes that these are of.
        absurd: There is a time that no clock shows.
    """

    span: Words
    parent: Words
    start: Ints
    end: Ints
    shape: Codes
    trace: Codes
    thread: Codes
    iteration: Codes
    shapes: list[Shape]
    traces: list[bytes]
    threads: Threads
    iterations: list[int]
    queued: tuple[Ints, Ints]
    version: tuple[Ints, Ints]
    links: Links
    link_traces: list[Trace]
    nodes: list[str]
    absurd: bool


@dataclass(slots=True)
class Batch:
    """The columns of one lot of records; a row that is no span has shape -1.

    Attributes:
        links, linked: What they link to, and such links as were decoded one by one; each with its row.
    """

    size: int

    def __post_init__(self) -> None:
        self.span = np.zeros(self.size, np.uint64)
        self.parent = np.zeros(self.size, np.uint64)
        self.start = np.zeros(self.size, np.uint64)
        self.end = np.zeros(self.size, np.uint64)
        self.shape = np.full(self.size, _NONE, np.int32)
        self.trace = np.zeros(self.size, np.int32)
        self.thread_name = np.full(self.size, _NONE, np.int32)
        self.numbers = {key: (np.zeros(self.size, np.int64), np.zeros(self.size, np.bool_)) for key in NUMBERS}
        self.links: list[Links] = []
        self.linked: list[tuple[int, _decode.Link]] = []

    span: Words = field(init=False)
    parent: Words = field(init=False)
    start: Words = field(init=False)
    end: Words = field(init=False)
    shape: Codes = field(init=False)
    trace: Codes = field(init=False)
    thread_name: Codes = field(init=False)
    numbers: dict[str, tuple[Any, Any]] = field(init=False)
    links: list[Links] = field(init=False)
    linked: list[tuple[int, _decode.Link]] = field(init=False)
