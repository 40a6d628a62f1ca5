"""`load_run`: from spool files and OTLP files to rows, whatever state they are in."""

from __future__ import annotations

import gzip
import io
import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from raytrace_rl import _decode, cli
from raytrace_rl.monitor import UnreadableRunError, export, load_run, otlp_json
from raytrace_rl.spool.format import SEALED_OFFSET, SPAN_COUNT_OFFSET, Kind, pack_header, pack_record
from tests.spooling import SECOND, T0, TRACE, Spool, attributes, ended, header, resource, span, span_id


@pytest.fixture
def spool(tmp_path):
    """A run directory to fill."""
    return Spool(tmp_path / "run")


def names(run):
    """Span names in order."""
    return [row.name for row in run.spans]


def gone(n):
    """Record that an open span has ended."""
    return pack_record(Kind.SPAN_GONE, TRACE + span_id(n))


def test_columns(spool):
    """Catches a column of the spans table that is lost or mixed up on the way."""
    data = span(
        3,
        1.5,
        2.25,
        parent=1,
        name="rl.grpo.step",
        error=True,
        rl__span_group="step",
        rl__bucket="overhead",
        rl__iteration=7,
        rl__queued_ns=99,
        thread__id=5,
        thread__name="MainThread",
        other=[1, 2],
    )
    identity = resource(
        rl__role="worker",
        rl__worker_group="generation",
        nv__dl__rank=2,
        rl__attempt=3,
        rl__run__id="my-run",
        ray__actor__id="abc",
        ray__actor__class="Gen",
        ray__actor__incarnation=1,
        ray__node__id="node-1",
    )
    spool.segment(77, ended(data), resource=identity)
    run = load_run(spool.run_dir)
    (row,) = run.spans
    assert run.run_id == "my-run"
    assert (row.trace_id, row.span_id, row.parent_span_id) == (TRACE.hex(), span_id(3).hex(), span_id(1).hex())
    assert (row.name, row.kind, row.status, row.status_message) == ("rl.grpo.step", "INTERNAL", "ERROR", "it broke")
    assert (row.start_ns, row.end_ns, row.duration_ns) == (T0 + 1_500_000_000, T0 + 2_250_000_000, 750_000_000)
    assert (row.span_group, row.bucket, row.iteration, row.queued_ns) == ("step", "overhead", 7, 99)
    assert (row.thread, row.thread_id, row.truncated) == ("MainThread", 5, False)
    assert (row.worker_group, row.rank, row.attempt, row.incarnation) == ("generation", 2, 3, 1)
    assert (row.actor_id, row.actor_class, row.node_id, row.pid) == ("abc", "Gen", "node-1", 77)
    assert row.lane == f"node-a/77-{T0}"
    assert row.attributes["other"] == [1, 2]
    assert row.resource["rl.role"] == "worker"


def test_attributes_of_the_wrong_type_are_no_columns(spool):
    """Catches a user's own ``rl.bucket=3`` or ``rl.iteration="x"`` that breaks every sum over the run."""
    spool.segment(77, ended(span(1, 0, 1, rl__bucket=3, rl__iteration="x", rl__span_group=True, thread__id="t")))
    spool.segment(78, ended(span(2, 0, 1, rl__bucket="fun", rl__iteration=True)))
    run = load_run(spool.run_dir)
    assert [(r.bucket, r.iteration, r.span_group, r.thread_id) for r in run.spans] == [(None, None, None, None)] * 2
    assert run.spans[0].attributes["rl.bucket"] == 3


def test_open_spans_of_a_dead_process_are_cut_at_its_last_beat(spool):
    """Catches a killed worker's unfinished span that is lost, counted twice, or left open."""
    spool.segment(77, ended(span(1, 0, 1)), heartbeat_ns=T0 + 5 * SECOND)
    spool.slots(77, [span(2, 2, None, name="killed"), span(1, 0, None)])
    spool.live_file(77)
    run = load_run(spool.run_dir)
    assert [(r.span_id, r.truncated) for r in run.spans] == [(span_id(1).hex(), False), (span_id(2).hex(), True)]
    assert run.spans[1].end_ns == T0 + 5 * SECOND
    assert run.spans[1].attributes["rl.truncated"] is True
    assert (run.processes[0].state, run.processes[0].heartbeat_ns) == ("dead", T0 + 5 * SECOND)
    assert run.damage == []


def test_a_late_end_is_a_later_sign_of_life(spool):
    """Catches a parent that is cut before its last child ended, between two heartbeats."""
    spool.segment(77, ended(span(3, 6, 7, parent=2)), heartbeat_ns=T0 + 5 * SECOND)
    spool.slots(77, [span(2, 2, None), span(4, 9, None)])
    spool.live_file(77)
    run = load_run(spool.run_dir)
    ends = {r.span_id: r.end_ns for r in run.spans}
    # Number 4 had started at 9: it ends no earlier than that, and so nothing else had.
    assert ends == {
        span_id(3).hex(): T0 + 7 * SECOND,
        span_id(2).hex(): T0 + 9 * SECOND,
        span_id(4).hex(): T0 + 9 * SECOND,
    }


def test_open_spans_of_a_living_process_stay_open(spool):
    """Catches a running job whose spans a report closes as truncated."""
    spool.segment(77, b"", heartbeat_ns=T0 + 5 * SECOND)
    spool.slots(77, [span(2, 2, None)])
    lock = spool.alive(77)
    try:
        (row,) = load_run(spool.run_dir).spans
    finally:
        lock.release()
    assert (row.end_ns, row.duration_ns, row.truncated) == (None, None, False)
    assert row.until_ns == T0 + 5 * SECOND
    assert row.process.state == "alive"


def test_open_spans_of_an_unknown_process_stay_open(spool):
    """Catches death guessed for a process of another host, where no lock can be asked."""
    spool.segment(77, b"", boot_id=b"another host's. ")
    spool.slots(77, [span(2, 2, None)], boot_id=b"another host's. ")
    spool.live_file(77)
    (row,) = load_run(spool.run_dir).spans
    assert (row.end_ns, row.process.state) == (None, "unknown")


def test_journal_and_table(spool):
    """Catches an open span that a SPAN_GONE has ended, or whose later attributes an older record hides."""
    journal = (
        pack_record(Kind.OPEN_SPAN, span(1, 1, None, step=1))
        + pack_record(Kind.OPEN_SPAN, span(2, 1, None))
        + pack_record(Kind.OPEN_SPAN, span(3, 1, None))
        + pack_record(Kind.OPEN_SPAN, span(1, 1, None, step=2))
        + pack_record(Kind.STACK, TRACE + span_id(1) + (T0 + 5).to_bytes(8, "little") + b"File x")
        + gone(2)
    )
    spool.journal(77, journal, 4)
    spool.slots(77, [span(1, 1, None), span(2, 1, None)])
    spool.segment(77, ended(span(3, 1, 2)))
    spool.live_file(77)
    run = load_run(spool.run_dir)
    assert {r.span_id: (r.truncated, r.attributes.get("step")) for r in run.spans} == {
        span_id(1).hex(): (True, 2),
        span_id(3).hex(): (False, None),
    }
    assert [(s.span_id, s.time_ns, s.text) for s in run.stacks] == [(span_id(1).hex(), T0 + 5, "File x")]


def test_torn_slots_are_ignored(spool):
    """Catches a slot caught in the midst of a write that becomes a span, or damage."""
    spool.segment(77, b"")
    spool.slots(77, [b"\xff\xff\xff", span(1, 0, None)[:30], b"\0" * 40])
    spool.live_file(77)
    run = load_run(spool.run_dir)
    assert (run.spans, run.damage) == ([], [])


def test_later_resource_completes_the_whole_process(spool):
    """Catches spans before `init_telemetry_worker(rank=...)` that have no rank."""
    later = pack_record(Kind.RESOURCE, resource(rl__worker_group="training", nv__dl__rank=1))
    spool.segment(77, ended(span(1, 0, 1)) + later + ended(span(2, 1, 2)), resource=resource(rl__role="worker"))
    run = load_run(spool.run_dir)
    assert [(r.worker_group, r.rank) for r in run.spans] == [("training", 1)] * 2


def test_rank_given_as_text(spool):
    """Catches a rank that came through OTEL_RESOURCE_ATTRIBUTES, where all is text."""
    spool.segment(77, ended(span(1, 0, 1)), resource=resource(nv__dl__rank="12", rl__attempt="2"))
    (row,) = load_run(spool.run_dir).spans
    assert (row.rank, row.attempt) == (12, 2)


def test_drops_are_read(spool):
    """Catches losses that the process counted and the report leaves out."""
    drops = [{"spans": 1, "bytes": 5}, {"spans": 2, "bytes": 9, "attributes": 1, "odd": "x", "less": -1}]
    spool.segment(77, b"".join(pack_record(Kind.DROPS, json.dumps(d).encode()) for d in drops))
    spool.segment(78, pack_record(Kind.DROPS, json.dumps(drops[0]).encode()), dropped_spans=40)
    run = load_run(spool.run_dir)
    assert [p.drops for p in run.processes] == [{"spans": 2, "bytes": 9, "attributes": 1}, {"spans": 40, "bytes": 5}]


def test_foreign_scopes(spool):
    """Catches SDK spans that are lost or lose their instrumentation scope."""
    message = ScopeSpans(scope=InstrumentationScope(name="lib", version="2"))
    message.spans.append(Span.FromString(span(5, 0, 1)))
    spool.segment(77, pack_record(Kind.SCOPE_SPANS, message.SerializeToString()) + ended(span(6, 1, 2)))
    run = load_run(spool.run_dir)
    assert [r.scope and (r.scope.name, r.scope.version) for r in run.spans] == [("lib", "2"), None]


def test_rubbish_payloads_cost_only_themselves(spool):
    """Catches a record with a valid CRC and rubbish inside that stops the reading."""
    rubbish = b"".join(pack_record(kind, b"\xff\xfe\x0a\xff") for kind in Kind) + pack_record(99, b"later version")
    spool.segment(77, ended(span(1, 0, 1)) + rubbish + ended(b"", span(2, 1, 2)))
    run = load_run(spool.run_dir)
    assert names(run) == ["span 1", "span 2"]
    assert {d.kind for d in run.damage} == {"payload"}
    assert any("without a trace id" in d.reason for d in run.damage)


def test_damage_and_lost_segments_are_reported(spool):
    """Catches damage, a lost segment and a short sealed one that the run keeps to itself."""
    spool.segment(77, ended(span(1, 0, 1)) + b"#" * 50 + ended(span(2, 1, 2)))
    (spool.node_dir / f"{spool.stem(77)}.1.rts").symlink_to("/nowhere/segment")
    sealed = bytearray(pack_header(header(pid=77, number=2)) + ended(span(3, 2, 3)))
    sealed[SEALED_OFFSET] = 1
    sealed[SPAN_COUNT_OFFSET] = 4
    (spool.node_dir / f"{spool.stem(77)}.2.rts").write_bytes(sealed)
    run = load_run(spool.run_dir)
    assert names(run) == ["span 1", "span 2", "span 3"]
    assert sorted((d.kind, d.skipped, d.count) for d in run.damage) == [
        ("count", 0, 3),
        ("record", 50, 1),
        ("unreachable", 0, 1),
    ]


def test_duplicates_count_once_and_ended_beats_open(spool):
    """Catches a span met twice (resent, or merged from two nodes) that doubles the sums."""
    spool.segment(77, ended(span(1, 0, 1), span(1, 0, 1)))
    spool.segment(78, ended(span(1, 0, 1)))
    other = Spool(spool.run_dir, "node-b")
    other.segment(79, b"")
    other.slots(79, [span(1, 0, None)])
    run = load_run(spool.run_dir)
    assert [(r.end_ns, r.truncated) for r in run.spans] == [(T0 + SECOND, False)]
    assert run.duplicates >= 2


def test_the_ways_to_name_a_run(spool):
    """Catches a spool directory, node directory or single file that a user cannot hand in."""
    path = spool.segment(77, ended(span(1, 0, 1)))
    for given_path in (spool.run_dir, str(spool.run_dir), spool.run_dir / "spool", spool.node_dir, path):
        assert names(load_run(given_path)) == ["span 1"]


@pytest.mark.parametrize("make", ["nothing", "empty directory", "empty file", "text", "link", "binary"])
def test_nothing_there_to_read(tmp_path, make):
    """Catches an empty report for a path that holds no run, instead of an error that says so."""
    path = tmp_path / "x"
    if make == "empty directory":
        path.mkdir()
    elif make == "link":
        path.symlink_to("/nowhere")
    elif make != "nothing":
        path.write_bytes({"empty file": b"", "text": b"hello\nworld\n", "binary": bytes(range(256))}[make])
    with pytest.raises(UnreadableRunError) as caught:
        load_run(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_of_rubbish_files_is_readable(spool):
    """Catches an error where files are there but none of their bytes make sense: that is damage, to be shown."""
    (spool.node_dir / f"{spool.stem(77)}.0.rts").write_bytes(b"rubbish" * 100)
    (spool.node_dir / f"{spool.stem(77)}.open").write_bytes(b"rubbish")
    (spool.node_dir / f"{spool.stem(77)}.open.0.rts").write_bytes(b"\xff" * 99)
    run = load_run(spool.run_dir)
    assert run.spans == []
    assert len(run.damage) == 3


# -- OTLP files -------------------------------------------------------------------------------------------------------


def request(*spans, **identity):
    """An official export request of one process."""
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=attributes({k.replace("__", "."): v for k, v in identity.items()})),
                scope_spans=[ScopeSpans(spans=[Span.FromString(data) for data in spans])],
            )
        ]
    )


def varint(n):
    """``n`` as a protobuf varint."""
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes(out) + bytes((n,))


FRAMINGS = {
    "single": b"".join,
    "varint": lambda messages: b"".join(varint(len(m)) + m for m in messages),
    "u32": lambda messages: b"".join(len(m).to_bytes(4, "big") + m for m in messages),
}


@pytest.mark.parametrize("framing", FRAMINGS)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_protobuf_files(tmp_path_factory, framing, counts):
    """Catches a framing of protobuf files (ours, the collector's, none) that is taken for another."""
    number, messages = 0, []
    for n, count in enumerate(counts):
        spans = [span(number + i + 1, number + i, number + i + 1) for i in range(count)]
        number += count
        messages.append(request(*spans, service__instance__id=f"i{n}").SerializeToString())
    path = tmp_path_factory.mktemp("otlp") / "run.pb"
    path.write_bytes(FRAMINGS[framing](messages))
    run = load_run(path)
    assert len(run.spans) == number
    assert run.damage == []
    assert [row.lane for row in run.spans] == [f"i{n}" for n, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_torn_protobuf_file(tmp_path, framing):
    """Catches a whole file given up because its end is torn off."""
    messages = [request(span(n, 0, 1), service__instance__id="x").SerializeToString() for n in range(1, 5)]
    path = tmp_path / "run.pb"
    path.write_bytes(FRAMINGS[framing](messages)[:-5])
    run = load_run(path)
    assert len(run.spans) == 3
    assert [d.kind for d in run.damage] == ["record"]


def test_json_as_other_exporters_write_it(tmp_path):
    """Catches snake_case names, enums by name, numbers as numbers or base64 ids that are not understood."""
    line = {
        "resource_spans": [
            {
                "resource": {"attributes": [{"key": "service.instance.id", "value": {"string_value": "a"}}]},
                "scope_spans": [
                    {
                        "spans": [
                            {
                                "trace_id": "AAECAwQFBgcICQoLDA0ODw==",
                                "span_id": "AAAAAAAAAAE=",
                                "name": "x",
                                "kind": "SPAN_KIND_CLIENT",
                                "start_time_unix_nano": 5,
                                "end_time_unix_nano": "9",
                                "status": {"code": "STATUS_CODE_ERROR"},
                                "attributes": [{"key": "n", "value": {"int_value": 3}}, {"key": "none", "value": {}}],
                            }
                        ]
                    }
                ],
            }
        ]
    }
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"resourceMetrics": []}) + "\n\n" + json.dumps(line) + "\n", encoding="utf-8")
    (row,) = load_run(path).spans
    assert (row.trace_id, row.span_id, row.kind, row.status) == (TRACE.hex(), span_id(1).hex(), "CLIENT", "ERROR")
    assert (row.start_ns, row.end_ns, row.attributes) == (5, 9, {"n": 3, "none": None})
    path.write_text(json.dumps(line, indent=2), encoding="utf-8")
    assert len(load_run(path).spans) == 1


GOOD_LINE = json.dumps(
    {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": TRACE.hex(), "spanId": "0000000000000001"}]}]}]}
)


@pytest.mark.parametrize(
    "line",
    [
        GOOD_LINE[:-9],
        "{}x",
        "[1, 2]",
        '{"a": ' * 50_000,
        '{"resourceSpans": 3}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "zz"}]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "-1"}]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": 1e999}]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key": "k", "value": 5}]}]}]}]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"value": {"intValue": [1]}}]}]}]}]}',
        "\x00\x01\x02",
    ],
)
def test_a_bad_json_line_costs_only_itself(tmp_path, line):
    """Catches a torn or strange line that hides the rest of the file."""
    path = tmp_path / "run.jsonl"
    path.write_text(GOOD_LINE + "\n" + line + "\n" + GOOD_LINE.replace("01", "02", 1) + "\n", encoding="utf-8")
    run = load_run(path)
    assert len(run.spans) >= 1
    assert len(run.damage) == 1
    assert 0 <= run.damage[0].offset - len(GOOD_LINE) - 1 <= len(line)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_the_best_copy_of_a_span_is_kept(tmp_path, order):
    """Catches an open or truncated copy of a span, whichever comes first, that stands over its real end."""
    copies = []
    for end, truncated in ((0, False), (7, True), (5, False)):
        attribute = {"key": "rl.truncated", "value": {"boolValue": True}}
        copies.append(
            {
                "traceId": TRACE.hex(),
                "spanId": span_id(1).hex(),
                "startTimeUnixNano": "1",
                "endTimeUnixNano": str(end),
                "attributes": [attribute] if truncated else [],
            }
        )
    path = tmp_path / "run.jsonl"
    lines = [json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [copies[n]]}]}]}) for n in order]
    path.write_text("\n".join(lines), encoding="utf-8")
    (row,) = load_run(path).spans
    assert (row.end_ns, row.truncated) == (5, False)
    path.write_text("\n".join(line for line, n in zip(lines, order, strict=True) if n != 2), encoding="utf-8")
    (row,) = load_run(path).spans
    assert (row.end_ns, row.truncated) == (7, True)


def _files_of_others(tmp_path):
    """Files that are no traces, and look like protobuf or hide what they are."""
    spool = Spool(tmp_path / "run")
    spool.segment(1, ended(span(1, 0, 1)), resource=resource(rl__role="driver"))
    perfetto, otlp, metrics = io.BytesIO(), io.BytesIO(), ExportMetricsServiceRequest()
    export.export(load_run(tmp_path / "run"), "perfetto", perfetto)
    export.export(load_run(tmp_path / "run"), "otlp-json", otlp)
    metrics.resource_metrics.add().scope_metrics.add().metrics.add(name="rl.step.time").gauge.data_points.add(as_int=1)
    zstd = b"\x28\xb5\x2f\xfd\x04\x00"
    return {
        "perfetto": (perfetto.getvalue(), "neither spool nor OTLP traces"),
        "metrics": (metrics.SerializeToString(), "neither spool nor OTLP traces"),
        "gzip": (gzip.compress(otlp.getvalue()), "is compressed (gzip): unpack it first"),
        "zstd": (zstd, "is compressed (zstd): unpack it first"),
        "zstd behind its length": (len(zstd).to_bytes(4, "big") + zstd, "is compressed (zstd): unpack it first"),
    }


@pytest.mark.parametrize("kind", ["perfetto", "metrics", "gzip", "zstd", "zstd behind its length"])
def test_a_file_of_another_form_is_no_run(tmp_path, kind):
    """Catches a report without a span, or a `stuck` that calls all well, of a file that holds no trace at all."""
    data, reason = _files_of_others(tmp_path)[kind]
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(UnreadableRunError, match=re.escape(reason)):
        load_run(tmp_path / "file")


def test_json_behind_a_byte_order_mark(tmp_path):
    """Catches a file that an editor, or a shell of Windows, has saved, and that is called no OTLP."""
    (tmp_path / "run.json").write_bytes(b"\xef\xbb\xbf" + GOOD_LINE.encode())
    assert len(load_run(tmp_path / "run.json").spans) == 1


def test_a_pipe_between_the_segments_holds_nobody_up(spool):
    """Catches a report that waits for ever for a writer of something that is no file."""
    spool.segment(1, ended(span(1, 0, 1)))
    os.mkfifo(spool.node_dir / f"{spool.stem(2)}.0.rts")
    assert cli.main(["report", str(spool.run_dir)]) == cli.OK
    assert cli.main(["stuck", str(spool.run_dir)]) == cli.OK


def test_too_long_a_line_is_skipped(tmp_path, monkeypatch):
    """Catches a file without line ends that is taken into memory whole."""
    monkeypatch.setattr("raytrace_rl.monitor.otlp_files.MAX_MESSAGE", 400)
    path = tmp_path / "run.jsonl"
    long = json.dumps({"resourceSpans": [], "x": "y" * 3000})
    path.write_text(f"{GOOD_LINE}\n{long}\n{GOOD_LINE}\n", encoding="utf-8")
    run = load_run(path)
    assert len(run.spans) == 1
    assert [(d.offset, d.skipped) for d in run.damage] == [(len(GOOD_LINE) + 1, len(long) + 1)]


JSON_NAMES = [
    "resourceSpans",
    "resource",
    "attributes",
    "key",
    "value",
    "scopeSpans",
    "scope",
    "spans",
    "traceId",
    "events",
    "links",
    "status",
    "kind",
    "startTimeUnixNano",
    "intValue",
    "arrayValue",
    "values",
]
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(JSON_NAMES),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)


@given(json_values)
def test_any_json(value):
    """Catches JSON that raises anything but ValueError or TypeError, which become damage."""
    for message in (value, {"resourceSpans": [{"scopeSpans": [{"spans": [value]}]}]}):
        try:
            batches = otlp_json.resource_spans(message, lambda *_: None)
        except (ValueError, TypeError):
            continue
        assert all(isinstance(batch, _decode.ResourceSpans) for batch in batches)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("keep", ["head", "tail"])
def test_the_record_that_a_kill_tore_is_not_lost_twice(keep, ahead, tmp_path):
    """Catches a span counted as truncated and once more as damage, because the kill came while it was being placed."""
    spool = Spool(tmp_path / "run")
    record = ended(span(3, 2, 3, parent=1))
    torn = record[:40] + bytes(len(record) - 40) if keep == "head" else bytes(40) + record[40:]
    spool.segment(77, ended(span(1, 0, 9), span(2, 1, 2, parent=1)) + torn, pad=256, heartbeat_ns=T0 + 9 * SECOND)
    spool.slots(77, [span(3, 2, None, parent=1)])
    spool.live_file(77)
    if ahead:  # the next segment, made before this one is full
        spool.segment(77, b"", number=1, pad=4096, heartbeat_ns=T0 + 9 * SECOND)

    run = load_run(tmp_path / "run")

    assert not run.damage
    assert [row.span_id for row in run.spans if row.truncated] == [span_id(3).hex()]

    spool.segment(77, ended(span(1, 0, 9)) + torn + ended(span(2, 1, 2, parent=1)), pad=256)
    assert len(load_run(tmp_path / "run").damage) == 1  # in the midst of the file it is no kill that did it
