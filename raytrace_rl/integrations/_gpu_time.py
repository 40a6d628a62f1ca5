"""A span that knows how long the GPU took: CUDA events at its ends, read when they have come to pass, never waited for.

The host's clock sees how long it took to *launch* the work of a span. Two events on the current stream see the work.
Their distance is known only once the GPU has got there, so that such a span is finished later than its ``with``
statement: at the start or end of another such span, or when telemetry shuts down. Its own end stays the host's.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Final

from opentelemetry.trace import Span

from raytrace_rl import _state, _trees
from raytrace_rl._head import TRUNCATED_KEY
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._span import ManagedSpan

#: Seconds from when the GPU came to the span's first work to when it had done the last.
RL_GPU_DURATION_ATTR: Final = "rl.gpu.duration_s"
#: Seconds that the span took on the host; also while the GPU still works, so that a span cut short has it.
RL_HOST_DURATION_ATTR: Final = "rl.host.duration_s"

#: Spans whose GPU work is under way. More than this, and the oldest are finished without its duration.
_MOST_PENDING: Final = 4096
#: Spans looked at in one go: work on one stream ends in order, and the rest can wait for the next time.
_LOOKS: Final = 16

_pending: Final[deque[GpuSpan]] = deque()
_lock: Final = threading.Lock()
#: Events that are free, by device: making one costs a call into the driver.
_free: Final[dict[int, list[Any]]] = {}


def timed(span: AbstractContextManager[Span | None]) -> AbstractContextManager[Span | None]:
    """Returns a span, not yet started, that also measures the GPU; without CUDA, and of other kinds, ``span`` itself.

    Nothing here initialises CUDA: until the program has, there is no GPU work to measure, and a worker must be free to
    choose its device first.
    """
    if type(span) is not ManagedSpan or span.group in _trees.ROOTS or _cuda() is None:
        return span
    return GpuSpan(span.group, span.name, span.attributes)


def settle() -> None:
    """Finishes those spans whose GPU work is done by now. Waits for nothing, and for no GPU."""
    cuda = _cuda()
    if not _pending or cuda is None or _capturing(cuda) or not _lock.acquire(blocking=False):
        return
    try:
        for _ in range(min(_LOOKS, len(_pending))):
            span = _pending.popleft()
            if not span.settled(drop=len(_pending) >= _MOST_PENDING):
                _pending.append(span)
    except IndexError:
        pass  # emptied by a fork meanwhile
    finally:
        _lock.release()


def _cuda() -> Any:
    """Returns ``torch.cuda`` where the program has initialised it, else None."""
    torch = sys.modules.get("torch")
    try:
        return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
    except Exception as error:  # half imported, or a build without it
        if is_interrupt(error):
            raise
        return None


def _capturing(cuda: Any) -> bool:
    """True while a CUDA graph is captured: asking an event then would make the capture fail."""
    return bool(cuda.is_current_stream_capturing())


def _record(cuda: Any) -> Any:
    """Returns an event recorded on the current stream; None where that cannot be done."""
    try:
        if _capturing(cuda):
            return None
        free = _free.setdefault(cuda.current_device(), [])
        event = free.pop() if free else cuda.Event(enable_timing=True)
        event.record()
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("gpu-event", "GPU time of spans is not measured: %r", error)
        return None
    return event


class GpuSpan(ManagedSpan):
    """A `ManagedSpan` with a CUDA event at each end."""

    __slots__ = ("_begun", "_done", "_until_ns")

    def __init__(self, group: str | None, name: str, attributes: dict[str, Any]) -> None:
        super().__init__(group, name, attributes)
        self._begun: Any = None
        self._done: Any = None
        #: When the host was done with it; 0 until then.
        self._until_ns = 0

    def __enter__(self) -> GpuSpan:  # noqa: PYI034 - typing.Self is 3.11
        super().__enter__()
        settle()
        cuda = _cuda()
        if cuda is not None:
            self._begun = _record(cuda)
        return self

    def _finish(self, end_ns: int) -> None:
        """Ends the span on the host. Where the GPU is not there yet, it stays open until `settled`."""
        if self._placed or self._until_ns:
            return
        if self._begun is None or self._epoch != _state.epoch:
            super()._finish(end_ns)
            return
        settle()
        cuda = _cuda()
        self._done = _record(cuda) if cuda is not None else None
        if self._done is None:
            super()._finish(end_ns)
            return
        self.attributes[RL_HOST_DURATION_ATTR] = (end_ns - self.start_ns) / 1e9
        self.version += 1
        self._until_ns = end_ns
        if not self.settled():
            _pending.append(self)

    def settled(self, *, drop: bool = False) -> bool:
        """Finishes the span if the GPU is done with it (or, with ``drop``, without its duration); returns whether."""
        if self._placed:
            return True
        try:
            if not drop:
                if not self._done.query():
                    return False
                self.attributes[RL_GPU_DURATION_ATTR] = self._begun.elapsed_time(self._done) / 1e3
                self._give_back()
        except Exception as error:  # events of two devices, or a GPU that has failed: the span is worth more
            if is_interrupt(error):
                raise
            _state.warn_once("gpu-time", "The GPU time of span %r is not known: %r", self.name, error)
        super()._finish(self._until_ns)
        return True

    def truncate(self, end_ns: int) -> None:
        """Ends the span at shutdown: with the host's end if it has one, else marked truncated."""
        if self._until_ns:
            cuda = _cuda()
            if cuda is None or _capturing(cuda) or not self.settled():
                self.settled(drop=True)
        else:
            self.attributes = {**self.attributes, TRUNCATED_KEY: True}
            super()._finish(end_ns)

    def _give_back(self) -> None:
        device = getattr(self._begun, "device", None)
        free = _free.get(getattr(device, "index", None) or 0)
        if free is not None and len(free) < _MOST_PENDING:
            free += [self._begun, self._done]
        self._begun = self._done = None
