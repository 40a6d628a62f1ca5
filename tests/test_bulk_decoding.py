"""Spans decoded by the thousand: the same as decoded one by one, whatever the records are."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrace_rl.monitor.bulk import decoding, framing, templates
from raytrace_rl.monitor.bulk.decoding import Decoder
from raytrace_rl.spool.format import pack_record
from raytrace_rl.spool.reader import Cursor
from tests import spooling
from tests.decoded import decoded_alone, frames_of, many_at_once, one_by_one

np = pytest.importorskip("numpy")


KEYS = (
    "rl.bucket", "rl.span_group", "rl.iteration", "rl.queued_ns", "rl.truncated", "rl.weight_version",
    "thread.id", "thread.name", "prompt", "tokens", "é",
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(["productive", "idle", "step", "", "MainThread", "käse"]),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, 300),
    st.booleans(),
    st.floats(),
    st.binary(max_size=4),
    st.lists(st.integers(0, 9), max_size=3),
    st.none(),
)


@st.composite
def records(draw):
    """Spans that are partly alike: several of each of a few patterns, some of them damaged."""
    payloads = []
    for pattern in range(draw(st.integers(1, 3))):
        keys = draw(st.lists(st.sampled_from(KEYS), max_size=5))
        kinds = draw(st.lists(VALUES, min_size=len(keys), max_size=len(keys)))
        several = draw(st.integers(1, 12))
        odd = draw(st.sampled_from(["", "", "", "links", "no parent", "zero id", "short id", "no trace"]))
        for n in range(several):
            changed = draw(st.integers(0, len(keys) - 1)) if keys and draw(st.booleans()) else -1
            values = {}
            for at, (key, value) in enumerate(zip(keys, kinds, strict=True)):
                values[key] = draw(VALUES) if at == changed else value
            number = draw(st.integers(1, 1 << 20))
            links = [(3, {"rl.trajectory.count": n})] if odd == "links" else ()
            record = spooling.span(
                number if odd != "zero id" else 0,
                draw(st.integers(0, 100)),
                draw(st.one_of(st.none(), st.integers(0, 200))),
                parent=0 if odd == "no parent" else draw(st.integers(1, 200)),
                name=draw(st.sampled_from(["a", "bb", "cé", f"name {pattern}"])),
                error=draw(st.booleans()),
                links=links,
                **values,
            )
            if odd == "short id":
                record += b"\x12\x03abc"
            if odd == "no trace":
                record = record[18:]
            payloads.append(record)
    whole = list(payloads)
    for _ in range(draw(st.integers(0, 3))):
        damaged = bytearray(draw(st.sampled_from(whole)))
        damaged[draw(st.integers(0, len(damaged) - 1))] = draw(st.integers(0, 255))
        payloads.append(bytes(damaged))
        payloads.append(bytes(damaged[: draw(st.integers(0, len(damaged)))]))
    draw(st.randoms(use_true_random=False)).shuffle(payloads)
    return payloads


@settings(max_examples=100, deadline=None)
@given(records(), st.integers(1, 3))
def test_bulk_decoding_is_plain_decoding(payloads, lots):
    """Catches a span that comes out of a template otherwise than the decoder reads it."""
    with mock.patch.object(decoding, "_WORTH", 2):
        assert many_at_once(payloads, lots) == one_by_one(payloads)


def test_each_changed_byte_of_many_spans_alike():
    """Catches a byte that a template takes for a value though it decides how the record is read."""
    base = spooling.span(
        77, 1, 2, parent=5, name="näme", error=True, rl__bucket="idle", rl__iteration=300, rl__truncated=True,
        thread__id=140_000_000_000_000, tokens=1.5, prompt="hello there", many=[1, 2],
    )  # fmt: skip
    generator = random.Random(5)
    payloads = [base] * 40
    for at in range(len(base)):
        for value in {0, 1, 0x7F, 0x80, 0xFF, base[at] ^ 1, base[at] ^ 0x80, generator.randrange(256)}:
            payloads.append(base[:at] + bytes([value]) + base[at + 1 :])
    assert many_at_once(payloads) == one_by_one(payloads)


def test_most_spans_are_decoded_by_template(monkeypatch):
    """Catches templates that fit nothing, so that every span is decoded by itself after all."""
    payloads = [
        spooling.span(
            n + 1,
            n,
            n + 1,
            parent=1,
            name=f"phase_{n % 7}",
            rl__iteration=n // 50,
            thread__id=1 + n % 3,
            thread__name=f"rollout-{n:05}",
            prompt=f"{n:06}",
        )
        for n in range(3000)
    ]
    calls = decoded_alone(monkeypatch)
    decoder = Decoder()
    decoder.add(frames_of(payloads))
    assert len(decoder.part().span) == 3000
    assert len(calls) < 100


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=30), st.data())
def test_framing_is_the_cursors(tmp_path_factory, payloads, data):
    """Catches a record, or a damage, that the piecewise reader sees otherwise than the cursor."""
    body = bytearray(b"".join(pack_record(data.draw(st.sampled_from([1, 5, 99])), payload) for payload in payloads))
    for _ in range(data.draw(st.integers(0, 3))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    body = body[: data.draw(st.integers(0, len(body)))] + bytes(data.draw(st.integers(0, 50)))
    spool = spooling.Spool(tmp_path_factory.mktemp("framing"))
    segment = spool.segment(7, bytes(body))
    if data.draw(st.booleans()):
        segment.write_bytes(b"?" + segment.read_bytes()[1:])
    path = str(segment)
    final = data.draw(st.booleans())
    with Cursor(path) as cursor:
        wanted = [(record.kind, record.payload, record.offset) for record in cursor.poll(final=final)]
        file = framing.SegmentFile(path, final=final)
        found = [
            (int(frames.kind[n]), frames.payload(n), int(frames.offset[n]))
            for frames in file.frames()
            for n in range(len(frames.kind))
        ]
        assert (found, file.damage, file.header) == (wanted, cursor.damage, cursor.header)
        assert file.last_offset == (wanted[-1][2] if wanted else -1)


def test_shapes_with_the_same_hash_stay_apart(monkeypatch):
    """Catches two spans that were written so that their hashes agree, and that pass for one another."""
    monkeypatch.setattr(templates, "_MIX", np.zeros_like(templates._MIX))
    traces = [bytes([n]) * 16 for n in (1, 2)]
    payloads = [
        spooling.span(n + 1, n, n + 1, name=f"phase_{n % 7}", trace=traces[n % 2], rl__iteration=n) for n in range(100)
    ]
    assert many_at_once(payloads) == one_by_one(payloads)
