"""`load_run`: from a run directory, a spool file or an OTLP file to a `Run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from raytrace_rl.monitor import otlp_files, spool_files
from raytrace_rl.monitor.builder import Builder
from raytrace_rl.monitor.model import UnreadableRunError
from raytrace_rl.spool import listing

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run


def load_run(path: str | os.PathLike[str]) -> Run:
    """Reads a run whole.

    Args:
        path: A run directory (or its ``spool`` directory, or one node's), one ``.rts`` file, or an OTLP traces file:
            JSON lines, or protobuf (one request, or requests each preceded by its length).

    Returns:
        The run: spans, metrics and logs as rows (of an OTLP file, spans alone). What could not be read is in
        ``damage``; nothing is left out silently.

    Raises:
        UnreadableRunError: Nothing is there to read.
    """
    path = Path(path)
    builder = Builder(str(path))
    if path.is_dir():
        for files in spool_processes(path):
            spool_files.add_process(builder, files)
    elif not path.exists() and not path.is_symlink():
        raise UnreadableRunError(f"{path}: no such file or directory")
    elif spool_files.is_spool_file(path):
        spool_files.add_process(builder, spool_files.single_file(path))
    else:
        otlp_files.add_file(builder, path)
        if not builder.run.spans and not builder.requests:
            reason = builder.run.damage[0].reason if builder.run.damage else "file is empty"
            raise UnreadableRunError(f"{path}: neither spool nor OTLP traces: {reason}")
    return builder.finish()


def spool_processes(path: Path) -> list[listing.ProcessFiles]:
    """Returns the spool files of each process under a run directory, its spool, or one node's directory.

    Raises:
        UnreadableRunError: There are none.
    """
    spool = path / "spool"
    root = spool if spool.is_dir() else path
    try:
        found = list(listing.processes(root)) or listing.node_processes(root)
    except OSError as error:
        raise UnreadableRunError(f"{path}: cannot be listed: {error.strerror}") from None
    if not found:
        raise UnreadableRunError(f"{path}: holds no spool (is it a run directory?)")
    return found
