"""Single spans out of columns, for those few that a person is told of, or that a critical path goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from raytrace_rl.monitor.bulk.columns import Columns
from raytrace_rl.monitor.bulk.parts import Shape
from raytrace_rl.monitor.bulk.threads import Thread

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Process


class ColumnRow:
    """One span, with those attributes of `SpanRow` that reports ask for.

    Args:
        columns: The run.
        at: Its row.
    """

    __slots__ = ("_columns", "at", "process", "shape", "start_ns", "until_ns")

    def __init__(self, columns: Columns, at: int) -> None:
        self._columns = columns
        self.at = at
        self.shape: Shape = columns.shapes[columns.shape[at]]
        self.start_ns = int(columns.start[at])
        self.until_ns = int(columns.until[at])
        self.process: Process = columns.processes[columns.lane[at]]

    def __repr__(self) -> str:
        return f"<ColumnRow {self.name!r} {self.span_id} {self.start_ns}..{self.until_ns}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self.shape.name

    @property
    def span_group(self) -> str | None:
        """Its span group."""
        return self.shape.span_group

    @property
    def bucket(self) -> str | None:
        """Its bucket."""
        return self.shape.bucket

    @property
    def _thread(self) -> Thread:
        return self._columns.threads.thread(int(self._columns.thread[self.at]))

    @property
    def thread(self) -> str | None:
        """Name of its thread."""
        return self._thread[0]

    @property
    def thread_id(self) -> int | None:
        """Id of its thread."""
        return self._thread[1]

    @property
    def status(self) -> str:
        """``ERROR``, or nothing that matters here."""
        return "ERROR" if self.shape.error else "UNSET"

    @property
    def truncated(self) -> bool:
        """It was open when its process ended."""
        return self.shape.truncated

    @property
    def end_ns(self) -> int | None:
        """Its end, ns since the epoch; None while it is open."""
        return None if self._columns.opened[self.at] else self.until_ns

    @property
    def iteration(self) -> int | None:
        """Its iteration."""
        code = self._columns.iteration[self.at]
        return self._columns.iterations[code] if code >= 0 else None

    @property
    def attempt(self) -> int:
        """Attempt of the run, from 1."""
        return self.process.attempt

    @property
    def trace_id(self) -> str:
        """Hexadecimal."""
        trace: bytes = self._columns.traces[self._columns.trace[self.at]]
        return trace.hex()

    @property
    def span_id(self) -> str:
        """Hexadecimal."""
        return f"{int(self._columns.span[self.at]):016x}"

    @property
    def parent_span_id(self) -> str | None:
        """Hexadecimal; None for a root, zeros where its parent is not in the run."""
        at = int(self._columns.parent[self.at])
        return (f"{int(self._columns.span[at]):016x}" if at >= 0 else "0" * 16) if self.shape.has_parent else None

    @property
    def links(self) -> range:
        """Numbers of its links, which stand for them."""
        first, last = np.searchsorted(self._columns.links.row, (self.at, self.at + 1)).tolist()
        return range(first, last)

    @property
    def attributes(self) -> dict[str, Any]:
        """Of its attributes the weight version alone."""
        return self._columns.few_attributes(self.at)
