"""Which files are checked, which are read besides to understand them, and what module each is."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

#: Directories without code of the user's own; a hidden one is skipped as well.
_SKIPPED: Final = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"})
#: How many directories above its package a module may be imported by (``examples.demo.driver`` of package ``demo``).
_NAMESPACE_LEVELS: Final = 3


class UnreadablePathError(Exception):
    """A path that was given cannot be read; the message says why, in one line."""


def find(paths: Iterable[str | os.PathLike[str]]) -> dict[Path, str]:
    """Returns the Python files at and below ``paths``, with the name that findings call them by.

    Args:
        paths: Files (of any ending) and directories.

    Raises:
        UnreadablePathError: A path does not exist, or may not be read.
    """
    found: dict[Path, str] = {}
    for given in paths:
        path = Path(given)
        try:
            if path.is_dir():
                for file in _below(path):
                    found.setdefault(file.absolute(), str(file))
            else:
                read(path, 0)
                found.setdefault(path.absolute(), str(path))
        except OSError as error:
            raise UnreadablePathError(f"{given}: {error.strerror or error}") from error
    return found


def read(path: Path, size: int = -1) -> bytes:
    """Returns the bytes of a file, or the first ``size`` of them.

    Raises:
        OSError: It cannot be read, or is a pipe, a device or a socket, which may never give anything or never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe waits for a writer
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "No regular file")
        return file.read(size)


def surroundings(files: Iterable[Path]) -> list[Path]:
    """Returns the other files of the packages that ``files`` belong to: a call's other end may lie there."""
    roots = {root for file in files if (root := package_root(file.parent)) is not None}
    return [file.absolute() for root in sorted(roots) for file in _below(root)]


def package_root(directory: Path) -> Path | None:
    """Returns the outermost package that ``directory`` is in, None if it is in none.

    A directory without ``__init__.py`` inside a package counts as part of it.
    """
    root = None
    if not _is_package(directory) and _is_package(directory.parent):
        directory = directory.parent
    while _is_package(directory) and directory != directory.parent:
        root, directory = directory, directory.parent
    return root


def _is_package(directory: Path) -> bool:
    return (directory / "__init__.py").is_file()


def module_names(file: Path) -> list[str]:
    """Returns the dotted names that a file can be imported by: that from its package first, longer ones after it."""
    root = package_root(file.parent)
    base = root.parent if root is not None else file.parent
    parts = list(file.relative_to(base).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    names = [".".join(parts)]
    for parent in base.parts[: -_NAMESPACE_LEVELS - 1 : -1]:
        if not parent.isidentifier():
            break
        parts.insert(0, parent)
        names.append(".".join(parts))
    if not _is_package(file.parent) and file.stem not in names:
        names.append(file.stem)  # as a script's neighbours import it
    return names


def _below(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for parent, directories, names in os.walk(directory, onerror=refuse):
        directories[:] = sorted(
            name
            for name in directories
            if not name.startswith(".") and name not in _SKIPPED and not Path(parent, name, "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(parent, name)
