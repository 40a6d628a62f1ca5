"""Where a process's spool files lie: the run directory for readers, and a directory that is safe to map for writing.

A write to a mapped page of a disk-backed file can wait for writeback with the GIL held (up to 200 ms seen), and a
network file system may not map at all. So active files prefer a tmpfs with room; the run directory then holds symbolic
links to them, which sealing replaces by the files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from raytrace_rl import _state
from raytrace_rl.spool.liveness import boot_id

_SHM: Final = "/dev/shm"
#: A tmpfs with less free than this is left to others.
MIN_TMPFS_FREE: Final = 256 * 1024 * 1024
#: With less than this the files of one process do not fit, whoever chose the directory.
_MIN_FREE: Final = 2 * 1024 * 1024
_LOCAL_TYPES: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs", "bcachefs"}
)


class Place(NamedTuple):
    """The directories of one process's spool.

    Attributes:
        directory: ``RUN_DIR/spool/<node>``: where readers look.
        active: Where files are mapped; equal to ``directory`` when that is safe to map.
    """

    directory: str
    active: str


def node_name() -> str:
    """Returns this host's name for directories: the host name and the boot it is in (two hosts may share a name)."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", os.uname().nodename)[:64] or "host"
    return f"{host}-{boot_id().hex()[:8]}"


def settle(run_dir: str, spool_dir: str | None = None) -> Place:
    """Chooses and makes this node's directories for a run.

    Args:
        run_dir: The run directory, absolute.
        spool_dir: Where the user wants active files; None lets us choose.

    Raises:
        OSError: The run directory's spool cannot be made or written.
    """
    directory = os.path.join(run_dir, "spool", node_name())
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory} is not writable")
    tried: list[str] = []
    for candidate in _candidates(directory, spool_dir, label(directory)):
        if candidate == directory or (
            _make_private(candidate, in_private=not spool_dir) and free_bytes(candidate) >= _MIN_FREE
        ):
            return Place(directory, candidate)
        tried.append(candidate)
    _state.warn_once(
        "spool-place", "None of %s can hold active spool files; they are mapped in %s itself.", tried, directory
    )
    return Place(directory, directory)


def label(directory: str) -> str:
    """Returns what stands for a node's directory of a run where active files lie: for people too, who look there.

    The run's name, the node's, and a checksum that tells runs of one name in two places apart. (A hash of `hashlib`
    would cost each worker 2 ms at its start, for OpenSSL.)
    """
    run = os.path.basename(os.path.dirname(os.path.dirname(directory)))
    name = re.sub(r"[^A-Za-z0-9.-]", "_", f"{run[:64]}.{os.path.basename(directory)}")
    return f"{name}.{crc32(os.fsencode(directory)):08x}"


def _candidates(directory: str, spool_dir: str | None, name: str) -> Iterator[str]:
    if spool_dir:
        # Resolved, since what we make ourselves must be no link, but the user's directory may well lie behind one.
        yield os.path.join(os.path.realpath(spool_dir), name)
        return
    private = f"raytrace_rl-{os.getuid()}"
    if _roomy_tmpfs(_SHM):
        yield os.path.join(_SHM, private, name)
    if is_local(directory):
        yield directory
    import tempfile  # costs every worker 2 ms, and is seldom needed

    yield os.path.join(tempfile.gettempdir(), private, name)


def is_local(path: str) -> bool:
    """True if files under ``path`` can safely be mapped: the file system is known to be one of this machine's own."""
    return file_system_type(path) in _LOCAL_TYPES


def file_system_type(path: str) -> str:
    """Returns the type of the file system that holds ``path`` (``ext4``, ``nfs4``...), empty where unknown."""
    real = os.path.realpath(path)
    best, found = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split(" ")
                if len(fields) < 3:
                    continue
                point = fields[1].replace("\\040", " ")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, found = point, fields[2]
    except OSError:
        pass
    return found


def _roomy_tmpfs(path: str) -> bool:
    return file_system_type(path) == "tmpfs" and free_bytes(path) >= MIN_TMPFS_FREE


def free_bytes(directory: str) -> int:
    """Returns how many bytes are free there, 0 where that cannot be told."""
    try:
        usage = os.statvfs(directory)
    except OSError:
        return 0
    return usage.f_bavail * usage.f_frsize


def _make_private(path: str, *, in_private: bool) -> bool:
    """Makes ``path`` and its parent with mode 0700; False unless they are directories of ours.

    Args:
        path: The directory.
        in_private: The parent too must be ours: in ``/dev/shm`` somebody else may have made the name first, and could
            put another directory in the place of ``path``. Of a directory that the user chose, the parent may be
            anyone's.
    """
    try:
        for directory in (os.path.dirname(path), path):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            found = os.lstat(directory)
            ours = found.st_uid == os.getuid() or (directory != path and not in_private)
            if not stat.S_ISDIR(found.st_mode) or not ours:
                return False
        return os.access(path, os.W_OK | os.X_OK)
    except OSError:
        return False
