"""Finds the spool files of each process in a run directory, and reads its table of open spans."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from raytrace_rl.spool import format as fmt
from raytrace_rl.spool import reader

_NAME: Final = re.compile(r"(\d{1,10}-\d{1,20})(?:\.(open))?(?:\.(\d{1,9})\.rts|\.(live))?")


@dataclass(slots=True)
class ProcessFiles:
    """What one process left in the spool; any part of it may be missing.

    Attributes:
        node: Name of the node's directory.
        stem: ``<pid>-<start ns>``, which names the process.
        live: Path of the liveness file, whether or not it exists.
        slots: Path of the table of open spans, None if there is none.
        segments: Paths of the segments by number.
        journals: Paths of the journals of open spans by number.
    """

    node: str
    stem: str
    live: str
    slots: str | None = None
    segments: dict[int, str] = field(default_factory=dict)
    journals: dict[int, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Process id, from the name: a damaged header does not hide it."""
        return int(self.stem.partition("-")[0])

    @property
    def start_ns(self) -> int:
        """Wall clock at which the writer started, ns since the epoch, from the name."""
        return int(self.stem.partition("-")[2])


def processes(spool_dir: str | os.PathLike[str]) -> Iterator[ProcessFiles]:
    """Yields the processes found in the node directories under ``spool_dir``, in a fixed order.

    Raises:
        OSError: The directory itself cannot be listed.
    """
    for node in sorted(os.scandir(spool_dir), key=lambda entry: entry.name):
        try:
            if node.is_dir():
                yield from node_processes(node.path)
        except OSError:
            continue  # vanished meanwhile, or closed to us


def node_processes(node_dir: str | os.PathLike[str]) -> list[ProcessFiles]:
    """Returns the processes whose files lie in ``node_dir``, in the order in which they started.

    Raises:
        OSError: The directory cannot be listed.
    """
    node_dir = Path(node_dir).absolute()
    found: dict[str, ProcessFiles] = {}
    for path in node_dir.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        stem, is_open, number, is_live = match.groups()
        if not (is_open or number or is_live):
            continue
        files = found.get(stem)
        if files is None:
            files = found[stem] = ProcessFiles(node_dir.name, stem, str(node_dir / f"{stem}.live"))
        if number is not None:
            (files.journals if is_open else files.segments)[int(number)] = str(path)
        elif is_open and not is_live:
            files.slots = str(path)
    return sorted(found.values(), key=lambda files: (files.start_ns, files.pid))


def read_slots(path: str) -> tuple[fmt.Header | None, list[bytes], reader.Damage | None]:
    """Reads a table of open spans.

    Returns:
        Its header, the OTLP ``Span`` bytes in its used slots (which may be rubbish where a write was under way), and
        what kept it from being read, if anything did.
    """
    try:
        data = reader.read_whole(path, fmt.MAX_HEADER_SIZE + fmt.SLOT_COUNT * fmt.SLOT_SIZE)
    except reader.UnreadableFileError as error:
        return None, [], reader.Damage(path, 0, 0, str(error), error.kind)
    if not data.strip(b"\0"):
        return None, [], None
    try:
        header = fmt.parse_header(data)
    except ValueError as error:
        return None, [], reader.Damage(path, 0, len(data), str(error), "header")
    spans = []
    for offset in range(header.size, min(len(data), header.size + fmt.SLOT_COUNT * fmt.SLOT_SIZE) - 1, fmt.SLOT_SIZE):
        length = data[offset] | data[offset + 1] << 8
        span = data[offset + 2 : offset + 2 + length]
        if 0 < length <= fmt.SLOT_SIZE - 2 and len(span) == length:
            spans.append(span)
    return header, spans, None
