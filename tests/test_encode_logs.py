"""The hand-written encoder of log records, against OpenTelemetry's own classes."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry._logs import SeverityNumber
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ScopeLogs

from raytrace_rl import _decode_logs, _encode, _encode_logs, _state
from raytrace_rl._redact import REDACTED
from tests.running import attributes, plain

any_text = st.text(st.characters(), max_size=40)


def record(message: Any = "hello", *args: Any, level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    """A record as a logger makes it; ``fields`` as ``extra=`` gives them."""
    made = logging.LogRecord("a.b", level, "/code/file.py", 7, message, args, fields.pop("exc_info", None), "fn")
    made.__dict__.update(fields)
    return made


def encoded(made: logging.LogRecord, span: tuple[int, int, int] | None = None, **options: Any) -> LogRecord:
    """The record as the official class reads it."""
    scope = ScopeLogs.FromString(_encode_logs.scope_logs(made, 123, span, **options))
    (found,) = scope.log_records
    assert scope.scope.name == made.name
    return found


@pytest.mark.parametrize(
    ("level", "number"),
    [
        (0, 0),
        (5, SeverityNumber.TRACE.value),
        (10, SeverityNumber.DEBUG.value),
        (11, SeverityNumber.DEBUG2.value),
        (19, SeverityNumber.DEBUG4.value),
        (20, SeverityNumber.INFO.value),
        (25, SeverityNumber.INFO4.value),
        (30, SeverityNumber.WARN.value),
        (33, SeverityNumber.WARN4.value),
        (40, SeverityNumber.ERROR.value),
        (50, SeverityNumber.FATAL.value),
        (52, SeverityNumber.FATAL3.value),
        (60, SeverityNumber.FATAL4.value),
        (10_000, SeverityNumber.FATAL4.value),
        (-5, 0),
    ],
)
def test_severity(level, number):
    """Catches a level that a backend shows, and filters, as another."""
    assert _encode_logs.severity(level) == number


def test_every_field():
    """Catches a wrong field number or wire type, or a field that is left out."""
    made = record("loss %.1f at %s", 0.25, "x", level=logging.WARNING)
    made.created = 1_700_000_000.5
    found = encoded(made, (0xABC, 0xDEF, 0x101))
    assert found.time_unix_nano == 1_700_000_000_500_000_000
    assert found.observed_time_unix_nano == 123
    assert (found.severity_number, found.severity_text) == (13, "WARNING")
    assert plain(found.body) == "loss 0.2 at x"
    assert found.trace_id == (0xABC).to_bytes(16, "big")
    assert found.span_id == (0xDEF).to_bytes(8, "big")
    assert found.flags == 1
    assert found.dropped_attributes_count == 0
    assert attributes(found) == {
        "code.file.path": "/code/file.py",
        "code.function.name": "fn",
        "code.line.number": 7,
        "thread.id": made.thread,
        "thread.name": made.threadName,
    }


def test_without_a_span_there_are_no_ids():
    """Catches ids of zeros, which a backend takes for a trace."""
    found = encoded(record())
    assert (found.trace_id, found.span_id, found.flags) == (b"", b"", 0)


def test_an_exception_is_described():
    """Catches a record of ``logger.exception`` without what went wrong, or with an attribute twice."""

    class Failure(Exception):
        pass

    try:
        raise Failure("no weights")
    except Failure:
        made = record("refit", level=logging.ERROR, exc_info=sys.exc_info(), **{"exception.type": "mine"})
    found = attributes(encoded(made))
    assert found["exception.type"].endswith("Failure")
    assert found["exception.message"] == "no weights"
    assert "raise Failure" in found["exception.stacktrace"]


@pytest.mark.parametrize("info", [(None, None, None), None, True])
def test_exc_info_without_an_exception(info):
    """Catches ``exc_info=True`` outside of a handler losing the record."""
    assert "exception.type" not in attributes(encoded(record(exc_info=info)))


def test_an_exception_that_cannot_be_described_leaves_the_record():
    """Catches a user's ``__str__`` that costs the record that would tell of it."""

    class Mute(Exception):
        def __str__(self):
            raise ValueError

    made = record(exc_info=(Mute, Mute(), None))
    assert attributes(encoded(made))["exception.type"].endswith("Mute")
    assert _state.drops["attributes"] == 1


def test_extras_are_attributes_and_redacted_by_key():
    """Catches ``extra=`` that is lost, a secret in it that is not, and one odd value that costs the others."""
    found = encoded(record(step=3, api_key="abc", odd=object(), none=None))
    assert {key: value for key, value in attributes(found).items() if "." not in key} == {
        "step": 3,
        "api_key": REDACTED,
    }
    assert found.dropped_attributes_count == 1
    assert "step" not in attributes(encoded(record(step=3), extras=False))


def test_a_message_whose_arguments_do_not_fit_is_kept():
    """Catches a mistake in a log call that makes its record disappear from telemetry."""
    assert plain(encoded(record("%d items", "many")).body) == "%d items ('many',)"


def test_a_message_of_any_type():
    """Catches a message that is no string."""
    assert plain(encoded(record(SimpleNamespace(a=1))).body) == "namespace(a=1)"


def test_long_messages_are_cut(monkeypatch):
    """Catches one record that fills a segment."""
    monkeypatch.setattr(_encode, "value_length_limit", 10)
    assert plain(encoded(record("x" * 50)).body) == "x" * 10


@given(any_text, st.dictionaries(any_text.filter(str.isidentifier), st.one_of(any_text, st.integers()), max_size=3))
def test_our_decoder_reads_what_was_encoded(message, extras):
    """Catches text that breaks the message, and a decoder that reads another one."""
    made = record(message.replace("%", "%%"), **{f"x_{key}": value for key, value in extras.items()})
    payload = _encode_logs.scope_logs(made, 5, (1, 2, 0))
    expected = ScopeLogs.FromString(payload).log_records[0]
    scope, (found,) = _decode_logs.scope_logs(payload)
    assert scope.name == "a.b"
    assert (found.time_ns, found.observed_ns) == (expected.time_unix_nano, 5)
    assert (found.severity, found.severity_text) == (expected.severity_number, expected.severity_text)
    assert found.body == plain(expected.body)
    assert found.attributes == attributes(expected)
    assert (found.trace_id, found.span_id, found.flags) == (expected.trace_id, expected.span_id, expected.flags)
    assert found.dropped_attributes == expected.dropped_attributes_count
