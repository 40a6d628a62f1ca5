"""Trace and span ids from a generator of our own: `random.seed(42)` on every rank must not repeat an id."""

from __future__ import annotations

import os
import random
from typing import Final

# Not os.urandom per id: a system call gives the GIL away, and getting it back beside a busy thread takes milliseconds.
_random: Final = random.Random(os.urandom(32))
getrandbits: Final = _random.getrandbits


def reseed(seed: int | bytes | None = None) -> None:
    """Starts a new sequence: from the kernel's entropy, or (for tests that want the same ids again) from ``seed``."""
    _random.seed(os.urandom(32) if seed is None else seed)


def new_trace_id() -> bytes:
    """Returns 16 random bytes, never all zero (the W3C invalid id)."""
    return (getrandbits(128) or 1).to_bytes(16, "big")


def new_span_id() -> bytes:
    """Returns 8 random bytes, never all zero (the W3C invalid id)."""
    return (getrandbits(64) or 1).to_bytes(8, "big")


# A forked child would otherwise continue its parent's sequence and repeat its ids.
os.register_at_fork(after_in_child=reseed)
