"""The run directory as nodes that do not share it see it: files that are appended to, from other nodes, by offset.

What is written is what stands on the node, byte for byte, so that every reader finds it as if the directory were
shared. Writing by offset makes it harmless to write twice: how much is there is the only cursor. Beside the spools come
the notes of the node's relay (its cursors, counts and failures), so that a report at home tells of them too.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay.home_bound import HomeBound
from raytrace_rl.spool.liveness import Liveness

#: Names of spool files, of a relay's notes, and of nodes: nothing that comes over the network reaches elsewhere.
_NAME: Final = re.compile(r"\d{1,10}-\d{1,20}(\.(open\.)?\d{1,9}\.rts|\.open|\.hang)")
_SEGMENT: Final = re.compile(r"(?P<stem>\d{1,10}-\d{1,20})\.(?P<number>\d{1,9})\.rts")
NOTE: Final = re.compile(r"relay/(?:status|refusal|(?:traces|metrics|logs)-[0-9a-f]{8})\.json")
_STEM: Final = re.compile(r"\d{1,10}-\d{1,20}")
_NODE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
#: The size of a segment that home has dropped.
DROPPED: Final = -1


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

    def sizes(self, node: str, bound_bytes: int | None) -> dict[str, int]:
        """Returns the sizes of the files that are there of a node, `DROPPED` for segments that were dropped.

        Args:
            node: Its name.
            bound_bytes: What home keeps of it, at most; None for what a node may take by default in such a place.
        """
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
        total_bytes: What all other nodes may take together; None for half of what its file system has for them.
    """

    def __init__(self, run_dir: str | os.PathLike[str], total_bytes: int | None = None) -> None:
        self._spool = Path(run_dir) / "spool"
        self._bound = HomeBound(self._spool, self._is_over, total_bytes)
        #: Nodes that have said which of their processes live.
        self._heard: set[str] = set()
        #: Held for processes of other nodes: where the readers' host cannot tell another's boot from its own (two
        #: containers on one machine), they look alive for as long as they are said to be.
        self._living: dict[str, Liveness] = {}

    def sizes(self, node: str, bound_bytes: int | None = None) -> dict[str, int]:
        """Begins with a node; see `Home`.

        Raises:
            OSError: Its directory cannot be made, or read.
        """
        directory = self._directory(node)
        with self._counted(node):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._bound.begin(node, bound_bytes)
            found = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
        return found | dict.fromkeys(self._bound.note(node).dropped(), DROPPED)

    def write(self, node: str, pieces: list[Piece]) -> None:
        """Writes pieces of files, but for those of segments that were dropped; then keeps the bounds.

        Raises:
            OSError: There is no room, say.
            ValueError: A name is none of a spool file's.
        """
        directory = self._directory(node)
        paths = [self._file(directory, one.name) for one in pieces]
        if not self._bound.has(node):
            self.sizes(node)
        note = self._bound.note(node)
        added = 0
        with self._counted(node):
            for path, (name, offset, data, whole) in zip(paths, pieces, strict=True):
                segment = _SEGMENT.fullmatch(name)
                if NOTE.fullmatch(name):
                    _replace(path, zlib.decompress(data))
                elif segment is None:
                    _write(path, offset, zlib.decompress(data), whole=whole)
                elif not note.is_dropped(segment["stem"], int(segment["number"])):
                    added += _write(path, offset, zlib.decompress(data), whole=whole)
            self._bound.added(node, added)

    @contextlib.contextmanager
    def _counted(self, node: str) -> Iterator[None]:
        """Counts what there is no room for. The node keeps it, and tries again."""
        note = self._bound.note(node)
        try:
            yield
        except OSError as error:
            if is_interrupt(error):
                raise
            note.refuse(f"{error.strerror or error}")
            _state.warn_once(
                f"home:{self._spool}",
                "What %s brings to %s cannot be written (%s): it stays there until it can.",
                node,
                self._spool,
                error,
            )
            raise
        note.accept()

    def _is_over(self, node: str, stem: str) -> bool:
        return node in self._heard and f"{node}/{stem}" not in self._living

    def living(self, node: str, stems: list[str]) -> None:
        """Says which of a node's processes may still write; they are all there are."""
        directory = self._directory(node)
        prefix = f"{node}/"
        current = {prefix + stem for stem in stems if _STEM.fullmatch(stem)}
        with self._counted(node):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for key in [key for key in self._living if key.startswith(prefix) and key not in current]:
                self._living.pop(key).release()
            for key in current - self._living.keys():
                self._living[key] = Liveness(f"{self._spool / key}.live")
            self._heard.add(node)
        for path in directory.glob("*.live"):
            if prefix + path.stem not in current:
                path.unlink(missing_ok=True)  # left by one that was here before

    def lose(self, node: str) -> None:
        """Says that a node is lost: nothing tells any more whether its processes live, and a free lock proves no death
        in a copy (`spool.liveness.COPY`).
        """
        self._heard.discard(node)
        for key in [key for key in self._living if key.startswith(f"{node}/")]:
            self._living.pop(key).abandon()

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
        if not _NAME.fullmatch(name) and not NOTE.fullmatch(name):
            raise ValueError(f"{name!r} names no spool file")
        return directory / name


def _write(path: Path, offset: int, data: bytes, *, whole: bool) -> int:
    """Writes into a file; returns how many bytes."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        written = 0
        while written < len(data):  # a disk that is almost full takes a part, and says why when asked for the rest
            written += os.pwrite(fd, memoryview(data)[written:], offset + written)
        if whole:
            os.ftruncate(fd, offset + len(data))
    finally:
        os.close(fd)
    return written


def _replace(path: Path, data: bytes) -> None:
    """Writes a note whole: a reader finds the one before it, or this one."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
