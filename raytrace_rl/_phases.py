"""Spans of particular phases: startup, set-up, evaluation, waits, and spans whose times are already known."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from raytrace_rl import _otel_context, _prompts, _scopes, _state
from raytrace_rl._head import NO_BUCKET
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._primitives import NO_SPAN, managed_span, umbrella_span
from raytrace_rl._prompts import PER_PROMPT
from raytrace_rl._span import RecordingSpan
from raytrace_rl._streaming import of_tracer
from raytrace_rl.buckets import Bucket, bucket_scope
from raytrace_rl.efficiency import efficiency_category
from raytrace_rl.span_groups import RLSpanGroup as G
from raytrace_rl.span_groups import is_span_group_enabled

if TYPE_CHECKING:
    from contextvars import Token

_BUCKET: Final = "rl.bucket"
_CATEGORY: Final = "rl.efficiency.category"


def startup_span(*, tracer: Any = None, **attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens ``rl.startup``: an umbrella over everything before the first step.

    Args:
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.
    """
    return umbrella_span(G.U_SETUP, "rl.startup", tracer=tracer, **attributes)


def setup_span(phase: str, /, *, tracer: Any = None, **attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens ``rl.setup.<phase>``: an umbrella over one start-up phase. Phases may nest.

    Args:
        phase: Such as ``workers`` or ``weights``.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.
    """
    return umbrella_span(G.U_SETUP, f"rl.setup.{phase}", tracer=tracer, **attributes)


class evaluate_span:
    """Opens ``rl.<algorithm>.evaluate``: an umbrella inside which every leaf is overhead.

    Validation generates by the same code as training, but moves no weights. The scope reaches remote workers.

    Args:
        algorithm: Such as ``grpo``.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.
    """

    __slots__ = ("_scope", "_span")

    def __init__(self, algorithm: str, /, *, tracer: Any = None, **attributes: Any) -> None:
        self._span = umbrella_span(G.U_EVALUATE, f"rl.{algorithm}.evaluate", tracer=tracer, **attributes)
        self._scope = bucket_scope(Bucket.OVERHEAD)

    def __enter__(self) -> Span | None:
        span = self._span.__enter__()
        self._scope.__enter__()
        return span

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scope.__exit__(exc_type, exc, traceback)
        self._span.__exit__(exc_type, exc, traceback)


def efficiency_span(category: str, /, *, tracer: Any = None, **attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens the span of an efficiency category, such as ``rl.idle.refit_bubble`` for ``idle/refit_bubble``.

    It keeps its category's bucket whatever the scope; categories that overlap bucketed work carry none. Wrap a wait,
    not work that opens bucketed spans of its own.

    Args:
        category: A registered category; an unknown one is recorded as overhead, what is no text not at all, each with
            one warning.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.
    """
    if G.EFFICIENCY not in _state.enabled:
        return NO_SPAN  # type: ignore[no-any-return]
    described = _describe(category)
    if described is None:
        return NO_SPAN  # type: ignore[no-any-return]
    name, own = described
    return managed_span(G.EFFICIENCY, name, tracer=tracer, **{**own, **attributes})


def start_efficiency_span(category: str, /, *, tracer: Any = None, **attributes: Any) -> Span | None:
    """Starts the span of an efficiency category, for the caller to ``end()``: a wait that is a loop of polls.

    It is not made current, so that what is started meanwhile does not become its child.

    Args:
        category: As for `efficiency_span`.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.

    Returns:
        The span, or None if the group is disabled.
    """
    if G.EFFICIENCY not in _state.enabled:
        return None
    described = _describe(category)
    if described is None:
        return None
    name, own = described
    given = {**own, **attributes}
    if tracer is not None and callable(getattr(tracer, "start_span", None)):
        if given.get(_BUCKET) is NO_BUCKET:
            del given[_BUCKET]
        return of_tracer(tracer, name, {"rl.span_group": G.EFFICIENCY, **given})
    return _started(G.EFFICIENCY, name, given)


def _describe(category: Any) -> tuple[str, dict[str, Any]] | None:
    """Returns the span name and fixed attributes of a category; None, with one warning, for what is no text."""
    if isinstance(category, Enum):
        category = category.value
    if not isinstance(category, str) or not category:
        _state.warn_once("efficiency", "%.80r is no efficiency category: its span is left out.", category)
        return None
    known = efficiency_category(category)
    if known is None:
        _state.warn_once(
            f"efficiency:{category}",
            "Efficiency category %r is not registered: its spans count as overhead. "
            "register_efficiency_category(EfficiencyCategory(...)) declares it.",
            category,
        )
        return f"rl.{category.replace('/', '.')}", {_CATEGORY: category}
    bucket: Any = known.bucket.value if known.bucketed_span else NO_BUCKET
    return known.span_name, {_CATEGORY: category, _BUCKET: bucket}


def checkpoint_finalize_span(
    algorithm: str, /, *, tracer: Any = None, **attributes: Any
) -> AbstractContextManager[Span | None]:
    """Opens ``rl.<algorithm>.checkpoint_finalize``: the end of an asynchronous save, long after it was begun.

    Args:
        algorithm: Such as ``grpo``.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.
    """
    return managed_span(G.CHECKPOINT, f"rl.{algorithm}.checkpoint_finalize", tracer=tracer, **attributes)


def emit_span(
    group: str,
    name: str,
    start_s: float,
    end_s: float,
    *,
    attributes: Mapping[str, Any] | None = None,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> None:
    """Records a span whose times are known already. Never raises.

    Args:
        group: Span group; nothing happens if it is disabled.
        name: Span name.
        start_s, end_s: Seconds since the epoch, as ``time.time()`` gives them. An end before the start is clamped to
            it, with one warning; the times that were given stay as ``rl.given_start_s`` and ``rl.given_end_s``.
        attributes: As for `managed_span`.
        context: OTel context that holds the parent; by default the current one.
        kind: Span kind.
    """
    try:
        if not is_span_group_enabled(group) or (group in PER_PROMPT and _prompts.muted()):
            return
        start_ns, end_ns = int(start_s * 1e9), int(end_s * 1e9)
        given = dict(attributes or {})
        if end_ns < start_ns:
            _state.warn_once(
                f"emit:{name}", "emit_span(%r): it ends %.6f s before it starts; clamped.", name, start_s - end_s
            )
            given.update({"rl.given_start_s": float(start_s), "rl.given_end_s": float(end_s)})
            end_ns = start_ns
        span = RecordingSpan(group, name, given)
        if kind is not SpanKind.INTERNAL:
            span.set_kind(kind)
        span.begin(_otel_context.otel_var.get() if context is None else context, start_ns)
        span.end(end_ns)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.count_drop("spans")
        _state.warn_once(f"emit-failed:{name}", "emit_span(%r, start_s=%r, end_s=%r): %r", name, start_s, end_s, error)


def _started(group: str, name: str, attributes: dict[str, Any]) -> RecordingSpan:
    span = RecordingSpan(group, name, attributes)
    span.begin(_otel_context.otel_var.get())
    return span


class span_attributes:
    """Spans opened inside, in this process, carry ``attributes`` too; a span's own value for a key holds.

    Args:
        attributes: As for `managed_span`.
    """

    __slots__ = ("_attributes", "_token")

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._attributes = attributes
        self._token: Token[_scopes.Scopes | None] | None = None

    def __enter__(self) -> None:
        if not _state.tracing:
            return
        base = _scopes.var.get()
        try:
            shared = {**dict(base.attributes if base is not None else ()), **self._attributes}
        except Exception as error:  # no mapping, or one of the user's that fails
            if is_interrupt(error):
                raise
            _state.warn_once("span-attributes", "span_attributes(%.80r) is ignored: %r", self._attributes, error)
            return
        given = tuple((key, value) for key, value in shared.items() if value is not None)
        self._token = _scopes.var.set(_scopes.make(base, attributes=given))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _scopes.leave(self._token)
