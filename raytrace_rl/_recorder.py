"""What a test looks at: the spans, metrics and logs of this process, decoded from records kept in memory.

The fixtures of `raytrace_rl.testing` hand these out; nothing here needs pytest.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from raytrace_rl import _decode, _metrics_pipeline
from raytrace_rl.monitor.model import Process, SpanRow
from raytrace_rl.monitor.signals import LogRow, MetricRow, log_rows, metric_rows
from raytrace_rl.spool.format import Kind

if TYPE_CHECKING:
    from raytrace_rl._sinks import MemorySink

#: Seconds for which reading metrics waits for callbacks of observable instruments.
_COLLECT_S = 5.0

Row = TypeVar("Row")


class RecordedSpan(SpanRow):
    """A finished span: a `SpanRow`, which knows the spans around it.

    Attributes:
        group: Its span group; the same as ``span_group``.
    """

    __slots__ = ("_all", "group")

    def __init__(self, span: _decode.Span, process: Process, scope: _decode.Scope | None, spans: SpanRecorder) -> None:
        super().__init__(span, process, scope)
        self._all = spans
        self.group = self.span_group

    @property
    def parent(self) -> RecordedSpan | None:
        """Its parent; None for a root, and while the parent has not finished (``parent_span_id`` says which)."""
        return next((span for span in self._all if span.span_id == self.parent_span_id), None)

    @property
    def children(self) -> list[RecordedSpan]:
        """Its children, in the order of their start."""
        return self._all.children_of(self.span_id)


class Recorder(Sequence[Row], ABC, Generic[Row]):
    """The records of one kind of signal, as a sequence of rows that grows while the test goes on.

    Args:
        sink: Where telemetry puts its records.
    """

    def __init__(self, sink: MemorySink) -> None:
        self._sink = sink
        self._process = Process("test", pid=os.getpid(), state="alive")
        self._read = 0
        self._rows: list[Row] = []

    @abstractmethod
    def _of(self, kind: int, payload: bytes) -> list[Row]:
        """Returns the rows in a record; none of another signal's."""

    def _all(self) -> list[Row]:
        records = self._sink.records
        while self._read < len(records):
            self._rows += self._of(*records[self._read])
            self._read += 1
        return self._rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._all()))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._all()}>"

    def clear(self) -> None:
        """Forgets what has been recorded up to now."""
        self._all()
        self._rows = []


class SpanRecorder(Recorder[RecordedSpan]):
    """The finished spans of this process, in the order in which they finished."""

    def _of(self, kind: int, payload: bytes) -> list[RecordedSpan]:
        if kind == Kind.SPAN:
            return [RecordedSpan(_decode.span(payload), self._process, None, self)]
        if kind == Kind.SCOPE_SPANS:
            scope, spans = _decode.scope_spans(payload)
            return [RecordedSpan(span, self._process, scope, self) for span in spans]
        return []

    @property
    def names(self) -> list[str]:
        """The names of all spans, in the order in which they finished."""
        return [span.name for span in self]

    def named(self, name: str) -> list[RecordedSpan]:
        """Returns the spans of that name."""
        return [span for span in self if span.name == name]

    def one(self, name: str) -> RecordedSpan:
        """Returns the only span of that name.

        Raises:
            AssertionError: There is none, or more than one; the message shows what there is.
        """
        found = self.named(name)
        if len(found) != 1:
            raise AssertionError(f"{len(found)} finished spans {name!r}, not 1, among:\n{self.tree() or '(none)'}")
        return found[0]

    def children_of(self, span_id: str | None) -> list[RecordedSpan]:
        """Returns the spans under a span, or (None) the roots, in the order of their start."""
        return sorted((span for span in self if span.parent_span_id == span_id), key=lambda span: span.start_ns)

    def tree(self) -> str:
        """Returns all spans as lines, children indented under their parents, in the order of their start."""
        known = {span.span_id for span in self}
        top = [span for span in self if span.parent_span_id not in known]
        lines: list[str] = []
        ahead = [(span, 0) for span in sorted(top, key=lambda span: span.start_ns, reverse=True)]
        while ahead:
            span, depth = ahead.pop()
            lines.append("  " * depth + span.name)
            ahead += [(child, depth + 1) for child in reversed(span.children)]
        return "\n".join(lines)


class MetricRecorder(Recorder[MetricRow]):
    """The data points of this process's metrics. Looking at them collects what has been recorded since."""

    def _of(self, kind: int, payload: bytes) -> list[MetricRow]:
        return metric_rows(payload, self._process) if kind == Kind.METRICS else []

    def _all(self) -> list[MetricRow]:
        _metrics_pipeline.collect(monotonic() + _COLLECT_S)
        return super()._all()

    def named(self, name: str) -> list[MetricRow]:
        """Returns the points of a series: at each collection one for each set of labels."""
        return [point for point in self if point.name == name]

    def latest(self, name: str, **labels: object) -> MetricRow:
        """Returns the newest point of a series.

        Args:
            name: The series.
            labels: Labels that the point must have, by name; pass dotted ones as ``**{"rl.bucket": "idle"}``.

        Raises:
            AssertionError: There is none; the message names the series that there are.
        """
        found = [point for point in self.named(name) if labels.items() <= point.attributes.items()]
        if not found:
            points = sorted({f"{point.name} {dict(point.attributes)}" for point in self})
            raise AssertionError(f"no point of {name!r} with {labels}, among:\n" + ("\n".join(points) or "(none)"))
        return found[-1]


class LogRecorder(Recorder[LogRow]):
    """The log records of this process, in the order in which they were logged."""

    def _of(self, kind: int, payload: bytes) -> list[LogRow]:
        return log_rows(payload, self._process) if kind == Kind.LOGS else []

    @property
    def messages(self) -> list[str]:
        """The messages of all records."""
        return [str(record.body) for record in self]
