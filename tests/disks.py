"""Small and read-only file systems, real ones where this process may mount, for the tests of a spool without room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl.spool import seal, segment, writer

_CAP_SYS_ADMIN = 21


def may_mount() -> bool:
    """Whether this process may mount file systems: root may, but for root of a container without the capability."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (capabilities,) = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(capabilities, 16) >> _CAP_SYS_ADMIN & 1)


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """Mounts a tmpfs for the length of a ``with`` statement; an error, not a skip, if that fails."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True, timeout=30)


class Disk:
    """A file system of a few MiB.

    Attributes:
        path: Where it is mounted.
        size: Bytes.
        real: It is one. Else what allocates and copies is replaced by a mock that keeps the quota.
    """

    def __init__(self, path: Path, size: int, *, real: bool) -> None:
        self.path = path
        self.size = size
        self.real = real
        self._filler = path / "filler"

    @property
    def free(self) -> int:
        if self.real:
            found = os.statvfs(self.path)
            return found.f_bavail * found.f_frsize
        used = 0
        for found_in, _, names in os.walk(self.path):
            for name in names:
                try:
                    used += os.lstat(os.path.join(found_in, name)).st_blocks * 512  # noqa: PTH118
                except OSError:
                    continue
        return self.size - used

    def fill(self) -> None:
        """Takes all the room that is left."""
        with self._filler.open("ab") as file:
            if room := self.free:
                os.posix_fallocate(file.fileno(), file.tell(), room)

    def release(self) -> None:
        """Gives back what `fill` took."""
        self._filler.unlink()

    def refuse(self, path: str, size: int) -> None:
        """What the mock does where a real disk would be full."""
        if path.startswith(f"{self.path}/") and size > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def small_disk(path: Path, monkeypatch: pytest.MonkeyPatch, *, mib: int = 4) -> Iterator[Disk]:
    """A disk of ``mib`` MiB at ``path``."""
    if may_mount():
        with mounted(path, f"size={mib}m"):
            yield Disk(path, mib << 20, real=True)
        return
    path.mkdir(parents=True)
    disk = Disk(path, mib << 20, real=False)
    allocate, bring_home = segment._allocate, seal._bring_home

    def allocate_within(fd: int, size: int) -> None:
        disk.refuse(str(Path(f"/proc/self/fd/{fd}").readlink()), size)
        allocate(fd, size)

    def bring_home_within(data: bytes, link: str, *args: Any) -> None:
        disk.refuse(link, len(data))
        bring_home(data, link, *args)

    with monkeypatch.context() as patch:
        patch.setattr(segment, "_allocate", allocate_within)
        patch.setattr(seal, "_bring_home", bring_home_within)
        patch.setattr(writer, "free_bytes", lambda directory: disk.free)
        yield disk


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """A directory that cannot be written, not by root either: below a read-only mount, else one of the kernel's."""
    if may_mount():
        with mounted(path, "ro"):
            yield path
    else:
        yield Path("/proc/self/task")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings given so far, but for the summary at the end of a process's telemetry."""
    found: Callable[[Any], bool] = lambda record: record.levelname == "WARNING" and record.name == "raytrace_rl"  # noqa: E731
    messages = [record.getMessage() for record in caplog.records if found(record)]
    return [message for message in messages if not message.startswith("Telemetry of this process lost")]
