"""Proof of death by a lock that dies with its process, and by nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raytrace_rl.spool import liveness
from raytrace_rl.spool.liveness import Liveness, boot_id, state
from tests.running import child

HOLDER = """
import os, sys
from raytrace_rl.spool.liveness import Liveness
held = Liveness(sys.argv[1])
print("held", flush=True)
for line in sys.stdin:
    if line == "release\\n":
        held.release()
    elif line == "fork\\n":
        pid = os.fork()
        if pid == 0:
            held.forget()
            os._exit(0)
        os.waitpid(pid, 0)
    elif line == "orphan\\n":  # a forked child that outlives its parent and keeps its descriptors
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
    print("done", flush=True)
"""


class Holder:
    """Another process, which holds a liveness file."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, line: str) -> None:
        """Has it do something, and waits until that is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        """Kills it as ``kill -9`` does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def holding(path: Path) -> Iterator[Holder]:
    """Another process that holds ``path``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield Holder(process)
        finally:
            process.kill()


def seen_from_elsewhere(path: Path) -> str:
    """The state as a process of its own finds it."""
    code = "import sys; from raytrace_rl.spool import liveness as l; print(l.state(sys.argv[1], l.boot_id()))"
    return subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_alive_then_dead(tmp_path: Path):
    """A living writer's spans are closed as truncated; a killed one's never are."""
    path = tmp_path / "7-1.live"
    link = tmp_path / "link.live"
    link.symlink_to(path)
    with holding(path) as holder:
        assert [state(one, boot_id()) for one in (path, str(path), link)] == ["alive"] * 3
        holder.kill()
        assert [state(one, boot_id()) for one in (path, str(path), link)] == ["dead"] * 3
        assert path.exists()


def test_closed_cleanly(tmp_path: Path):
    """A process that ended well counts as killed."""
    path = tmp_path / "7-1.live"
    with holding(path) as holder:
        holder.tell("release")
        assert state(path, boot_id()) == "closed"
        assert not path.exists()


def test_asking_does_not_free_the_lock(tmp_path: Path):
    """A reader in the writer's own process, or in another, makes the writer look dead: POSIX frees a process's locks
    when it closes any descriptor of the file.
    """
    path = tmp_path / "7-1.live"
    (tmp_path / "link").symlink_to(tmp_path)
    held = Liveness(str(path))
    try:
        for one in (path, tmp_path / "link" / "7-1.live", f"{tmp_path}/./7-1.live"):
            assert state(one, boot_id()) == "alive"
        assert state(path, bytes(16)) == "alive"  # of itself it knows whatever the header says
        assert seen_from_elsewhere(path) == "alive"
        assert seen_from_elsewhere(path) == "alive"
    finally:
        held.release()
    assert seen_from_elsewhere(path) == "closed"


def test_fork_neither_inherits_nor_frees(tmp_path: Path):
    """A forked child frees its parent's lock when it ends, or holds it when the parent is dead."""
    path = tmp_path / "7-1.live"
    with holding(path) as holder:
        holder.tell("fork")
        assert state(path, boot_id()) == "alive"
        holder.tell("orphan")
        assert state(path, boot_id()) == "alive"
        holder.kill()
        assert state(path, boot_id()) == "dead"


def test_forked_child_asks_about_its_parent(tmp_path: Path):
    """A forked child takes its parent's file for its own, or frees the parent's lock by asking."""
    code = """
    import os, sys
    from raytrace_rl.spool.liveness import Liveness, boot_id, state
    held = Liveness(sys.argv[1])
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            print(state(sys.argv[1], boot_id()), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    """
    assert child(code, tmp_path / "7-1.live").stdout.split() == ["alive", "alive"]


@pytest.mark.parametrize("writer", [bytes(16), bytes(range(16))])
def test_another_boot_or_host_is_unknown(tmp_path: Path, writer: bytes):
    """A process of another host counts as dead because its lock is not to be seen from here."""
    path = tmp_path / "7-1.live"
    path.touch()
    assert state(path, writer) == "unknown"
    path.unlink()
    assert state(path, writer) == "closed"


def test_link_that_leads_nowhere_is_unknown(tmp_path: Path):
    """A writer in a container with a ``/dev/shm`` of its own counts as closed."""
    link = tmp_path / "7-1.live"
    link.symlink_to(tmp_path / "elsewhere" / "7-1.live")
    assert state(link, boot_id()) == "unknown"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EINVAL, errno.EIO])
def test_file_system_without_locks_is_unknown(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch):
    """A file system that cannot lock (a mock of its answer) proves a death."""
    path = tmp_path / "7-1.live"
    path.touch()

    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert state(path, boot_id()) == "unknown"


def test_unreadable_file_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Somebody else's file, which we may not open (a mock of that answer), proves a death."""

    def refuse(*args: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    path = tmp_path / "7-1.live"
    path.touch()
    monkeypatch.setattr(liveness.os, "open", refuse)
    assert state(path, boot_id()) == "unknown"


def test_directory_that_cannot_hold_it(tmp_path: Path):
    """A liveness file that cannot be made passes for one, and the process for dead from its start."""
    with pytest.raises(OSError, match="No such file"):
        Liveness(str(tmp_path / "missing" / "7-1.live"))


def test_no_lock_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without locks (a mock of the answer) the file stays open, or the process believes that it is proven alive."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = tmp_path / "7-1.live"
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)
        with pytest.raises(OSError, match="locks"):
            Liveness(str(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert os.path.realpath(path) not in liveness._own


def test_release_closes_its_descriptor_and_may_find_the_file_gone(tmp_path: Path):
    """Each start and stop leaks a descriptor; or a run directory that vanished breaks the shutdown."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = Liveness(str(tmp_path / "7-1.live"))
    (tmp_path / "7-1.live").unlink()
    held.release()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_boot_id_is_the_kernels():
    """Two hosts, or two boots of one, cannot be told apart."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    assert boot_id().hex() == text.strip().replace("-", "")
