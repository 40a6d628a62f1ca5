"""What the decoded spans of one lot are: columns, with numbers for what comes up again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from raytrace_rl import semconv
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Words
from raytrace_rl.monitor.bulk.templates import NUMBERS

if TYPE_CHECKING:
    from raytrace_rl import _decode
    from raytrace_rl.monitor.model import SpanRow

#: A time beyond is no time; with such a one in it a run is read row by row.
LATEST_NS: Final = 1 << 62
_NONE: Final = -1


#: Name and id, as far as they are there.
Thread = tuple[str | None, int | None]


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


class Coder:
    """Gives things numbers, in the order in which they come up."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._codes: dict[Any, int] = {}

    def code(self, thing: Any) -> int:
        """Returns the number of a thing."""
        found = self._codes.get(thing)
        if found is None:
            found = self._codes[thing] = len(self.things)
            self.things.append(thing)
        return found


@dataclass(slots=True)
class Part:
    """Spans as columns, in the order in which they were read.

    Attributes:
        span, parent: Ids as numbers; a parent of 0 is none, or none that a span could have.
        start, end: ns since the epoch; ``end`` is 0 while it is open.
        shape, trace, thread, iteration: Places in ``shapes``, ``traces``, ``threads`` (name and id of each) and
            ``iterations``; -1 for no iteration.
        queued, version: Row and value of ``rl.queued_ns`` and ``rl.weight_version``, where they are there.
        linked: Row and links of the spans that have any.
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
    threads: list[Thread]
    iterations: list[int]
    queued: tuple[Ints, Ints]
    version: tuple[Ints, Ints]
    linked: list[tuple[int, Sequence[_decode.Link]]]
    absurd: bool


@dataclass(slots=True)
class Batch:
    """The columns of one lot of records; a row that is no span has shape -1."""

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
        self.linked: dict[int, Sequence[_decode.Link]] = {}

    span: Words = field(init=False)
    parent: Words = field(init=False)
    start: Words = field(init=False)
    end: Words = field(init=False)
    shape: Codes = field(init=False)
    trace: Codes = field(init=False)
    thread_name: Codes = field(init=False)
    numbers: dict[str, tuple[Any, Any]] = field(init=False)
    linked: dict[int, Sequence[_decode.Link]] = field(init=False)
