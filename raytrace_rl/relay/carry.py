"""Brings the spools of a node home, to a run directory that the node does not share: whatever is new, again and again.

Segments and journals are carried as far as their records are whole; the table of open spans whole when it has changed,
and so are the stacks of a hang, which stay when the process dies. A process that is proven dead gets one more segment
at home, with what it left open (`closing`). The notes of the node's relay follow the spools.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay import closing, truncated, wholes
from raytrace_rl.relay.cursors import DIRECTORY
from raytrace_rl.relay.follow import Basket, Follower, Reading
from raytrace_rl.relay.followed import boot_id
from raytrace_rl.relay.home import DROPPED, NOTE, Home, Piece, piece
from raytrace_rl.relay.retry import Backoff
from raytrace_rl.relay.standing import Standing
from raytrace_rl.relay.wholes import Wholes
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool import hang, liveness
from raytrace_rl.spool.listing import ProcessFiles, node_processes
from raytrace_rl.spool.reader import UnreadableFileError, open_regular

#: Seconds between two rounds, and bytes that go in one call.
INTERVAL_S: Final = 1.0
_MOST_BYTES: Final = 4 << 20
#: Seconds after which home is told once more who lives: it takes a silent node for lost, and may have forgotten.
_LIVING_S: Final = 20.0
_OVER: Final = ("dead", "closed")
#: What of a header is rewritten in place while the file lives.
_MUTABLE: Final = slice(fmt.HEARTBEAT_OFFSET, fmt.SEALED_OFFSET + 4)


class Carrier:
    """Carries one node's spools home.

    Args:
        node_dir: ``RUN_DIR/spool/<node>`` on the node.
        home: Where they go.
        home_bytes: What they may take there; None where home decides by the room it has.

    Attributes:
        standing: How it stands.
        clear_at: When the last round began that found nothing more to carry (`time.monotonic`).
        failed_at: When the last round began that failed.
        noting: Called before the relay's notes are carried, to bring them up to date.
    """

    def __init__(self, node_dir: str | os.PathLike[str], home: Home, home_bytes: int | None = None) -> None:
        self._node_dir = Path(node_dir)
        self._node = self._node_dir.name
        self._home = home
        self._followers: dict[str, Follower] = {}
        self._home_bytes = home_bytes
        self._wholes = Wholes()
        self._mutable: dict[str, bytes] = {}
        self._done: set[str] = set()
        #: As `_done`, but at home for sure.
        self._settled: frozenset[str] = frozenset()
        self._pending: list[Piece] = []
        self._pending_bytes = 0
        self._finished: set[str] = set()
        self._sizes: dict[str, int] | None = None
        self._living: list[str] | None = None
        self._living_at = -math.inf
        #: As `_sizes`, of what home has got for sure.
        self._there: dict[str, int] = {}
        self._backoff = Backoff()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.standing = Standing()
        self.clear_at = -math.inf
        self.failed_at = -math.inf
        self.noting: Callable[[], None] | None = None

    # -- in a thread of its own -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Carries what comes until `stop`."""
        while not self._stop.is_set():
            self._pause(INTERVAL_S if self.round() else self._backoff.wait_s())

    def hurry(self) -> None:
        """Has it look at once."""
        self._wake.set()

    def stop(self) -> None:
        """Ends `run`."""
        self._stop.set()
        self._wake.set()

    def _pause(self, seconds: float) -> None:
        if self._wake.wait(seconds):
            self._wake.clear()

    # -- one round ------------------------------------------------------------------------------------------------

    def round(self) -> bool:
        """Carries all that is new; returns whether that succeeded. Never raises."""
        begun = monotonic()
        try:
            self._round()
        except Exception as error:
            if is_interrupt(error):
                raise
            self.failed_at = begun
            self.standing.failed(error, self._behind())
            self._sizes = None  # whatever came of it is found out anew
            self._pending, self._pending_bytes = [], 0
            _state.warn_once("relay-carry", "The spools of %s cannot be brought home: %r", self._node, error)
            return False
        self._backoff.reset()
        if not self._stop.is_set():
            self.clear_at = begun
        return True

    def is_done(self, stem: str, number: int) -> bool:
        """Whether all of a segment is at home."""
        return f"{stem}.{number}.rts" in self._settled

    def _round(self) -> None:
        if self._sizes is None:
            self._sizes = self._home.sizes(self._node, self._home_bytes)
            self._there = dict(self._sizes)
            self._followers.clear()
            self._wholes.clear()
            self._mutable.clear()
            self._done.clear()
            self._finished.clear()
            self._living = None
        states = {files.stem: self._state(files) for files in node_processes(self._node_dir)}
        processes = node_processes(self._node_dir)  # after the states: of a dead process nothing can be missing
        # Before their files, or they would look closed; also those that are over and not at home yet.
        self._say_living([files.stem for files in processes if files.stem not in self._finished])
        for files in processes:
            if files.stem in self._finished or self._stop.is_set():
                continue
            over = states.get(files.stem) in _OVER
            self._process(files, over)
            if over and not self._stop.is_set():
                self._finish(files)
        self._flush()
        self._settled = frozenset(self._done)
        self._say_living([files.stem for files in processes if files.stem not in self._finished])
        if not self._stop.is_set():
            self.standing.succeeded()
            self._carry_notes()

    def _say_living(self, stems: list[str]) -> None:
        now = monotonic()
        if stems != (self._living or []) or (stems and now - self._living_at > _LIVING_S):
            self._home.living(self._node, stems)
            self._living, self._living_at = stems, now

    def _carry_notes(self) -> None:
        """Carries the notes of the relay, which go whole: not among the bytes carried, which stand in one of them."""
        if self.noting is not None:
            self.noting()
        pieces = []
        for path in sorted((self._node_dir / DIRECTORY).glob("*.json")):
            name = f"{DIRECTORY}/{path.name}"
            data = wholes.contents(str(path)) if NOTE.fullmatch(name) else b""
            if data and (one := self._wholes.changed(name, data)) is not None:
                pieces.append(one)
        if pieces:
            self._home.write(self._node, pieces)

    def _behind(self) -> int:
        """Returns how many bytes, at most, home has not got: of a segment that is being written, all it may take."""
        behind = 0
        with contextlib.suppress(OSError):
            for files in node_processes(self._node_dir):
                for path in files.segments.values() if files.stem not in self._finished else ():
                    name = Path(path).name
                    there = self._there.get(name, 0)
                    if there != DROPPED:
                        with contextlib.suppress(OSError):
                            behind += max(0, Path(path).stat().st_size - there)
        return behind

    def _state(self, files: ProcessFiles) -> liveness.State:
        if files.stem in self._finished:
            return "closed"
        return liveness.state(files.live, boot_id(files))

    def _process(self, files: ProcessFiles, over: bool) -> None:
        there = [name for name in self._sizes or () if name.startswith(f"{files.stem}.open")]
        if not over:
            if files.slots is not None:
                self._whole(files.slots)
            for _, path in sorted(files.journals.items()):
                self._file(path, over)
            kept = {Path(path).name for path in [files.slots or "", *files.journals.values()]}
            self._remove([name for name in there if name not in kept])
        self._hang(files)
        for _, path in sorted(files.segments.items()):
            self._file(path, over)

    def _hang(self, files: ProcessFiles) -> None:
        """Carries where the threads of a process stand whose heartbeat did not come; goes when the hang is over."""
        path = f"{files.live.removesuffix('.live')}{hang.SUFFIX}"
        name = Path(path).name
        if not self._whole(path) and name in (self._sizes or ()):
            self._remove([name])

    def _whole(self, path: str) -> bool:
        """Carries a file if it has changed; returns whether there is anything in it."""
        data = wholes.contents(path)
        if data and (one := self._wholes.changed(Path(path).name, data)) is not None:
            self._send(one)
        return bool(data)

    def _file(self, path: str, over: bool) -> None:
        """Carries what is new of a segment or a journal."""
        name = Path(path).name
        if name in self._done:
            return
        sizes = self._sizes if self._sizes is not None else {}
        if sizes.get(name) == DROPPED:
            self._done.add(name)
            return
        follower = self._followers.get(name)
        if follower is None:
            follower = self._followers[name] = Follower(path, sizes.get(name, 0))
        reading = Reading.FULL
        while reading is Reading.FULL and not self._stop.is_set():
            at = sizes.get(name, 0)
            reading = follower.read({}, Basket(1 << 62, 1 << 62, _MOST_BYTES), final=over)
            try:
                data, mutable = _bytes(path, at, follower.offset)
            except UnreadableFileError:
                return
            if data:
                self._send(piece(name, at, data))
            if (at or data) and self._mutable.get(name) != mutable:
                self._send(piece(name, fmt.HEARTBEAT_OFFSET, mutable))
                self._mutable[name] = mutable
            sizes[name] = at + len(data)
        if reading is Reading.DONE and not self._stop.is_set():
            self._done.add(name)
            follower.close()
            del self._followers[name]

    def _finish(self, files: ProcessFiles) -> None:
        """All of a process is at home but what it left open: that follows, and then nothing of it is open there."""
        closed = truncated.closed_for(files)
        if closed:
            number = max(files.segments, default=-1) + 1
            self._send(piece(f"{files.stem}.{number}.rts", 0, closing.segment(files, number, closed), whole=True))
        self._remove([name for name in self._sizes or () if name.startswith(f"{files.stem}.open")])
        self._finished.add(files.stem)

    def _send(self, one: Piece) -> None:
        self._pending.append(one)
        self._pending_bytes += len(one.data)
        if self._sizes is not None:
            self._sizes.setdefault(one.name, 0)
        if self._pending_bytes >= _MOST_BYTES:
            self._flush()

    def _flush(self) -> None:
        pieces, self._pending = self._pending, []
        if pieces:
            self._home.write(self._node, pieces)
            self._there = dict(self._sizes or {})
            self.standing.carried += self._pending_bytes
        self._pending_bytes = 0

    def _remove(self, names: list[str]) -> None:
        if names:
            self._flush()
            self._home.remove(self._node, names)
            for name in names:
                self._wholes.forget(name)
                if self._sizes is not None:
                    self._sizes.pop(name, None)


def _bytes(path: str, start: int, stop: int) -> tuple[bytes, bytes]:
    """Returns the bytes of a file from ``start`` to ``stop``, and those of its header that are rewritten in place."""
    fd = open_regular(path)
    try:
        parts = []
        while start < stop and (data := os.pread(fd, stop - start, start)):
            parts.append(data)
            start += len(data)
        return b"".join(parts), os.pread(fd, _MUTABLE.stop - _MUTABLE.start, _MUTABLE.start)
    finally:
        os.close(fd)
