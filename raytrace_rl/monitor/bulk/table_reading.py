"""Reads one process for its Parquet files: large segments as columns, all else as `spool_files` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from raytrace_rl.monitor import spool_files
from raytrace_rl.monitor.bulk.arrays import Words
from raytrace_rl.monitor.bulk.framing import Frames, SegmentFile
from raytrace_rl.monitor.bulk.table_rows import TableRows
from raytrace_rl.monitor.load import file_size
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.reader import Record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from raytrace_rl.monitor.builder import Builder
    from raytrace_rl.monitor.model import SpanRow, State
    from raytrace_rl.spool.listing import ProcessFiles

#: A segment of fewer bytes is read row by row, which takes no longer.
LARGE_BYTES: Final = 256 << 10


class Taker(Protocol):
    """What takes the spans.

    Attributes:
        caught: Where rows go that are read one by one, if not on at once.
    """

    caught: list[SpanRow] | None

    def columns(self, made: Any) -> None:
        """Takes ended spans of the process, as an Arrow table."""


class TableReader(spool_files.ProcessReader):
    """Reads one process.

    Args:
        builder: Takes what is read row by row.
        files: Of the process.
        taker: The same builder, as what takes columns.
        state: Of the process, found out on its own host.
    """

    def __init__(self, builder: Builder, files: ProcessFiles, taker: Taker, state: State) -> None:
        super().__init__(builder, files)
        self._found = state
        self._taker = taker
        self._rows = TableRows(self.process.key)

    def _state(self) -> State:
        return self._found

    def _file(self, path: str, number: int | None = None) -> None:
        if number is None or file_size(path) < LARGE_BYTES:
            super()._file(path, number)
            return
        file = SegmentFile(path, final=self.process.state in {"dead", "closed"})
        ended = 0
        apart = self._noted()
        for frames in file.frames():
            if (frames.kind == fmt.Kind.OPEN_SPAN).any():  # one of a journal, and it changes what is apart
                ended += self._one_by_one(path, frames, range(len(frames.kind)))
                apart = self._noted()
                continue
            ended += self._lot(path, frames, apart)
        self._settle(path, file.header, file.damage, file.last_offset, ended)

    def _noted(self) -> Words:
        """The ids of spans that were noted as open: whether they ended has to be remembered."""
        return np.array([int.from_bytes(key[16:], "big") for key in self.open if len(key) == 24], np.uint64)

    def _lot(self, path: str, frames: Frames, apart: Words) -> int:
        lot = self._rows.lot(frames, apart)
        self.process.last_ns = max(self.process.last_ns, lot.last_ns())
        caught: list[tuple[int, SpanRow]] = []
        ended = lot.count()
        for at in lot.left():
            self._taker.caught = []
            ended += self._one_by_one(path, frames, [at])
            caught += [(at, row) for row in self._taker.caught]
        self._taker.caught = None
        if lot.count() or caught:
            self._taker.columns(lot.table(caught))
        return ended

    def _one_by_one(self, path: str, frames: Frames, records: Iterable[int]) -> int:
        kinds, offsets = frames.kind, frames.offset
        return sum(self._take(path, Record(int(kinds[at]), frames.payload(at), int(offsets[at]))) for at in records)
