"""The live control of a run: ``RUN_DIR/control.json``, written by ``raytrace-rl groups``, read at each heartbeat.

So span groups go up for five minutes and down again, or telemetry off, without a restart. It reaches every process
that sees the run directory, within a heartbeat.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import time_ns
from typing import Any, Final

from raytrace_rl import _state, span_groups

NAME: Final = "control.json"
_SCHEMA: Final = 1
_MAX_BYTES: Final = 65536


def write(run_dir: str | os.PathLike[str], span_groups_spec: str | None, until_ns: int | None = None) -> Path:
    """Writes the control file of a run, whole or not at all.

    Args:
        run_dir: The run directory.
        span_groups_spec: What shall record from now on; ``none`` for nothing (telemetry off); None to take the control
            file's effect back.
        until_ns: When it ends by itself, ns since the epoch; None for not.

    Returns:
        The file.

    Raises:
        OSError: It cannot be written.
    """
    path = Path(run_dir) / NAME
    content = {"schema": _SCHEMA, "span_groups": span_groups_spec, "until_ns": until_ns, "written_ns": time_ns()}
    temporary = path.with_name(f"{NAME}.{os.getpid()}.new")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


class Control:
    """Follows the control file of the run that this process belongs to.

    Args:
        run_dir: The run directory.
        own: The spec that this process was started with, and comes back to.
    """

    def __init__(self, run_dir: str, own: str) -> None:
        self._path = Path(run_dir) / NAME
        self._own = own
        self._seen: tuple[int, int, int] | None = None
        self._until_ns: int | None = None
        self._in_force: str | None = None

    def check(self) -> None:
        """Looks at the file, and puts a change into force. Never raises for what the file holds."""
        try:
            found = self._path.stat()
        except OSError:  # none, or taken away: what it said ends
            self._seen = None
            self._apply(None)
            return
        mark = (found.st_mtime_ns, found.st_size, found.st_ino)
        if mark != self._seen:
            self._seen = mark
            self._read()
        if self._until_ns is not None and time_ns() >= self._until_ns:
            self._apply(None)

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                content: Any = json.loads(file.read(_MAX_BYTES))
            spec, until_ns = content["span_groups"], content.get("until_ns")
            usable = (
                content.get("schema") == _SCHEMA
                and (spec is None or isinstance(spec, str))
                and (until_ns is None or isinstance(until_ns, int))
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            usable = False
        if not usable:
            _state.warn_once(
                f"control:{self._seen}",
                "%s cannot be used and changes nothing: write it with 'raytrace-rl groups RUN SPEC'.",
                self._path,
            )
            return
        self._until_ns = until_ns
        self._apply(None if until_ns is not None and time_ns() >= until_ns else spec)

    def _apply(self, spec: str | None) -> None:
        if spec == self._in_force:
            return
        self._in_force = spec
        chosen = self._own if spec is None else spec
        _state.logger.info("Span groups are %r now (%s)", chosen, self._path if spec is not None else "as configured")
        span_groups.apply_spec(chosen)
        # Off altogether: carriers travel no more either, so that nothing of a call is left.
        _state.tracing = span_groups.split_spec(chosen) != ["none"]
