"""The columns of the SQL tables, and rows turned into them. What is the same for a whole process is in ``processes``.

Imports pyarrow, of the ``report`` extra; nothing but the store leads here.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from raytrace_rl.monitor.model import Process, Run, SpanRow, StackRow

if TYPE_CHECKING:
    from raytrace_rl.monitor.signals import LogRow, MetricRow

#: Rows that are turned into columns at a time.
BATCH: Final = 50_000
#: Bytes of a file that are summed at a time.
_PIECE: Final = 1 << 20

_TEXT, _INT, _REAL, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_REPEATED: Final = pa.dictionary(pa.int32(), pa.string())

Column = tuple[str, Any, Callable[[Any], Any]]


def json_text(value: Any) -> str:
    """Returns a value of an attribute, or all attributes, as JSON."""
    try:
        return json.dumps(value, default=_hex, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:  # JSON has no word for these numbers
        return json.dumps(_finite(value), default=_hex, separators=(",", ":"), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _hex(value: bytes) -> str:
    return value.hex()


_SPANS: Final[Sequence[Column]] = (
    ("trace_id", _TEXT, lambda row: row.trace_id),
    ("span_id", _TEXT, lambda row: row.span_id),
    ("parent_span_id", _TEXT, lambda row: row.parent_span_id),
    ("name", _REPEATED, lambda row: row.name),
    ("kind", _REPEATED, lambda row: row.kind),
    ("start_ns", _INT, lambda row: row.start_ns),
    ("end_ns", _INT, lambda row: row.end_ns),
    ("status", _REPEATED, lambda row: row.status),
    ("status_message", _TEXT, lambda row: row.status_message or None),
    ("span_group", _REPEATED, lambda row: row.span_group),
    ("bucket", _REPEATED, lambda row: row.bucket),
    ("iteration", _INT, lambda row: row.iteration),
    ("thread", _REPEATED, lambda row: row.thread),
    ("thread_id", _INT, lambda row: row.thread_id),
    ("lane", _REPEATED, lambda row: row.lane),
    ("queued_ns", _INT, lambda row: row.queued_ns),
    ("truncated", _BOOL, lambda row: row.truncated),
    ("scope", _REPEATED, lambda row: row.scope.name if row.scope else None),
    ("attributes", _TEXT, lambda row: json_text(row.attributes)),
    (
        "events",
        _TEXT,
        lambda row: (
            json_text([{"name": e.name, "time_ns": e.time_ns, "attributes": e.attributes} for e in row.events])
            if row.events
            else None
        ),
    ),
    (
        "links",
        _TEXT,
        lambda row: (
            json_text(
                [
                    {"trace_id": _hex(link.trace_id), "span_id": _hex(link.span_id), "attributes": link.attributes}
                    for link in row.links
                ]
            )
            if row.links
            else None
        ),
    ),
)

#: Of a process, and how much of what it left could not be read.
_PROCESSES: Final[Sequence[Column]] = (
    ("lane", _TEXT, lambda row: row[0].key),
    ("label", _TEXT, lambda row: row[0].label),
    ("role", _TEXT, lambda row: row[0].role),
    ("worker_group", _TEXT, lambda row: row[0].worker_group),
    ("rank", _INT, lambda row: row[0].rank),
    ("node_id", _TEXT, lambda row: row[0].node_id),
    ("actor_id", _TEXT, lambda row: row[0].actor_id),
    ("actor_class", _TEXT, lambda row: row[0].actor_class),
    ("incarnation", _INT, lambda row: row[0].incarnation),
    ("attempt", _INT, lambda row: row[0].attempt),
    ("pid", _INT, lambda row: row[0].pid),
    ("state", _TEXT, lambda row: row[0].state),
    ("start_ns", _INT, lambda row: row[0].start_ns),
    ("last_ns", _INT, lambda row: row[0].last_ns),
    ("dropped_spans", _INT, lambda row: row[0].drops.get("spans", 0)),
    ("damaged_records", _INT, lambda row: row[1]),
    ("run_id", _TEXT, lambda row: row[0].text("rl.run.id")),
    ("resource", _TEXT, lambda row: json_text(row[0].resource)),
)

_METRICS: Final[Sequence[Column]] = (
    ("name", _REPEATED, lambda row: row.name),
    ("kind", _REPEATED, lambda row: row.kind),
    ("unit", _REPEATED, lambda row: row.unit),
    ("temporality", _REPEATED, lambda row: row.temporality),
    ("monotonic", _BOOL, lambda row: row.monotonic),
    ("start_ns", _INT, lambda row: row.start_ns),
    ("time_ns", _INT, lambda row: row.time_ns),
    ("value", _REAL, lambda row: row.value),
    ("count", _INT, lambda row: row.count),
    ("sum", _REAL, lambda row: row.sum),
    ("min", _REAL, lambda row: row.min),
    ("max", _REAL, lambda row: row.max),
    ("bounds", pa.list_(_REAL), lambda row: row.bounds),
    ("bucket_counts", pa.list_(_INT), lambda row: row.bucket_counts),
    ("attributes", _TEXT, lambda row: json_text(row.attributes)),
    ("scope", _REPEATED, lambda row: row.scope),
    ("lane", _REPEATED, lambda row: row.process.key),
)

_LOGS: Final[Sequence[Column]] = (
    ("time_ns", _INT, lambda row: row.time_ns),
    ("severity", _INT, lambda row: row.severity),
    ("severity_text", _REPEATED, lambda row: row.severity_text),
    ("body", _TEXT, lambda row: row.body if isinstance(row.body, str) or row.body is None else json_text(row.body)),
    ("logger", _REPEATED, lambda row: row.logger),
    ("trace_id", _TEXT, lambda row: row.trace_id),
    ("span_id", _TEXT, lambda row: row.span_id),
    ("attributes", _TEXT, lambda row: json_text(row.attributes)),
    ("lane", _REPEATED, lambda row: row.process.key),
)

_STACKS: Final[Sequence[Column]] = (
    ("trace_id", _TEXT, lambda row: row.trace_id),
    ("span_id", _TEXT, lambda row: row.span_id),
    ("time_ns", _INT, lambda row: row.time_ns),
    ("text", _TEXT, lambda row: row.text),
)

COLUMNS: Final[dict[str, Sequence[Column]]] = {
    "processes": _PROCESSES,
    "spans": _SPANS,
    "metrics": _METRICS,
    "logs": _LOGS,
    "stacks": _STACKS,
}
SCHEMAS: Final = {
    table: pa.schema([pa.field(name, kind) for name, kind, _ in columns]) for table, columns in COLUMNS.items()
}


def as_table(table: str, rows: Iterable[Any]) -> pa.Table:
    """Returns rows of one of the `COLUMNS` as an Arrow table."""
    rows = list(rows)
    arrays = [pa.array([_text_safe(of(row)) for row in rows], kind) for _, kind, of in COLUMNS[table]]
    return pa.Table.from_arrays(arrays, schema=SCHEMAS[table])


class Sink:
    """The Parquet files of one source: ``<base>.<table>.parquet``, each written in batches, none for an empty table.

    Several processes may write the same ones at once: each writes files of its own, and whole ones take the names.

    Args:
        base: Path without the suffixes.
        about: Kept in the metadata of ``processes``, with what tells the other files apart from any that came later,
            and the id of the process that wrote them.
        scratch: Directory, of the same file system, where files are as long as they are not whole.
    """

    def __init__(self, base: Path, about: str, scratch: Path) -> None:
        self._base = base
        self._about = about
        self._scratch = scratch
        self._own = secrets.token_hex(4)
        self._rows: dict[str, list[Any]] = {table: [] for table in COLUMNS}
        self._made: dict[str, list[pa.Table]] = {table: [] for table in COLUMNS}
        self._writers: dict[str, pq.ParquetWriter] = {}

    def spans(self, rows: Iterable[SpanRow]) -> None:
        """Adds spans."""
        self._add("spans", rows)

    def spans_table(self, made: pa.Table) -> None:
        """Adds spans that are columns already; whoever adds both adds them in order."""
        self._gather("spans")
        self._made["spans"].append(made)
        if sum(map(len, self._made["spans"])) >= BATCH:
            self._flush("spans")

    def rest(self, run: Run, processes: Iterable[Process], stacks: Iterable[StackRow]) -> None:
        """Adds all else that was read."""
        metrics: Iterable[MetricRow] = run.metrics
        logs: Iterable[LogRow] = run.logs
        damaged = [sum(damage.count for damage in run.damage)]  # of a file with several processes: said of the first
        about = [(process, damaged.pop() if damaged else 0) for process in processes]
        for table, rows in (("metrics", metrics), ("logs", logs), ("processes", about), ("stacks", stacks)):
            self._add(table, rows)

    def _add(self, table: str, rows: Iterable[Any]) -> None:
        held = self._rows[table]
        for row in rows:
            held.append(row)
            if len(held) >= BATCH and table != "processes":  # it is written last, and there are few
                self._flush(table)

    def _gather(self, table: str) -> None:
        """Makes columns of the rows that are held."""
        rows = self._rows[table]
        if rows:
            self._made[table].append(as_table(table, rows))
            rows.clear()

    def _flush(self, table: str, metadata: dict[str, str] | None = None) -> None:
        self._gather(table)
        if not self._made[table]:
            return
        made = pa.concat_tables(self._made[table]).unify_dictionaries()
        self._made[table].clear()
        writer = self._writers.get(table)
        if writer is None:
            described = SCHEMAS[table].with_metadata(metadata)
            writer = self._writers[table] = pq.ParquetWriter(
                self._part(table), described, compression="zstd", write_page_checksum=True
            )
        writer.write_table(made)

    def _part(self, table: str) -> Path:
        return self._scratch / f"{self._base.name}.{table}.{self._own}.part"

    def close(self) -> list[Path]:
        """Writes what is left, and gives the files their names; ``processes``, which tells that all are there, last."""
        signs: dict[str, list[int]] = {}
        written = []
        for table in sorted(COLUMNS, key="processes".__eq__):
            path = Path(f"{self._base}.{table}.parquet")
            self._flush(table, {"raytrace_rl": self._about, "files": json.dumps(signs), "pid": str(os.getpid())})
            if table in self._writers:
                self._writers[table].close()
                signs[table] = file_sign(self._part(table))
                self._part(table).replace(path)
                written.append(path)
            else:
                path.unlink(missing_ok=True)
        return written

    def abandon(self) -> None:
        """Takes away what was written."""
        for writer in self._writers.values():
            writer.close()
        for table in COLUMNS:
            self._part(table).unlink(missing_ok=True)


def file_sign(path: Path) -> list[int]:
    """Returns what tells a file from any other, one in which a bit has flipped included. [] where it is not there."""
    sum_ = size = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                sum_, size = zlib.crc32(piece, sum_), size + len(piece)
            return [size, os.fstat(file.fileno()).st_mtime_ns, sum_]
    except FileNotFoundError:
        return []


def _text_safe(value: Any) -> Any:
    """A value as Arrow takes it: text without lone surrogates, integers that fit."""
    if type(value) is str and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return None
    return value
