"""`Timer`: seconds by label, as a training loop logs them, and on request the span of the same name.

In the shape of NeMo-RL's timer. A label and its span are one word in the code, so that what is logged and what is
traced cannot drift apart.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.instrumentation import managed_span

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_logger: Final = logging.getLogger(__name__)

_REDUCTIONS: Final[dict[str, Callable[[Sequence[float]], float]]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "std": statistics.pstdev,
    "sum": math.fsum,
    "count": len,
}


class Timer:
    """Keeps every duration of every label, until it is reset. May be used from several threads at once.

    Example::

        timer = Timer(span_prefix="rl.grpo")
        with timer.time("policy_training", group=G.POLICY_UPDATE) as span:  # the span rl.grpo.policy_training
            ...
        with timer.time("idle/refit_bubble", span=efficiency_span("idle/refit_bubble")):
            ...
        logger.log_metrics(timer.get_timing_metrics("sum"), step, prefix="timing/train")
        timer.reset()

    Args:
        context: What tells this timer from others (a rank, a worker) in its debug log lines.
        span_prefix: What the names of spans begin with, ``rl.<algorithm>``.
    """

    def __init__(self, context: Mapping[str, object] | None = None, *, span_prefix: str = "rl") -> None:
        self._prefix = "".join(f"{key}={value} " for key, value in (context or {}).items())
        self._span_prefix = span_prefix
        self._elapsed: dict[str, list[float]] = {}
        self._started: dict[str, float] = {}

    def start(self, label: str, should_log: bool = True) -> None:
        """Starts timing ``label``, for `stop` to end.

        Args:
            label: What is timed.
            should_log: Write a debug log line.

        Raises:
            ValueError: It has been started and not stopped.
        """
        now = perf_counter()
        if self._started.setdefault(label, now) is not now:
            raise ValueError(f"Timer {label!r} is running already")
        if should_log:
            _logger.debug("%s%s start", self._prefix, label)

    def stop(self, label: str, should_log: bool = True) -> float:
        """Stops timing ``label``; returns the seconds since it was started.

        Args:
            label: What is timed.
            should_log: Write a debug log line.

        Raises:
            ValueError: It has not been started.
        """
        now = perf_counter()
        started = self._started.pop(label, None)
        if started is None:
            raise ValueError(f"Timer {label!r} is not running; running are: {', '.join(self._started) or 'none'}")
        self.record(label, now - started, should_log)
        return now - started

    def record(self, label: str, elapsed: float, should_log: bool = True) -> None:
        """Adds a duration that was measured elsewhere.

        Args:
            label: What was timed.
            elapsed: Seconds.
            should_log: Write a debug log line.
        """
        self._elapsed.setdefault(label, []).append(elapsed)
        if should_log:
            _logger.debug("%s%s %.4f s", self._prefix, label, elapsed)

    # Settings are Any: to a type checker, each value in **{"rl.x": 1} may be meant for any of them.
    def time(
        self, label: str, should_log: Any = True, *, group: Any = None, span: Any = None, **attributes: Any
    ) -> AbstractContextManager[Span | None]:
        """Times the body of a ``with`` statement, whether or not it raises.

        Unlike `start` it may run several times at once under one label, nested or on several threads.

        Args:
            label: What is timed.
            should_log: Write a debug log line (a boolean).
            group: Span group (a string) of a `managed_span` to open around the body, named ``<span_prefix>.<label>`` (a
                slash in the label becomes a dot).
            span: Any other context manager to enter around the body.
            attributes: Attributes of the span that ``group`` opens.

        Returns:
            A context manager that yields the span, or what ``span`` yields; None without one.
        """
        if span is None and group is not None:
            span = managed_span(group, f"{self._span_prefix}.{label.replace('/', '.')}", **attributes)
        return _Timed(self, label, should_log, span)

    def get_elapsed(self, label: str) -> list[float]:
        """Returns all durations of ``label``, in seconds.

        Raises:
            KeyError: It has none.
        """
        try:
            return list(self._elapsed[label])
        except KeyError:
            raise KeyError(f"nothing was timed under {label!r}") from None

    def get_latest_elapsed(self, label: str) -> float:
        """Returns the latest duration of ``label``, in seconds.

        Raises:
            KeyError: It has none.
        """
        return self.get_elapsed(label)[-1]

    def drain(self, label: str) -> float:
        """Returns the sum of ``label``'s durations, in seconds, and forgets them; 0.0 if it has none."""
        return math.fsum(self._elapsed.pop(label, ()))

    def reduce(self, label: str, operation: str = "mean") -> float:
        """Returns one number for all durations of ``label``.

        Args:
            label: What was timed.
            operation: ``mean``, ``median``, ``min``, ``max``, ``std`` (of the population), ``sum`` or ``count``.

        Raises:
            KeyError: The label has no durations.
            ValueError: There is no such operation.
        """
        return _reduction(operation)(self.get_elapsed(label))

    def get_timing_metrics(self, reduction_op: str | Mapping[str, str] = "mean") -> dict[str, float | list[float]]:
        """Returns every label's durations, reduced.

        Args:
            reduction_op: An operation of `reduce` for all labels, or one for each label; labels that are left out
                come as lists.

        Raises:
            ValueError: There is no such operation.
        """
        found: dict[str, float | list[float]] = {}
        one = _reduction(reduction_op) if isinstance(reduction_op, str) else None
        for label, elapsed in list(self._elapsed.items()):
            reduction = one
            if not isinstance(reduction_op, str) and label in reduction_op:
                reduction = _reduction(reduction_op[label])
            found[label] = reduction(list(elapsed)) if reduction is not None else list(elapsed)
        return found

    def totals(self) -> dict[str, float]:
        """Returns the sum of each label's durations, in seconds."""
        return {label: math.fsum(elapsed) for label, elapsed in list(self._elapsed.items())}

    def reset(self, label: str | None = None) -> None:
        """Forgets the durations of ``label``, or of all labels, and what has been started and not stopped."""
        for table in (self._elapsed, self._started):
            if label is None:
                table.clear()
            else:
                table.pop(label, None)


#: NeMo-RL's name for a timer that several threads may use; here each may.
ThreadSafeTimer = Timer


def _reduction(operation: str) -> Callable[[Sequence[float]], float]:
    try:
        return _REDUCTIONS[operation]
    except KeyError:
        raise ValueError(f"no reduction {operation!r}: one of {', '.join(_REDUCTIONS)}") from None


class _Timed:
    """The body of a ``with`` statement being timed."""

    __slots__ = ("_label", "_should_log", "_span", "_started", "_timer")

    def __init__(self, timer: Timer, label: str, should_log: bool, span: AbstractContextManager[Any] | None) -> None:
        self._timer = timer
        self._label = label
        self._should_log = should_log
        self._span = span
        self._started = 0.0

    def __enter__(self) -> Any:
        found = self._span.__enter__() if self._span is not None else None
        self._started = perf_counter()
        return found

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            self._timer.record(self._label, perf_counter() - self._started, self._should_log)
        finally:
            swallowed = self._span.__exit__(exc_type, exc, traceback) if self._span is not None else None
        return swallowed
