"""`load_open`: what of a run is open, without reading what has ended. Its cost does not grow with the run's length."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from raytrace_rl._decode import Span
from raytrace_rl.monitor import spool_files
from raytrace_rl.monitor.builder import Builder
from raytrace_rl.monitor.frames import Section, of_fault
from raytrace_rl.monitor.load import load_run, spool_processes
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool import hang, place, seal
from raytrace_rl.spool.reader import Record, UnreadableFileError, read_whole

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run

#: Segments of a process that are read: those written to within this of its last heartbeat (ns), and as many at least.
_RECENT_NS: Final = 10_000_000_000
_SEGMENTS_LEAST: Final = 2
#: Longer than the stacks of a thousand threads.
_HANG_MAX: Final = 16 << 20


class _OpenReader(spool_files.ProcessReader):
    """Reads what is open, and of what has ended only what tells that it has."""

    def _segments(self) -> list[tuple[int, str]]:
        # A span that was open at the last heartbeat, and has ended, did so in a segment that was written to since.
        every = sorted(self.files.segments.items())
        latest = max((header.heartbeat_ns for header in self.headers), default=0)
        kept: list[tuple[int, str]] = []
        for number, path in reversed(every):
            try:
                beat_ns = seal.read_header(path).heartbeat_ns
            except (OSError, ValueError):
                beat_ns = latest
            latest = max(latest, beat_ns)
            if len(kept) >= _SEGMENTS_LEAST and beat_ns < latest - _RECENT_NS:
                break
            kept.append((number, path))
        return kept[::-1]

    def _record(self, record: Record) -> bool:
        kind, payload = record.kind, record.payload
        if kind == fmt.Kind.SPAN and not _may_matter(payload, self.open):
            return True
        if kind in {fmt.Kind.METRICS, fmt.Kind.LOGS}:
            return False
        return super()._record(record)


def _may_matter(payload: bytes, opened: dict[bytes, Span]) -> bool:
    """Whether an ended span is one of those noted as open, or was cut short. Its ids are read without the rest."""
    if b"rl.truncated" in payload:
        return True
    at = 18  # behind the trace id: the parent and the flags, then the span id
    if payload[at : at + 2] == b'"\x08':
        at += 10
    if payload[at : at + 2] == b"\x85\x01":
        at += 6
    if payload[at : at + 2] != b"\x12\x08":
        return True
    return payload[2:18] + payload[at + 2 : at + 10] in opened


def load_open(path: str | os.PathLike[str]) -> Run:
    """Reads the open spans of a run, those that the death or the end of their process cut short, and their stacks.

    Args:
        path: As `load_run` takes it. Of an OTLP file everything is read.

    Raises:
        UnreadableRunError: Nothing is there to read.
    """
    if not Path(path).is_dir():
        return load_run(path)
    builder = Builder(str(path))
    for files in spool_processes(Path(path)):
        _OpenReader(builder, files).read()
    return builder.finish()


def hung_threads(path: str | os.PathLike[str]) -> dict[str, list[Section]]:
    """Returns the stacks of processes whose heartbeat did not come (`raytrace_rl.spool.hang`), by lane."""
    stacks: dict[str, list[Section]] = {}
    if not Path(path).is_dir():
        return stacks
    for files in spool_processes(Path(path)):
        try:
            data = read_whole(files.live.removesuffix(".live") + hang.SUFFIX, _HANG_MAX)
        except UnreadableFileError:
            continue
        if data:
            stacks[f"{files.node}/{files.stem}"] = of_fault(data.decode("utf-8", "replace"))
    return stacks


def stopped_lanes(run: Run) -> set[str]:
    """Returns the lanes whose processes are stopped (SIGSTOP, a debugger), of those that live on this host."""
    here = place.node_name()
    found = set()
    for process in run.processes:
        if process.state != "alive" or process.node != here:
            continue
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{process.pid}/stat").read_bytes()
            if status.rpartition(b")")[2].split()[0] in {b"T", b"t"}:
                found.add(process.key)
    return found
