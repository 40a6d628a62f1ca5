"""Helpers of the tests of the span path: telemetry started for a test, and its spool read back without our encoder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from raytrace_rl import _state, setup
from raytrace_rl.monitor import load_run
from raytrace_rl.monitor.model import Run
from raytrace_rl.spool import listing
from raytrace_rl.spool.format import Kind
from raytrace_rl.spool.reader import Cursor, Damage, Record

#: What most tests of spans start with: everything recorded, beats only where a test asks for them.
SETTINGS: dict[str, Any] = {"enabled": True, "span_groups": "all", "heartbeat_s": 3600.0}


def plain(value: AnyValue) -> Any:
    """What an official ``AnyValue`` holds, as a Python value."""
    which = value.WhichOneof("value")
    if which is None:
        return None
    if which == "array_value":
        return [plain(item) for item in value.array_value.values]
    if which == "kvlist_value":
        return {item.key: plain(item.value) for item in value.kvlist_value.values}
    return getattr(value, which)


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of an official message; a key that stands there twice is an error (OTLP: keys are unique)."""
    found = {item.key: plain(item.value) for item in message.attributes}
    assert len(found) == len(message.attributes), [item.key for item in message.attributes]
    return found


class Telemetry:
    """Telemetry that runs in this process."""

    def __init__(self, handle: setup.TelemetryHandle) -> None:
        self.handle = handle
        assert handle.run_dir is not None
        self.run_dir = Path(handle.run_dir)

    @property
    def drops(self) -> dict[str, int]:
        return {kind: n for kind, n in _state.drops.items() if n}

    def run(self) -> Run:
        """The run as ``raytrace-rl report`` reads it."""
        return load_run(self.run_dir)

    def records(self) -> list[Record]:
        """All records of all segments, read by the tolerant reader; damage is an error."""
        records, damage = read_records(self.run_dir)
        assert not damage, damage
        return records

    def spans(self) -> list[Span]:
        """All ended spans in the order in which they ended, as messages of the official class."""
        return spans_of(self.records())

    def span(self, name: str) -> Span:
        """The one ended span of that name."""
        (found,) = [span for span in self.spans() if span.name == name]
        return found


def read_records(run_dir: Path) -> tuple[list[Record], list[Damage]]:
    """All records of a run's segments, process by process in order, and what could not be read."""
    records: list[Record] = []
    damage: list[Damage] = []
    for files in listing.processes(run_dir / "spool"):
        for _, path in sorted(files.segments.items()):
            with Cursor(path) as cursor:
                records += cursor.poll()
                damage += cursor.damage
    return records, damage


def spans_of(records: list[Record]) -> list[Span]:
    """The ended spans among records, as messages of the official class."""
    found = []
    for record in records:
        if record.kind == Kind.SPAN:
            found.append(Span.FromString(record.payload))
        elif record.kind == Kind.SCOPE_SPANS:
            found += ScopeSpans.FromString(record.payload).spans
    return found


@contextmanager
def running(run_dir: Path, **settings: Any) -> Iterator[Telemetry]:
    """Telemetry with `SETTINGS` and ``settings`` for the length of a ``with`` statement."""
    handle = setup.init_telemetry_driver({**SETTINGS, "run_dir": str(run_dir), **settings})
    assert handle is not None
    try:
        yield Telemetry(handle)
    finally:
        setup.shutdown_telemetry()


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Returns what ``condition`` answers as soon as it is true; fails, naming ``what``, if it never is."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s} s")
        time.sleep(0.005)
    return answer


def child(code: str, *arguments: object, timeout_s: float = 60.0, check: bool = True, **env: str) -> Any:
    """Runs ``code`` as a Python program of its own; it must succeed unless ``check`` is False."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:raytrace_rl", **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def drive(program: str, tmp_path: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a driver's program to its end in a process of its own, with ``tmp_path / "run"`` as its run directory."""
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(program))
    return subprocess.run(
        [sys.executable, str(script), *argv],
        cwd=tmp_path,
        env={**os.environ, "RAYTRACE_RL_RUN_DIR": str(tmp_path / "run"), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
