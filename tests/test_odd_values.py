"""Values of every odd type, anywhere in a batch of spans: each loses at most its own attribute, all else arrives."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from raytrace_rl.instrumentation import emit_span, managed_span, safe_set_span_attributes, span_attributes
from raytrace_rl.monitor import load_run
from tests.running import running
from tests.test_encode import UNENCODABLE

pytest_plugins = ["tests.telemetry_fixtures"]

GOOD: st.SearchStrategy[Any] = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    | st.lists(st.integers(0, 9), max_size=3)
)
VALUES = GOOD.map(lambda value: (True, value)) | st.sampled_from(UNENCODABLE).map(lambda value: (False, value))
#: Attributes by key, each with whether it can arrive.
KEYS = st.text("abcdefg", min_size=3, max_size=5).map(lambda key: f"rl.x.{key}")
ATTRIBUTES = st.dictionaries(KEYS, VALUES, max_size=4)
SPANS = st.lists(st.tuples(st.sampled_from(["with", "later", "scope", "emitted"]), ATTRIBUTES), min_size=1, max_size=6)


def record(way: str, name: str, attributes: dict[str, Any]) -> None:
    """Opens a span that is given its attributes in one of the ways that there are."""
    if way == "with":
        with managed_span("generation", name, **attributes):
            pass
    elif way == "later":
        with managed_span("generation", name) as span:
            safe_set_span_attributes(span, attributes)
    elif way == "scope":
        with span_attributes(attributes), managed_span("generation", name):
            pass
    else:
        emit_span("generation", name, 1.0, 2.0, attributes=attributes)


@settings(max_examples=60, deadline=None)
@given(SPANS)
def test_a_batch_arrives_whatever_is_in_it(batch):
    """One odd value takes its span, the rest of its span, the name or the batch with it; or is lost without a count."""
    with tempfile.TemporaryDirectory() as directory:
        with running(Path(directory) / "run") as telemetry:
            for number, (way, attributes) in enumerate(batch):
                record(way, f"rl.x.span_{number}", {key: value for key, (_, value) in attributes.items()})
            drops = telemetry.drops
        spans = {span.name: span for span in load_run(Path(directory) / "run").spans}
    assert sorted(spans) == sorted(f"rl.x.span_{number}" for number in range(len(batch)))
    for number, (_, attributes) in enumerate(batch):
        span = spans[f"rl.x.span_{number}"]
        arrived = {key: value for key, value in span.attributes.items() if key.startswith("rl.x.")}
        good = {key: value for key, (can, value) in attributes.items() if can}
        assert arrived == good
        assert {key: type(value) for key, value in arrived.items()} == {key: type(good[key]) for key in good}
        assert (span.span_group, span.bucket) == ("generation", "productive")
    odd = sum(not can for _, attributes in batch for can, _ in attributes.values())
    assert drops == ({"attributes": odd} if odd else {})
