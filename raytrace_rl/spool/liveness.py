"""Proof of death: a living writer holds an fcntl lock, which the kernel frees with the process and a fork never copies.

POSIX drops a process's locks on a file when the process closes *any* descriptor of it; so a process never opens its own
liveness file a second time, and `state` answers for it without looking.
"""

from __future__ import annotations

import errno
import fcntl
import os
from functools import lru_cache
from typing import Final, Literal

State = Literal["alive", "dead", "closed", "unknown"]

#: A file in a node's directory that is a copy of another one's: there a lock is held from afar, for writers who live
#: elsewhere, and that nobody holds it proves nothing.
COPY: Final = "relay/home.json"

_BOOT_ID_FILE: Final = "/proc/sys/kernel/random/boot_id"
#: Real paths of the liveness files that this process holds, with its pid (a forked child holds none of them).
_own: Final[dict[str, int]] = {}


@lru_cache(maxsize=1)
def boot_id() -> bytes:
    """Returns the kernel's boot id (16 bytes), zeros where there is none: it tells hosts, and boots of one, apart."""
    try:
        with open(_BOOT_ID_FILE, encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


class Liveness:
    """Holds the lock for as long as the process lives, or until `release`."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str) -> None:
        """Makes the file and takes its lock.

        Raises:
            OSError: The file cannot be made, or its file system has no locks.
        """
        self.path = path
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)  # waits only for a reader's momentary probe
        except OSError:
            os.close(self._fd)
            raise
        _own[os.path.realpath(path)] = os.getpid()

    def release(self) -> None:
        """Frees the lock and removes the file: a clean close."""
        _own.pop(os.path.realpath(self.path), None)
        try:
            os.unlink(self.path)
        except OSError:
            pass
        os.close(self._fd)

    def abandon(self) -> None:
        """Frees the lock and leaves the file: whether the process lives is not known here any more."""
        _own.pop(os.path.realpath(self.path), None)
        os.close(self._fd)

    def forget(self) -> None:
        """In a forked child: lets go of the parent's descriptor. The parent's lock is the parent's alone."""
        os.close(self._fd)


def state(path: str | os.PathLike[str], writer_boot_id: bytes) -> State:
    """Tells whether the writer that holds ``path`` lives.

    Args:
        path: The liveness file of the process.
        writer_boot_id: The boot id in the writer's spool header.

    Returns:
        ``closed``: it ended cleanly (no file). ``alive``, ``dead``: proven by the lock. ``unknown``: another host (or
        boot) wrote it, or the lock cannot be asked for, or is none of its own; nothing is concluded then.
    """
    real = os.path.realpath(path)
    if _own.get(real) == os.getpid():
        return "alive"
    if writer_boot_id != boot_id() or not any(writer_boot_id):
        return "unknown" if os.path.lexists(path) else "closed"
    try:
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        # a dangling link: the writer may live in a container with a tmpfs of its own
        return "unknown" if os.path.lexists(path) else "closed"
    except OSError:
        return "unknown"
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return "alive" if error.errno in (errno.EACCES, errno.EAGAIN) else "unknown"
    else:
        return "unknown" if os.path.exists(os.path.join(os.path.dirname(path), COPY)) else "dead"
    finally:
        os.close(fd)
