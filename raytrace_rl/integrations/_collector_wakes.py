"""Waking what a collector's threads are parked on: again and again, and never in the thread that flushes.

A wait's ``set``, ``notify`` or function is code of the user's, which may block: a sentinel does not fit into a full
queue. Whoever hangs keeps a thread of its own; the others are woken by another one.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Final

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt

#: Waits are woken again and again until their threads have ended: one that looked at its flag just before it was set
#: (NeMo-RL's loop clears its event and then waits for it) parks after the first call. Seconds.
WAKE_EVERY_S: Final = 0.05
#: Waits behind one whose waking takes longer are woken by another thread. Seconds.
_HANGS_AFTER_S: Final = 0.1
#: Of these it is known that waking them does not block.
_PLAIN: Final = (threading.Event, threading.Condition, threading.Semaphore, threading.BoundedSemaphore)


class _Wait:
    """One registered wait.

    Attributes:
        name: What to call it.
        since: When the call began that has not returned; None while there is none.
        plain: Waking it does not block.
    """

    __slots__ = ("_wake", "name", "plain", "since")

    def __init__(self, wait: Any, wake: Callable[[], object]) -> None:
        name = wait.__qualname__ if inspect.isroutine(wait) else type(wait).__name__
        self.name = f"wake_on_stop({name})"
        self.plain = type(wait) in _PLAIN
        self.since: float | None = None
        self._wake = wake

    def wake(self) -> None:
        try:
            result = self._wake()
            if isinstance(result, Coroutine):
                result.close()
                raise TypeError("it returned a coroutine, which nobody awaits here")
        except Exception as error:
            if is_interrupt(error):
                raise
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        _state.warn_once(f"collector-wake:{self.name}", "%s of a collector failed: %r", self.name, error)

    def hangs(self, now: float) -> bool:
        since = self.since
        return since is not None and now - since >= _HANGS_AFTER_S


class Wakes:
    """The registered waits of a collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: list[_Wait] = []

    def register(self, wait: Any) -> None:
        """Registers a wait; one that cannot be woken from another thread is refused with a warning."""
        try:
            wake = _waker(wait)
            known = None if wake is None else _Wait(wait, wake)
        except Exception as error:  # an attribute of the user's
            if is_interrupt(error):
                raise
            known = None
        if known is not None:
            with self._lock:
                self._waits.append(known)
            return
        _state.warn_once(
            f"collector-wait:{type(wait).__name__}",
            "A %s cannot be woken when the collector stops: register an Event, a Condition, a Semaphore or a plain "
            "function.",
            type(wait).__name__,
        )

    def all(self) -> list[_Wait]:
        """Returns all of them."""
        with self._lock:
            return list(self._waits)

    def begin(self, wait: _Wait) -> bool:
        """True if the caller may wake ``wait`` now; False while an earlier call has not returned."""
        with self._lock:
            if wait.since is not None:
                return False
            wait.since = monotonic()
            return True


class Waking:
    """The waking of one flush.

    Args:
        wakes: What is to be woken.
    """

    def __init__(self, wakes: Wakes) -> None:
        self._wakes = wakes
        self._over = threading.Event()
        #: The thread whose turn it is, and the wait in which it is.
        self._runner: threading.Thread | None = None
        self._inside: _Wait | None = None

    def tend(self) -> None:
        """Sees to it that waits are being woken; to be called every round. Does not block."""
        inside = self._inside
        if self._runner is not None and not (inside is not None and inside.hangs(monotonic())):
            return
        if not self._wakes.all():
            return
        self._inside = None
        self._runner = threading.Thread(target=self._run, name="raytrace_rl-wake", daemon=True)
        try:
            self._runner.start()
        except RuntimeError:  # no more threads: what may block is left alone
            self._runner = None
            for wait in self._wakes.all():
                if wait.plain:
                    wait.wake()

    def end(self) -> list[str]:
        """Ends the waking; returns the names of those whose waking has not returned."""
        self._over.set()
        now = monotonic()
        hanging = [wait.name for wait in self._wakes.all() if wait.hangs(now)]
        for name in hanging:
            _state.warn_once(f"collector-hangs:{name}", "%s of a collector hangs; it is left behind.", name)
        return hanging

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            for wait in self._wakes.all():
                if self._runner is not own:
                    return  # another has taken over while this one was held up
                if not self._wakes.begin(wait):
                    continue
                self._inside = wait
                try:
                    wait.wake()
                except SystemExit as error:  # the function's own: signal handlers run in the main thread
                    wait.failed(error)
                finally:
                    wait.since = None
                    if self._runner is own:
                        self._inside = None
            # Behind the round: a flush without time for more has each woken once.
            if self._over.wait(WAKE_EVERY_S):
                return


def _waker(wait: Any) -> Callable[[], object] | None:
    """Returns what wakes the threads that are parked on ``wait``; None if there is nothing."""
    if isinstance(wait, threading.Condition):
        return lambda: _notify(wait)
    if isinstance(wait, threading.Semaphore):
        return lambda: _release(wait)
    found = wait if inspect.isroutine(wait) else getattr(wait, "set", wait)
    if type(wait).__module__.startswith("asyncio") or not callable(found) or inspect.iscoroutinefunction(found):
        return None  # asyncio's own are for the thread of their loop alone
    woken: Callable[[], object] = found
    return woken


def _notify(condition: threading.Condition) -> None:
    if condition.acquire(blocking=False):  # else it is held just now: its holder is awake, and the next round comes
        try:
            condition.notify_all()
        finally:
            condition.release()


def _release(semaphore: threading.Semaphore) -> None:
    try:
        for _ in range(threading.active_count()):  # whoever waits is one of these
            semaphore.release()
    except ValueError:
        pass  # a bounded one, of which every permit is back
