"""Megatron's own timers as spans: what it times anyhow becomes visible where it happened, and not only as a sum.

Megatron calls ``timers("forward-backward", log_level=1).start()`` and ``.stop()``, in functions of its own. Its spans
are therefore never made current: a timer that an exception leaves running would stay current for ever. They nest all
the same: a timer started inside another one, under the same current span, is its child.
"""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context

from raytrace_rl import _otel_context, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._span import RecordingSpan
from raytrace_rl.integrations import _megatron_topology, _versions
from raytrace_rl.span_groups import register_span_groups

#: The group of these spans. An umbrella: they nest, and lie inside the bucketed spans of their phase.
MEGATRON_TIMER: Final = "megatron_timer"
register_span_groups("raytrace_rl.integrations.megatron", [MEGATRON_TIMER], umbrellas=[MEGATRON_TIMER])

_PREFIX: Final = "rl.megatron.timer."
_TRACED: Final = "_raytrace_timers"


class _Running(threading.local):
    def __init__(self) -> None:
        #: Timers that run on this thread, outermost first, each with the span that was current at its start.
        self.timers: list[tuple[RecordingSpan, Any]] = []


_running: Final = _Running()
#: Views of the timers of each of Megatron's ``Timers``: beside them and not in them, since they are copied and pickled.
_views: Final[weakref.WeakKeyDictionary[Any, dict[str, TimerView]]] = weakref.WeakKeyDictionary()


class TimerView:
    """One of Megatron's timers, whose runs are spans. Everything else is the timer's own.

    Args:
        name: Megatron's name of it.
        timer: The timer; None where nothing but spans is wanted.
    """

    def __init__(self, name: str, timer: Any = None) -> None:
        self.name = name
        self.timer = timer
        self._span: RecordingSpan | None = None
        self._stack: list[tuple[RecordingSpan, Any]] = []

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Starts the timer, then the span: after the barrier, as Megatron's clock."""
        if self.timer is not None:
            self.timer.start(*args, **kwargs)
        if self._span is not None:  # a dummy timer, which nobody minds being started twice
            self._end()
        if MEGATRON_TIMER in _state.enabled:
            self._begin()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stops the timer, then the span."""
        try:
            if self.timer is not None:
                self.timer.stop(*args, **kwargs)
        finally:
            self._end()

    def _begin(self) -> None:
        try:
            around = trace.get_current_span()
            context: Context = _otel_context.otel_var.get()
            stack = _running.timers
            if stack and stack[-1][1] is around:
                context = Context({**context, _otel_context.SPAN_KEY: stack[-1][0]})
            name = _PREFIX + self.name.replace("-", "_").replace(" ", "_")
            span = RecordingSpan(MEGATRON_TIMER, name, dict(_megatron_topology.described()))
            span.begin(context)
            stack.append((span, around))
            self._span, self._stack = span, stack
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.count_drop("spans")
            _state.warn_once("megatron-timer", "Megatron's timer %r makes no span: %r", self.name, error)

    def _end(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            self._stack[:] = [entry for entry in self._stack if entry[0] is not span]
            span.end()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of this object itself, such as what copying it asks for
            raise AttributeError(name)
        return getattr(self.timer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies to a view of a copy of the timer: what is under way here is not under way there."""
        return TimerView, (self.name, self.timer)


class SpanTimers:
    """Timers of which nothing is wanted but spans, for Megatron-core alone: ``TransformerConfig(timers=SpanTimers())``.

    Megatron's own ``Timers`` synchronise the GPU at each start and stop; these do not.
    """

    def __init__(self) -> None:
        self._timers: dict[str, TimerView] = {}

    def __call__(self, name: str, log_level: int | None = None) -> TimerView:  # noqa: ARG002 - Megatron's signature
        """Returns the timer of that name."""
        return self._timers.setdefault(name, TimerView(name))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies to timers of its own: Megatron copies whole configurations, and writes them into checkpoints."""
        return SpanTimers, ()


class TimerSpans:
    """What `trace_megatron_timers` returns: ``stop()``, or the end of a ``with`` statement, ends it."""

    def __init__(self) -> None:
        self._timers: Any = None
        self._plain: Any = None
        self._traced: Any = None
        try:
            from megatron.core.timers import Timers
        except Exception as error:
            if is_interrupt(error):
                raise
            _versions.unknown_api("megatron", "megatron.core.timers.Timers", "its timers make no spans")
            return
        plain = Timers.__call__
        if getattr(plain, _TRACED, False):
            return  # asked for before: whoever did ends it

        def traced(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            timer = plain(self, name, *args, **kwargs)
            try:
                views = _views.setdefault(self, {})
                view = views.get(name)
                if view is None:
                    view = views[name] = TimerView(name)
                view.timer = timer
            except Exception as error:
                if is_interrupt(error):
                    raise
                return timer
            return view

        setattr(traced, _TRACED, True)
        self._timers, self._plain, self._traced = Timers, plain, traced
        Timers.__call__ = traced

    def stop(self) -> None:
        """Gives Megatron its timers back."""
        timers, self._timers = self._timers, None
        if timers is not None and timers.__call__ is self._traced:
            timers.__call__ = self._plain

    def __enter__(self) -> TimerSpans:  # noqa: PYI034 - typing.Self is 3.11
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
