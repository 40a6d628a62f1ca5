"""Why a node has no relay although one was asked for (grpcio is missing, say): noted where its counts would be."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from time import time_ns
from typing import Any, Final

from raytrace_rl.relay import notes
from raytrace_rl.relay.cursors import DIRECTORY

VERSION: Final = 1
NAME: Final = "refusal.json"


def note(node_dir: str | os.PathLike[str], failure: str) -> None:
    """Notes why there is none. Never raises for a file that cannot be written."""
    with contextlib.suppress(OSError):
        notes.replace(
            Path(node_dir) / DIRECTORY / NAME, {"version": VERSION, "failure": failure, "failed_ns": time_ns()}
        )


def forget(node_dir: str | os.PathLike[str]) -> None:
    """There is one now."""
    with contextlib.suppress(OSError):
        (Path(node_dir) / DIRECTORY / NAME).unlink()


def read(node_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns ``failure`` and ``failed_ns``; empty where nothing is noted."""
    return notes.read(Path(node_dir) / DIRECTORY / NAME, VERSION)
