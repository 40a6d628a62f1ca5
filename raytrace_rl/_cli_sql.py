"""``raytrace-rl sql`` and ``export --format parquet``: their options and output, on the Parquet store."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl._cli_progress import watched

if TYPE_CHECKING:
    from raytrace_rl.monitor.store import Store

#: Rows that a table on the terminal is aligned by; those after it keep its widths.
_ALIGNED: Final = 1000
_WIDEST: Final = 60


class QueryError(Exception):
    """DuckDB does not take the query; the message is its first line."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of ``sql``."""
    command.add_argument("QUERY", help="of the tables spans, metrics, logs, stacks, processes, runs (docs/sql.md)")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    form.add_argument("--json", action="store_true", help="print a JSON object a line")


@contextmanager
def opened(path: str) -> Iterator[Store]:
    """Yields the store of a run, and says how far it is while someone watches."""
    from raytrace_rl.monitor.store import Store

    with watched(f"reading {path}") as progress:
        store = Store(path, progress)
    try:
        yield store
    finally:
        store.close()


def run(options: argparse.Namespace) -> None:
    """Runs a query and prints what it answers.

    Raises:
        QueryError: It is none.
    """
    with opened(options.RUN) as store:
        import duckdb

        try:
            cursor = store.connection.execute(options.QUERY)
            if cursor is None:  # DuckDB's answer to nothing but blanks and comments
                raise QueryError("the query is empty")
            names = [column[0] for column in cursor.description or ()]
            _print(names, lambda: cursor.fetchmany(_ALIGNED), options)
        except duckdb.Error as error:
            raise QueryError(next(iter(str(error).splitlines()), "query failed")) from None


def _print(names: Sequence[str], more: Callable[[], list[tuple[Any, ...]]], options: argparse.Namespace) -> None:
    if options.json:
        from raytrace_rl.monitor.store import rows_as_json

        while rows := more():
            print(rows_as_json(list(names), rows), end="")
        return
    if options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        while rows := more():
            writer.writerows(rows)
        return
    _print_table(names, more)


def _print_table(names: Sequence[str], more: Callable[[], list[tuple[Any, ...]]]) -> None:
    rows = more()
    shown = [[_cell(value) for value in row] for row in rows]
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(names, *shown, strict=True)]
    right = [
        all(isinstance(row[at], (int, float, type(None))) for row in rows) and rows != [] for at in range(len(names))
    ]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, right, strict=True)
        ).rstrip()

    print(line(names))
    print("  ".join("-" * width for width in widths))
    while rows:
        for row in rows:
            print(line([_cell(value) for value in row]))
        rows = more()


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else "?" for char in text)


def export(path: str, out: str) -> int:
    """Writes a run's tables into a directory; returns how many spans there are."""
    with opened(path) as store:
        return store.export(Path(out))
