"""Files that a subcommand writes: whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

T = TypeVar("T")


class UnusablePathError(Exception):
    """There is no writing there; the message says why."""


def write_file(path: str, write: Callable[[IO[bytes]], T]) -> T:
    """Calls ``write`` with the open file, and returns what it returns.

    Args:
        path: Where to; ``-`` is standard output.
        write: Writes the contents.

    Raises:
        UnusablePathError: It is a directory, or in none that exists.
        OSError: It cannot be written.
    """
    if path == "-":
        return write(sys.stdout.buffer)
    out = Path(path).resolve()  # behind a link lies what is meant
    if out.is_dir():
        raise UnusablePathError(f"{path}: is a directory")
    if out.exists() and not out.is_file():  # a device, a pipe: written to, never replaced
        with out.open("wb") as stream:
            return write(stream)
    if not out.parent.is_dir():
        raise UnusablePathError(f"{path}: there is no directory {out.parent}")
    # The run may be the file that is overwritten: it is whole until the new one is.
    temporary = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            result = write(file)
        temporary.replace(out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return result
