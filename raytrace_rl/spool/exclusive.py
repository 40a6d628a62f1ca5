"""One at a time through a node's directory: who drops old segments, or adopts those of the dead.

Two at once would count wrong what either has dropped. An advisory lock on the directory itself, so that it leaves no
file and is gone with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from time import monotonic, sleep


@contextlib.contextmanager
def alone(directory: str, wait_s: float) -> Iterator[bool]:
    """Keeps other threads and processes of the node out for the length of a ``with`` statement.

    Args:
        directory: ``RUN_DIR/spool/<node>``.
        wait_s: Seconds for which a sibling is waited for.

    Yields:
        False if a sibling is at it, and still was after ``wait_s`` seconds.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True  # it is gone; what follows finds that out
        return
    try:
        yield _locked(fd, monotonic() + wait_s)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do it: a child forked meanwhile has the descriptor too
        os.close(fd)


def _locked(fd: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                return True  # a file system without locks
            if monotonic() >= until:
                return False
            sleep(0.005)
        else:
            return True
