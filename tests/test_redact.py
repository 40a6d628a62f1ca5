"""Which attribute keys are content or a secret: DESIGN's list of words, and what passes although it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace

from raytrace_rl._redact import REDACTED, is_sensitive
from raytrace_rl.instrumentation import managed_span
from tests.running import attributes, running

WORDS = ["prompt", "completion", "response", "message", "content", "argument", "password", "secret", "token"]


@pytest.mark.parametrize("word", [*WORDS, *(f"{word}s" for word in WORDS), "authorization"])
@pytest.mark.parametrize("form", ["{}", "my.{}", "{}.0.role", "my_{}", "{}_id", "a.b_{}.c"])
def test_each_word_wherever_it_stands(word: str, form: str):
    """A prompt or a password leaves the process because its key spells it in the plural, or with a prefix."""
    assert is_sensitive(form.format(word))
    assert is_sensitive(form.format(word).upper())


@pytest.mark.parametrize(
    "key",
    [
        "input.value",
        "output.value",
        "input_text",
        "llm.output.messages",
        "llm.input_messages.0.message.content",
        "inputs.text",
        "api_key",
        "openai.api_key",
        "api.keys",
        "gen_ai.prompt",
        "gen_ai.completion.0.content",
        "gen_ai.input.messages",
        "gen_ai.tool.call.arguments",
        "http.request.body",
        "http.response.body.text",
        "http.request.header.authorization",
        "http.request.header.x_secret",
    ],
)
def test_content_under_the_names_of_the_conventions(key: str):
    """The names that OpenTelemetry, OpenInference and OpenLLMetry give to content pass."""
    assert is_sensitive(key)


@pytest.mark.parametrize(
    "key",
    [
        "gen_ai.response.model",
        "gen_ai.response.finish_reasons",
        "gen_ai.response.id",
        "http.response.status_code",
        "http.request.method",
        "http.response.header.content-type",
        "exception.message",
        "rl.bucket",
        "rl.span_group",
        "input",
        "output",
        "input.size",
        "api",
        "key",
        "keyboard.api",
        "promptly",
        "tokenizer",
        "messenger",
        "secretary",
        "access.mode",
        "s",
        "",
        "_",
        "...",
    ],
)
def test_metadata_passes(key: str):
    """Metadata is redacted, and the trace tells nothing any more."""
    assert not is_sensitive(key)


@given(st.text(max_size=30))
def test_any_key_has_an_answer(key: str):
    """A key of odd characters raises in the middle of a span."""
    assert is_sensitive(key) in (True, False)


GIVEN: dict[str, Any] = {"prompt": "who?", "num_prompts": 4, "messages": ["a", "b"], "note": "fine"}


@pytest.mark.parametrize("capture", [None, "0", "1"])
def test_on_spans_of_ours_and_of_others(tmp_path: Path, capture: str | None, monkeypatch: pytest.MonkeyPatch):
    """Redaction holds for our spans and not for foreign ones; or cannot be switched off."""
    if capture is not None:
        monkeypatch.setenv("RAYTRACE_RL_CAPTURE_CONTENT", capture)
    with running(tmp_path / "run") as telemetry:
        with managed_span("generation", "ours", **GIVEN) as span:
            assert span is not None
            span.add_event("e", GIVEN)
        with trace.get_tracer("other").start_as_current_span("theirs", attributes=GIVEN) as foreign:
            foreign.add_event("e", GIVEN)
        hidden = {"prompt": REDACTED, "num_prompts": 4, "messages": [REDACTED, REDACTED], "note": "fine"}
        wanted = GIVEN if capture == "1" else hidden
        for name in ("ours", "theirs"):
            message = telemetry.span(name)
            assert {key: value for key, value in attributes(message).items() if key in GIVEN} == wanted
            assert attributes(message.events[0]) == wanted
