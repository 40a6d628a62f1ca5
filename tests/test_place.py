"""Where spool files lie: in a tmpfs with room, else beside the readers' directory, never where mapping is unsafe."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from raytrace_rl.spool import place
from raytrace_rl.spool.place import Place, settle
from tests.disks import may_mount, mounted, read_only, warnings_of


def mode(path: Path | str) -> int:
    """The permission bits of a directory."""
    return stat.S_IMODE(Path(path).stat().st_mode)


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of ``/dev/shm`` (a mock), which counts as a tmpfs with room."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(place, "_SHM", str(path))
    monkeypatch.setattr(place, "_roomy_tmpfs", lambda path: True)
    return path


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file system says that it is NFS (a mock); the directory that temporary files go to."""
    monkeypatch.setattr(place, "file_system_type", lambda path: "nfs4")
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_active_files_lie_in_a_tmpfs_with_room(tmp_path: Path, shm: Path):
    """Every roll waits for the disk, with the GIL held; or others can read the files."""
    found = settle(str(tmp_path / "run"))
    assert found.directory == str(tmp_path / "run" / "spool" / place.node_name())
    private = shm / f"raytrace_rl-{os.getuid()}"
    name = place.label(found.directory)
    assert name.startswith(f"run.{place.node_name()}.")
    assert found.active == str(private / name)
    assert [mode(path) for path in (found.directory, found.active, private)] == [0o700] * 3


def test_runs_do_not_share_and_processes_of_one_run_do(tmp_path: Path, shm: Path):
    """The end of one run removes the active directory of another, or each process has a directory of its own."""
    one, again, other = (settle(str(tmp_path / name)) for name in ("one", "one", "other"))
    assert one == again
    assert one.active != other.active


def test_small_tmpfs_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The 64 MiB ``/dev/shm`` of a container is filled up, and the program's own shared memory has no room."""
    monkeypatch.setattr(place, "MIN_TMPFS_FREE", 1 << 62)
    monkeypatch.setattr(place, "is_local", lambda path: True)
    found = settle(str(tmp_path / "run"))
    assert found.active == found.directory


def test_a_disk_in_the_place_of_the_tmpfs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``/dev/shm`` that is an ordinary directory counts as memory (a mock: it says that it is ext4)."""
    monkeypatch.setattr(place, "file_system_type", lambda path: "ext4")
    found = settle(str(tmp_path / "run"))
    assert found.active == found.directory


def test_network_file_system_is_never_mapped(tmp_path: Path, network: Path):
    """A run directory on NFS is mapped, and the run dies of SIGBUS when the server goes."""
    found = settle(str(tmp_path / "run"))
    assert found.active.startswith(f"{network}/raytrace_rl-{os.getuid()}/")


def test_nowhere_else_to_map(tmp_path: Path, network: Path, caplog: pytest.LogCaptureFixture):
    """Without any good place the run has no telemetry, or nobody learns that mapping is unsafe there."""
    network.rmdir()
    network.touch()
    found = settle(str(tmp_path / "run"))
    assert found == Place(found.directory, found.directory)
    (warning,) = warnings_of(caplog)
    assert str(network) in warning


def test_spool_dir_holds_the_active_files(tmp_path: Path, network: Path):
    """``spool_dir`` has no effect; its parents are not made."""
    found = settle(str(tmp_path / "run"), str(tmp_path / "local" / "disk"))
    assert Path(found.active).parent == tmp_path / "local" / "disk"
    assert mode(found.active) == 0o700


def test_spool_dir_behind_a_link(tmp_path: Path):
    """``/scratch`` that is a symbolic link, as on many clusters, is refused."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    found = settle(str(tmp_path / "run"), str(tmp_path / "scratch"))
    assert Path(found.active).parent == tmp_path / "disk"


def test_spool_dir_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A relative ``spool_dir`` gives links that lead nowhere once they are read from elsewhere."""
    monkeypatch.chdir(tmp_path)
    found = settle(str(tmp_path / "run"), "here")
    assert Path(found.active).parent == tmp_path / "here"


def test_unusable_spool_dir_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A mistake in ``spool_dir`` costs all spans."""
    (tmp_path / "file").touch()
    found = settle(str(tmp_path / "run"), str(tmp_path / "file"))
    assert found.active == found.directory
    (warning,) = warnings_of(caplog)
    assert str(tmp_path / "file") in warning


@pytest.mark.parametrize("run_dir", ["file", "file/below", "/proc/raytrace", "/dev/null"])
def test_unusable_run_dir_is_an_error(tmp_path: Path, run_dir: str):
    """A run directory that cannot be made is taken for one, and every span fails on its own."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r".+"):
        settle(str(tmp_path / run_dir))


def test_read_only_run_dir_is_an_error(tmp_path: Path):
    """A read-only file system is found out at the first span."""
    with read_only(tmp_path / "disk") as disk, pytest.raises(OSError, match=r".+"):
        settle(str(disk / "run"))


def test_a_strangers_directory_is_not_used(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch):
    """Somebody makes our directory in the world-writable ``/dev/shm`` first, and reads or swaps our files."""
    private = shm / f"raytrace_rl-{os.getuid() + 1}"
    monkeypatch.setattr(place, "is_local", lambda path: True)
    owner = os.getuid()
    for strange in ("parent", "link"):
        if strange == "parent":
            private.mkdir()
            monkeypatch.setattr(os, "getuid", lambda: owner + 1)  # a mock: we are somebody else than who made it
        else:
            monkeypatch.setattr(os, "getuid", lambda: owner)
            (shm / f"raytrace_rl-{owner}").symlink_to(tmp_path)
        found = settle(str(tmp_path / "run"))
        assert found.active == found.directory, strange


def test_a_stranger_may_own_the_parent_of_spool_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A ``spool_dir`` that root has made for everybody, such as ``/scratch``, is refused."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = os.lstat

    def lstat(path: str) -> os.stat_result:
        found = made(path)
        return os.stat_result((*found[:4], os.getuid() + 1, *found[5:])) if path == str(scratch) else found

    monkeypatch.setattr(place.os, "lstat", lstat)  # a mock of the owner
    assert Path(settle(str(tmp_path / "run"), str(scratch)).active).parent == scratch


@pytest.mark.parametrize("host", ["node-1.cluster", "../../etc", "名前", "", "x" * 300, "a b\n"])
def test_node_name_is_one_name_of_a_directory(host: str, monkeypatch: pytest.MonkeyPatch):
    """A host name leads out of the run directory, or is too long for a file name."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    name = place.node_name()
    assert os.path.basename(name) == name  # noqa: PTH119
    assert name not in {".", ".."}
    assert len(os.fsencode(name)) < 100


def test_file_system_types(tmp_path: Path):
    """The type of a file system is read off the wrong mount."""
    assert place.file_system_type("/proc/self") == "proc"
    assert place.file_system_type("/dev/shm") == "tmpfs"
    assert place.file_system_type(str(tmp_path)) != ""
    assert not place.is_local("/proc")
    assert not place._roomy_tmpfs("/proc")
    assert not place._roomy_tmpfs("/nowhere")
    if may_mount():
        with mounted(tmp_path / "with space", "size=1m"):
            assert place.file_system_type(str(tmp_path / "with space" / "below")) == "tmpfs"
            assert not place._roomy_tmpfs(str(tmp_path / "with space"))
            # a sibling whose name begins alike lies elsewhere
            assert place.file_system_type(str(tmp_path / "with space too")) == place.file_system_type(str(tmp_path))


def test_runs_of_one_name_have_names_of_their_own():
    """Catches two runs in one place, and a name of a run that is no name of a directory."""
    names = {place.label(f"{parent}/run/spool/node") for parent in ("/a", "/b")}
    assert len(names) == 2
    odd = place.label("/a/../" + "r\n n/" * 3 + "x" * 300 + "/spool/node")
    assert len(odd) < 255
    assert odd.replace(".", "").replace("-", "").replace("_", "").isalnum()


@pytest.mark.skipif(not may_mount(), reason="mounting is not permitted here")
def test_a_directory_without_room_is_not_used_whoever_chose_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Catches a spool directory of a megabyte in which no process's files fit: all of its spans are dropped."""
    small = tmp_path / "small"
    with mounted(small, "size=1m"):
        found = settle(str(tmp_path / "run"), str(small))
        assert found.active == found.directory
    assert str(small) in "".join(warnings_of(caplog))
