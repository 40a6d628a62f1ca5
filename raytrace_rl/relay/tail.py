"""Follows every spool of a node for one signal, and deals out what has come since in portions that fit a request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic, time_ns
from typing import Final

from raytrace_rl.relay import truncated
from raytrace_rl.relay.batch import Batch, Portion
from raytrace_rl.relay.cursors import Cursors
from raytrace_rl.relay.follow import Basket, Follower, Reading, baskets
from raytrace_rl.relay.followed import FollowedProcess
from raytrace_rl.spool import liveness
from raytrace_rl.spool.format import Kind
from raytrace_rl.spool.listing import node_processes

#: A directory that has changed this recently (ns) may change again without its time of change telling: the kernel
#: rounds it.
_SETTLED_NS: Final = 50_000_000
#: Seconds between two questions whether a writer lives.
_STATE_S: Final = 0.5
#: What a process's own ``Resource`` and the messages around it cost in a request, besides its length.
_OVERHEAD: Final = 64
#: Bytes of the spools that one batch looks at, at most.
_SIGHT: Final = 64 << 20
_OVER: Final = ("dead", "closed")


class Tail:
    """Follows the processes of one node's directory.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        kinds: The kinds of records that are wanted.
        cursors: What is acknowledged: where it starts, and goes back to on `rewind`.

    Attributes:
        damaged: Damages that were passed over.
    """

    def __init__(self, node_dir: str | os.PathLike[str], kinds: Iterable[int], cursors: Cursors) -> None:
        self.node_dir = Path(node_dir)
        self.damaged = 0
        self._kinds = frozenset(kinds)
        self._cursors = cursors
        self._processes: dict[str, FollowedProcess] = {}
        self._listing = 0
        self._listed_at: int | None = None
        self._states_at = 0.0
        self._next = 0

    def read(self, max_bytes: int, max_records: int) -> Batch:
        """Takes the next batch. It is to be acknowledged, or taken back by `rewind`, before the next one.

        Args:
            max_bytes: Of the request; one record alone may exceed it.
            max_records: In the request.
        """
        self._refresh()
        basket = Basket(max_bytes, max_records, _SIGHT)
        portions: list[Portion] = []
        processes = list(self._processes.values())
        begin = self._next % max(1, len(processes))
        for n, process in enumerate(processes[begin:] + processes[:begin]):
            portion, full = self._portion(process, basket)
            if portion is not None:
                portions.append(portion)
            if full:
                # The next batch starts behind this one: a process that writes more than is sent starves nobody.
                self._next = begin + n + 1
                return Batch(portions, full=True)
        return Batch(portions, full=False)

    def acknowledge(self, batch: Batch) -> None:
        """Moves the cursors behind ``batch``. Saving them is left to the caller."""
        for portion in batch.portions:
            stem = portion.stem
            for number, offset in portion.offsets.items():
                self._cursors.move(stem, number, offset)
            for number in portion.done:
                self._cursors.finish_segment(stem, number)
            self._cursors.add_truncated(stem, portion.truncated)
            if portion.finished:
                self._cursors.finish(stem)
                if (process := self._processes.pop(stem, None)) is not None:
                    process.close()

    def rewind(self) -> None:
        """Takes back what was read and not acknowledged."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self._listed_at = None

    def close(self) -> None:
        """Closes what is open."""
        self.rewind()

    @property
    def unfinished(self) -> int:
        """Processes of which more may come, or of which something is not acknowledged."""
        return len(self._processes)

    def states(self) -> Iterator[tuple[str, liveness.State]]:
        """Yields the processes that are followed, and whether their writers live."""
        for process in list(self._processes.values()):
            yield process.files.stem, process.state

    # -- the directory --------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._list()
        now = monotonic()
        if now - self._states_at < _STATE_S:
            return
        self._states_at = now
        died = False
        for process in self._processes.values():
            if process.over:
                continue
            process.state = liveness.state(process.files.live, process.boot_id())
            if process.state in _OVER:
                process.over = died = True
                process.final_listing = self._listing + 1
        if died:
            self._listed_at = None
            self._list()

    def _list(self) -> None:
        """Lists the directory, unless nothing has changed in it."""
        try:
            changed_at = self.node_dir.stat().st_mtime_ns
            if changed_at == self._listed_at:
                return
            now = time_ns()
            found = node_processes(self.node_dir)
        except OSError:
            return
        self._listed_at = changed_at if now - changed_at > _SETTLED_NS else None
        self._listing += 1
        present = {}
        for files in found:
            present[files.stem] = files.segments
            if self._cursors.is_finished(files.stem):
                continue
            process = self._processes.get(files.stem)
            if process is None:
                if not (files.segments or files.journals or files.slots):
                    continue  # about to begin, or all that is left is its liveness file
                process = self._processes[files.stem] = FollowedProcess(files)
            process.files = files
            self._follow_segments(process)
        for stem in self._processes.keys() - present.keys():
            self._processes.pop(stem).close()
        self._cursors.forget(present)

    def _follow_segments(self, process: FollowedProcess) -> None:
        stem, files = process.files.stem, process.files
        for number, path in sorted(files.segments.items()):
            if number not in process.followers and not self._cursors.is_done(stem, number):
                process.followers[number] = Follower(path, self._cursors.offset(stem, number))
                if not process.resource:
                    process.resource = process.followers[number].resource() or b""

    # -- one process ----------------------------------------------------------------------------------------------

    def _portion(self, process: FollowedProcess, basket: Basket) -> tuple[Portion | None, bool]:
        """Takes what there is of one process; also tells whether the basket is full."""
        portion = Portion(process.files.stem, b"", baskets(self._kinds | {Kind.RESOURCE}))
        before = basket.taken
        basket.room -= len(process.resource) + _OVERHEAD
        full = False
        for number, follower in sorted(process.followers.items()):
            offset, damaged = follower.offset, follower.damaged
            reading = follower.read(portion.payloads, basket, final=process.over)
            self.damaged += follower.damaged - damaged
            if follower.offset != offset:
                portion.offsets[number] = follower.offset
            if reading is Reading.DONE:
                portion.done.append(number)
                follower.close()
                del process.followers[number]
            elif reading is Reading.FULL:
                full = True
                break
        described = portion.payloads.pop(Kind.RESOURCE)
        if described:
            process.resource = described[-1]
        if not full and process.over and not process.followers and self._listing >= process.final_listing:
            full = self._close_open_spans(process, portion, basket)
            portion.finished = not full
        portion.resource = process.resource
        if basket.taken == before:
            basket.room += len(process.resource) + _OVERHEAD
        if portion.offsets or portion.done or portion.finished or not portion.empty:
            return portion, full
        return None, full

    def _close_open_spans(self, process: FollowedProcess, portion: Portion, basket: Basket) -> bool:
        """Adds the spans that a dead process left open. Returns whether some had no room."""
        if Kind.SPAN not in self._kinds:
            return False
        if process.closed is None:
            already = self._cursors.truncated(process.files.stem)
            process.closed = truncated.closed_for(process.files)[already:]
        while process.closed:
            if not basket.fits(len(process.closed[0])):
                return True
            payload = process.closed.pop(0)
            basket.take(len(payload))
            portion.payloads[Kind.SPAN].append(payload)
            portion.truncated += 1
        return False
