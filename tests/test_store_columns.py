"""Tables made of large segments as columns: those of the same segments row by row, whatever is in them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import made_spool
from raytrace_rl import managed_span
from raytrace_rl.monitor import store
from raytrace_rl.monitor.bulk import table_rows
from raytrace_rl.spool.format import Kind, pack_record
from tests import spooling
from tests.bulk_runs import drawn_runs
from tests.decoded import decoded_alone
from tests.running import running
from tests.spooling import Spool, ended, resource, span
from tests.store_tables import differences
from tests.test_bulk_decoding import frames_of, records

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=200, suppress_health_check=SLOW)
@given(records(), st.data())
def test_any_spans_have_the_same_rows(tmp_path_factory, payloads, data):
    """Catches a span whose row, attributes as JSON included, is another one in columns; or a damage that is."""
    directory = tmp_path_factory.mktemp("made")
    opened = [span(77, 0, None), span(data.draw(st.integers(1, 40)), 0, None, rl__bucket="idle")]
    spool = Spool(directory / "run")
    spool.segment(7, ended(*payloads[::2]), span_count=len(payloads), sealed=True)
    spool.segment(7, ended(*payloads[1::2])[: -data.draw(st.integers(1, 9))], 1, pad=data.draw(st.integers(0, 9)))
    if data.draw(st.booleans()):
        spool.slots(7, opened)
    if data.draw(st.booleans()):
        spool.live_file(7)
    assert differences(directory / "run", directory) == []


@settings(max_examples=60, suppress_health_check=SLOW)
@given(drawn_runs())
def test_any_run_has_the_same_tables(tmp_path_factory, write):
    """Catches a process whose state, last sign of life, or open spans come out otherwise in columns."""
    directory = tmp_path_factory.mktemp("drawn")
    locks = write(directory / "run")
    try:
        assert differences(directory / "run", directory) == []
    finally:
        for lock in locks:
            lock.release()


def test_each_changed_byte_of_many_spans_alike(tmp_path):
    """Catches a byte that decides how a row reads and that columns take for a value."""
    base = span(
        77, 1, 2, parent=5, name="näme", error=True, rl__bucket="idle", rl__iteration=300, rl__truncated=True,
        thread__id=140_000_000_000_000, thread__name="worker", tokens=1.5, prompt='"hi" there', many=[1, 2], raw=b"ab",
    )  # fmt: skip
    generator = random.Random(5)
    payloads = [base] * 40
    for at in range(len(base)):
        others = {base[at] ^ 1, base[at] ^ 0x80, generator.randrange(256)}
        for value in {0, 1, 0x1F, 0x22, 0x5C, 0x7F, 0x80, 0xFF, *others}:
            payloads.append(base[:at] + bytes([value]) + base[at + 1 :])
    Spool(tmp_path / "run").segment(7, ended(*payloads))
    assert differences(tmp_path / "run", tmp_path) == []


@pytest.mark.parametrize("seed", range(4))
def test_what_no_template_has_stays_in_its_place(tmp_path, seed):
    """Catches rows out of order, lost or there twice, where spans of several kinds, and signals, are between others."""
    generator = random.Random(seed)
    made: list[bytes] = []
    for n in range(1, 1500):
        values: dict[str, Any] = {
            "rl__iteration": n // 100, "thread__name": f"rollout-{n % 9}", "thread__id": generator.getrandbits(47),
            "loss": generator.choice([0.1, 1e300, float("inf"), float("nan"), -0.0, 1 / 3]), "ok": n % 2 == 0,
            "prompt": "".join(generator.choices('ab"\\\n\x7f', k=3)), "rl__queued_ns": generator.randrange(-5, 1 << 20),
        }  # fmt: skip
        kind = generator.randrange(12)
        if kind == 0:
            values["prompt"] = "é" * generator.randrange(3)
        payload = span(
            n, n, None if kind == 1 else n + 1, parent=n // 2, name=f"phase_{n % 3}", error=kind == 2,
            links=[(3, {"a": n})] if kind == 3 else (), **values,
        )  # fmt: skip
        if kind == 4:
            message = spooling.Span()
            message.ParseFromString(payload)
            message.events.add(time_unix_nano=5, name="exception")
            payload = message.SerializeToString()
        if kind == 5:
            made.append(pack_record(Kind.SCOPE_SPANS, scoped(payload, span(10_000 + n, 1, 2, name="two"))))
            continue
        made.append(ended(payload))
        if kind == 6:
            made.append(generator.choice([b"?" * 9, pack_record(Kind.SPAN, b"\x0a\xff"), pack_record(99, b"later")]))
        if kind == 7 and n > 700 and seed == 0:  # such a piece is read row by row
            made.append(pack_record(Kind.OPEN_SPAN, span(n + 20, 1, None)))
    spool = Spool(tmp_path / "run")
    spool.segment(7, b"".join(made), resource=resource(rl__worker_group="training", nv__dl__rank=3))
    spool.journal(7, b"".join(pack_record(Kind.OPEN_SPAN, span(n, n, None)) for n in range(0, 3000, 50)))
    spool.live_file(7)
    assert differences(tmp_path / "run", tmp_path) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_span_that_was_noted_as_open_and_ended_is_there_once(tmp_path, again):
    """Catches a span of a killed process that is in its columns and once more as truncated, or twice as ended."""
    spans = [span(n, n, n + 1, name="work", rl__iteration=n) for n in range(100, 300)]
    spool = Spool(tmp_path / "run")
    spool.segment(7, ended(*spans, *(spans[::3] if again else ())))
    spool.journal(7, b"".join(pack_record(Kind.OPEN_SPAN, span(n, n, None)) for n in range(90, 310, 2)))
    spool.live_file(7)
    assert differences(tmp_path / "run", tmp_path) == []
    opened = store.Store(tmp_path / "run")
    counts = "SELECT count(*), count(DISTINCT span_id), count(*) FILTER (truncated) FROM spans"
    assert opened.connection.execute(counts).fetchone() == (210, 210, 10)
    opened.close()


def scoped(*payloads: bytes) -> bytes:
    """Spans of another library's, as its ``ScopeSpans``."""
    from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

    message = ScopeSpans(spans=[spooling.Span.FromString(payload) for payload in payloads])
    message.scope.name = "vllm"
    return message.SerializeToString()


def test_spans_as_the_library_writes_them(tmp_path):
    """Catches spans that differ between both ways though they are made by our own encoder."""
    with running(tmp_path / "run", span_groups="all"):
        for n in range(3000):
            with managed_span(
                "generation" if n % 3 else "step", f"rl.grpo.phase_{n % 5}", tokens=n, loss=n / 7, note=f"n{n}", odd="ß"
            ) as opened:
                assert opened is not None
                opened.set_attribute("rl.batch_id", n * 1000)
                if n % 50 == 0:
                    opened.add_event("sampled", {"n": n})
    assert differences(tmp_path / "run", tmp_path, worth=16) == []


def test_most_spans_are_no_objects(tmp_path, monkeypatch):
    """Catches columns that fit nothing, so that every span of a large run is decoded by itself after all."""
    whole = made_spool.make(tmp_path / "run", 100_000)
    decoded = decoded_alone(monkeypatch)
    opened = store.Store(tmp_path / "run")
    assert opened.connection.execute("SELECT count(*) FROM spans").fetchone() == (whole,)
    opened.close()
    assert len(decoded) < whole / 4


def test_a_pattern_of_which_there_are_few_goes_row_by_row(monkeypatch):
    """Catches arrays made for each of many spans that have no other like them, which takes longer than rows do."""
    payloads = [span(n + 1, 1, 2, name=f"{n:05}") for n in range(500)]
    lot = table_rows.TableRows("lane").lot(frames_of(payloads), np.zeros(0, np.uint64))
    assert len(lot.left()) == 500
