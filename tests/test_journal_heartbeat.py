"""The heartbeat: open spans and where they stand, signs of life, drops, clock steps; and nothing stops it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from raytrace_rl import _clock, _process, _span, _state
from raytrace_rl._span import RecordingSpan
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.monitor import load_run
from raytrace_rl.spool import heartbeat as module
from raytrace_rl.spool import journal as journals
from raytrace_rl.spool import listing
from raytrace_rl.spool.format import MAX_PAYLOAD, Kind
from raytrace_rl.spool.heartbeat import Heartbeat
from raytrace_rl.spool.journal import Journal
from raytrace_rl.spool.reader import Cursor, Record
from raytrace_rl.spool.writer import SpoolWriter
from tests import spooling
from tests.disks import small_disk, warnings_of
from tests.running import Telemetry, attributes, child, running, wait_for
from tests.writers import record, writing

pytest_plugins = ["tests.telemetry_fixtures"]


def heart() -> Heartbeat:
    """The heartbeat of the running telemetry."""
    assert _process.current is not None
    assert _process.current._heartbeat is not None
    return _process.current._heartbeat


def noted(run_dir: Path) -> list[Record]:
    """The records of the newest journal; damage is an error."""
    (files,) = listing.processes(run_dir / "spool")
    if not files.journals:
        return []
    with Cursor(files.journals[max(files.journals)]) as cursor:
        found = list(cursor.poll())
        assert cursor.damage == []
    return found


def kinds(run_dir: Path) -> Counter[str]:
    """How many records of each kind the journal holds."""
    return Counter(Kind(one.kind).name for one in noted(run_dir))


def started(name: str, **given: Any) -> RecordingSpan:
    """A span that is ended by hand."""
    span = RecordingSpan("generation", name, given)
    span.begin(_span.otel_var.get())
    return span


class FakeSpan:
    """What the journal asks of a span."""

    def __init__(self, n: int, size: int = 100) -> None:
        self.n = n
        self.version = 0
        self.size = size
        self.ids = spooling.TRACE + spooling.span_id(n)

    def open_payload(self) -> bytes:
        payload: bytes = spooling.span(self.n, 0, None, version=self.version, note="x" * self.size)
        return payload


@contextmanager
def journal_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SpoolWriter, Journal]]:
    """A journal of its own."""
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        journal = Journal(writer)
        try:
            yield writer, journal
        finally:
            journal.close()


# -- the journal -------------------------------------------------------------------------------------------------------


def test_open_span_is_noted_once_and_again_on_change(telemetry: Telemetry):
    """Every beat writes every open span again, or what was set later is not in the notes."""
    span = started("open", first=1)
    for _ in range(5):
        heart().beat()
    assert kinds(telemetry.run_dir) == {"OPEN_SPAN": 1}
    span.set_attribute("second", 2)
    heart().beat()
    heart().beat()
    assert kinds(telemetry.run_dir) == {"OPEN_SPAN": 2}
    last = Span.FromString(noted(telemetry.run_dir)[-1].payload)
    assert (last.span_id, last.end_time_unix_nano) == (span.span_id, 0)
    found = attributes(last)
    assert (found["first"], found["second"], found["rl.span_group"]) == (1, 2, "generation")
    span.end()
    heart().beat()
    heart().beat()
    assert kinds(telemetry.run_dir) == {"OPEN_SPAN": 2, "SPAN_GONE": 1}
    assert noted(telemetry.run_dir)[-1].payload == span.trace_id + span.span_id


def test_short_spans_are_never_noted(telemetry: Telemetry):
    """Spans that ended between two beats fill the journal."""
    for _ in range(50):
        with managed_span("generation", "short"):
            pass
        heart().beat()
    assert noted(telemetry.run_dir) == []


def test_foreign_spans_are_noted_too(telemetry: Telemetry):
    """An open span of other instrumentation leaves no trace when its process is killed."""
    with trace.get_tracer("theirs").start_as_current_span("foreign", attributes={"a": 1}) as span:
        heart().beat()
        span.set_attribute("b", 2)
        heart().beat()
        found = [Span.FromString(one.payload) for one in noted(telemetry.run_dir)]
        assert [one.name for one in found] == ["foreign", "foreign"]
        assert attributes(found[-1])["b"] == 2
    heart().beat()
    assert kinds(telemetry.run_dir)["SPAN_GONE"] == 1


def test_journal_is_written_anew_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The journal grows without end, or loses who is still open when it begins anew."""
    with journal_of(tmp_path, monkeypatch) as (writer, journal):
        spans = [FakeSpan(n, 500) for n in range(1, 513)]
        journal.note(spans)
        for turn in range(60):
            spans[turn].version += 1
            spans.append(FakeSpan(1000 + turn))
            journal.note(spans)
            spans.pop()
            journal.note(spans)
        files = [path for path in Path(writer.place.active).iterdir() if ".open." in path.name]
        assert len(files) == 1
        assert files[0].stat().st_size < 2 << 20
        found: dict[bytes, dict[str, Any]] = {}
        for one in noted(tmp_path):
            if one.kind == Kind.OPEN_SPAN:
                span = Span.FromString(one.payload)
                found[span.span_id] = attributes(span)
            elif one.kind == Kind.SPAN_GONE:
                found.pop(one.payload[16:], None)
        assert {int.from_bytes(key, "big"): values["version"] for key, values in found.items()} == {
            span.n: span.version for span in spans
        }
        assert writer.segment.number == 0  # nothing of it is in the spool of ended spans


def test_512_long_open_spans_push_no_ended_one_out(tmp_path: Path):
    """Spans that are open for hours fill the spool beat by beat, and ended ones are dropped for them."""
    with running(tmp_path / "run", spool_max_mib=1) as telemetry:
        spans = [started(f"open {n}", note="x" * 500) for n in range(512)]
        for n in range(100):
            for span in spans[n : n + 20]:
                span.set_attribute("turn", n)
            with managed_span("generation", "ended", n=n):
                pass
            heart().beat()
        assert telemetry.drops == {}
        assert sum(span.name == "ended" for span in telemetry.spans()) == 100
        node = next((telemetry.run_dir / "spool").iterdir())
        assert sum(path.stat().st_size for path in node.glob("*.open.*.rts")) <= 2 << 20
        (process,) = telemetry.run().processes
        assert len([row for row in telemetry.run().spans if row.end_ns is None]) == 512
        assert process.state == "alive"
        for span in spans:
            span.end()
        heart().beat()
        assert not [row for row in telemetry.run().spans if row.end_ns is None]


def test_more_open_spans_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Beyond its bound the journal is written anew at every beat, 8 MiB each, or grows beyond it."""
    now = 1000.0
    monkeypatch.setattr(journals, "monotonic", lambda: now)  # a mock: time passes when the test says so
    monkeypatch.setattr(journals, "LARGEST", 64 << 10)
    made = []
    create = journals.create_segment

    def counted(*given: Any) -> Any:
        made.append(given)
        return create(*given)

    monkeypatch.setattr(journals, "create_segment", counted)
    with journal_of(tmp_path, monkeypatch) as (_, journal):
        spans = [FakeSpan(n, 1000) for n in range(1, 101)]
        for _ in range(10):
            for span in spans:
                span.version += 1
            journal.note(spans)
            now += 1
        assert len(made) == 1
        first = [Span.FromString(one.payload).span_id for one in noted(tmp_path)]
        assert first == [spooling.span_id(n) for n in range(1, len(first) + 1)]  # the outermost
        assert len(first) > 40
        now += journals.FULL_PAUSE_S
        spans = spans[50:]
        spans[0].version += 1
        journal.note(spans)
        assert len(made) == 2
        assert len(noted(tmp_path)) == 50


def test_one_rotten_span_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """One open span that cannot be encoded (a mock that raises) keeps all others out of the notes, at every beat."""

    class Rotten(FakeSpan):
        def open_payload(self) -> bytes:
            raise KeyError("evicted meanwhile")

    class Worse(FakeSpan):
        @property
        def version(self) -> int:
            raise RuntimeError("gone")

        @version.setter
        def version(self, value: int) -> None:
            pass

    huge = FakeSpan(4, MAX_PAYLOAD)
    with journal_of(tmp_path, monkeypatch) as (_, journal):
        for _ in range(3):
            journal.note([FakeSpan(1), Rotten(2), Worse(3), huge, FakeSpan(5)])
        found = [Span.FromString(one.payload).span_id for one in noted(tmp_path)]
    assert found == [spooling.span_id(1), spooling.span_id(5)]
    assert len(warnings_of(caplog)) == 1


def test_journal_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """A full disk ends the heartbeat, warns at every beat, or leaves open spans unnoted once there is room again."""
    with small_disk(tmp_path / "disk", monkeypatch) as disk, running(disk.path / "run", spool_dir=str(disk.path)):
        run_dir = disk.path / "run"
        span = started("open")
        disk.fill()
        for _ in range(5):
            heart().beat()
        assert noted(run_dir) == []
        assert len(warnings_of(caplog)) == 1
        disk.release()
        heart().beat()
        assert kinds(run_dir) == {"OPEN_SPAN": 1}
        span.end()
    assert len(warnings_of(caplog)) == 1


# -- stacks ------------------------------------------------------------------------------------------------------------


def the_place_where_it_hangs(ready: threading.Event, go_on: threading.Event) -> None:
    """Waits, for the tests that want to find its name in a stack."""
    ready.set()
    go_on.wait(30)


def test_stack_names_the_function_that_the_thread_stands_in(tmp_path: Path):
    """A hung span's stack is another thread's, is taken too early, or never."""
    with running(tmp_path / "run", stack_after_s=0.05) as telemetry:
        ready, go_on = threading.Event(), threading.Event()

        def hang() -> None:
            with managed_span("generation", "hangs"):
                the_place_where_it_hangs(ready, go_on)

        thread = threading.Thread(target=hang)
        thread.start()
        ready.wait(30)
        with managed_span("generation", "young"):
            opened = time.monotonic()
            heart().beat()
            early = telemetry.run().stacks if time.monotonic() - opened < 0.05 else []
            names = {row.span_id: row.name for row in telemetry.run().spans}
            assert not [stack for stack in early if names[stack.span_id] == "young"]
        (hung,) = _state.open_spans
        wait_for(lambda: _clock.now_ns() - hung.start_ns > 50_000_000, "an old span")
        heart().beat()
        run = telemetry.run()
        (stack,) = run.stacks
        (row,) = [row for row in run.spans if row.name == "hangs"]
        assert stack.span_id == row.span_id
        assert "the_place_where_it_hangs" in stack.text
        assert "in hang" in stack.text
        assert abs(stack.time_ns - time.time_ns()) < 60e9
        heart().beat()
        # Two: the span's, and one for the threads that have none open. Not at every beat.
        assert kinds(telemetry.run_dir)["STACK"] == 2
        wait_for(lambda: _clock.now_ns() - stack.time_ns > 50_000_000, "another 50 ms")
        heart().beat()
        assert kinds(telemetry.run_dir)["STACK"] == 4
        go_on.set()
        thread.join()
        heart().beat()
        assert heart()._stacks_at == {}


def test_stacks_outlive_a_clean_end(tmp_path: Path):
    """Where a span stood that its process's shutdown cut short (Ctrl-C, in despair) is lost with the journal."""
    with running(tmp_path / "run", stack_after_s=0):
        with managed_span("generation", "ended"):
            heart().beat()
        managed_span("generation", "hangs").__enter__()
        heart().beat()
    run = load_run(tmp_path / "run")
    names = {row.span_id: row.name for row in run.spans}
    assert [names[stack.span_id] for stack in run.stacks] == ["hangs"]
    assert "test_stacks_outlive_a_clean_end" in run.stacks[0].text


def test_every_stack_of_many_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of 512 spans that hang at once, the journal keeps the stacks of the last few."""
    with journal_of(tmp_path, monkeypatch) as (_, journal):
        spans = [FakeSpan(n) for n in range(1, 513)]
        journal.note(spans)
        for span in spans:
            journal.note_stack(span.ids, span.n, f"in function_{span.n}\n" * 100)
        found = {one.payload[16:24]: one.payload[32:] for one in noted(tmp_path) if one.kind == Kind.STACK}
        assert len(found) == 512
        assert all(f"function_{int.from_bytes(ids, 'big')}\n".encode() in text for ids, text in found.items())
        journal.note(spans[:3])
        assert len(journal._stacks) == 3
        assert journal._stacks_size == sum(map(len, journal._stacks.values()))


def test_stacks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Huge stacks take the process's memory, or the place of the open spans themselves."""
    monkeypatch.setattr(journals, "STACKS_MAX", 300_000)
    with journal_of(tmp_path, monkeypatch) as (_, journal):
        spans = [FakeSpan(n) for n in range(1, 41)]
        journal.note(spans)
        for span in spans:
            journal.note_stack(span.ids, 1, "é" * 10**6)
        assert sum(map(len, journal._stacks.values())) == journal._stacks_size <= 300_000
        found = noted(tmp_path)
        assert max(len(one.payload) for one in found) <= 65536 + 32
        assert {Span.FromString(one.payload).span_id for one in found if one.kind == Kind.OPEN_SPAN} == {
            spooling.span_id(span.n) for span in spans
        }


def test_span_whose_thread_has_ended(tmp_path: Path):
    """A span that its thread left open ends the heartbeat."""
    with running(tmp_path / "run", stack_after_s=0) as telemetry:
        thread = threading.Thread(target=lambda: started("left open"))
        thread.start()
        thread.join()
        heart().beat()
        assert kinds(telemetry.run_dir)["OPEN_SPAN"] == 1


# -- signs of life -----------------------------------------------------------------------------------------------------


def test_sign_of_life(telemetry: Telemetry):
    """A living process looks as if it had stood still."""
    (before,) = telemetry.run().processes
    heart().beat()
    (after,) = telemetry.run().processes
    assert before.heartbeat_ns < after.heartbeat_ns
    assert abs(after.heartbeat_ns - time.time_ns()) < 60e9


def test_beats_come_by_themselves(tmp_path: Path):
    """The heartbeat does not beat."""
    with running(tmp_path / "run", heartbeat_s=0.01) as telemetry:
        seen: set[int] = set()

        def four_seen() -> bool:
            seen.add(telemetry.run().processes[0].heartbeat_ns)
            return len(seen) > 3

        wait_for(four_seen, "four beats")


def test_no_beat_before_its_time(tmp_path: Path):
    """On a machine that has been up for long the first beat comes at once, on a fresh one an interval later."""
    with running(tmp_path / "run") as telemetry:
        first = telemetry.run().processes[0].heartbeat_ns
        heart().wake()
        assert heart()._thread.is_alive()
        wait_for(lambda: not heart()._bell.acquire(blocking=False), "the bell heard")
        assert telemetry.run().processes[0].heartbeat_ns == first


def test_wake_never_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A span's end waits for the heartbeat, which waits for a disk."""
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        beat = Heartbeat(writer, None, interval_s=3600, stack_after_s=3600)
        for _ in range(1000):  # nobody listens
            beat.wake()
        beat.start()
        for _ in range(1000):
            beat.wake()
        beat.stop(10)
        assert not beat._thread.is_alive()
        beat.stop(0)
        beat.wake()


def test_full_segments_are_sealed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full segment stays in the tmpfs until the next beat, which may be an hour away."""
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        beat = Heartbeat(writer, None, interval_s=3600, stack_after_s=3600)
        beat.start()
        n = 0
        while writer.segment.number < 2:
            n += 1
            writer.append_record(record(n))
        first = Path(writer.place.directory) / f"{writer.stem}.0.rts"
        wait_for(lambda: not first.is_symlink(), "the first segment sealed")
        beat.stop(10)


def test_heartbeat_survives_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """One failure ends all beats, and the process looks dead from then on."""
    with running(tmp_path / "run", heartbeat_s=0.01) as telemetry:
        failures = []

        def fail(self: Journal, spans: object) -> None:
            failures.append(spans)
            raise ValueError("rotten")

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "note", fail)
            wait_for(lambda: len(failures) > 3, "failures")
        span = started("open")
        wait_for(lambda: kinds(telemetry.run_dir)["OPEN_SPAN"] == 1, "the span noted")
        span.end()
    assert len([message for message in warnings_of(caplog) if "rotten" in message]) == 1


def test_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """A process at its limit of threads (a mock) has no telemetry, or dies of it."""

    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with running(tmp_path / "run") as telemetry, managed_span("generation", "s"):
            pass
    assert [row.name for row in telemetry.run().spans] == ["s"]
    assert telemetry.run().processes[0].state == "closed"
    assert len(warnings_of(caplog)) == 1


# -- drops and clocks --------------------------------------------------------------------------------------------------


def test_drops_are_recorded_once_each_time_they_change(telemetry: Telemetry):
    """What was lost is known to the process alone, or is written down at every beat."""

    def recorded() -> list[dict[str, int]]:
        return [json.loads(one.payload) for one in telemetry.records() if one.kind == Kind.DROPS]

    heart().beat()
    assert recorded() == []
    _state.count_drop("attributes", 3)
    _state.count_drop("spans", 2)
    heart().beat()
    heart().beat()
    assert [(one["attributes"], one["spans"]) for one in recorded()] == [(3, 2)]
    _state.count_drop("logs")
    heart().beat()
    assert [one["logs"] for one in recorded()] == [0, 1]
    assert telemetry.run().processes[0].drops["attributes"] == 3


def test_dropped_spans_are_in_the_header_where_a_record_finds_no_room(tmp_path: Path):
    """A process that is killed while its disk is full says that it lost nothing."""
    with running(tmp_path / "run") as telemetry:
        _state.count_drop("spans", 7)
        _process.current.writer.beat()
        assert telemetry.run().processes[0].drops["spans"] == 7


def test_stepped_wall_clock_is_recorded(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch):
    """After NTP has stepped the clock (a mock does) nobody can tell how this process's times compare to others'."""

    def anchors() -> list[tuple[int, int]]:
        return [struct.unpack("<QQ", one.payload) for one in telemetry.records() if one.kind == Kind.CLOCK]

    heart().beat()
    before = len(anchors())
    read = _clock.read_anchor

    def stepped() -> _clock.Anchor:
        anchor = read()
        return anchor._replace(wall_ns=anchor.wall_ns - 3600 * 10**9)

    monkeypatch.setattr(module._clock, "read_anchor", stepped)
    heart().beat()
    heart().beat()
    found = anchors()
    assert len(found) == before + 1
    wall, monotonic = found[-1]
    assert abs(wall - monotonic - _clock.OFFSET_NS + 3600 * 10**9) < 10**9


def test_anchor_that_found_no_room_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A clock step while the disk is full is never recorded (mocks of both)."""
    with writing(tmp_path, "tmpfs", monkeypatch) as writer:
        beat = Heartbeat(writer, None, interval_s=3600, stack_after_s=3600)
        monkeypatch.setattr(module._clock, "read_anchor", lambda: _clock.Anchor(10**18, 5))
        with monkeypatch.context() as patch:
            patch.setattr(writer, "append", lambda kind, payload: False)
            beat._record_clock()
        beat._record_clock()
        beat._record_clock()
        (files,) = listing.processes(tmp_path / "spool")
        with Cursor(files.segments[0]) as cursor:
            assert [one.payload for one in cursor.poll()] == [struct.pack("<QQ", 10**18, 5)]


# -- a killed process --------------------------------------------------------------------------------------------------


def test_killed_process_with_many_open_spans(tmp_path: Path):
    """Of a killed process's open spans some are missing, are there twice, or have lost their attributes and stacks."""
    code = """
    import os, sys
    from raytrace_rl import setup, _process
    from raytrace_rl.instrumentation import managed_span
    setup.init_telemetry_driver(
        {"enabled": True, "span_groups": "all", "run_dir": sys.argv[1], "heartbeat_s": 3600, "stack_after_s": 0}
    )
    held = [managed_span("generation", f"s{n}", n=n) for n in range(500)]
    for span in held:
        span.__enter__()
    _process.current._heartbeat.beat()
    for span in reversed(held[100:]):
        span.__exit__(None, None, None)
    with managed_span("generation", "last"):
        os._exit(9)
    """
    child(code, tmp_path, check=False)
    run = load_run(tmp_path)
    assert run.damage == []
    assert Counter(row.name for row in run.spans) == {**{f"s{n}": 1 for n in range(500)}, "last": 1}
    assert {row.name for row in run.spans if row.truncated} == {*(f"s{n}" for n in range(100)), "last"}
    assert all(row.attributes["n"] == int(row.name[1:]) for row in run.spans if row.name != "last")
    names = {row.span_id: row.name for row in run.spans}
    assert {names[stack.span_id] for stack in run.stacks} >= {f"s{n}" for n in range(500)}


def test_vanished_run_directory_does_not_stop_the_beats(tmp_path: Path, caplog):
    """Beats fail for ever once the run directory is gone, or make it again."""
    with running(tmp_path / "run") as telemetry:
        span = started("open")
        heart().beat()
        shutil.rmtree(telemetry.run_dir)
        for n in range(5):
            span.set_attribute("n", n)
            heart().beat()
        span.end()
        heart().beat()
        assert not telemetry.run_dir.exists()
    assert not telemetry.run_dir.exists()
    assert os.getpid()
    assert len(warnings_of(caplog)) <= 1
