"""One signal's way out of a node: read, send, wait until it is acknowledged, move the cursors. One batch at a time."""

from __future__ import annotations

import math
import os
import threading
from time import monotonic
from typing import TYPE_CHECKING, Final

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay.cursors import Cursors
from raytrace_rl.relay.requests import Signal, request
from raytrace_rl.relay.retry import Answer, Backoff
from raytrace_rl.relay.sampling import Sampler, sample
from raytrace_rl.relay.sender import Sender
from raytrace_rl.relay.tail import Tail

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Endpoint

#: gRPC's default for the longest message that a receiver takes is 4 MiB, its framing included.
MAX_BYTES: Final = (4 << 20) - (64 << 10)
MAX_RECORDS: Final = 8192
#: Batches are not made smaller than this, whatever the receiver does.
_LEAST_BYTES: Final = 64 << 10
#: Seconds after which what has come is sent, even if it would not fill a request.
INTERVAL_S: Final = 0.5
#: Seconds between two times that cursors are saved which moved over records of other signals alone.
_SAVE_S: Final = 5.0


class Lane:
    """Sends one signal of one node.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        signal: What is sent.
        endpoint: Where to.
        sender: What carries it.
        sampler: Whether the trace of a span is sent; None for all.

    Attributes:
        counts: What it has done so far; what relays before it did is in ``cursors.tally``.
    """

    def __init__(
        self,
        node_dir: str | os.PathLike[str],
        signal: Signal,
        endpoint: Endpoint,
        sender: Sender,
        sampler: Sampler | None = None,
    ) -> None:
        self.signal = signal
        self.endpoint = endpoint
        self.cursors = Cursors(node_dir, signal.name, endpoint.url)
        self.counts = self.cursors.tally.counts
        self.tail = Tail(node_dir, signal.kinds, self.cursors)
        self._sender = sender
        self._sampler = sampler if signal.name == "traces" else None
        self._backoff = Backoff()
        self._most_bytes = self._max_bytes = MAX_BYTES
        self._deadline = math.inf
        self._gives_up = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._saved_at = monotonic()
        #: When the last look began that found nothing more to send.
        self.clear_at = -math.inf
        #: When the last attempt began that failed.
        self.failed_at = -math.inf

    @property
    def failure(self) -> str:
        """What keeps it from sending just now, for a person; empty if nothing does."""
        return self.cursors.tally.failure

    # -- in a thread of its own -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Sends what comes until `stop`. What goes wrong is tried again."""
        self._begin()
        while not self._stop.is_set():
            try:
                if not self.step():
                    self._pause(INTERVAL_S)
            except Exception as error:
                if is_interrupt(error):
                    raise
                _state.warn_once(f"relay-{self.signal.name}", "The relay of %s failed: %r", self.signal.name, error)
                self.failed_at = monotonic()
                self.tail.rewind()
                self._pause(1.0)
        self.tail.close()
        self.cursors.save()

    def _begin(self) -> None:
        self.cursors.tally.begin()
        self.cursors.save()  # before anything is sent: who looks into the directory sees that something is to be

    def hurry(self) -> None:
        """Has it look, or try again, at once."""
        self._wake.set()

    def stop(self) -> None:
        """Ends `run`, and a request that waits for its answer: it was not acknowledged, and stays to be sent."""
        self._stop.set()
        self._wake.set()
        self._sender.close()

    # -- without a thread -----------------------------------------------------------------------------------------

    def finish(self, deadline: float, *, gives_up: bool = False) -> bool:
        """Sends all that there is, in the calling thread.

        Args:
            deadline: `time.monotonic` moment to be done by.
            gives_up: Return at the first failure instead of trying again until then.

        Returns:
            Whether everything is acknowledged.
        """
        self._deadline, self._gives_up = deadline, gives_up
        self._begin()
        try:
            while monotonic() < deadline and not self._stop.is_set():
                clear_at = self.clear_at
                if not self.step():
                    return self.clear_at != clear_at
            return False
        finally:
            self._deadline, self._gives_up = math.inf, False
            self.cursors.save()

    # -- one batch ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Reads and sends one batch; returns whether there is more to do at once."""
        begun = monotonic()
        damaged = self.tail.damaged
        batch = self.tail.read(self._max_bytes, MAX_RECORDS)
        damaged = self.tail.damaged - damaged
        left_out = sample(batch.portions, self._sampler) if self._sampler is not None else 0
        records = sum(len(payloads) for portion in batch.portions for payloads in portion.payloads.values())
        data = request(self.signal, batch.portions)
        for portion in batch.portions:
            portion.payloads.clear()  # they are in the request, and would be in memory twice
        dropped = self.counts.dropped
        if data and not self._deliver(data, records):
            self.tail.rewind()
            return not self._gives_up and not self._stop.is_set()
        if self.counts.dropped > dropped:
            for portion in batch.portions:
                for number in portion.offsets:
                    self.cursors.refuse(portion.stem, number)
        self.counts.sampled_out += left_out
        self.counts.damaged += damaged
        self.tail.acknowledge(batch)
        if data or monotonic() - self._saved_at > _SAVE_S:
            self._saved_at = monotonic()
            self.cursors.save()
        if not batch.full:
            self.clear_at = begun
        return batch.full

    def _deliver(self, data: bytes, records: int) -> bool:
        """Sends one request until it is settled. False if it has to be read anew: in smaller batches, or later."""
        while not self._stop.is_set():
            begun = monotonic()
            timeout_s = min(self.endpoint.timeout_s, self._deadline - begun)
            if timeout_s <= 0:
                return False
            answer = self._sender.send(data, timeout_s)
            if answer.accepted:
                self._accepted(answer, len(data), records)
                return True
            if self._stop.is_set():
                return False
            smaller = records > 1 and self._max_bytes > _LEAST_BYTES
            self.counts.too_large += answer.too_large
            if answer.too_large and smaller:
                self.cursors.tally.erred(answer.message)
                self._most_bytes = self._max_bytes = max(_LEAST_BYTES, min(self._max_bytes, len(data)) // 2)
                return False
            if not answer.retry:
                self._refused(answer, records)
                return True
            again = bool(self.failure)
            self.failed_at = begun
            self.counts.retries += 1
            self.counts.timed_out += answer.timed_out
            self.cursors.tally.erred(answer.message, lasts=True)
            self.cursors.save()
            if self._gives_up:
                return False
            self._pause(self._backoff.wait_s(answer.delay_s))
            if again and answer.timed_out and smaller:  # too much for the time that it has, perhaps
                self._max_bytes = max(_LEAST_BYTES, self._max_bytes // 2)
                return False
        return False

    def _accepted(self, answer: Answer, size: int, records: int) -> None:
        self._backoff.reset()
        self.cursors.tally.accepted()
        self.counts.sent += records
        self.counts.requests += 1
        self.counts.bytes += size
        self.counts.rejected += answer.rejected
        self._max_bytes = min(self._most_bytes, self._max_bytes * 5 // 4)
        if answer.rejected or answer.message:
            self.cursors.tally.erred(answer.message or f"{answer.rejected} rejected")
            _state.warn_once(
                f"relay-partial-{self.signal.name}",
                "%s accepted a request and refused %d of its %s: %s",
                self.endpoint.url,
                answer.rejected,
                self.signal.name,
                answer.message,
            )

    def _refused(self, answer: Answer, records: int) -> None:
        self._backoff.reset()
        self.cursors.tally.erred(answer.message)
        self.counts.dropped += records
        _state.warn_once(
            f"relay-refused-{self.signal.name}-{answer.message[:40]}",
            "%s refuses %s (%s): they are not sent again, and counted. They are kept in the spool; "
            "'raytrace-rl push --again' sends them once the cause is gone.",
            self.endpoint.url,
            self.signal.name,
            answer.message,
        )

    def _pause(self, seconds: float) -> None:
        if self._wake.wait(max(0.0, min(seconds, self._deadline - monotonic()))):
            self._wake.clear()  # and not otherwise: it may be set between the two
