"""Small JSON files beside a relay's cursors: replaced whole, so that a kill at any moment leaves the old or the new."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from raytrace_rl._interrupts import is_interrupt

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: What the kernel writes in one go, whatever strikes meanwhile.
_PAGE: Final = 4096


def replace(path: Path, found: Mapping[str, Any]) -> None:
    """Writes a file anew.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def replace_somehow(path: Path, found: Mapping[str, Any]) -> bool:
    """Writes a file anew; on a full disk in its own place, if it is there and small. False if neither can be done.

    For what says that the disk is full: that must not be lost for want of room.
    """
    try:
        replace(path, found)
    except OSError as error:
        if is_interrupt(error):
            raise
        return error.errno in _NO_ROOM and _overwrite(path, json.dumps(found, separators=(",", ":")).encode())
    return True


def _overwrite(path: Path, data: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if len(data) > _PAGE or os.fstat(fd).st_blocks * 512 < len(data):
            return False
        written = os.pwrite(fd, data, 0) == len(data)
        os.ftruncate(fd, len(data))
    except OSError:
        return False
    else:
        return written
    finally:
        os.close(fd)


def read(path: Path, version: int) -> dict[str, Any]:
    """Returns what a file holds; empty where there is none that can be read, or one of another version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("version") == version else {}
