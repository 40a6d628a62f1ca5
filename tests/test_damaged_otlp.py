"""Damaged OTLP: whatever is wrong with one record, all others are read, and it is told of, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.model import Run
from raytrace_rl.spool.format import Kind, pack_record
from tests.spooling import T0, TRACE, Spool, any_value, attributes, ended, span, span_id

pytest.importorskip("numpy")

from raytrace_rl.monitor.bulk.reading import read

#: Spans of one process, in two scopes of each of two messages.
SPANS = 16


def _json_span(n: int) -> dict[str, Any]:
    return {
        "traceId": TRACE.hex(),
        "spanId": span_id(n).hex(),
        "parentSpanId": span_id(99).hex(),
        "name": f"span {n}",
        "kind": 1,
        "startTimeUnixNano": str(T0 + n),
        "endTimeUnixNano": str(T0 + n + 5),
        "attributes": [
            {"key": "text", "value": {"stringValue": "a name"}},
            {"key": "count", "value": {"intValue": "3"}},
            {"key": "deep", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}]}}},
        ],
        "events": [{"timeUnixNano": str(T0 + n + 1), "name": "event"}],
        "links": [{"traceId": TRACE.hex(), "spanId": span_id(98).hex()}],
        "status": {"code": 1},
    }


def _json_lines() -> list[dict[str, Any]]:
    about = {"attributes": [{"key": "service.instance.id", "value": {"stringValue": "one"}}]}
    numbers = iter(range(1, SPANS + 1))

    def scope() -> dict[str, Any]:
        return {"scope": {"name": "lib"}, "spans": [_json_span(next(numbers)) for _ in range(SPANS // 4)]}

    return [{"resourceSpans": [{"resource": about, "scopeSpans": [scope(), scope()]}]} for _ in range(2)]


def _spans_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        one
        for line in lines
        for batch in line["resourceSpans"]
        for scope in batch["scopeSpans"]
        for one in scope["spans"]
    ]


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda one: one.update({name: value})


def _attribute(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda one: one["attributes"].append({"key": "bad", "value": value})


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"boolValue": True}
    for _ in range(depth):
        value = {"arrayValue": {"values": [value]}}
    return value


#: What is done to one span of a JSON line that stays JSON.
OF_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no trace id": lambda one: one.pop("traceId"),
    "no span id": lambda one: one.pop("spanId"),
    "zeros for an id": _set("spanId", "0" * 16),
    "trace id too short": _set("traceId", "ab"),
    "span id too long": _set("spanId", "ab" * 9),
    "id that is no number": _set("spanId", "zz" * 8),
    "id of a number": _set("spanId", 7),
    "parent id of three bytes": _set("parentSpanId", "abcdef"),
    "link to three bytes": lambda one: one["links"][0].update(spanId="abcdef"),
    "negative start": _set("startTimeUnixNano", "-1"),
    "huge end": _set("endTimeUnixNano", str(1 << 64)),
    "start of NaN": _set("startTimeUnixNano", float("nan")),
    "start of infinity": _set("startTimeUnixNano", 1e999),
    "start of half a ns": _set("startTimeUnixNano", 0.5),
    "start that is true": _set("startTimeUnixNano", True),
    "start of a list": _set("startTimeUnixNano", []),
    "name of a number": _set("name", 0),
    "name that is false": _set("name", False),
    "name of half a character": _set("name", "\ud800"),
    "kind of a list": _set("kind", []),
    "kind of nobody": _set("kind", "SPAN_KIND_X"),
    "attributes of an object": _set("attributes", {}),
    "attributes of text": _set("attributes", ""),
    "attribute that is none": lambda one: one["attributes"].append(5),
    "key of a number": lambda one: one["attributes"].append({"key": 5, "value": {}}),
    "value of a number": _attribute(5),
    "value of a list": _attribute([]),
    "text of a number": _attribute({"stringValue": 5}),
    "truth of text": _attribute({"boolValue": "false"}),
    "integer of text": _attribute({"intValue": "much"}),
    "integer too large": _attribute({"intValue": str(1 << 63)}),
    "integer that is true": _attribute({"intValue": True}),
    "double of text": _attribute({"doubleValue": "much"}),
    "double of a list": _attribute({"doubleValue": []}),
    "bytes of text": _attribute({"bytesValue": "no base64!"}),
    "list of a number": _attribute({"arrayValue": {"values": 5}}),
    "nested too deep": _attribute(_nested(40)),
    "event that is none": lambda one: one["events"].append("event"),
    "event before time": lambda one: one["events"][0].update(timeUnixNano="-5"),
    "events of text": _set("events", "none"),
    "link that is none": lambda one: one["links"].append(None),
    "status of text": _set("status", "fine"),
    "status message of a number": _set("status", {"message": 5}),
    "flags beyond 32 bits": _set("flags", 1 << 32),
}

#: What is done to the text of one span, which is no JSON, or says a thing twice, after that.
OF_TEXT: dict[str, Callable[[bytes], bytes]] = {
    "a name twice": lambda text: text.replace(b'"kind"', b'"name": "other", "kind"'),
    "a name twice in an attribute": lambda text: text.replace(b'"key": "text"', b'"key": "text", "key": "text"'),
    "no UTF-8 in its name": lambda text: text.replace(b'"span ', b'"\xff\xfe'),
    "no UTF-8 in a key": lambda text: text.replace(b'"kind"', b'"ki\xffnd"'),
    "a comma is missing": lambda text: text.replace(b', "kind"', b' "kind"'),
    "a quote is missing": lambda text: text.replace(b'"kind"', b'"kind'),
    "a control character": lambda text: text.replace(b"span ", b"span\x00"),
    "a brace is missing": lambda text: text.replace(b'"status": {', b'"status": '),
    "torn in its events": lambda text: text[: text.index(b'"events"') + 20],
    "torn in a link": lambda text: text[: text.index(b'"links"') + 40],
    "nested without end": lambda text: text.replace(b'"event"', b"[" * 100_000),
}


def _read_all_but(run: Run, bad: int, damage: int = 1) -> None:
    assert [row.span_id for row in run.spans] == [span_id(n).hex() for n in range(1, SPANS + 1) if n != bad]
    assert {(row.process.key, row.attributes["text"], row.scope and row.scope.name) for row in run.spans} == {
        ("one", "a name", "lib")
    }
    assert sum(one.count for one in run.damage) == damage, run.damage


def test_what_is_not_damaged_is_read_whole(tmp_path):
    """Catches a test of damage that finds it where there is none."""
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, _json_lines())), encoding="utf-8")
    _read_all_but(load_run(path), 0, damage=0)


@pytest.mark.parametrize("bad", [1, 7, SPANS])
@pytest.mark.parametrize("how", OF_VALUES)
def test_a_bad_value_costs_its_span(tmp_path, how, bad):
    """Catches a line of a thousand spans that is lost for one value of one of them."""
    lines = _json_lines()
    OF_VALUES[how](_spans_of(lines)[bad - 1])
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    run = load_run(path)
    _read_all_but(run, bad)
    (damage,) = run.damage
    place = (bad - 1) % (SPANS // 2)
    assert f"scopeSpans[{place // 4}].spans[{place % 4}]: " in damage.reason


@pytest.mark.parametrize("indent", [None, 1], ids=["lines", "one document"])
@pytest.mark.parametrize("bad", [1, 7, SPANS])
@pytest.mark.parametrize("how", OF_TEXT)
def test_bad_text_costs_its_span(tmp_path, how, bad, indent):
    """Catches a line, or a document, that is lost whole for one byte that is wrong."""
    lines = _json_lines()
    _spans_of(lines)[bad - 1]["traceState"] = "here"
    if indent:
        (first, second) = lines
        lines = [{"resourceSpans": first["resourceSpans"] + second["resourceSpans"]}]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    before, _, behind = data.partition(b', "traceState": "here"}')
    start = before.rindex(b'{"traceId": "' + TRACE.hex().encode() + b'", "spanId": "' + span_id(bad).hex().encode())
    data = before[:start] + OF_TEXT[how](before[start:] + b"}") + behind
    if indent:
        data = data.replace(b', "', b',\n "').replace(b": [{", b": [\n{").replace(b"{", b"{\n", 1)
    path = tmp_path / "run.json"
    path.write_bytes(data)
    run = load_run(path)
    _read_all_but(run, bad)
    if not indent:
        (damage,) = run.damage
        begin = data.rindex(b"\n", 0, start) + 1 if b"\n" in data[:start] else 0
        assert damage.offset in (start, begin)


@pytest.mark.parametrize("indent", [None, 1], ids=["lines", "one document"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_torn_file_costs_what_is_torn(tmp_path_factory, indent, data):
    """Catches the last line of a killed collector that takes its whole spans along."""
    (line,) = _json_lines()[:1]
    text = json.dumps(line, indent=indent)
    whole = [text.index(f'"spanId": "{span_id(n).hex()}"') for n in range(1, SPANS // 2 + 1)]
    cut = data.draw(st.integers(whole[0], len(text) - 1))
    path = tmp_path_factory.mktemp("torn") / "run.json"
    path.write_text(text[:cut], encoding="utf-8")
    read_ones = [row.span_id for row in load_run(path).spans] if cut >= whole[1] else []
    begun = sum(at < cut for at in whole)
    assert [span_id(n).hex() for n in range(1, begun)] == read_ones[: begun - 1]
    assert len(read_ones) in (begun, begun - 1) or cut < whole[1]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("resource",), 5),
        (("resource",), {"attributes": "x"}),
        (("scopeSpans", 0, "scope"), []),
        (("scopeSpans", 0, "scope", "name"), 5),
        (("scopeSpans", 0, "scope", "attributes"), [{"key": 3}]),
    ],
)
def test_a_bad_resource_or_scope_costs_itself(tmp_path, where, value):
    """Catches spans that are lost because of what they hang from."""
    lines = _json_lines()
    place: Any = lines[0]["resourceSpans"][0]
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    run = load_run(path)
    assert len(run.spans) == SPANS
    assert [where[-1] in damage.reason for damage in run.damage] == [True]


def test_a_bad_attribute_of_a_resource_costs_itself(tmp_path):
    """Catches a worker without its rank and group because of one attribute that is wrong."""
    lines = _json_lines()[:1]
    lines[0]["resourceSpans"][0]["resource"]["attributes"].insert(0, {"key": "bad", "value": {"intValue": "x"}})
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(lines[0]), encoding="utf-8")
    run = load_run(path)
    assert {row.process.key for row in run.spans} == {"one"}
    assert len(run.damage) == 1


@pytest.mark.parametrize("damage", ["5", '[{"spans": []}, 7]', '{"a": 1}'])
def test_bad_scope_spans_cost_themselves(tmp_path, damage):
    """Catches batches behind one that is none."""
    lines = list(map(json.dumps, _json_lines()))
    bad = lines[0].replace("[{", f'[{{"scopeSpans": {damage}}}, {{', 1)
    path = tmp_path / "run.jsonl"
    path.write_text(f"{bad}\n{lines[1]}\n", encoding="utf-8")
    run = load_run(path)
    assert len(run.spans) == SPANS
    assert len(run.damage) == 1


def test_very_many_damages_are_summed_up(tmp_path):
    """Catches a damaged file of a million spans whose damage takes more memory than they would."""
    line = {"resourceSpans": [{"scopeSpans": [{"spans": [5] * 5000 + [_json_span(1)]}]}]}
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8")
    run = load_run(path)
    assert len(run.spans) == 1
    assert sum(one.count for one in run.damage) == 5000
    assert len(run.damage) <= 1000


# -- protobuf ---------------------------------------------------------------------------------------------------------


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes(out) + bytes((n,))


def _field(tag: int, data: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(data)) + data


def _raw_spans() -> list[bytes]:
    return [
        span(n, n, n + 5, parent=99, links=[(98, {"a": 1})], text="a name", deep=[1, {"b": 2}])
        for n in range(1, SPANS + 1)
    ]


def _message(raw: list[bytes], about: bytes | None = None) -> bytes:
    about = about or Resource(attributes=attributes({"service.instance.id": "one"})).SerializeToString()
    scope = _field(0x0A, InstrumentationScope(name="lib").SerializeToString())
    half = len(raw) // 2
    scopes = [scope + b"".join(_field(0x12, one) for one in some) for some in (raw[:half], raw[half:])]
    return _field(0x0A, _field(0x0A, about) + b"".join(_field(0x12, one) for one in scopes))


FRAMINGS = {
    "single": b"".join,
    "varint": lambda messages: b"".join(_varint(len(m)) + m for m in messages),
    "u32": lambda messages: b"".join(len(m).to_bytes(4, "big") + m for m in messages),
}

#: What is done to the bytes of one span; its length is that of what it becomes.
OF_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "no trace id": lambda raw: raw[18:],
    "no span id": lambda raw: raw[:18] + raw[28:],
    "trace id too short": lambda raw: _field(0x0A, b"short") + raw[18:],
    "span id of zeros": lambda raw: raw[:20] + bytes(8) + raw[28:],
    "span id too long": lambda raw: raw[:18] + _field(0x12, bytes(range(9))) + raw[28:],
    "parent id of three bytes": lambda raw: raw + _field(0x22, b"abc"),
    "link to three bytes": lambda raw: raw + _field(0x6A, _field(0x0A, b"abc")),
    "no UTF-8 in its name": lambda raw: raw + _field(0x2A, b"\xff\xfe"),
    "no UTF-8 in a value": lambda raw: raw + _field(0x4A, _field(0x0A, b"k") + _field(0x12, _field(0x0A, b"\xff"))),
    "no UTF-8 in a key": lambda raw: raw + _field(0x4A, _field(0x0A, b"\xff")),
    "nested too deep": lambda raw: raw + _field(0x4A, _field(0x0A, b"k") + _field(0x12, _deep(40))),
    "an event that is none": lambda raw: raw + _field(0x5A, b"\x0b"),
    "an unknown kind of field": lambda raw: raw + b"\x0b\x0c",
    "a field that reaches beyond it": lambda raw: raw + b"\x4a\x7f",
    "torn": lambda raw: raw[:-1],
    "rubbish": lambda raw: b"\xff" * len(raw),
    "nothing": lambda _: b"",
}


def _deep(depth: int) -> bytes:
    value = any_value(1).SerializeToString()
    for _ in range(depth):
        value = _field(0x2A, _field(0x0A, value))
    return value


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("bad", [1, 7, SPANS])
@pytest.mark.parametrize("how", OF_BYTES)
def test_bad_bytes_cost_their_span(tmp_path, how, bad, framing):
    """Catches a request of a thousand spans that is lost for one of them."""
    raw = _raw_spans()
    raw[bad - 1] = OF_BYTES[how](raw[bad - 1])
    path = tmp_path / "run.pb"
    data = FRAMINGS[framing]([_message(raw[: SPANS // 2]), _message(raw[SPANS // 2 :])])
    path.write_bytes(data)
    run = load_run(path)
    _read_all_but(run, bad)
    (damage,) = run.damage
    assert (
        data[damage.offset :].startswith(raw[bad - 1]) or raw[bad - 1] in data[damage.offset :][: len(raw[bad - 1]) + 3]
    )


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("by", [-9, 5, 100, 5000])
@pytest.mark.parametrize("bad", [1, 7, SPANS])
def test_a_wrong_length_costs_its_span(tmp_path, bad, by, framing):
    """Catches all spans behind one whose length is wrong."""
    raw = _raw_spans()
    data = FRAMINGS[framing]([_message(raw[: SPANS // 2]), _message(raw[SPANS // 2 :])])
    whole = _field(0x12, raw[bad - 1])
    wrong = whole[:1] + _varint(len(raw[bad - 1]) + by)
    assert len(wrong) == 3  # as long as the right one, so that what is around it keeps its length
    path = tmp_path / "run.pb"
    path.write_bytes(data.replace(whole, wrong + raw[bad - 1]))
    run = load_run(path)
    assert {row.span_id for row in run.spans} >= {span_id(n).hex() for n in range(1, SPANS + 1) if n != bad}
    assert {row.process.key for row in run.spans} == {"one"}
    assert run.damage


@pytest.mark.parametrize("framing", FRAMINGS)
@given(cut=st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_a_torn_request_costs_what_is_torn(tmp_path_factory, framing, cut):
    """Catches the last request of a killed collector that takes its whole spans along."""
    raw = _raw_spans()
    data = FRAMINGS[framing]([_message(raw[: SPANS // 2]), _message(raw[SPANS // 2 :])])
    torn = data[:-cut]
    path = tmp_path_factory.mktemp("torn") / "run.pb"
    path.write_bytes(torn)
    run = load_run(path)
    assert {row.span_id for row in run.spans} == {span_id(n).hex() for n, one in enumerate(raw, 1) if one in torn}
    assert {row.process.key for row in run.spans} == {"one"}
    boundary = FRAMINGS[framing]([_message(raw[: SPANS // 2])])
    assert sum(one.count for one in run.damage) == (torn != boundary)


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("at", range(9))
def test_a_bad_head_of_a_request_costs_no_other(tmp_path, at, framing):
    """Catches a byte in the frame of one request that hides all requests behind it, or the spans in it."""
    raw = _raw_spans()
    messages = [_message(raw[: SPANS // 2]), _message(raw[SPANS // 2 :])]
    more = [_message([span(100 + n, n, n + 1, text="a name")]) for n in range(5)]
    data = bytearray(FRAMINGS[framing]([*messages, *more]))
    data[at] ^= 0xFF
    path = tmp_path / "run.pb"
    path.write_bytes(data)
    found = {row.span_id for row in load_run(path).spans}
    assert found >= {span_id(n).hex() for n in range(SPANS // 2 + 1, SPANS + 1)} | {
        span_id(100 + n).hex() for n in range(5)
    }
    assert len(found) >= SPANS + 4


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255), st.sampled_from(sorted(FRAMINGS)))
def test_any_byte_costs_at_most_what_it_is_part_of(tmp_path_factory, at, flip, framing):
    """Catches a byte somewhere in a file that costs more than a span, or a resource, and goes untold."""
    raw = _raw_spans()
    data = bytearray(FRAMINGS[framing]([_message(raw[n : n + 4]) for n in range(0, SPANS, 4)]))
    data[at % len(data)] ^= flip
    path = tmp_path_factory.mktemp("flipped") / "run.pb"
    path.write_bytes(data)
    run = load_run(path)
    found = {row.span_id for row in run.spans} & {span_id(n).hex() for n in range(1, SPANS + 1)}
    assert len(found) >= SPANS - 2
    assert len(run.spans) + run.duplicates == SPANS or run.damage


def test_a_bad_attribute_of_a_protobuf_resource_costs_itself(tmp_path):
    """Catches a worker that loses its group, or its spans, for one attribute of its resource."""
    good = Resource(attributes=attributes({"service.instance.id": "one"})).SerializeToString()
    path = tmp_path / "run.pb"
    path.write_bytes(_message(_raw_spans(), _field(0x0A, _field(0x0A, b"\xff")) + good))
    _read_all_but(load_run(path), 0)


# -- records of a spool that hold several -----------------------------------------------------------------------------


def _bad(messages: list[bytes], at: int, tag: int = 0x12) -> bytes:
    return b"".join(_field(tag, b"\x0b" if n == at else one) for n, one in enumerate(messages))


@pytest.mark.parametrize("bad", range(3))
def test_a_bad_one_among_foreign_spans_logs_and_points(tmp_path, bad):
    """Catches a record of many logs, points or foreign spans that is lost whole; and columns that count otherwise."""
    scope = _field(0x0A, InstrumentationScope(name="lib").SerializeToString())
    spans = scope + _bad([span(n, n, n + 1) for n in (1, 2, 3)], bad)
    logs = scope + _bad([LogRecord(severity_text=str(n)).SerializeToString() for n in range(3)], bad)
    points = _bad([NumberDataPoint(as_int=n).SerializeToString() for n in range(3)], bad, 0x0A)
    metric = _field(0x0A, b"m") + _field(0x2A, points)
    spool = Spool(tmp_path)
    records = [(Kind.SCOPE_SPANS, spans), (Kind.LOGS, logs), (Kind.METRICS, scope + _field(0x12, metric))]
    spool.segment(77, b"".join(pack_record(kind, payload) for kind, payload in records) + ended(span(9, 9, 10)))
    run = load_run(tmp_path)
    kept = [n for n in range(3) if n != bad]
    assert [row.span_id for row in run.spans] == [*(span_id(n + 1).hex() for n in kept), span_id(9).hex()]
    assert [row.severity_text for row in run.logs] == list(map(str, kept))
    assert [row.value for row in run.metrics] == kept
    assert {(row.name, row.scope) for row in run.metrics} == {("m", "lib")}
    assert [
        f"content of a record of kind {kind:d}, at " in one.reason
        for (kind, _), one in zip(records, run.damage, strict=True)
    ] == [True] * 3
    assert [one.kind for one in run.damage] == ["payload"] * 3
    assert read(tmp_path).run.damage == run.damage
