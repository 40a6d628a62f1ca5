"""Turns what one process left behind into Parquet, a batch of spans at a time: a long run is never in memory whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor import spool_files
from raytrace_rl.monitor.builder import Builder
from raytrace_rl.monitor.bulk.table_reading import TableReader
from raytrace_rl.monitor.columns import Sink
from raytrace_rl.monitor.load import load_run
from raytrace_rl.monitor.model import SpanRow
from raytrace_rl.spool import listing, liveness

if TYPE_CHECKING:
    from raytrace_rl._decode import Scope, Span
    from raytrace_rl.monitor.model import Process, State
    from raytrace_rl.spool.reader import Damage

#: Changes with the columns: what an older version has cached is made anew.
VERSION: Final = 2


class _Streaming(Builder):
    """Hands ended spans on at once. Holds open ones, and the fact that they have ended, until all has been read."""

    def __init__(self, path: str, sink: Sink) -> None:
        super().__init__(path)
        self._sink = sink
        self.reader: spool_files.ProcessReader | None = None
        self.caught: list[SpanRow] | None = None
        self._ended: set[bytes] = set()
        self._held: dict[bytes, SpanRow] = {}

    def ended(self, span: Span) -> bool:
        """Whether a span that was noted as open has been met with its end."""
        return span.trace_id + span.span_id in self._ended

    def add(self, span: Span, process: Process, scope: Scope | None = None) -> SpanRow | None:
        """Adds a span."""
        if len(span.trace_id) != 16 or len(span.span_id) != 8 or not any(span.trace_id) or not any(span.span_id):
            raise ValueError("span without a trace id and a span id")
        row = SpanRow(span, process, scope)
        process.last_ns = max(process.last_ns, row.end_ns or row.start_ns)
        key = span.trace_id + span.span_id
        if row.end_ns is None:
            self._held[key] = row
            return row
        if self.reader is not None and key in self.reader.open:
            if key in self._ended:
                return None
            self._ended.add(key)
        if self.caught is None:
            self._sink.spans([row])
        else:
            self.caught.append(row)
        return row

    def columns(self, made: Any) -> None:
        """Adds ended spans, none of which was noted as open."""
        self._sink.spans_table(made)

    def close(self) -> None:
        """Hands on what was held."""
        self._sink.spans(self._held.values())
        self._sink.rest(self.run, self.run.processes, self._stacks.values())


def state_of(files: listing.ProcessFiles) -> State:
    """Returns whether a process lives, as far as this host can tell."""
    return liveness.state(files.live, spool_files.boot_id(files))


def signature(files: listing.ProcessFiles, state: State) -> str:
    """Returns what tells that the files of a process are the same as before; empty while they may still change."""
    if state not in {"dead", "closed"}:
        return ""
    paths = [*files.segments.values(), *files.journals.values(), *([files.slots] if files.slots else [])]
    return json.dumps([VERSION, *_stats(paths)])


def file_signature(path: Path) -> str:
    """Returns the same of an OTLP file."""
    return json.dumps([VERSION, *_stats([str(path)])])


def _stats(paths: list[str]) -> Iterator[list[Any]]:
    for path in sorted(paths):
        try:
            found = os.stat(path)  # noqa: PTH116 - behind a link lies what is meant, and a path is all there is
        except OSError:
            yield [path, 0, 0]
        else:
            yield [path, found.st_size, found.st_mtime_ns]


def convert(files: listing.ProcessFiles, base: str, about: str, scratch: str, state: State) -> list[Damage]:
    """Writes the Parquet files of one process, and returns what could not be read of it.

    Args:
        files: What it left.
        base: Path of the files without their suffixes.
        about: Kept in them.
        scratch: Directory, of the same file system, for files that are not whole yet.
        state: Of the process, found out on its own host.
    """
    sink = Sink(Path(base), about, Path(scratch))
    try:
        builder = _Streaming(base, sink)
        builder.reader = reader = TableReader(builder, files, builder, state)
        reader.read()
        builder.close()
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    return builder.run.damage


def convert_file(path: str, base: str, about: str, scratch: str) -> list[Damage]:
    """Writes the Parquet files of an OTLP file, or of one spool file, and returns what could not be read of it."""
    run = load_run(path)
    sink = Sink(Path(base), about, Path(scratch))
    try:
        sink.spans(run.spans)
        sink.rest(run, run.processes, run.stacks)
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    return run.damage
