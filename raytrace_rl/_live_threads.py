"""The registry of threads and pool tasks whose spans have not all closed yet.

A flush before an actor is killed must wait for them: their spans are not in the spool before they end. So an entry
leaves only when the thread's function, and with it every span opened in it, is done.
"""

from __future__ import annotations

import os
import threading
import weakref
from time import monotonic


class Work:
    """One thread, or one task of a pool, from its start (or submission) until its spans have closed.

    A collector's thread is enlisted when it is made: between that and its start no flush may take it for done.
    """

    __slots__ = ("_unstarted", "ident", "name")

    def __init__(self, name: str, unstarted: threading.Thread | None = None) -> None:
        self.name = name
        #: The thread that runs it, once it runs.
        self.ident: int | None = None
        #: Weak: a thread that is dropped unstarted will never run.
        self._unstarted = None if unstarted is None else weakref.ref(unstarted)

    def started(self) -> None:
        """Notes that its thread is on its way: from here on it leaves by `discharge` alone."""
        self._unstarted = None

    @property
    def pending(self) -> bool:
        """False once its thread was dropped without having been started."""
        unstarted = self._unstarted
        return unstarted is None or unstarted() is not None

    def __str__(self) -> str:
        return self.name if self._unstarted is None else f"{self.name} (not started)"


_live: set[Work] = set()
_changed = threading.Condition()


def enlist(work: Work) -> None:
    with _changed:
        _live.add(work)


def discharge(work: Work) -> None:
    with _changed:
        _live.discard(work)
        _changed.notify_all()


def _forget_threads() -> None:
    """A forked child has none of its parent's threads, and may have inherited the lock taken."""
    global _live, _changed
    _live = set()
    _changed = threading.Condition()


os.register_at_fork(after_in_child=_forget_threads)


def _left() -> list[str]:
    """The names of what is not done, the calling thread's own left out; to be called under the lock."""
    own = threading.get_ident()
    for work in [work for work in _live if not work.pending]:
        _live.discard(work)
    return sorted(str(work) for work in _live if work.ident != own)


def names() -> list[str]:
    """Returns the names of traced threads and pool tasks that have not ended, the calling one left out."""
    with _changed:
        return _left()


def join(timeout_s: float) -> list[str]:
    """Waits until every traced thread and pool task but the calling one has ended, no longer than ``timeout_s``.

    Args:
        timeout_s: Seconds; 0 only looks.

    Returns:
        The names of those that still run, or have not started; empty if all have ended.
    """
    deadline = monotonic() + timeout_s
    with _changed:
        while left := _left():
            remaining = deadline - monotonic()
            if remaining <= 0:
                break
            _changed.wait(remaining)
    return left
