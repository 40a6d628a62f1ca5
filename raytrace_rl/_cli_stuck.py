"""``raytrace-rl stuck``: its options, its output, and following a live run."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from raytrace_rl.monitor import open_spans
from raytrace_rl.monitor.stuck import stuck
from raytrace_rl.monitor.text_stuck import FRAMES, render

#: Seconds between two looks at a live run, and at least as long as one takes.
_EVERY_S: Final = 1.0


def add_options(command: argparse.ArgumentParser, duration: Any) -> None:
    """Adds the options of the subcommand; ``duration`` reads ``30s``, ``5m`` or ``1h``."""
    command.add_argument("--json", action="store_true", help="print what is open as JSON (schema in docs/stuck.md)")
    command.add_argument(
        "--after",
        type=duration,
        default=0.0,
        metavar="TIME",
        help="of a live run, only what has stood for at least 30s, 5m or 1h",
    )
    command.add_argument("--full", action="store_true", help="whole stacks, library code included")
    command.add_argument("--follow", action="store_true", help="look again and again, until the run is over")


def look(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what is open in the run now."""
    run = open_spans.load_open(options.RUN)
    return stuck(
        run,
        after_s=options.after,
        hung=open_spans.hung_threads(options.RUN),
        stopped=open_spans.stopped_lanes(run),
    )


def run(options: argparse.Namespace) -> bool:
    """Prints what is open; returns whether anything is."""
    found = _follow(options) if options.follow else look(options)
    if not options.follow:
        _print(found, options)
    return bool(found["stands"] or found["late"])


def _text(found: dict[str, Any], options: argparse.Namespace) -> str:
    if options.json:
        return json.dumps(found, indent=None if options.follow else 2) + "\n"
    return render(found, frames=None if options.full else FRAMES)


def _print(found: dict[str, Any], options: argparse.Namespace) -> None:
    print(_text(found, options), end="", flush=True)


def _follow(options: argparse.Namespace) -> dict[str, Any]:
    """Shows what is open until the run is over; returns what was open last."""
    if options.json or not sys.stdout.isatty():
        return _each(options, _Lines(options))
    with _screen() as draw:
        found = _each(options, lambda found: draw(_text(found, options)))
    _print(found, options)  # whole, now that the display, which ends with the screen, is gone
    return found


def _each(options: argparse.Namespace, show: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    while True:
        started = time.monotonic()
        found = look(options)
        show(found)
        if found["run"]["state"] == "over":
            return found
        time.sleep(max(_EVERY_S, time.monotonic() - started))


class _Lines:
    """Prints, in a pipe or a file, a block at each change of what is open; ages alone are none."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._shown: Any = None

    def __call__(self, found: dict[str, Any]) -> None:
        essence = _essence(found)
        if essence == self._shown:
            return
        if self._shown is not None and not self._options.json:
            print("\n" + "-" * 72)
        _print(found, self._options)
        self._shown = essence


def _essence(found: dict[str, Any]) -> Any:
    spans = [(span["span_id"], stand["stack_ns"]) for stand in found["stands"] for span in stand["spans"]]
    return found["run"]["state"], spans, [process["lane"] for process in found["late"]]


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[str], object]]:
    """Yields what draws on the terminal in place: rich's display where it is installed, else a cleared screen."""
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        yield lambda text: print(f"\033[H\033[J{text}", end="", flush=True)
        return
    with Live(auto_refresh=False, transient=True, vertical_overflow="crop") as live:
        yield lambda text: live.update(Text(text), refresh=True)
