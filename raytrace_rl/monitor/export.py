"""Writes a run in the file forms of other tools: OTLP for collectors and trace backends, Perfetto's for its viewer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Final

from raytrace_rl._decode import Scope
from raytrace_rl._encode import varint
from raytrace_rl.monitor import otlp_json, otlp_proto, perfetto
from raytrace_rl.monitor.model import SCOPE_NAME, Process, Run, SpanRow

#: The standard file forms of OTLP.
OTLP_FORMATS: Final = ("otlp-json", "otlp-proto")
FORMATS: Final = (*OTLP_FORMATS, "perfetto")

#: Spans in one message: a line or message stays small enough for any receiver (gRPC's default is 4 MiB).
BATCH: Final = 1000

_OWN_SCOPE: Final = Scope(SCOPE_NAME, "", {})


def export(run: Run, form: str, out: IO[bytes]) -> int:
    """Writes every span of ``run`` to ``out``.

    Args:
        run: What to write.
        form: ``otlp-json``: one ``ExportTraceServiceRequest`` as JSON a line. ``otlp-proto``: the same as protobuf,
            each message preceded by its length as a varint. A message holds spans of one process, at most `BATCH`.
            ``perfetto``: a Perfetto trace.
        out: A binary file.

    Returns:
        How many spans were written. Spans still open have end time 0, in a Perfetto trace no end.
    """
    if form == "perfetto":
        return perfetto.write(run, out)
    written = 0
    for process, rows in batches(run):
        scopes = _by_scope(rows)
        if form == "otlp-json":
            message = json.dumps(otlp_json.request_json(process, scopes), separators=(",", ":"), ensure_ascii=False)
            out.write(message.encode("utf-8", "backslashreplace") + b"\n")
        else:
            data = otlp_proto.request(process, scopes)
            out.write(varint(len(data)) + data)
        written += len(rows)
    return written


def batches(run: Run) -> Iterator[tuple[Process, list[SpanRow]]]:
    """Yields the spans of each process, at most `BATCH` at a time, in the order of their start."""
    by_process: dict[str, list[SpanRow]] = {process.key: [] for process in run.processes}
    for row in run.spans:
        by_process[row.process.key].append(row)
    for process in run.processes:
        rows = by_process[process.key]
        for start in range(0, len(rows), BATCH):
            yield process, rows[start : start + BATCH]


def _by_scope(rows: list[SpanRow]) -> list[tuple[Scope, list[SpanRow]]]:
    scopes: dict[str, tuple[Scope, list[SpanRow]]] = {}
    for row in rows:
        scope = row.scope or _OWN_SCOPE
        scopes.setdefault(repr(scope), (scope, []))[1].append(row)
    return list(scopes.values())
