"""The table of spans that are open this instant: written at a span's start, freed at its end.

The heartbeat notes open spans in full, once a beat; a span that opened since the last beat would be invisible after a
kill. One slot assignment at its start makes it visible at once, without its attributes.
"""

from __future__ import annotations

import mmap
from time import monotonic
from typing import Final

from raytrace_rl.spool.format import SLOT_COUNT, SLOT_SIZE, Header, pack_header
from raytrace_rl.spool.segment import create_mapping

#: The longest span head that fits a slot; a longer one waits for the heartbeat.
MAX_HEAD: Final = SLOT_SIZE - 2
#: Little-endian u16 of every length, made once.
LENGTHS: Final = tuple(n.to_bytes(2, "little") for n in range(MAX_HEAD + 1))
FREE: Final = LENGTHS[0]
#: Seconds for which a slot must have been lost before it is freed.
RECLAIM_AFTER_S: Final = 3.0


class OpenTable:
    """A mapped table of `SLOT_COUNT` slots.

    Attributes:
        buffer: The mapping.
        free: Offsets of free slots; ``pop`` and ``append`` are atomic. Empty: spans start without a slot and are
            noted by the heartbeat.
        base: Offset of the first slot.
    """

    __slots__ = ("_suspects", "base", "buffer", "free", "path")

    def __init__(self, path: str, header: Header) -> None:
        """Makes the file.

        Raises:
            OSError: It cannot be made.
        """
        head = pack_header(header)
        self.path = path
        self.base = len(head)
        self.buffer: mmap.mmap | memoryview = create_mapping(path, self.base + SLOT_COUNT * SLOT_SIZE, head)
        self.free = [self.base + n * SLOT_SIZE for n in reversed(range(SLOT_COUNT))]
        #: Slots that seem lost: when that was first seen, and what they held.
        self._suspects: dict[int, tuple[float, bytes]] = {}

    def reclaim(self, used: set[int]) -> None:
        """Frees slots that an interrupted start or end left neither used nor free.

        Spans start and end meanwhile, so a slot in use may well be found in neither set, and more than once. One that
        is lost keeps its bytes: only what was seen `RECLAIM_AFTER_S` ago, and has not changed since, is freed.

        Args:
            used: Offsets of the slots of spans that were open a moment ago.
        """
        if isinstance(self.buffer, mmap.mmap) and self.buffer.closed:
            return
        if len(used - {0}) + len(self.free) >= SLOT_COUNT:  # none is lost; to look takes 0.1 ms, at each beat
            self._suspects = {}
            return
        slots = {self.base + n * SLOT_SIZE for n in range(SLOT_COUNT)}
        now = monotonic()
        suspects: dict[int, tuple[float, bytes]] = {}
        for offset in slots - used - set(self.free):
            held = bytes(self.buffer[offset : offset + SLOT_SIZE])
            since, before = self._suspects.get(offset, (now, held))
            if held != before:
                since = now
            if now - since >= RECLAIM_AFTER_S:
                self.buffer[offset : offset + 2] = FREE
                self.free.append(offset)
            else:
                suspects[offset] = since, held
        self._suspects = suspects

    def close(self) -> None:
        """Unmaps the table; spans that start or end from now on leave it alone."""
        self.free = []
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()
