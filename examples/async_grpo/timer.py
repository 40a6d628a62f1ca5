"""Wall-clock seconds of a step's phases, by key: the keys that the spans are named after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Sums the seconds spent under each key."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, key: str) -> Iterator[None]:
        """Adds the body's duration to ``key``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start
