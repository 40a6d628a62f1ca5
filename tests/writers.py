"""Spool writers of the tests: one in this process with small segments, and whole processes that write and report."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl.spool import writer as module
from raytrace_rl.spool.format import Kind, pack_record
from raytrace_rl.spool.liveness import Liveness
from raytrace_rl.spool.place import Place
from raytrace_rl.spool.writer import SpoolWriter
from tests import spooling
from tests.running import read_records

SEGMENT = 64 << 10


def place_of(run_dir: Path, mode: str) -> Place:
    """A node's directories: active files beside the readers' directory (``tmpfs``), or in it (``direct``)."""
    directory = run_dir / "spool" / "node"
    active = run_dir / "active" if mode == "tmpfs" else directory
    for path in (directory, active):
        path.mkdir(parents=True, exist_ok=True)
    return Place(str(directory), str(active))


@contextmanager
def writing(
    run_dir: Path, mode: str, monkeypatch: pytest.MonkeyPatch, *, bound: int = 64 << 20, segment: int = SEGMENT
) -> Iterator[SpoolWriter]:
    """A writer in this process whose segments are all of one size."""
    monkeypatch.setattr(module, "FIRST_SIZE", segment)
    monkeypatch.setattr(module, "LARGEST_SIZE", segment)
    place = place_of(run_dir, mode)
    writer = SpoolWriter(place, spooling.resource(rl__role="worker"), bound_bytes=bound)
    path, link = writer.paths(".live")
    live = Liveness(path)
    if link != path:
        Path(link).symlink_to(path)
    writer.open()
    try:
        yield writer
    finally:
        writer.close()
        Path(link).unlink(missing_ok=True)
        live.release()


def record(n: int, size: int = 300) -> bytes:
    """The record of span number ``n``, of about ``size`` bytes."""
    return pack_record(Kind.SPAN, spooling.span(n, n, n + 1, note="x" * max(0, size - 100)))


def written(run_dir: Path) -> list[int]:
    """The numbers of the spans that are to be read, in their order; damage is an error."""
    records, damage = read_records(run_dir)
    assert not damage, damage
    return [
        int.from_bytes(spooling.Span.FromString(one.payload).span_id, "big") for one in records if one.kind == Kind.SPAN
    ]


WORKER = """
import json, os, sys
from raytrace_rl import setup, _process, _state
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.spool import place

settings = json.loads(sys.argv[1])
if settings.pop("direct", False):
    place.MIN_TMPFS_FREE = 1 << 62
    place.is_local = lambda path: True
handle = setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "heartbeat_s": 3600, **settings})

def answer(**values):
    print(json.dumps(values), flush=True)

answer(pid=os.getpid(), active=_process.current.writer.place.active)
for line in sys.stdin:
    command, _, count = line.strip().partition(" ")
    if command == "write":
        for n in range(int(count)):
            with managed_span("generation", "s", n=n, note="x" * 900):
                pass
        _process.current.writer.seal_full()
    elif command == "beat":
        _process.current._heartbeat.beat()
    elif command == "open":
        managed_span("generation", "open").__enter__()
    elif command == "stop":
        setup.shutdown_telemetry()
    answer(drops=_state.drops)
"""


class Worker:
    """A process that writes spans on command."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, command: str) -> dict[str, Any]:
        """Has it do something; returns its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """Kills it as ``kill -9`` does."""
        self.process.kill()
        self.process.wait(30)


@contextmanager
def worker(run_dir: Path, **settings: Any) -> Iterator[Worker]:
    """Another process with telemetry in ``run_dir``."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER), json.dumps({"run_dir": str(run_dir), **settings})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()
