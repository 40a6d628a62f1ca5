"""Where a run lies: its id, its directory, and which attempt of it this start is."""

from __future__ import annotations

import json
import os
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from raytrace_rl import _clock, _state
from raytrace_rl._version import VERSION

if TYPE_CHECKING:
    from raytrace_rl.config import TelemetryConfig

#: Tells workers which attempt they belong to.
ATTEMPT_VARIABLE: Final = "RAYTRACE_RL_ATTEMPT"
#: A Ray worker's working directory lies in its session's; files there go with the session.
_RAY_SESSION: Final = re.compile(r"/session_\d{4}-\d{2}-\d{2}_")


def settle(config: TelemetryConfig) -> TelemetryConfig:
    """Returns ``config`` with a run id and an absolute run directory."""
    run_id = config.run_id or uuid.uuid4().hex[:8]
    if config.run_dir:
        run_dir = config.run_dir if Path(config.run_dir).is_absolute() else str(_base() / config.run_dir)
    else:
        base = _base()
        if _RAY_SESSION.search(str(base)):
            base = _home()
        run_dir = str(base / "raytrace_runs" / run_id)
    return replace(config, run_id=run_id, run_dir=run_dir)


def _base() -> Path:
    try:
        return Path.cwd()
    except OSError:  # somebody has deleted it
        return _home()


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry, as in many containers
        import tempfile  # costs every worker 2 ms, and is seldom needed

        return Path(tempfile.gettempdir())


def claim_attempt(config: TelemetryConfig, algorithm: str | None) -> int:
    """Makes the run directory and returns this attempt's number, from 1. An unusable directory is found out later."""
    if config.exporter in ("none", "console") or config.run_dir is None:
        return 1
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _hide(run_dir)
        about = {"run_id": config.run_id, "algorithm": algorithm, "started_ns": _clock.now_ns(), "version": VERSION}
        attempts = run_dir / "attempts"
        attempts.mkdir(mode=0o700, exist_ok=True)
        for attempt in range(1, 1_000_000):
            try:
                with (attempts / f"{attempt}.json").open("x", encoding="utf-8") as file:
                    json.dump({**about, "attempt": attempt}, file)
                return attempt
            except FileExistsError:
                continue
    except OSError as error:
        _state.logger.debug("run directory %s: %s", run_dir, error)  # the spool meets it next, and warns
    return 1


def _hide(run_dir: Path) -> None:
    """Hides a run from git and from Ray, which packs the working directory. Files that are there already hold.

    A directory that holds other things is the user's own, perhaps all of the code: only what we put into it is hidden.
    """
    ours = {"spool", "attempts", ".gitignore", ".rayignore", "control.json"}
    foreign = any(entry.name not in ours for entry in run_dir.iterdir())
    for directory in (run_dir / "spool", run_dir / "attempts") if foreign else (run_dir,):
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in (".gitignore", ".rayignore"):
            path = directory / name
            if not path.exists():
                path.write_text("*\n", encoding="ascii")


def inherited_attempt() -> int:
    """Returns the attempt that a worker's driver has claimed, as the environment says; 1 if it does not."""
    text = os.environ.get(ATTEMPT_VARIABLE, "1")
    return int(text) if text.isdecimal() and len(text) < 10 else 1
