"""Where the node's local OTLP receiver listens: every process of a run can know it, whether or not it is there yet."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Final

#: Not the user's TMPDIR: processes of one run may have different ones, and a socket's path has little room.
_ROOT: Final = "/tmp"


def socket_path(run_id: str) -> Path:
    """Returns the path of the receiver's Unix socket for a run, on this node."""
    return _directory() / f"{_label(run_id)}.otlp.sock"


def local_endpoint(run_id: str) -> str:
    """Returns what ``OTEL_EXPORTER_OTLP_ENDPOINT`` of a process on this node is set to, to reach the receiver."""
    return f"unix:{socket_path(run_id)}"


def http_path(run_id: str) -> Path:
    """Returns the path of the file that says where the receiver listens for HTTP, and with which token."""
    return _directory() / f"{_label(run_id)}.otlp.json"


def local_http_endpoint(run_id: str) -> tuple[str, str] | None:
    """Returns URL and token of the receiver's HTTP side, None where none listens."""
    try:
        found = json.loads(http_path(run_id).read_text(encoding="utf-8"))
        return str(found["url"]), str(found["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_directory() -> None:
    """Makes the directory of the sockets.

    Raises:
        OSError: It cannot be made, or somebody else has made it.
    """
    directory = _directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not ours alone")


def _directory() -> Path:
    return Path(_ROOT) / f"raytrace_rl-{os.getuid()}-otlp"


def _label(run_id: str) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]
