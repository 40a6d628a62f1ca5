"""Where records go without a spool: the console, nowhere on purpose, nowhere because there is no room."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from opentelemetry import trace

from raytrace_rl import _state, setup
from raytrace_rl._sinks import ConsoleSink, NoSink, NullSink
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.spool.format import Kind, pack_record
from tests.running import child, running

pytest_plugins = ["tests.telemetry_fixtures"]


@pytest.mark.parametrize(("sink", "kept"), [(NoSink(), False), (NullSink(), True)])
def test_what_takes_nothing_says_so(sink: NoSink, kept: bool):
    """A record that is lost passes for kept, or one that nobody wanted is counted as lost."""
    assert sink.append_record(pack_record(Kind.SPAN, b"")) is kept
    assert sink.append(Kind.METRICS, b"rubbish") is kept


def test_console_prints_each_span_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """``exporter="console"`` prints nothing, or prints to standard output, among the program's own lines."""
    with running(tmp_path / "run", exporter="console") as telemetry:
        assert telemetry.handle.is_exporting
        with managed_span("generation", "rl.vllm.generate", n=3):
            pass
        with trace.get_tracer("theirs").start_as_current_span("foreign"):
            pass
        assert telemetry.drops == {}
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 2
    told = r"rl\.vllm\.generate \d+\.\d{6}s rl\.span_group='generation' rl\.bucket='productive' n=3"
    assert re.fullmatch(rf"\[[0-9a-f]{{8}}\] {told}", lines[0])
    assert " foreign " in lines[1]
    assert not (tmp_path / "run").exists()


def test_console_without_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, capsys):
    """A daemon that has closed its standard error dies of its first span, or loses spans without counting them."""
    with running(tmp_path / "run", exporter="console") as telemetry:
        with (tmp_path / "closed").open("w", encoding="utf-8") as stream:
            pass
        monkeypatch.setattr(sys, "stderr", stream)
        for _ in range(3):
            with managed_span("generation", "s"):
                pass
        monkeypatch.setattr(sys, "stderr", None)
        with managed_span("generation", "s"):
            pass
        assert telemetry.drops["spans"] == 4
    assert len([record for record in caplog.records if "could not be printed" in record.getMessage()]) == 1
    assert capsys.readouterr().out == ""


def test_console_and_rubbish():
    """Bytes that are no span end the run."""
    sink = ConsoleSink()
    assert sink.append(Kind.SPAN, b"\xff\xff\xff") is False
    assert sink.append(Kind.SCOPE_SPANS, b"\x0a\xff") is False
    assert sink.append(Kind.METRICS, b"\xff") is True  # not for the console


def test_exporter_none_makes_spans_and_keeps_none(tmp_path: Path):
    """``exporter="none"`` writes files, counts its spans as lost, or breaks the chain of parents for others."""
    with running(tmp_path / "run", exporter="none") as telemetry:
        assert not telemetry.handle.is_exporting
        with managed_span("generation", "outer") as outer, managed_span("generation", "inner") as inner:
            assert outer is not None
            assert inner.parent_id == outer.span_id
            assert trace.get_current_span() is inner
        assert telemetry.drops == {}
        assert _state.open_spans == {}
    assert not (tmp_path / "run").exists()


def test_console_at_exit(tmp_path: Path):
    """A span that is open when a program ends is not printed."""
    done = child(
        """
        from raytrace_rl import setup
        from raytrace_rl.instrumentation import managed_span
        setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "exporter": "console"})
        managed_span("generation", "never-ended").__enter__()
        """
    )
    assert "never-ended" in done.stderr
    assert "rl.truncated=True" in done.stderr
    assert done.stdout == ""


def test_no_directory_is_settled_for_what_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``exporter="console"`` leaves an empty ``raytrace_runs`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    handle = setup.init_telemetry_driver({"enabled": True, "exporter": "console"})
    assert handle is not None
    setup.shutdown_telemetry()
    assert list(tmp_path.iterdir()) == []
