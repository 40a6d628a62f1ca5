"""`Scratch`: a directory for what goes with a query, and the leftovers of queries that were killed, taken away.

Beside it lies a file that the query holds locked: the kernel frees the lock with the process, whichever way that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Final

_PREFIX: Final = "live-"
_LOCK: Final = ".lock"


class Scratch:
    """A directory of this process's alone.

    Args:
        cache: Where it is made.

    Attributes:
        path: The directory.
        token: Text of its file `TOKEN`: whoever reads the same there, on whatever machine, has the same directory.

    Raises:
        OSError: It cannot be made.
    """

    TOKEN: Final = "token"

    def __init__(self, cache: Path) -> None:
        lock = -1
        while lock < 0:  # who cleans up may take the lock of a file that was made this moment
            self.path = cache / f"{_PREFIX}{secrets.token_hex(6)}"
            lock = self._locked()
        self.path.mkdir(mode=0o700)
        self.token = secrets.token_hex(16)
        (self.path / self.TOKEN).write_text(self.token)
        self._close = weakref.finalize(self, _close, self.path, lock, os.getpid())

    def _locked(self) -> int:
        """Makes the lock file and takes its lock; returns its descriptor, -1 where the name is not to be had."""
        try:
            fd = os.open(f"{self.path}{_LOCK}", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(fd), os.stat(f"{self.path}{_LOCK}"))  # noqa: PTH116 - a path is all there is
        except (BlockingIOError, FileNotFoundError):
            mine = False
        except OSError:  # a file system without locks: what is left behind there stays
            mine = True
        if mine:
            return fd
        os.close(fd)
        return -1

    def close(self) -> None:
        """Takes it away."""
        self._close()


def _close(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        _remove(path)
        os.close(lock)


def clean(cache: Path) -> None:
    """Takes away what queries have left behind whose process is gone."""
    for lock in list(cache.glob(f"{_PREFIX}*{_LOCK}")):
        with contextlib.suppress(OSError):
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock.with_suffix(""))
            finally:
                os.close(fd)
    for directory in list(cache.glob(f"{_PREFIX}*")):
        # An older release locked nothing; a lock comes before its directory and goes after it.
        if directory.suffix != _LOCK and not Path(f"{directory}{_LOCK}").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    Path(f"{directory}{_LOCK}").unlink(missing_ok=True)
