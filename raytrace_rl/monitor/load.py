"""`load_run`: from a run directory, a spool file or an OTLP file to a `Run`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from raytrace_rl.monitor import otlp_files, spool_files
from raytrace_rl.monitor.builder import Builder
from raytrace_rl.monitor.model import UnreadableRunError
from raytrace_rl.monitor.relay_counters import add_home_losses
from raytrace_rl.spool import listing

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run

#: Below so many bytes a run is read in one process: to start others takes longer.
ALONE_BYTES: Final = 32 << 20

#: Told of how much has been done, and how much there is.
Progress = Callable[[int, int], None]


def load_run(path: str | os.PathLike[str], *, align: bool = False) -> Run:
    """Reads a run whole.

    Args:
        path: A run directory (or its ``spool`` directory, or one node's), one ``.rts`` file, or an OTLP traces file:
            JSON lines, or protobuf (one request, or requests each preceded by its length).
        align: Shift the times of other nodes to the clock of the driver's, as far as the run's own messages tell how
            far they are apart; ``.skew`` then says what was done. Without, times are as each node's clock had them.

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
    run = builder.finish()
    add_home_losses(run)
    if align:
        from raytrace_rl.monitor import align as alignment

        alignment.align(run)
    return run


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


def spool_bytes(path: Path) -> int:
    """Returns how many bytes of segments a run directory has; 0 of anything else.

    Raises:
        UnreadableRunError: Nothing is there to read.
    """
    if not path.is_dir():
        return 0
    return sum(file_size(segment) for files in spool_processes(path) for segment in files.segments.values())


def file_size(path: str) -> int:
    """Returns the size of a file in bytes, behind a link that of what it leads to; 0 where it is out of reach."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
