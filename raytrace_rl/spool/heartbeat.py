"""The heartbeat: one thread a process that keeps the spool fit, off the hot path.

Each beat rewrites the sign of life, notes the spans that are open (and, after a threshold, where their threads stand),
makes the next segment ahead of need, seals full ones, and records drops and clock drift.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from raytrace_rl import _clock, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.spool import stacks
from raytrace_rl.spool.format import NO_SPAN, Kind
from raytrace_rl.spool.hang import Watch
from raytrace_rl.spool.journal import Journal
from raytrace_rl.spool.opentable import OpenTable
from raytrace_rl.spool.writer import SpoolWriter

#: A drift of the wall clock against the monotonic one beyond this (ns) is recorded as a new anchor.
CLOCK_STEP_NS: Final = 1_000_000


class Heartbeat:
    """Runs beats until stopped.

    Args:
        writer: The spool of this process.
        table: Its table of open spans.
        interval_s: Seconds between beats.
        stack_after_s: An open span's stack is taken when it is this old, and again each time as much has passed.
        each_beat: What is to be done at each beat besides.
        watch: Notes the stacks when beats no longer come.
    """

    def __init__(
        self,
        writer: SpoolWriter,
        table: OpenTable | None,
        *,
        interval_s: float,
        stack_after_s: float,
        each_beat: Sequence[Callable[[], None]] = (),
        watch: Watch | None = None,
    ) -> None:
        self._each_beat = each_beat
        self._watch = watch
        self._writer = writer
        self._table = table
        self._journal = Journal(writer)
        self._interval_s = interval_s
        self._stack_after_ns = int(stack_after_s * 1e9)
        self._stacks_at: dict[bytes, int] = {}
        self._recorded_drops = dict(_state.drops)
        self._offset_ns = _clock.OFFSET_NS
        self._stopped = False
        # A lock as the alarm bell, not an Event: releasing it is one C call, safe from signal handlers and finalizers.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._thread = threading.Thread(target=self._run, name="raytrace_rl-heartbeat", daemon=True)
        writer.wake = self.wake

    def start(self) -> None:
        """Starts the thread."""
        if self._watch is not None:
            self._watch.put_off()
        self._thread.start()

    def wake(self) -> None:
        """Asks for a beat now. Never blocks."""
        try:
            self._bell.release()
        except RuntimeError as error:
            if is_interrupt(error):
                raise
            # else it rings already

    def stop(self, timeout_s: float) -> None:
        """Ends the thread, waits at most ``timeout_s`` seconds for it, and removes the journal."""
        self._stopped = True
        if self._watch is not None:
            self._watch.close()
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            # Where those stood that the shutdown has cut short: it may be the end of a run that hung.
            for record in self._journal.stacks():
                self._writer.append_record(record)
            self._journal.close()

    def _run(self) -> None:
        last = monotonic()  # the files are new, and so is the sign of life in them
        while not self._stopped:
            try:
                if monotonic() - last >= self._interval_s * 0.9:
                    last = monotonic()
                    self.beat()
                self._writer.prepare_next()
                self._writer.seal_full()
            except Exception as error:
                _state.warn_once("heartbeat", "A heartbeat of the telemetry failed: %r", error)
            self._bell.acquire(timeout=max(0.01, self._interval_s - (monotonic() - last)))

    def beat(self) -> None:
        """One beat."""
        self._writer.beat()
        if self._watch is not None:
            self._watch.put_off()
        spans = list(_state.open_spans)
        self._journal.note(spans)
        self._note_stacks(spans)
        if self._table is not None:
            self._table.reclaim({span.slot for span in spans})
        self._record_clock()
        for call in self._each_beat:
            call()
        self._record_drops()

    def _record_drops(self) -> None:
        drops = dict(_state.drops)
        if drops != self._recorded_drops and self._writer.append(Kind.DROPS, json.dumps(drops).encode()):
            self._recorded_drops = drops

    def _record_clock(self) -> None:
        anchor = _clock.read_anchor()
        offset = anchor.wall_ns - anchor.monotonic_ns
        record = struct.pack("<QQ", anchor.wall_ns, anchor.monotonic_ns)
        if abs(offset - self._offset_ns) > CLOCK_STEP_NS and self._writer.append(Kind.CLOCK, record):
            self._offset_ns = offset

    def _note_stacks(self, spans: Sequence[Any]) -> None:
        now = _clock.now_ns()
        before = self._stacks_at
        self._stacks_at = {span.ids: before[span.ids] for span in spans if span.ids in before} if before else {}
        due = [span for span in spans if now - self._stacks_at.get(span.ids, span.start_ns) >= self._stack_after_ns]
        if not due:
            return
        frames = sys._current_frames()
        parked = self._parked(due)
        texts: dict[int, str] = {}
        for span in due:
            text = parked.get(span.ids)
            ident = span.thread_ident
            if text is None and ident in frames:
                text = texts.get(ident) or texts.setdefault(ident, stacks.of_thread(frames[ident]))
            if text:
                self._stacks_at[span.ids] = now
                self._journal.note_stack(span.ids, now, text)
        others = stacks.of_other_threads(frames, {span.thread_ident for span in spans})
        if others:
            self._journal.note_stack(NO_SPAN, now, others)
        del frames

    @staticmethod
    def _parked(due: Sequence[Any]) -> dict[bytes, str]:
        try:
            return stacks.of_tasks(due)
        except Exception as error:  # it looks into asyncio's own objects, which another version may have otherwise
            _state.warn_once("task-stacks", "Stacks of asyncio tasks cannot be told: %r", error)
            return {}
