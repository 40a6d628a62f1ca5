"""What the relays of a run have noted: sent, unsent, refused, dropped at home; and the one or two lines of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor.model import Process
from raytrace_rl.monitor.text_relay import relay_lines
from raytrace_rl.relay import home_note, refusal, status
from raytrace_rl.relay.cursors import DIRECTORY, Cursors, Noted, noted
from raytrace_rl.relay.lock import NodeLock
from raytrace_rl.relay.requests import SIGNALS
from raytrace_rl.relay.tail import Tail
from raytrace_rl.relay.writers import Writers

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run

#: What is read of a spool at a time to count what is unsent.
_BYTES: Final = 4 << 20
_RECORDS: Final = 8192
#: Ends of the names of what may not be there.
_MAY_LACK: Final = ("_ns", "failure", "error")
_CARRIED: Final = ("bytes", "failures", "behind_bytes")
_RECEIVED: Final = ("requests", "rejected", "invalid", "too_large", "unauthorised", "no_room", "dropped_spans")


def relay_counters(path: str) -> dict[str, Any]:
    """Returns the ``relay`` section of a report (docs/report.md).

    Args:
        path: As `load_run` takes it. Of anything but a directory there is nothing to tell.
    """
    nodes = [_node(node_dir) for node_dir in _node_dirs(Path(path))]
    current = [one for node in nodes for one in node["signals"] if one["current"]]
    section = {
        "nodes": nodes,
        "sent": sum(one["sent"] for one in current),
        "unsent": sum(one["unsent"] for one in current),
        "dropped": sum(one["dropped"] for one in current),
        "rejected": sum(one["rejected"] for one in current),
        "home_dropped": sum(node["home"]["spans"] for node in nodes if node["home"] is not None),
    }
    lines, wrong = relay_lines(section)
    return {**section, "wrong": wrong, "summary": lines}


def add_home_losses(run: Run) -> None:
    """Adds what home has dropped of other nodes' processes to what these have counted as lost themselves."""
    known = {process.key: process for process in run.processes}
    for node_dir in _node_dirs(Path(run.path)):
        note = home_note.read(node_dir)
        for stem, dropped in note.processes.items() if note is not None else ():
            key = f"{node_dir.absolute().name}/{stem}"
            process = known.get(key)
            if process is None:  # nothing else is left of it
                pid, _, start_ns = stem.partition("-")
                process = Process(key, node=key.partition("/")[0], pid=int(pid), start_ns=int(start_ns))
                run.processes.append(process)
            process.drops["spans"] = process.drops.get("spans", 0) + dropped.spans
    run.processes.sort(key=lambda process: (process.start_ns, process.key))


def _node_dirs(path: Path) -> list[Path]:
    """Returns the directories of nodes under a run directory, its spool, or one node's directory, that have notes."""
    for pattern in ("spool/*", "*", "."):
        found = sorted(one.parent for one in path.glob(f"{pattern}/{DIRECTORY}") if one.is_dir())
        if found:
            return found
    return []


def _node(node_dir: Path) -> dict[str, Any]:
    told = status.read(node_dir)
    home = home_note.read(node_dir)
    freed = told.get(status.FREED, {})
    return {
        "node": node_dir.absolute().name,
        "copy": home is not None,
        "running": Writers(node_dir).any() if home is not None else NodeLock(node_dir).is_held(),
        "failure": refusal.read(node_dir).get("failure"),
        "signals": [_signal(node_dir, one) for one in noted(node_dir)],
        "freed": {key: _number(freed.get(key)) for key in ("spans", "bytes")},
        "carried": _carried(told.get(status.CARRIED)),
        "home": _home(home) if home is not None else None,
        "receiver": _counts(told.get(status.RECEIVER), _RECEIVED),
    }


def _signal(node_dir: Path, one: Noted) -> dict[str, Any]:
    unsent, unsent_bytes = _unsent(node_dir, one) if one.current else (0, 0)
    return {
        "signal": one.signal,
        "destination": one.destination,
        "current": one.current,
        **{key: value or (None if key.endswith(_MAY_LACK) else value) for key, value in one.tally.items()},
        "unsent": unsent,
        "unsent_bytes": unsent_bytes,
    }


def _unsent(node_dir: Path, one: Noted) -> tuple[int, int]:
    """Counts what a relay would send now, as a relay would find it; records and bytes."""
    tail = Tail(node_dir, SIGNALS[one.signal].kinds, Cursors(node_dir, one.signal, one.destination))
    records = size = 0
    full = True
    while full:
        batch = tail.read(_BYTES, _RECORDS)
        payloads = [found for portion in batch.portions for found in portion.payloads.values()]
        records += sum(map(len, payloads))
        size += sum(len(payload) for found in payloads for payload in found)
        full = batch.full
        tail.acknowledge(batch)  # in memory alone: nothing is saved
    tail.close()
    return records, size


def _carried(found: dict[str, Any] | None) -> dict[str, Any] | None:
    counts = _counts(found, _CARRIED)
    if counts is None or found is None:
        return None
    texts = {key: str(found.get(key) or "") or None for key in ("failure", "last_error")}
    times = {key: _number(found.get(key)) or None for key in ("acknowledged_ns", "last_error_ns")}
    return {**counts, **times, **texts}


def _home(note: home_note.HomeNote) -> dict[str, Any]:
    return {
        "segments": note.segments,
        "spans": note.spans,
        "bytes": note.bytes,
        "refused": note.refused,
        "failure": note.failure or None,
        "last_error": note.last_error or None,
        "last_error_ns": note.last_error_ns or None,
    }


def _counts(found: dict[str, Any] | None, names: tuple[str, ...]) -> dict[str, int] | None:
    return None if found is None else {name: _number(found.get(name)) for name in names}


def _number(found: object) -> int:
    return found if type(found) is int else 0
