"""What a subcommand says of long work while someone watches: one line on stderr, gone when the work is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_WIDTH: Final = 30


@contextmanager
def watched(what: str) -> Iterator[Callable[[int, int], None]]:
    """Says what is being done; yields what draws how much of how much is done. Not on a terminal it is silent."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda *_: None
        return

    def say(line: str) -> None:
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def draw(done: int, whole: int) -> None:
        part = min(1.0, done / whole) if whole else 1.0
        say(f"{what} [{'#' * int(_WIDTH * part):<{_WIDTH}}] {part:.0%}")

    say(f"{what} ...")
    try:
        yield draw
    finally:
        say("")
