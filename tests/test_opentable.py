"""The table of open spans: a span is in it the moment it starts, and its slot is free again when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl import _process, _span, _state
from raytrace_rl._span import RecordingSpan
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.monitor import load_run
from raytrace_rl.spool import listing, opentable
from raytrace_rl.spool.format import SLOT_COUNT, SLOT_SIZE
from raytrace_rl.spool.opentable import FREE, LENGTHS, OpenTable
from tests import spooling
from tests.running import Telemetry, child

pytest_plugins = ["tests.telemetry_fixtures"]


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """A table of its own."""
    made = OpenTable(str(tmp_path / "7-1.open"), spooling.header())
    yield made
    made.close()


def started(name: str) -> RecordingSpan:
    """A span that nobody ends."""
    span = RecordingSpan("generation", name, {})
    span.begin(_span.otel_var.get())
    return span


def slots_of(telemetry: Telemetry) -> list[Span]:
    """What is in the used slots, as a reader finds it."""
    (files,) = listing.processes(telemetry.run_dir / "spool")
    assert files.slots is not None
    header, spans, damage = listing.read_slots(files.slots)
    assert header is not None
    assert damage is None
    return [Span.FromString(data) for data in spans]


def current_table() -> OpenTable:
    """The table of the running telemetry."""
    assert _state.table is not None
    return _state.table


def test_span_is_there_from_start_to_end(telemetry: Telemetry):
    """A span is invisible until the next heartbeat, or is open for ever."""
    with managed_span("generation", "outer") as outer:
        assert isinstance(outer, RecordingSpan)
        with managed_span("reward", "inner", n=1):
            found = {span.name: span for span in slots_of(telemetry)}
            assert sorted(found) == ["inner", "outer"]
            assert found["outer"].span_id == outer.span_id
            assert found["outer"].start_time_unix_nano == outer.start_ns
            assert found["outer"].end_time_unix_nano == 0
            assert found["inner"].parent_span_id == outer.span_id
        assert [span.name for span in slots_of(telemetry)] == ["outer"]
    assert slots_of(telemetry) == []


def test_more_open_spans_than_slots(telemetry: Telemetry):
    """The 257th open span breaks, overwrites another's slot, or keeps slots from being used again."""
    spans = [started(f"s{n}") for n in range(SLOT_COUNT + 40)]
    assert len(slots_of(telemetry)) == SLOT_COUNT
    assert current_table().free == []
    for span in spans:
        span.end()
    assert slots_of(telemetry) == []
    assert sorted(current_table().free) == sorted({*current_table().free})
    assert len(current_table().free) == SLOT_COUNT
    assert len(telemetry.spans()) == len(spans)
    with managed_span("generation", "again"):
        assert [span.name for span in slots_of(telemetry)] == ["again"]


def test_threads_share_the_slots(telemetry: Telemetry):
    """Two threads get one slot, and one of their spans is invisible."""
    wait, held = threading.Event(), threading.Barrier(9)

    def hold(thread: int) -> None:
        spans = [started(f"{thread}.{n}") for n in range(30)]
        held.wait(30)
        wait.wait(30)
        for span in spans:
            span.end()

    threads = [threading.Thread(target=hold, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    held.wait(30)
    names = Counter(span.name for span in slots_of(telemetry))
    wait.set()
    for thread in threads:
        thread.join()
    assert names == {f"{thread}.{n}": 1 for thread in range(8) for n in range(30)}
    assert len(current_table().free) == SLOT_COUNT


def test_head_too_long_for_a_slot(telemetry: Telemetry):
    """A long name is cut, or runs into the next slot."""
    with managed_span("generation", "x" * SLOT_SIZE), managed_span("generation", "short"):
        assert [span.name for span in slots_of(telemetry)] == ["short"]
        assert len(current_table().free) == SLOT_COUNT - 1
    longest = 0
    for length in range(300, SLOT_SIZE):
        with managed_span("generation", "y" * length):
            longest = max([longest, *(len(span.name) for span in slots_of(telemetry))])
    assert longest > 300


def test_lengths():
    """A length does not say how many bytes follow."""
    assert [int.from_bytes(length, "little") for length in LENGTHS] == list(range(SLOT_SIZE - 1))
    assert FREE == b"\0\0"


def test_leaked_slot_is_reclaimed(table: OpenTable, monkeypatch: pytest.MonkeyPatch):
    """Each interrupted start costs a slot for good."""
    now = 1000.0
    monkeypatch.setattr(opentable, "monotonic", lambda: now)  # a mock: time passes when the test says so
    lost, used = table.free.pop(), table.free.pop()
    for slot in (lost, used):
        table.buffer[slot : slot + 6] = LENGTHS[4] + b"head"
    table.reclaim({used})
    now += opentable.RECLAIM_AFTER_S - 0.1
    table.reclaim({used, 0})
    assert lost not in table.free
    now += 0.2
    table.reclaim({used})
    assert table.free.count(lost) == 1
    assert used not in table.free
    assert table.buffer[lost : lost + 2] == FREE
    assert table.buffer[used : used + 2] == LENGTHS[4]
    now += 100
    table.reclaim({used})
    assert table.free.count(lost) == 1


def test_slot_that_is_in_use_is_never_reclaimed(table: OpenTable, monkeypatch: pytest.MonkeyPatch):
    """A slot that short spans use over and over, always between two looks, is given to a second span."""
    now = 1000.0
    monkeypatch.setattr(opentable, "monotonic", lambda: now)  # a mock
    slot = table.free.pop()
    for n in range(40):  # the heartbeat always comes between the slot's taking and the span's registration
        table.buffer[slot : slot + 6] = LENGTHS[4] + n.to_bytes(4, "little")
        table.reclaim(set())
        now += 1.0
    assert slot not in table.free
    table.reclaim({slot})  # seen in use: what was suspected before counts no more
    now += opentable.RECLAIM_AFTER_S + 1
    table.reclaim(set())
    assert slot not in table.free


def test_closed_table_is_left_alone(table: OpenTable):
    """A heartbeat that comes after the table was closed fails, and warns of it."""
    table.close()
    table.reclaim(set())
    assert table.free == []


def test_leaked_slots_come_back_by_the_heartbeat(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch):
    """The heartbeat does not look after the table, or takes slots of spans that are open."""
    now = 1000.0
    monkeypatch.setattr(opentable, "monotonic", lambda: now)  # a mock
    leaked = [current_table().free.pop() for _ in range(100)]
    for slot in leaked:
        current_table().buffer[slot : slot + 6] = LENGTHS[4] + b"head"
    with managed_span("generation", "open"):
        assert _process.current is not None
        assert _process.current._heartbeat is not None
        for _ in range(4):
            _process.current._heartbeat.beat()
            now += 2
        assert set(leaked) <= set(current_table().free)
        assert [span.name for span in slots_of(telemetry)] == ["open"]
    assert len(current_table().free) == SLOT_COUNT


VICTIM = """
import os, sys
from raytrace_rl import setup
from raytrace_rl.instrumentation import managed_span, iteration_scope
setup.init_telemetry_driver({"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "heartbeat_s": 3600})
with iteration_scope(3), managed_span("generation", "ended"):
    pass
with iteration_scope(3), managed_span("generation", "open", prompts=4):
    %s
"""


@pytest.mark.parametrize("way", ["os._exit(1)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_killed_within_microseconds_of_its_start(tmp_path: Path, way: str):
    """A span that no heartbeat has seen leaves no trace, or is there twice."""
    child(VICTIM % way, tmp_path, check=False)
    run = load_run(tmp_path)
    assert run.damage == []
    assert sorted(row.name for row in run.spans) == ["ended", "open"]
    (row,) = [row for row in run.spans if row.name == "open"]
    assert row.truncated
    assert row.end_ns is not None
    assert row.end_ns >= row.start_ns
    assert (row.span_group, row.bucket, row.iteration) == ("generation", "productive", 3)


def test_living_process_leaves_its_spans_open(tmp_path: Path):
    """A reader ends the spans of a process that still works on them."""
    code = textwrap.dedent(VICTIM % "print('open', flush=True); sys.stdin.read()")
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            (row,) = [row for row in load_run(tmp_path).spans if row.name == "open"]
            assert (row.end_ns, row.truncated) == (None, False)
            os.kill(process.pid, signal.SIGSTOP)  # stopped is not dead
            (row,) = [row for row in load_run(tmp_path).spans if row.name == "open"]
            assert (row.end_ns, row.truncated) == (None, False)
        finally:
            process.kill()
    (row,) = [row for row in load_run(tmp_path).spans if row.name == "open"]
    assert row.truncated
