"""The watch on a heartbeat that does not come: a C call that holds the GIL stops every Python thread, ours too.

`faulthandler` has a thread in C that needs no GIL. Each beat puts it off; if none comes for long enough it writes the
stacks of all threads into a file beside the spool's, where they outlive a kill.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from typing import Any, Final

from raytrace_rl._interrupts import is_interrupt

SUFFIX: Final = ".hang"
#: Beyond this it is not armed: it would never fire, and `faulthandler` takes no longer times everywhere.
_LONGEST_S: Final = 1e6

#: Held while the timer is set, and across a fork: a child hangs at its exit if it was forked while the timer ran.
_lock = threading.RLock()
#: The program uses ``faulthandler.dump_traceback_later`` itself: it has one timer, and it is the program's.
_taken = False
_original: Callable[..., Any] = faulthandler.dump_traceback_later


class Watch:
    """The file of one process, and the timer that fills it.

    Args:
        path: The file; made here.
        after_s: How long after the last `put_off` it writes, in seconds.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: str, after_s: float) -> None:
        global _original
        self.path = path
        self._after_s = after_s
        self._pid = os.getpid()
        self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if faulthandler.dump_traceback_later is not _ours:
            _original = faulthandler.dump_traceback_later
            faulthandler.dump_traceback_later = _ours

    def put_off(self) -> None:
        """Starts the time anew, where it can; what an earlier hang left in the file goes, since it is over."""
        if _taken or self._after_s > _LONGEST_S:
            return
        with _lock:
            if self._fd < 0 or self._pid != os.getpid():
                return
            try:
                if os.fstat(self._fd).st_size:
                    os.ftruncate(self._fd, 0)
                _original(self._after_s, file=self._fd)
            except (OSError, RuntimeError, ValueError) as error:  # no more threads for this process, for one
                if is_interrupt(error):
                    raise

    def close(self) -> None:
        """Disarms it; the file is its owner's to remove."""
        with _lock:
            fd, self._fd = self._fd, -1
            if fd >= 0 and self._pid == os.getpid():
                _cancel()
                os.close(fd)


def _ours(*args: Any, **kwargs: Any) -> Any:
    """``faulthandler.dump_traceback_later``, noticing that the program uses it."""
    global _taken
    _taken = True
    return _original(*args, **kwargs)


def _cancel() -> None:
    if not _taken:
        faulthandler.cancel_dump_traceback_later()


def _before_fork() -> None:
    _lock.acquire()
    _cancel()


def _after_fork_in_parent() -> None:
    _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
