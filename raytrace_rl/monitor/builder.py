"""Gathers what is read into a `Run`: each span once, each process once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from raytrace_rl import semconv
from raytrace_rl.monitor.model import Process, Run, SpanRow, StackRow

if TYPE_CHECKING:
    from raytrace_rl._decode import Attributes, Scope, Span
    from raytrace_rl.spool.reader import Damage


class Builder:
    """A `Run` under construction: makes each span a row, once.

    Attributes:
        run: The run so far.
        requests: OTLP messages met, whether or not they held spans.
    """

    def __init__(self, path: str) -> None:
        self.run = Run(path, "")
        self.requests = 0
        self._rows: dict[bytes, SpanRow] = {}
        self._stacks: dict[tuple[str, str], StackRow] = {}
        self._processes: dict[str, Process] = {}

    @property
    def has_spans(self) -> bool:
        """Whether a span has been added."""
        return bool(self._rows)

    def process(self, key: str) -> Process:
        """Returns the process of that key, a new one at first."""
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = Process(key)
            self.run.processes.append(process)
        return process

    def damage(self, damage: Damage) -> None:
        """Notes something that could not be read."""
        self.run.damage.append(damage)

    def stack(self, row: StackRow) -> None:
        """Notes where an open span's thread stood; the latest holds."""
        self._stacks[row.trace_id, row.span_id] = row

    def ended(self, span: Span) -> bool:
        """Whether the span has been met with its end."""
        row = self._rows.get(span.trace_id + span.span_id)
        return row is not None and row.end_ns is not None and not row.truncated

    def add(self, span: Span, process: Process, scope: Scope | None = None) -> SpanRow | None:
        """Adds a span. An ended one takes the place of the same span open or truncated.

        Returns:
            Its row, or None if a better one is already there.

        Raises:
            ValueError: It has no ids.
        """
        check_ids(span)
        key = span.trace_id + span.span_id
        known = self._rows.get(key)
        row = SpanRow(span, process, scope)
        if known is not None:
            self.run.duplicates += 1
            if row.end_ns is None or (known.end_ns is not None and (row.truncated or not known.truncated)):
                return None
        self._rows[key] = row
        last = row.end_ns or row.start_ns
        process.last_ns = max(process.last_ns, last)
        return row

    def finish(self) -> Run:
        """Returns the run, in order."""
        run = self.run
        run.spans = sorted(self._rows.values(), key=lambda row: row.start_ns)
        run.metrics.sort(key=lambda row: row.time_ns)
        run.logs.sort(key=lambda row: row.time_ns)
        run.stacks = list(self._stacks.values())
        earliest: dict[str, int] = {}
        for row in run.spans:
            earliest.setdefault(row.process.key, row.start_ns)
        for process in run.processes:
            if not process.start_ns:
                process.start_ns = earliest.get(process.key, 0)
        run.processes.sort(key=lambda process: (process.start_ns, process.key))
        names = Counter(name for process in run.processes if (name := process.text(semconv.RL_RUN_ID)))
        run.run_id = names.most_common(1)[0][0] if names else Path(run.path).resolve().name
        return run


def check_ids(span: Span) -> None:
    """Raises ValueError for a span that cannot be told from others."""
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or not any(span.trace_id) or not any(span.span_id):
        raise ValueError("span without a trace id and a span id")


def identify(process: Process, resource: Attributes) -> None:
    """Fills in what a process's resource says of it."""
    process.resource = resource
    process.pid = process.pid or process.number(semconv.PROCESS_PID) or 0
    process.node = process.node or process.text(semconv.HOST_NAME) or process.text(semconv.RAY_NODE_ID) or ""
