"""Work that may have to wait (for a slow disk, for a collector), bounded by a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic


def run_until(deadline: float, work: Callable[[], None], name: str) -> None:
    """Runs ``work`` in a thread called ``name`` and goes on at ``deadline``, whether or not it is done.

    Args:
        deadline: A `time.monotonic` moment.
        work: Runs in this thread, without a bound, where the interpreter is shutting down and starts no more.
        name: Name of the thread.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        work()
    else:
        thread.join(max(0.0, deadline - monotonic()))
