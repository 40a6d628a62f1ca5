"""What the relays of a node have done, in a small file beside their cursors: for the report, `doctor` and people."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from raytrace_rl.relay.cursors import DIRECTORY

VERSION: Final = 1
#: Beside the signals: what was acknowledged and then removed.
FREED: Final = "freed"
_NAME: Final = "status.json"


class Status:
    """The counts of a node's relays, summed over all that were there one after the other.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
    """

    def __init__(self, node_dir: str | os.PathLike[str]) -> None:
        self._path = Path(node_dir) / DIRECTORY / _NAME
        self._before: dict[str, dict[str, int]] | None = None
        self._written: dict[str, Any] = {}

    def write(self, signals: Mapping[str, tuple[dict[str, int], str]], freed: Mapping[str, int]) -> None:
        """Writes counts and failure of each signal, if they have changed. Never raises for a file that cannot be.

        Args:
            signals: Counts and failure by signal.
            freed: Spans and bytes that were acknowledged and then removed, for want of room.
        """
        if self._before is None:
            self._before = {name: _counts(found) for name, found in _read(self._path.parent.parent).items()}
        summed = {}
        for name, (counts, failure) in signals.items():
            before = self._before.get(name, {})
            summed[name] = {key: n + before.get(key, 0) for key, n in counts.items()} | {"failure": failure}
        for name, before in self._before.items():
            if name != FREED:
                summed.setdefault(name, {**before, "failure": ""})  # a signal that is sent no more
        summed[FREED] = {key: n + self._before.get(FREED, {}).get(key, 0) for key, n in freed.items()}
        if summed == self._written:
            return
        text = json.dumps({"version": VERSION, "pid": os.getpid(), "updated_ns": time.time_ns(), "signals": summed})
        temporary = self._path.with_name(f"{_NAME}.{os.getpid()}.new")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
        else:
            self._written = summed


def read(node_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Returns counts and ``failure`` by signal, of all relays that a node had; empty where there was none."""
    return {name: found for name, found in _read(node_dir).items() if name != FREED}


def freed(node_dir: str | os.PathLike[str]) -> dict[str, int]:
    """Returns the spans and bytes that were acknowledged and then removed from a node's spools; empty without any."""
    return {key: n for key, n in _counts(_read(node_dir).get(FREED, {})).items() if n}


def _read(node_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((Path(node_dir) / DIRECTORY / _NAME).read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return {}
        return {str(name): dict(counts) for name, counts in found["signals"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _counts(found: Mapping[str, Any]) -> dict[str, int]:
    return {key: value for key, value in found.items() if isinstance(value, int)}
