"""The registry of threads and pool tasks that were started and have not ended.

A flush before an actor is killed must wait for them: their spans are not in the spool before they end. So an entry
leaves only when the thread's function, and with it every span opened in it, is done.
"""

from __future__ import annotations

import os
import threading
from time import monotonic


class Work:
    """One thread, or one task of a pool, from its start (or submission) until its spans have closed."""

    __slots__ = ("ident", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        #: The thread that runs it, once it runs.
        self.ident: int | None = None


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


def names() -> list[str]:
    """Returns the names of traced threads and pool tasks that have not ended, the calling one left out."""
    own = threading.get_ident()
    with _changed:
        return sorted(work.name for work in _live if work.ident != own)


def join(timeout_s: float) -> list[str]:
    """Waits until every traced thread and pool task but the calling one has ended, no longer than ``timeout_s``.

    Args:
        timeout_s: Seconds; 0 only looks.

    Returns:
        The names of those that still run; empty if all have ended.
    """
    own = threading.get_ident()
    deadline = monotonic() + timeout_s
    with _changed:
        while left := sorted(work.name for work in _live if work.ident != own):
            remaining = deadline - monotonic()
            if remaining <= 0:
                break
            _changed.wait(remaining)
    return left
