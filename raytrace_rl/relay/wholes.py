"""Files that go home whole, when they have changed: tables of open spans, stacks of hangs, the notes of relays."""

from __future__ import annotations

import zlib
from typing import Final

from raytrace_rl.relay.home import Piece, piece
from raytrace_rl.spool.reader import UnreadableFileError, read_whole

#: Files longer than this are not carried (bytes).
MOST: Final = 4 << 20


class Wholes:
    """Remembers, by a sum of each, what home has of them."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}

    def changed(self, name: str, data: bytes) -> Piece | None:
        """Returns what to send of a file, which counts as sent from now on; None where home has it.

        Args:
            name: Its name at home.
            data: What is in it.
        """
        found = zlib.crc32(data)
        if self._sums.get(name) == found:
            return None
        self._sums[name] = found
        return piece(name, 0, data, whole=True)

    def forget(self, name: str) -> None:
        """Home has it no longer."""
        self._sums.pop(name, None)

    def clear(self) -> None:
        """Forgets all: what home has is found out anew."""
        self._sums.clear()


def contents(path: str) -> bytes:
    """Returns what is in a file; nothing where it is gone, is no file, or is longer than `MOST`."""
    try:
        data = read_whole(path, MOST + 1)
    except UnreadableFileError:
        return b""
    return data if len(data) <= MOST else b""
