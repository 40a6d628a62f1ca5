"""The relay of one node: a lane a signal, the node's lock, and what is known of its work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay import refusal, room, sampling, status
from raytrace_rl.relay.carry import Carrier
from raytrace_rl.relay.lane import Lane
from raytrace_rl.relay.lock import NodeLock
from raytrace_rl.relay.requests import SIGNALS
from raytrace_rl.relay.sender import sender_for
from raytrace_rl.relay.writers import Writers
from raytrace_rl.spool import seal

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Settings
    from raytrace_rl.relay.home import Home
    from raytrace_rl.relay.receiver import Receiver
    from raytrace_rl.relay.work import Work

_NO_BOUND: Final = 1 << 62
#: Seconds for the last of what others have sent, when it ends by itself.
_LAST_S: Final = 5.0
#: Seconds between two rounds of what a relay does besides sending.
_TEND_S: Final = 1.0
#: With nobody left to write and a receiver that takes nothing, a relay stays this many times its idle time: it must
#: not keep a node alive for ever. `push` sends the rest.
_PATIENCE: Final = 10


class Relay:
    """Forwards what the spools of one node hold.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        settings: Where to; None where nothing is sent.
        home: Where the spools are brought; None where the node shares the run directory.
        idle_s: Seconds without a live writer and with nothing unsent after which it ends by itself.
        bound_bytes: What the node's spools may take together; None where there is no bound.
        home_bytes: What they may take at home; None where home decides by the room it has.
        receiver: What listens for OTLP on the node, if anything does.

    Attributes:
        lanes: One a signal that is sent.
        carrier: What brings the spools home, if that is to be done.
    """

    def __init__(
        self,
        node_dir: str | os.PathLike[str],
        settings: Settings | None,
        *,
        home: Home | None = None,
        idle_s: float = 30.0,
        bound_bytes: int | None = None,
        home_bytes: int | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        """Raises ImportError where grpcio is needed and not installed."""
        self.node_dir = Path(node_dir)
        self.lanes: list[Lane] = []
        self.carrier = Carrier(node_dir, home, home_bytes) if home is not None else None
        sampler = sampling.ratio(settings.sampled_share) if settings is not None else None
        for name, endpoint in settings.endpoints.items() if settings is not None else ():
            if endpoint is not None:
                signal = SIGNALS[name]
                self.lanes.append(Lane(node_dir, signal, endpoint, sender_for(signal, endpoint), sampler))
        self._lock = NodeLock(node_dir)
        self._writers = Writers(node_dir)
        self._idle_s = idle_s
        self._bound_bytes = bound_bytes
        self._freed = room.Freed(0, 0)
        self._dropped_before = _state.drops["spans"]
        self._receiver = receiver
        self._intake = receiver.intake if receiver is not None else None
        if receiver is not None:
            receiver.on_loss = self._write_status
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._busy_at = monotonic()
        self._live_at = monotonic()
        self._status = status.Status(node_dir)
        if self.carrier is not None:
            self.carrier.noting = self._write_status

    def acquire(self, wait_s: float = 0.0) -> bool:
        """Becomes the node's relay; False if there is one, and still was after ``wait_s`` seconds."""
        deadline = monotonic() + wait_s
        while not self._lock.acquire():
            if monotonic() >= deadline or self._stopping.wait(0.05):
                return False
        for lane in self.lanes:
            # What another relay noted while this one waited.
            lane.cursors.load()
        return True

    def start(self, ended: Callable[[], None] | None = None) -> None:
        """Works in threads until `stop`, or until it is idle. `acquire` comes before.

        Args:
            ended: Called at the end by the relay's own thread, when it has ended by itself.

        Raises:
            RuntimeError: No more threads can be started.
        """
        refusal.forget(self.node_dir)
        if self._receiver is not None:
            try:
                self._receiver.start()
            except OSError as error:
                _state.warn_once("receiver", "The local OTLP receiver cannot listen: %s", error)
        for lane in self.lanes:
            self._start_thread(lane.run, f"raytrace_rl-relay-{lane.signal.name}")
        if self.carrier is not None:
            self._start_thread(self.carrier.run, "raytrace_rl-relay-home")
        self._start_thread(lambda: self._tend(ended), "raytrace_rl-relay")

    def _start_thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that was there at the call is acknowledged; returns whether it is.

        It does not wait for a receiver that fails: one attempt made after the call is enough to know.
        """
        deadline = monotonic() + timeout_s
        done = self._drained(self._ways, deadline)
        if self.carrier is not None and self.lanes:  # home is to know what has been sent meanwhile, and what has not
            done = self._drained([self.carrier], deadline) and done
        return done

    def _drained(self, ways: Sequence[Lane | Carrier], deadline: float) -> bool:
        since = monotonic()
        for way in ways:
            way.hurry()
        while True:
            clear = [way.clear_at >= since for way in ways]
            if all(clear):
                return True
            settled = [done or way.failed_at >= since for done, way in zip(clear, ways, strict=True)]
            if all(settled) or monotonic() >= deadline or self._stopping.is_set():
                return False
            sleep(0.01)

    def finish(self, deadline: float, *, gives_up: bool = False) -> bool:
        """Sends all that there is in the calling thread, one signal after the other; see `Lane.finish`."""
        done = [lane.finish(deadline, gives_up=gives_up) for lane in self.lanes]
        self._write_status()
        return all(done)

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the threads and frees the lock. What was not acknowledged stays in the spools, for the next relay."""
        self._stopping.set()
        self._close_receiver()
        for way in self._ways:
            way.stop()
        deadline = monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - monotonic()))
        self._write_status()
        self._lock.release()

    def _close_receiver(self) -> bool:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        return receiver is not None

    @property
    def _ways(self) -> list[Lane | Carrier]:
        return [*self.lanes, *([self.carrier] if self.carrier is not None else [])]

    @property
    def stopped(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._stopping.is_set()

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns what was done so far, by signal; see `tally.Counts`."""
        return {lane.signal.name: lane.counts.as_dict() for lane in self.lanes}

    # -- what it does besides sending -----------------------------------------------------------------------------

    def _tend(self, ended: Callable[[], None] | None) -> None:
        while not self._stopping.wait(_TEND_S):
            for duty in (self._adopt, self._free, self._write_status, self._beat):  # none keeps it from the others
                self._guarded(duty)
            if self._guarded(self._is_idle):
                if self._guarded(self._close_receiver):
                    self.drain(_LAST_S)
                self.stop()
                if ended is not None:
                    ended()
                return

    def _guarded(self, duty: Callable[[], bool | None]) -> bool | None:
        try:
            return duty()
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("relay-tend", "The relay of %s failed: %r", self.node_dir, error)
            return None

    def _beat(self) -> None:
        if self._receiver is not None:
            self._receiver.intake.tend()

    def _is_idle(self) -> bool:
        now = monotonic()
        senders = self._receiver.intake.stems if self._receiver is not None else set()
        if self._writers.any(but=senders):
            self._live_at = self._busy_at = now
        elif any(stem not in senders for lane in self.lanes for stem, _ in lane.tail.states()) or any(
            way.clear_at < now - 5 for way in self._ways
        ):
            self._busy_at = now
        return now - self._busy_at >= self._idle_s or now - self._live_at >= self._idle_s * _PATIENCE

    def _adopt(self) -> None:
        """Brings home what dead processes left in a tmpfs, so that it survives the node.

        Asked of the directory, where active files are links, and not of the lanes alone: those forget a dead process
        once all of it is sent, which may be before the next look.
        """
        alive = {stem for lane in self.lanes for stem, state in lane.tail.states() if state != "dead"}
        with os.scandir(self.node_dir) as entries:
            left = any(entry.is_symlink() and entry.name.split(".", 1)[0] not in alive for entry in entries)
        if left:
            seal.adopt_orphans(str(self.node_dir))

    def _free(self) -> None:
        """Removes acknowledged segments where the spools come near their bound."""
        if self._bound_bytes is not None:
            freed = room.free(self.node_dir, self._bound_bytes, self._is_acknowledged, self._status.removing)
            self._freed = room.Freed(self._freed.spans + freed.spans, self._freed.bytes + freed.bytes)
            self._status.removed(self._freed._asdict())

    def _is_acknowledged(self, stem: str, number: int) -> bool:
        return (self.carrier is None or self.carrier.is_done(stem, number)) and all(
            lane.cursors.is_done(stem, number) and not lane.cursors.is_refused(stem, number) for lane in self.lanes
        )

    def _write_status(self) -> None:
        sections = {}
        if self.carrier is not None:
            sections[status.CARRIED] = status.Section(self.carrier.standing.counts(), self.carrier.standing.now())
        if self._intake is not None:
            # What the bound took in this process counts here, unless the process has telemetry of its own and says it.
            dropped = _state.drops["spans"] - self._dropped_before if _state.config is None else 0
            received = {**self._intake.counts.as_dict(), "dropped_spans": dropped}
            sections[status.RECEIVER] = status.Section(received)
        self._status.write(sections)


def relay_for(work: Work) -> Relay:
    """Returns the relay that does ``work``.

    Raises:
        ImportError: grpcio is needed and not installed.
    """
    receiver = None
    if work.receives:
        from raytrace_rl.config import capture_content
        from raytrace_rl.relay.intake import Intake
        from raytrace_rl.relay.receiver import Receiver

        run_dir = Path(work.node_dir).parent.parent
        bound = work.bound_bytes if work.bound_bytes is not None else _NO_BOUND
        receiver = Receiver(work.run_id, Intake(run_dir, work.run_id, bound, capture_content=capture_content()))
    return Relay(
        work.node_dir,
        work.settings,
        home=work.home,
        idle_s=work.idle_s,
        bound_bytes=work.bound_bytes,
        home_bytes=work.home_bytes,
        receiver=receiver,
    )
