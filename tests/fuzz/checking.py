"""What the fuzz targets share: how a property is asserted, and where files go."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


class BrokenPropertyError(AssertionError):
    """A property does not hold for an input."""


def check(holds: object, what: str, *shown: object) -> None:
    """Raises where a property does not hold: no ``assert``, which a run with ``-O`` would skip."""
    if not holds:
        raise BrokenPropertyError("\n  ".join([what, *(f"{one!r:.2000}" for one in shown)]))


@cache
def scratch() -> Path:
    """A directory of this process, in memory where there is room: a file a try."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="raytrace_rl-fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
