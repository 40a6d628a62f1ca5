"""`Threads`: names and ids of threads as arrays, for there may be a thread for each rollout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from raytrace_rl.monitor.bulk.arrays import Bytes, Codes, Ints, Mask

#: Name and id, as far as they are there.
Thread = tuple["str | None", "int | None"]
_NONE: Final = -1


class Threads(NamedTuple):
    """Threads by number; a thread may have several.

    Attributes:
        name: Place of its name, -1 without one.
        known, id: Whether it has an id, and which.
        bounds, text: Where each name begins in ``text``, and at last its length; UTF-8.
    """

    name: Codes
    known: Mask
    id: Ints
    bounds: Ints
    text: Bytes

    def __len__(self) -> int:
        return len(self.name)

    def thread(self, number: int) -> Thread:
        """Returns name and id of a thread."""
        at = int(self.name[number])
        name = None if at < 0 else self.text[self.bounds[at] : self.bounds[at + 1]].tobytes().decode()
        return name, int(self.id[number]) if self.known[number] else None


def threads_of(pairs: Iterable[Thread]) -> Threads:
    """Returns threads by name and id."""
    listed = list(pairs)
    names = [name for name, _ in listed if name is not None]
    return made(
        names,
        np.cumsum([0, *(name is not None for name, _ in listed)])[:-1],
        np.array([name is not None for name, _ in listed], np.bool_),
        np.array([thread_id is not None for _, thread_id in listed], np.bool_),
        np.array([thread_id or 0 for _, thread_id in listed], np.int64),
    )


def made(names: Sequence[str], name: Ints, named: Mask, known: Mask, ids: Ints) -> Threads:
    """Returns threads whose names are places in ``names``, where they are ``named``."""
    encoded = [one.encode() for one in names]
    bounds = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(one) for one in encoded], out=bounds[1:])
    place = np.where(named, name, _NONE).astype(np.int32)
    return Threads(place, known, ids, bounds, np.frombuffer(b"".join(encoded), np.uint8))


def joined_threads(parts: Sequence[Threads]) -> Threads:
    """Returns the threads of several, one behind the other."""
    names = np.cumsum([0, *(len(part.bounds) - 1 for part in parts)])
    sizes = np.cumsum([0, *(len(part.text) for part in parts)])
    return Threads(
        np.concatenate([np.where(p.name >= 0, p.name + n, _NONE) for p, n in zip(parts, names, strict=False)]).astype(
            np.int32
        ),
        np.concatenate([part.known for part in parts]),
        np.concatenate([part.id for part in parts]),
        np.concatenate([*(p.bounds[:-1] + n for p, n in zip(parts, sizes, strict=False)), sizes[-1:]]),
        np.concatenate([part.text for part in parts]),
    )
