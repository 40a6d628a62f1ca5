"""For the tests of code that uses the library: assertions about its wiring."""

from __future__ import annotations

import os
from collections.abc import Iterable

from raytrace_rl.lint import lint


def assert_wired(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Asserts that `raytrace_rl.lint` finds no mistake; what is for information only does not fail.

    Args:
        paths: Files and directories of source code. It is read, not imported.

    Raises:
        AssertionError: There are findings; the message has one a line. Or ``paths`` hold no Python at all, and the
            assertion would hold of nothing.
        UnreadablePathError: A path does not exist or may not be read.
    """
    report = lint(paths)
    if not report.files:
        raise AssertionError("no Python file at or below the paths: nothing was checked")
    if report.errors:
        raise AssertionError("\n".join(["wired or named wrongly:", *map(str, report.errors)]))
