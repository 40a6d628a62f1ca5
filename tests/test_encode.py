"""The hand-written encoder, field by field, against the official protobuf classes and the SDK's own encoder.

Differences that are meant, each tested as such: our ``flags`` carry the W3C trace flags too; content is redacted by
key; empty keys are refused; values and status messages are cut.
"""

from __future__ import annotations

import enum
import math
import struct
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Status as ApiStatus

from raytrace_rl import _decode, _encode, _foreign, _state
from raytrace_rl._redact import REDACTED
from tests.running import attributes, plain

# Text as users have it: every code point, lone surrogates included.
any_text = st.text(st.characters(), max_size=40)
keys = st.text(st.characters(), min_size=1, max_size=20).filter(lambda key: key.encode("utf-8", "ignore") != b"")
int64 = st.integers(-(2**63), 2**63 - 1)
scalars: st.SearchStrategy[Any] = st.one_of(any_text, st.booleans(), int64, st.floats())
values: st.SearchStrategy[Any] = st.one_of(scalars, st.lists(st.one_of(scalars, st.none()), max_size=8))


def clean(text: str) -> str:
    """Text as it comes out: what UTF-8 cannot hold is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def expected(value: Any) -> Any:
    """A value as it comes out."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, (list, tuple)):
        return [expected(item) for item in value]
    return value


def same(found: Any, wanted: Any) -> bool:
    """Equal in type and bits: True is not 1, 1 is not 1.0, -0.0 is not 0.0, NaN is NaN."""
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isnan(found) if math.isnan(wanted) else struct.pack("<d", found) == struct.pack("<d", wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def encoded(key: str, value: Any) -> Any:
    """The value as it comes back from the official class."""
    message = KeyValue.FromString(_encode.key_value(_encode.RESOURCE_ATTRIBUTE, key, value)[2:])
    return plain(message.value)


def span_with(given_attributes: dict[Any, Any]) -> tuple[Span, int]:
    """A span with these attributes, decoded by the official class, and how many the encoder says are lost."""
    parts: list[bytes] = []
    lost = _encode.span_attributes(given_attributes, parts)
    return Span.FromString(b"".join(parts)), lost


@pytest.fixture(autouse=True)
def _capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is redacted but where a test says so; no encoding of another test is remembered."""
    monkeypatch.setattr(_state, "capture_content", True)
    _encode.clear_caches()


@pytest.fixture
def _redacting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_state, "capture_content", False)


# -- varints, and the frame of a field ---------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1))
def test_varint_is_what_protobuf_reads(n: int):
    """A wrong varint shifts everything behind it."""
    status = Status.FromString(b"\x18" + _encode.varint(n & 0x7FFFFFFF))
    assert status.code == n & 0x7FFFFFFF
    value = AnyValue.FromString(b"\x18" + _encode.varint(n))
    assert value.int_value % 2**64 == n


@pytest.mark.parametrize("n", [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**32, 2**63, 2**64 - 1])
def test_varint_at_its_seams(n: int):
    """Off by one where a varint grows by a byte."""
    assert AnyValue.FromString(b"\x18" + _encode.varint(n)).int_value % 2**64 == n


# -- attribute values --------------------------------------------------------------------------------------------------


@given(keys, values)
def test_every_value_comes_back_as_it_was(key: str, value: Any):
    """A value changes its type or its bits on the way (bool to int, -0.0 to 0.0, a surrogate to nothing)."""
    message, lost = span_with({key: value})
    assert lost == 0
    ((found_key, found),) = attributes(message).items()
    assert found_key == clean(key)
    assert same(found, expected(value)), (found, value)
    # once more: from the cache, if there is one
    again, _ = span_with({key: value})
    assert again == message


@given(st.lists(st.tuples(st.sampled_from("abc"), scalars), max_size=30))
def test_values_that_are_equal_and_not_the_same_keep_their_type(pairs: list[tuple[str, Any]]):
    """The cache answers True for 1, or 1 for 1.0: they are equal as dictionary keys."""
    for key, value in [*pairs, ("a", True), ("a", 1), ("a", 1.0), ("a", 0), ("a", False), ("a", 0.0), ("a", -0.0)]:
        message, _ = span_with({key: value})
        assert same(plain(message.attributes[0].value), expected(value))


def test_decoder_of_the_project_agrees_with_the_official_one():
    """What we write cannot be read by our own reader, though protobuf can."""
    parts: list[bytes] = []
    _encode.span_attributes({"a": "ü\udc80", "b": -1, "c": True, "d": 0.5, "e": ["x", 1, None], "f": b"\xff"}, parts)
    found = _decode.span(b"".join(parts))
    assert found.attributes == {"a": "ü\\udc80", "b": -1, "c": True, "d": 0.5, "e": ["x", 1, None], "f": b"\xff"}


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Mode(str, enum.Enum):
    FAST = "fast"


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Mode.FAST, "fast"),
        (Word("w"), "w"),
        (PurePosixPath("/a/b"), "/a/b"),
        (Path("c"), "c"),
        (np.float64(0.25), 0.25),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(-7), -7),
        (np.uint64(2**63 - 1), 2**63 - 1),
        (np.int8(-1), -1),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.array(3), 3),
        (np.array([1, 2]), [1, 2]),
        (np.array([0.5]), [0.5]),
        (np.array([], dtype=np.int64), []),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([True, False]), [True, False]),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([1, 2, 3]), [1, 2, 3]),
        ((1, 2), [1, 2]),
        ([Colour.RED, np.float32(0.5), Path("p")], ["red", 0.5, "p"]),
        ([], []),
        ("", ""),
        (b"", b""),
        (b"\x00\xff", b"\x00\xff"),
    ],
    ids=repr,
)
def test_values_of_numpy_torch_enums_and_paths(value: Any, wanted: Any):
    """What a training loop has in its hands (a loss, a step, an enum of modes) is refused, or comes out as a repr."""
    message, lost = span_with({"k": value})
    assert lost == 0
    assert same(attributes(message)["k"], wanted)


class Hostile:
    """Raises from whatever is asked of it."""

    dtype = "float32"

    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape")


class HostileDtype:
    @property
    def dtype(self) -> Any:
        raise RuntimeError("no dtype")


class HostileItem:
    dtype = "float32"
    shape = ()

    def item(self) -> Any:
        raise RuntimeError("no item")


class ItemOfItself(HostileItem):
    def item(self) -> Any:
        return self


class HostileLength(list[int]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


class HostileIteration(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError("no items")


class Endless(list[int]):
    """Says that it is short, and never ends."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        while True:
            yield 1


class HostilePath:
    def __fspath__(self) -> str:
        raise RuntimeError("no path")


class HostileText(str):
    __slots__ = ()

    def __getitem__(self, _: Any) -> Any:
        raise RuntimeError("no characters")


class OnGpu:
    """A tensor on a device, as far as the encoder can see (there is none on this machine)."""

    dtype = "float32"
    shape = ()

    device = SimpleNamespace(type="cuda")

    def item(self) -> float:
        raise AssertionError("the encoder waited for the GPU")


UNENCODABLE: list[Any] = [
    2**63,
    -(2**63) - 1,
    10**400,
    [1, 2**63],
    list(range(65)),
    np.zeros(65),
    np.zeros((2, 2)),
    torch.zeros(2, 2),
    torch.zeros(65),
    torch.tensor(1 + 2j),
    1 + 2j,
    {"a": 1},
    {1, 2},
    object(),
    [[1]],
    [object()],
    np.datetime64("2020-01-01"),
    np.uint64(2**63),
    range(3),
    Hostile(),
    HostileDtype(),
    HostileItem(),
    ItemOfItself(),
    HostileIteration([1]),
    Endless(),
    HostilePath(),
    HostileText("x"),
    OnGpu(),
    torch.zeros((), device="meta"),
]


@pytest.mark.parametrize(
    "value", UNENCODABLE, ids=[f"{n}-{type(value).__name__}" for n, value in enumerate(UNENCODABLE)]
)
def test_what_no_attribute_can_hold_loses_itself_alone(value: Any):
    """One bad attribute takes the span, its other attributes, or the training step with it; or is lost in silence."""
    message, lost = span_with({"before": 1, "bad": value, "after": "x"})
    assert attributes(message) == {"before": 1, "after": "x"}
    assert lost == 1
    assert _state.drops["attributes"] == 1


def test_list_that_lies_about_its_length_is_read_all_the_same():
    """A list's own ``__len__`` decides whether the encoder ends."""
    message, lost = span_with({"k": HostileLength([1])})
    assert (attributes(message), lost) == ({"k": [1]}, 0)


def test_longest_array_is_kept():
    """The bound of 64 elements is off by one."""
    message, lost = span_with({"k": list(range(64))})
    assert lost == 0
    assert attributes(message)["k"] == list(range(64))


def test_none_is_left_out_and_not_counted():
    """``attempt=None`` is a common default: it is no loss."""
    message, lost = span_with({"a": None, "b": 1})
    assert attributes(message) == {"b": 1}
    assert (lost, _state.drops["attributes"]) == (0, 0)


@pytest.mark.parametrize("key", ["", 1, None, ("a",)])
def test_key_that_is_no_text_loses_its_attribute_alone(key: Any):
    """``set_attributes({1: ...})`` breaks the span."""
    message, lost = span_with({key: "x", "ok": 1})
    assert attributes(message) == {"ok": 1}
    assert lost == 1


def test_values_are_cut_at_the_limit_in_characters(monkeypatch: pytest.MonkeyPatch):
    """A whole prompt fills the spool; or the cut falls inside a character and nobody can read the string."""
    monkeypatch.setattr(_encode, "value_length_limit", 10)
    message, lost = span_with({"s": "é" * 11, "l": ["x" * 11, "y"], "b": b"z" * 11})
    assert lost == 0
    assert attributes(message) == {"s": "é" * 10, "l": ["x" * 10, "y"], "b": b"z" * 10}


def test_default_limit_is_64_kib():
    """DESIGN 3.2: values are cut at 64 KiB."""
    message, _ = span_with({"s": "x" * 70_000})
    assert attributes(message)["s"] == "x" * 65536


def test_cache_does_not_grow_without_end():
    """A value per request (a uuid, a loss) leaks memory for as long as the run lasts."""
    for n in range(10_000):
        span_with({"s": f"{n}", "i": n, "f": n + 0.5, f"k{n}": 0.5, f"b{n}": True})
    for cache in (_encode._strings, _encode._ints, _encode._bools, _encode._double_prefixes):
        assert len(cache) <= _encode._CACHE_SIZE


@pytest.mark.usefixtures("_redacting")
def test_content_is_redacted_in_every_form_it_comes_in():
    """A prompt leaves the process as bytes, a path, an enum, a list or an array though as a string it does not."""
    message, lost = span_with(
        {
            "prompt": "secret",
            "prompts": ["secret", 3, "secret"],
            "content": b"secret",
            "message": Mode.FAST,
            "arguments": Path("secret"),
            "responses": np.array(["secret"]),
            "rl.num_prompts": 3,
            "token": 0.5,
        }
    )
    assert lost == 0
    assert attributes(message) == {
        "prompt": REDACTED,
        "prompts": [REDACTED, 3, REDACTED],
        "content": REDACTED.encode(),
        "message": REDACTED,
        "arguments": REDACTED,
        "responses": [REDACTED],
        "rl.num_prompts": 3,
        "token": 0.5,
    }


# -- events, links, status, resource -----------------------------------------------------------------------------------


@given(any_text, st.integers(0, 2**64 - 1), st.dictionaries(keys, values, max_size=4))
def test_event(name: str, time_ns: int, given_attributes: dict[str, Any]):
    """A field of an event has a wrong number or type."""
    (event,) = Span.FromString(_encode.event(name, time_ns, given_attributes)).events
    assert event.name == clean(name)
    assert event.time_unix_nano == time_ns
    assert event.dropped_attributes_count == 0
    found = [(item.key, plain(item.value)) for item in event.attributes]
    wanted = [(clean(key), expected(value)) for key, value in given_attributes.items()]
    assert len(found) == len(wanted)
    assert all(f[0] == w[0] and same(f[1], w[1]) for f, w in zip(found, wanted, strict=True))


@given(
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.sampled_from(["", "a=1", "a=1,b=2"]),
    st.dictionaries(keys, scalars, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_link(trace_id: bytes, span_id: bytes, state: str, given_attributes: dict[str, Any], flags: int):
    """A field of a link has a wrong number or type."""
    (link,) = Span.FromString(_encode.link(trace_id, span_id, state, given_attributes, flags)).links
    assert (link.trace_id, link.span_id, link.trace_state, link.flags) == (trace_id, span_id, state, flags)
    assert len(link.attributes) == len(given_attributes)


def test_events_and_links_count_what_they_could_not_hold():
    """An attribute of an event is lost without a trace."""
    bad = {"ok": 1, "bad": object(), "none": None}
    (event,) = Span.FromString(_encode.event("e", 1, bad)).events
    (link,) = Span.FromString(_encode.link(b"t" * 16, b"s" * 8, "", bad, 1)).links
    assert (event.dropped_attributes_count, attributes(event)) == (1, {"ok": 1})
    assert (link.dropped_attributes_count, attributes(link)) == (1, {"ok": 1})
    assert _state.drops["attributes"] == 2


def test_attribute_count_limit_of_events(monkeypatch: pytest.MonkeyPatch):
    """An event with ten thousand attributes goes through whole, or loses the first ones."""
    monkeypatch.setattr(_encode, "attribute_count_limit", 3)
    (event,) = Span.FromString(_encode.event("e", 1, {f"k{n}": n for n in range(5)})).events
    assert attributes(event) == {"k0": 0, "k1": 1, "k2": 2}
    assert event.dropped_attributes_count == 2
    assert _state.drops["attributes"] == 2


@given(st.sampled_from([0, 1, 2]), any_text)
def test_status(code: int, message: str):
    """An ERROR status reads as UNSET, or its message is lost."""
    status = Span.FromString(_encode.status(code, message)).status
    assert status.code == code
    assert status.message == (clean(message) if code else "")


def test_status_message_is_cut_at_1_kib():
    """An exception message of megabytes fills the spool."""
    assert Span.FromString(_encode.status(2, "x" * 5000)).status.message == "x" * 1024


@given(st.dictionaries(keys, values, max_size=5))
def test_resource(given_attributes: dict[str, Any]):
    """The resource of a process cannot be read back."""
    message = Resource.FromString(_encode.resource(given_attributes))
    assert len(message.attributes) == len(given_attributes)
    for item, (key, value) in zip(message.attributes, given_attributes.items(), strict=True):
        assert item.key == clean(key)
        assert same(plain(item.value), expected(value))


def test_resource_fits_a_segment_header():
    """A header beyond the format's limit is refused by every reader: all spans of the process would be lost."""
    from raytrace_rl.spool.format import MAX_HEADER_SIZE

    encoded_resource = _encode.resource({f"k{n}": "x" * 65536 for n in range(40)} | {"last": 1})
    assert len(encoded_resource) <= _encode.MAX_RESOURCE < MAX_HEADER_SIZE
    kept = attributes(Resource.FromString(encoded_resource))
    assert kept["last"] == 1
    assert _state.drops["attributes"] == 41 - len(kept) > 0


# -- whole spans, against the SDK's encoder ----------------------------------------------------------------------------

sdk_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
sdk_keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=15)
sdk_values: st.SearchStrategy[Any] = st.one_of(
    sdk_text,
    st.booleans(),
    int64,
    st.floats(allow_nan=False),
    st.lists(st.one_of(sdk_text), max_size=5),
    st.lists(int64, max_size=5),
    st.lists(st.booleans(), max_size=5),
    st.lists(st.floats(allow_nan=False), max_size=5),
)
sdk_attributes = st.dictionaries(sdk_keys, sdk_values, max_size=5)
contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.sampled_from([TraceFlags(0), TraceFlags(1)]),
    st.sampled_from([TraceState(), TraceState([("a", "1")]), TraceState([("a", "1"), ("b", "x/y")])]),
)


@st.composite
def sdk_spans(draw: Any) -> ReadableSpan:
    """A span as the SDK's own tracer makes it, limits and all."""
    limits = SpanLimits(max_span_attributes=3, max_events=2, max_links=2, max_event_attributes=2, max_link_attributes=2)
    provider = TracerProvider(shutdown_on_exit=False, span_limits=limits, id_generator=_foreign._Ids())
    tracer = provider.get_tracer("library", "1.2", "https://schema")
    parent = draw(st.none() | contexts)
    # the parent's flags decide on sampling: an unsampled parent would make a span that records nothing
    if parent is not None:
        parent = SpanContext(parent.trace_id, parent.span_id, parent.is_remote, TraceFlags(1), parent.trace_state)
    span = tracer.start_span(
        draw(sdk_text),
        set_span_in_context(NonRecordingSpan(parent)) if parent is not None else None,
        draw(st.sampled_from(SpanKind)),
        draw(sdk_attributes),
        draw(st.lists(st.builds(Link, contexts, sdk_attributes), max_size=3)),
        start_time=draw(st.integers(1, 2**63)),
    )
    for _ in range(draw(st.integers(0, 3))):
        span.add_event(draw(sdk_text), draw(sdk_attributes), draw(st.integers(1, 2**63)))
    code = draw(st.sampled_from(StatusCode))
    span.set_status(ApiStatus(code, draw(sdk_text) if code is StatusCode.ERROR else None))
    span.end(draw(st.integers(1, 2**63)))
    assert isinstance(span, ReadableSpan)
    return span


@given(sdk_spans())
def test_foreign_span_is_encoded_as_the_sdk_encodes_it(span: ReadableSpan):
    """A span of another instrumentation loses a field on its way to the collector."""
    assert span.end_time is not None
    ours = Span.FromString(_foreign.encode_span(span, span.end_time))
    (theirs,) = encode_spans([span]).resource_spans[0].scope_spans[0].spans
    context = span.get_span_context()
    assert context is not None
    # Meant: the W3C flags are in the low byte (trace.proto, SpanFlags), which the SDK's encoder leaves out ...
    assert ours.flags == theirs.flags | int(context.trace_flags)
    ours.flags = theirs.flags
    for mine, other, link in zip(ours.links, theirs.links, span.links, strict=True):
        assert mine.flags == other.flags | int(link.context.trace_flags)
        mine.flags = other.flags
        # ... and the trace state of links, which it leaves out too.
        assert mine.trace_state == link.context.trace_state.to_header()
        mine.trace_state = ""
    if not theirs.status.code:
        theirs.ClearField("status")  # UNSET is what an absent status means; the SDK sends an empty message
    assert ours == theirs


@given(sdk_spans())
def test_foreign_scope_is_encoded_as_the_sdk_encodes_it(span: ReadableSpan):
    """The name of the library that made a span is lost."""
    assert span.end_time is not None
    assert span.instrumentation_scope is not None
    scope = span.instrumentation_scope
    encoded_span = _foreign.encode_span(span, span.end_time)
    ours = ScopeSpans.FromString(
        _encode.scope_spans(scope.name, scope.version or "", scope.schema_url or "", [encoded_span])
    )
    theirs = encode_spans([span]).resource_spans[0].scope_spans[0]
    assert ours.scope == theirs.scope
    assert ours.schema_url == theirs.schema_url
    assert len(ours.spans) == 1
