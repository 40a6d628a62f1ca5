"""Writes a run in the file forms of other tools: OTLP for collectors and trace backends, Perfetto's for its viewer."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Final

from raytrace_rl._decode import Scope
from raytrace_rl._encode import varint
from raytrace_rl.monitor import otlp_json_out, otlp_proto, perfetto, spool_files
from raytrace_rl.monitor.builder import Builder
from raytrace_rl.monitor.load import Progress, file_size, spool_processes
from raytrace_rl.monitor.model import SCOPE_NAME, Process, Run, SpanRow

if TYPE_CHECKING:
    from pathlib import Path

#: The standard file forms of OTLP.
OTLP_FORMATS: Final = ("otlp-json", "otlp-proto")
FORMATS: Final = (*OTLP_FORMATS, "perfetto")

#: Spans in one message.
BATCH: Final = 1000
#: Bytes of one that has several: gRPC takes 4 MiB unless told, the collector 1 MiB a line of a file.
MOST_BYTES: Final = 1_000_000

_OWN_SCOPE: Final = Scope(SCOPE_NAME, "", {})


def nobody(done: int, whole: int) -> None:
    """Progress that nobody watches."""
    del done, whole


def export(run: Run, form: str, out: IO[bytes], progress: Progress = nobody) -> int:
    """Writes every span of ``run`` to ``out``.

    Args:
        run: What to write.
        form: ``otlp-json``: one ``ExportTraceServiceRequest`` as JSON a line. ``otlp-proto``: the same as protobuf,
            each message preceded by its length as a varint. A message holds spans of one process, at most `BATCH`, and
            no more than fit into `MOST_BYTES`.
            ``perfetto``: a Perfetto trace.
        out: A binary file.
        progress: Called with how many spans have been written, and how many there are.

    Returns:
        How many spans were written. Spans still open have end time 0, in a Perfetto trace no end.
    """
    if form == "perfetto":
        return perfetto.write(run, out, progress)
    written = 0
    by_process: dict[str, list[SpanRow]] = {process.key: [] for process in run.processes}
    for row in run.spans:
        by_process[row.process.key].append(row)
    for process in run.processes:
        written += _write(process, by_process[process.key], form, out)
        progress(written, len(run.spans))
    return written


def export_spool(path: Path, form: str, out: IO[bytes], progress: Progress = nobody) -> int:
    """Writes the spans of a run directory, one process after the other: no more than one is in memory.

    Of a span that was met in several processes each copy is written that may be better than those before: who reads
    them takes the best one.

    Args:
        path: The run directory.
        form: ``otlp-json`` or ``otlp-proto``, as `export` writes them.
        out: A binary file.
        progress: Called with how many bytes of the spool have been dealt with, and how many there are.

    Returns:
        How many spans were written.

    Raises:
        UnreadableRunError: Nothing is there to read.
    """
    every = sorted(spool_processes(path), key=lambda files: (files.start_ns, f"{files.node}/{files.stem}"))
    sizes = [sum(map(file_size, files.segments.values())) for files in every]
    ended: set[bytes] = set()
    written = done = 0
    for files, size in zip(every, sizes, strict=True):
        builder = Builder(str(path))
        spool_files.add_process(builder, files)
        run = builder.finish()
        rows = []
        for row in run.spans:
            span = bytes.fromhex(row.trace_id + row.span_id)
            if span in ended:
                continue
            rows.append(row)
            if row.end_ns is not None and not row.truncated:
                ended.add(span)
        for process in run.processes:
            written += _write(process, rows, form, out)
        done += size
        progress(done, sum(sizes))
    return written


def _write(process: Process, rows: list[SpanRow], form: str, out: IO[bytes]) -> int:
    for start in range(0, len(rows), BATCH):
        _write_lot(process, rows[start : start + BATCH], form, out)
    return len(rows)


def _write_lot(process: Process, rows: list[SpanRow], form: str, out: IO[bytes]) -> None:
    data = _message(process, rows, form)
    if len(data) > MOST_BYTES and len(rows) > 1:
        half = len(rows) // 2
        _write_lot(process, rows[:half], form, out)
        _write_lot(process, rows[half:], form, out)
    else:
        out.write(data)


def _message(process: Process, rows: list[SpanRow], form: str) -> bytes:
    scopes = _by_scope(rows)
    if form == "otlp-json":
        text = json.dumps(otlp_json_out.request_json(process, scopes), separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8", "backslashreplace") + b"\n"
    data = otlp_proto.request(process, scopes)
    return varint(len(data)) + data


def _by_scope(rows: list[SpanRow]) -> list[tuple[Scope, list[SpanRow]]]:
    scopes: dict[str, tuple[Scope, list[SpanRow]]] = {}
    for row in rows:
        scope = row.scope or _OWN_SCOPE
        scopes.setdefault(repr(scope), (scope, []))[1].append(row)
    return list(scopes.values())
