"""``raytrace-rl push``: its options, and what it says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _env_otlp
from raytrace_rl.relay.push import Pushed, nodes, push

if TYPE_CHECKING:
    from collections.abc import Iterable

_TIMEOUT_S: Final = 60.0
_UNITS: Final = {"traces": "spans", "metrics": "metric messages", "logs": "log messages"}


class NothingToPushError(Exception):
    """The message says why."""


def add_options(command: argparse.ArgumentParser, duration: Any) -> None:
    """Adds the options of the subcommand; ``duration`` reads ``30s``, ``5m`` or ``1h``."""
    command.add_argument("--again", action="store_true", help="send everything anew, also what was acknowledged")
    command.add_argument(
        "--timeout",
        type=duration,
        default=_TIMEOUT_S,
        metavar="TIME",
        help="give up after 30s, 5m or 1h; by default 60s",
    )


def run(options: argparse.Namespace) -> bool:
    """Sends what the run left behind, and says what became of it; returns whether all of it is acknowledged.

    Raises:
        NothingToPushError: There is no spool, or nothing to send it with.
    """
    found = nodes(options.RUN)
    if not found:
        raise NothingToPushError(f"{options.RUN}: holds no spool (is it a run directory?)")
    settings = _env_otlp.settings()
    deadline = monotonic() + options.timeout
    complete = True
    try:
        for node_dir in found:
            result = push(node_dir, settings, deadline=deadline, again=options.again)
            complete = complete and result.complete
            _say(result)
    except ImportError as error:
        raise NothingToPushError(f"{error}: pip install 'raytrace-rl[otlp]'") from None
    urls = {endpoint.url for endpoint in settings.endpoints.values() if endpoint is not None}
    print(f"{Path(options.RUN)} -> {', '.join(sorted(urls)) or 'nowhere'}: {'complete' if complete else 'incomplete'}")
    return complete


def _say(result: Pushed) -> None:
    if result.busy:
        print(f"{result.node}: a relay is at work there")
        return
    if result.unusable:
        print(f"{result.node}: cannot be written, and what is sent has to be noted there: push a copy that can")
        return
    parts = list(_counts(result.sent, "sent")) or ["nothing to send"]
    parts += [*_counts(result.rejected, "rejected by the receiver"), *_counts(result.dropped, "refused for good")]
    print(f"{result.node}: {', '.join(parts)}")
    for signal, failure in result.failures.items():
        print(f"raytrace-rl: {result.node}: {signal}: {failure}", file=sys.stderr)
    if result.writers:
        print(f"raytrace-rl: {result.node}: processes still write there", file=sys.stderr)


def _counts(counts: dict[str, int], what: str) -> Iterable[str]:
    return (f"{n} {_UNITS[signal]} {what}" for signal, n in counts.items() if n)
