"""Exported files are what the official OTLP classes read, and say the same as the run."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks import made_spool
from raytrace_rl import _decode
from raytrace_rl.monitor import export as export_module
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.export import export
from raytrace_rl.monitor.model import Process, Run, SpanRow
from tests.spooling import SECOND, T0, Spool, ended, resource, span
from tests.test_decode import assert_same_span, spans

IDS = ("traceId", "spanId", "parentSpanId")


def official_json(line):
    """The official message of a line: protobuf's own JSON has base64 where OTLP has hexadecimal ids."""

    def convert(value):
        if isinstance(value, list):
            return [convert(item) for item in value]
        if isinstance(value, dict):
            return {
                key: base64.b64encode(bytes.fromhex(item)).decode() if key in IDS else convert(item)
                for key, item in value.items()
            }
        return value

    return json_format.ParseDict(convert(json.loads(line)), ExportTraceServiceRequest())


def official_messages(form, data):
    """The official messages of an exported file."""
    if form == "otlp-json":
        return [official_json(line) for line in data.splitlines()]
    messages, at = [], 0
    while at < len(data):
        size, at = _decode._varint(data, at, len(data))
        messages.append(ExportTraceServiceRequest.FromString(data[at : at + size]))
        at += size
    return messages


def exported(run, form):
    """The bytes of an export."""
    out = io.BytesIO()
    assert export(run, form, out) == len(run.spans)
    return out.getvalue()


def _with_whole_ids(message):
    """The same span, its parent's and its links' ids as long as they must be."""
    message.parent_span_id = message.parent_span_id and message.parent_span_id.ljust(8, b"p")[:8]
    for link in message.links:
        link.trace_id = link.trace_id and link.trace_id.ljust(16, b"t")[:16]
        link.span_id = link.span_id and link.span_id.ljust(8, b"s")[:8]
    return message


@settings(max_examples=200)
@given(spans.map(_with_whole_ids))
@pytest.mark.parametrize("form", export_module.OTLP_FORMATS)
def test_every_field_survives(form, message):
    """Catches any field of a span that an export loses or changes, for whatever a span may hold."""
    process = Process("p", resource={"service.name": "x"})
    run = Run("x", "x", [SpanRow(_decode.span(message.SerializeToString()), process)], [process])
    (request,) = official_messages(form, exported(run, form))
    (batch,) = request.resource_spans
    assert [(a.key, a.value.string_value) for a in batch.resource.attributes] == [("service.name", "x")]
    (scope,) = batch.scope_spans
    assert scope.scope.name == "raytrace_rl"
    (out,) = scope.spans
    assert_same_span(_decode.span(message.SerializeToString()), Span.FromString(out.SerializeToString()))


@pytest.mark.parametrize("form", export_module.OTLP_FORMATS)
def test_ids_that_a_collector_refuses_stay_behind(form):
    """Catches one bad id of a parent or link that makes a collector refuse a thousand spans."""
    link = _decode.Link(b"t" * 16, b"s" * 8, "", {}, 0, 0)
    made = _decode.span(span(1, 0, 1))
    made.parent_span_id = b"abc"
    made.links = (link, link._replace(trace_id=b"short"), link._replace(span_id=b"far too long"))
    process = Process("p")
    (request,) = official_messages(form, exported(Run("x", "x", [SpanRow(made, process)], [process]), form))
    (out,) = request.resource_spans[0].scope_spans[0].spans
    assert out.parent_span_id == b""
    assert [one.trace_id for one in out.links] == [b"t" * 16]
    assert out.dropped_links_count == 2


@pytest.fixture
def run(tmp_path):
    """Two processes; one of them was killed with a span open."""
    spool = Spool(tmp_path / "run")
    spool.segment(
        10,
        ended(span(1, 0, 9, name="rl.grpo.job", rl__span_group="job", nan=math.nan, inf=-math.inf, blob=b"\0\xff")),
        resource=resource(service__instance__id="a", rl__role="driver"),
    )
    spool.segment(
        11,
        ended(*(span(n, n, n + 1, parent=1, error=n == 20, deep={"a": [1, {"b": "c"}]}) for n in range(10, 60))),
        resource=resource(service__instance__id="b", rl__role="worker", nv__dl__rank=3),
    )
    spool.slots(11, [span(99, 5, None, parent=1)])
    spool.live_file(11)
    return load_run(spool.run_dir)


@pytest.mark.parametrize("form", export_module.OTLP_FORMATS)
def test_export_is_read_back(run, form, tmp_path, monkeypatch):
    """Catches an export that our own reader, or another run of it, understands differently."""
    monkeypatch.setattr(export_module, "BATCH", 7)
    path = tmp_path / "out"
    path.write_bytes(exported(run, form))
    again = load_run(path)
    assert again.damage == []
    assert len(again.processes) == 2
    assert exported(again, form) == exported(run, form)
    assert [r.span_id for r in again.spans if r.truncated] == [r.span_id for r in run.spans if r.truncated] != []


@pytest.mark.parametrize("form", export_module.OTLP_FORMATS)
def test_a_message_is_of_one_process_and_small(run, form, monkeypatch):
    """Catches messages beyond what a receiver takes, and processes mixed under one resource."""
    monkeypatch.setattr(export_module, "BATCH", 20)
    messages = official_messages(form, exported(run, form))
    sizes = []
    for message in messages:
        (batch,) = message.resource_spans
        sizes.append(sum(len(scope.spans) for scope in batch.scope_spans))
    assert sizes == [1, 20, 20, 11]


@pytest.mark.parametrize("form", export_module.OTLP_FORMATS)
def test_no_message_outgrows_a_receiver_because_its_spans_are_long(form):
    """Catches 199 spans of 100 kB in one request, which a receiver at its default refuses, all of them."""
    process = Process("p")
    made = [
        _decode.span(span(n, n, n + 1, parent=1, text="x" * (1_500_000 if n == 3 else 90_000))) for n in range(1, 40)
    ]
    rows = [SpanRow(one, process) for one in made]
    messages = official_messages(form, exported(Run("x", "x", rows, [process]), form))
    found = [[one.span_id.hex() for batch in m.resource_spans[0].scope_spans for one in batch.spans] for m in messages]
    assert [one for ids in found for one in ids] == [row.span_id for row in rows]
    assert all(
        m.ByteSize() <= export_module.MOST_BYTES or len(ids) == 1 for m, ids in zip(messages, found, strict=True)
    )
    assert max(map(len, found)) > 1


def test_json_is_the_standard_mapping(run):
    """Catches ids in base64, 64-bit integers as numbers, or NaN that is not JSON at all."""
    line = exported(run, "otlp-json").splitlines()[0]

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    message = json.loads(line, parse_constant=refuse)
    (exported_span,) = message["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert exported_span["traceId"] == bytes(range(16)).hex()
    assert exported_span["spanId"] == "0000000000000001"
    assert exported_span["kind"] == 1
    assert exported_span["startTimeUnixNano"] == "1700000000000000000"
    values = {item["key"]: item["value"] for item in exported_span["attributes"]}
    assert values["nan"] == {"doubleValue": "NaN"}
    assert values["inf"] == {"doubleValue": "-Infinity"}
    assert values["blob"] == {"bytesValue": "AP8="}
    assert "parentSpanId" not in exported_span


def test_nothing_to_export():
    """Catches an invented message for an empty run."""
    for form in export_module.OTLP_FORMATS:
        assert exported(Run("x", "x"), form) == b""


@pytest.mark.parametrize("form", export_module.OTLP_FORMATS)
def test_process_by_process_is_the_same(run, form):
    """Catches spans that are lost, doubled or out of order where no more than one process is in memory."""
    out = io.BytesIO()
    seen: list[tuple[int, int]] = []
    path = Path(run.path)
    written = export_module.export_spool(path, form, out, lambda done, whole: seen.append((done, whole)))
    assert (written, out.getvalue()) == (len(run.spans), exported(run, form))
    assert [done < whole for done, whole in seen] == [True, False]


@pytest.mark.parametrize("form", export_module.OTLP_FORMATS)
def test_the_best_copy_is_among_what_is_written(tmp_path, form):
    """Catches a span that another process has sent anew, of which the copy that a kill cut short alone is kept."""
    spool = Spool(tmp_path / "run")
    spool.segment(10, ended(span(2, 0, 1)), heartbeat_ns=T0 + 5 * SECOND)
    spool.slots(10, [span(1, 0, None)])
    spool.live_file(10)
    spool.segment(11, ended(span(1, 0, 2), span(2, 0, 1)))
    path = tmp_path / "out"
    with path.open("wb") as file:
        assert export_module.export_spool(spool.run_dir, form, file) == 3
    again = load_run(path)
    assert sorted((row.span_id, row.end_ns, row.truncated) for row in again.spans) == [
        ("0000000000000001", T0 + 2 * SECOND, False),
        ("0000000000000002", T0 + SECOND, False),
    ]


@pytest.mark.parametrize("form", [*export_module.FORMATS, "parquet"])
def test_command_shows_progress_on_a_terminal_alone(tmp_path, form):
    """Catches minutes of silence, or escape codes in a pipe."""
    made_spool.make(tmp_path / "run", 500)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "raytrace_rl.cli", "export", str(tmp_path / "run"), "--format", form]
    command += ["--out", str(out)]
    plain = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert b"\x1b" not in plain.stderr + plain.stdout
    ours, theirs = pty.openpty()
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True, timeout=120)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ("reading" if form == "parquet" else "100%") in shown
