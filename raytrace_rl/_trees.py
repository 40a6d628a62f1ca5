"""Where a trace begins: the whole run as one, or (``trace_per="step"``) each step and rollout as one of its own.

Backends that refuse traces of a million spans, or show a trace only when its root has ended, want the latter; the step
then links to the job. A job also announces itself by a span of no length, since its own ends with the run.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import get_current_span

from raytrace_rl import _scopes, _state
from raytrace_rl._span import SPAN_KEY, ManagedSpan, RecordingSpan

_JOB: Final = "job"
_STEP: Final = "step"
_ROLLOUT: Final = "rollout"


#: The groups for whose spans `umbrella` may make another kind of span than a `ManagedSpan`.
ROOTS: Final = frozenset({_JOB, _STEP, _ROLLOUT})


def umbrella(group: str, name: str, attributes: dict[str, Any]) -> ManagedSpan:
    """Returns the span for an umbrella, not yet started."""
    if group == _JOB:
        return _JobSpan(group, name, attributes)
    if group == _STEP and _per_step():
        return _RootSpan(group, name, attributes)
    if group == _ROLLOUT and _per_step():
        scopes = _scopes.var.get()
        if scopes is None or scopes.iteration is None:  # a collector's rollout, outside any step
            return _RootSpan(group, name, attributes)
    return ManagedSpan(group, name, attributes)


def _per_step() -> bool:
    config = _state.config
    if config is None:
        return False
    return config.trace_per == "step" or (config.trace_per == "auto" and config.exporter == "otlp")


class _JobSpan(ManagedSpan):
    """The job's span, which says at its start that the run lives."""

    __slots__ = ()

    def begin(self, context: Context, start_ns: int | None = None) -> None:
        super().begin(context, start_ns)
        started = RecordingSpan(self.group, f"{self.name}.started", {})
        started.begin(Context({**context, SPAN_KEY: self}), self.start_ns)
        started.end(self.start_ns)


class _RootSpan(ManagedSpan):
    """A span that begins a trace of its own, linked to the span that would have been its parent."""

    __slots__ = ()

    def begin(self, context: Context, start_ns: int | None = None) -> None:
        parent = get_current_span(context).get_span_context()
        super().begin(Context({key: value for key, value in context.items() if key != SPAN_KEY}), start_ns)
        self.add_link(parent)
