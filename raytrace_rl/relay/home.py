"""The run directory as nodes that do not share it see it: files that are appended to, from other nodes, by offset.

What is written is what stands on the node, byte for byte, so that every reader finds it as if the directory were
shared. Writing by offset makes it harmless to write twice: how much is there is the only cursor.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from raytrace_rl.spool.liveness import Liveness

#: Names of spool files, and of nodes: nothing that comes over the network reaches another directory.
_NAME: Final = re.compile(r"\d{1,10}-\d{1,20}(\.(open\.)?\d{1,9}\.rts|\.open)")
_STEM: Final = re.compile(r"\d{1,10}-\d{1,20}")
_NODE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Piece(NamedTuple):
    """Bytes of a file.

    Attributes:
        name: Of the file, within its node's directory.
        offset: Where they stand.
        data: The bytes, compressed by zlib.
        whole: The file ends behind them.
    """

    name: str
    offset: int
    data: bytes
    whole: bool = False


def piece(name: str, offset: int, data: bytes, *, whole: bool = False) -> Piece:
    """Returns a `Piece`, compressed."""
    return Piece(name, offset, zlib.compress(data, 1), whole)


class Home(Protocol):
    """Where the spools of other nodes go. Its methods raise when it cannot be reached, or written."""

    def sizes(self, node: str) -> dict[str, int]:
        """Returns the sizes of the files that are there of a node."""
        ...

    def write(self, node: str, pieces: list[Piece]) -> None:
        """Writes pieces of files."""
        ...

    def living(self, node: str, stems: list[str]) -> None:
        """Says which of a node's processes may still write; they are all there are."""
        ...

    def remove(self, node: str, names: list[str]) -> None:
        """Removes files that are no longer on the node either."""
        ...


class HomeFiles:
    """A run directory of this machine.

    Args:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._spool = Path(run_dir) / "spool"
        #: Held for processes of other nodes: where the readers' host cannot tell another's boot from its own (two
        #: containers on one machine), they look alive for as long as they are said to be.
        self._living: dict[str, Liveness] = {}

    def sizes(self, node: str) -> dict[str, int]:
        """Returns the sizes of the files that are there of a node."""
        try:
            return {path.name: path.stat().st_size for path in self._directory(node).iterdir() if path.is_file()}
        except FileNotFoundError:
            return {}

    def write(self, node: str, pieces: list[Piece]) -> None:
        """Writes pieces of files.

        Raises:
            OSError: There is no room, say.
            ValueError: A name is none of a spool file's.
        """
        directory = self._directory(node)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, offset, data, whole in pieces:
            fd = os.open(self._file(directory, name), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                found = zlib.decompress(data)
                written = os.pwrite(fd, found, offset)
                if written < len(found):
                    raise OSError(f"{name}: {written} of {len(found)} bytes written")
                if whole:
                    os.ftruncate(fd, offset + len(found))
            finally:
                os.close(fd)

    def living(self, node: str, stems: list[str]) -> None:
        """Says which of a node's processes may still write; they are all there are."""
        directory = self._directory(node)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        prefix = f"{node}/"
        current = {prefix + stem for stem in stems if _STEM.fullmatch(stem)}
        for key in [key for key in self._living if key.startswith(prefix) and key not in current]:
            self._living.pop(key).release()
        for key in current - self._living.keys():
            self._living[key] = Liveness(f"{self._spool / key}.live")
        for path in directory.glob("*.live"):
            if prefix + path.stem not in current:
                path.unlink(missing_ok=True)  # left by one that was here before

    def lose(self, node: str) -> None:
        """Says that a node is lost: nothing tells any more whether its processes live."""
        for key in [key for key in self._living if key.startswith(f"{node}/")]:
            self._living.pop(key).forget()

    @property
    def has_living(self) -> bool:
        """Whether a process elsewhere is said to live."""
        return bool(self._living)

    def remove(self, node: str, names: list[str]) -> None:
        """Removes files that are no longer on the node either."""
        directory = self._directory(node)
        for name in names:
            self._file(directory, name).unlink(missing_ok=True)

    def _directory(self, node: str) -> Path:
        if not _NODE.fullmatch(node):
            raise ValueError(f"{node!r} names no node")
        return self._spool / node

    def _file(self, directory: Path, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} names no spool file")
        return directory / name
