"""Reads a run for its report: as rows, or, where it is large and NumPy is there, as columns. The report is the same."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Union

from raytrace_rl.monitor import report as of_rows
from raytrace_rl.monitor.load import load_run, spool_bytes
from raytrace_rl.monitor.model import Run
from raytrace_rl.monitor.text import render

if TYPE_CHECKING:
    from raytrace_rl.monitor.bulk.columns import Columns
    from raytrace_rl.monitor.diff import Side
    from raytrace_rl.monitor.windows import Windows

#: A spool of so many bytes (about 20,000 spans) is read as columns: below, to import NumPy takes as long as to read it.
LARGE_BYTES: Final = 4 << 20
#: From so many bytes on it matters that NumPy is missing: a minute, and 1 GiB of memory.
_SLOW_BYTES: Final = 256 << 20

#: A list of so many entries is a long one.
_LONG: Final = 1001

ReadRun = Union[Run, "Columns"]


def read(
    path: str | os.PathLike[str],
    *,
    align: bool = False,
    windows: Windows | None = None,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ReadRun:
    """Reads a run.

    Args:
        path: As `raytrace_rl.monitor.load_run` takes it.
        align: As `load_run` takes it.
        windows: Which part goodput is asked about; None for all.
        progress: Called with how many bytes of a large run have been read, and how many there are.
        say: Called with what a person should know.

    Raises:
        UnreadableRunError: Nothing is there to read.
    """
    size = spool_bytes(Path(path))
    if size >= LARGE_BYTES and importlib.util.find_spec("numpy") is not None:
        from raytrace_rl.monitor.bulk.lanes import NotForColumnsError
        from raytrace_rl.monitor.bulk.reading import read as read_columns

        try:
            columns = read_columns(path, progress, align=align)
            columns.run.windows = windows
            return columns
        except NotForColumnsError as error:
            say(f"this run is read span by span, which takes longer: it has {error}")
    elif size >= _SLOW_BYTES:
        say(f"{size >> 20} MiB of spans: pip install 'raytrace-rl[report]' has them read ten times as fast")
    run = load_run(path, align=align)
    run.windows = windows
    return run


def report(run: ReadRun) -> dict[str, Any]:
    """Returns the report of a run: plain JSON values, described in docs/report.md."""
    if isinstance(run, Run):
        return of_rows.report(run)
    from raytrace_rl.monitor.bulk import report as of_columns

    return of_columns.report(run)


def json_text(run: ReadRun) -> str:
    """Returns the report of a run as JSON, of which a long list has each entry on one line."""
    lists: list[list[Any]] = []
    mark = f"list {os.urandom(16).hex()} "  # no text of the run can look like it

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        if isinstance(value, list) and len(value) >= _LONG:
            lists.append(value)
            return f"{mark}{len(lists) - 1}"
        return value

    outline = json.dumps(marked(report(run)), indent=2).split(f'"{mark}')
    pieces = [outline[0]]
    for following in outline[1:]:
        number, _, rest = following.partition('"')
        entries = ",\n      ".join(map(json.dumps, lists[int(number)]))  # indented, it would take five times as long
        pieces += ["[\n      ", entries, "\n    ]", rest]
    return "".join(pieces)


def text(run: ReadRun) -> str:
    """Returns the whole report for a terminal or a pipe."""
    return render(report(run))


def side(run: ReadRun) -> Side:
    """Returns what `diff` compares of a run."""
    if isinstance(run, Run):
        from raytrace_rl.monitor import diff

        return diff.side(run)
    from raytrace_rl.monitor.bulk import sides

    return sides.side(run)


def html(run: ReadRun) -> str:
    """Returns the report as a page."""
    if isinstance(run, Run):
        from raytrace_rl.monitor import html_report

        return html_report.html(run)
    from raytrace_rl.monitor.bulk import report as of_columns

    return of_columns.html(run)
