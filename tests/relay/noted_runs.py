"""Runs as relays leave them: notes made by the relay's own code, without a relay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytrace_rl.relay import status
from raytrace_rl.relay.cursors import Cursors
from raytrace_rl.relay.home_note import HomeNote
from raytrace_rl.relay.standing import Standing
from tests.spooling import Spool, ended, span

URL = "http://collector:4317"


def noted_run(run_dir: Path, **tally: Any) -> Spool:
    """A run of one process that closed, with ten spans; all of it is sent, and counted as ``tally`` says."""
    spool = Spool(run_dir)
    spool.segment(1, ended(*[span(n, 0, 1) for n in range(1, 11)]), sealed=True, span_count=10)
    note(spool, **tally)
    return spool


def note(spool: Spool, signal: str = "traces", *, url: str = URL, finished: bool = True, **tally: Any) -> None:
    """Notes of a signal what a relay would: counts as they are given, and whether all is acknowledged."""
    cursors = Cursors(spool.node_dir, signal, url)
    cursors.tally.begin()
    if finished:
        cursors.finish(spool.stem(1))
    for name, value in tally.items():
        setattr(cursors.tally.counts if hasattr(cursors.tally.counts, name) else cursors.tally, name, value)
    assert cursors.save()


def note_all(spool: Spool, **home: Any) -> None:
    """Everything else that may be noted of a node: what was freed, carried, received, and what home did with it."""
    standing = Standing()
    standing.succeeded()
    received = {"requests": 2, "rejected": 0, "dropped_spans": 0}
    status.Status(spool.node_dir).write(
        {
            status.FREED: status.Section({"spans": 5, "bytes": 100}),
            status.CARRIED: status.Section(standing.counts(), standing.now()),
            status.RECEIVER: status.Section(received),
        }
    )
    found = HomeNote(spool.node_dir)
    for name, value in home.items():
        setattr(found, name, value)
    assert found.save()
