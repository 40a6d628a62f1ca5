"""One relay a node: it is who holds the lock in the node's directory, and the kernel frees that with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import Final

from raytrace_rl.relay.cursors import DIRECTORY

_NAME: Final = "lock"
#: Descriptors of this process that hold a lock: a forked child would hold it on, long after the relay has gone.
_held: Final[weakref.WeakSet[NodeLock]] = weakref.WeakSet()


class NodeLock:
    """The right to be the relay of one node's directory.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
    """

    def __init__(self, node_dir: str | os.PathLike[str]) -> None:
        self._path = Path(node_dir) / DIRECTORY / _NAME
        self._fd = -1

    def acquire(self) -> bool:
        """Takes the lock; False if another relay has it, or the directory cannot be used."""
        if self._fd >= 0:
            return True
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(fd)
                return False
            # a file system without locks: better two relays, and spans that are sent twice, than none
        self._fd = fd
        _held.add(self)
        return True

    def release(self) -> None:
        """Frees the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _held.discard(self)
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def is_held(self) -> bool:
        """Whether a relay of this or another process has it."""
        if self._fd >= 0:
            return True
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        else:
            return False
        finally:
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: lets go of the parent's descriptor, without freeing the parent's lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _after_fork_in_child() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
