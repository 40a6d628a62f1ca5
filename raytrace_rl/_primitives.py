"""The span primitives: open a span in a group, decorate a function, set the scope of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from opentelemetry.trace import Span

from raytrace_rl import _decorators, _prompts, _registry, _scopes, _state, _trees
from raytrace_rl._head import NO_BUCKET
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._prompts import PER_PROMPT
from raytrace_rl._span import ManagedSpan

if TYPE_CHECKING:
    from contextvars import Token

P = ParamSpec("P")
R = TypeVar("R")


class _NoSpan:
    """What a disabled span is: yields None, runs the body, lets exceptions pass. Shared, for it holds nothing.

    Its two methods are bound C functions that ignore what they are given: ``list.clear`` of an empty list returns
    None, ``"".format`` a false string. Calling a Python function instead costs 25 ns each.
    """

    __slots__ = ()
    __enter__ = [].clear
    __exit__ = "".format


NO_SPAN: Final[Any] = _NoSpan()


def managed_span(
    group: str, name: str, /, *, tracer: Any = None, **attributes: Any
) -> AbstractContextManager[Span | None]:
    """Opens a span for the body of a ``with`` statement, if ``group`` is enabled.

    The span is current inside (``opentelemetry.trace.get_current_span()``), child of whatever span was current, ours
    or another library's. An exception is recorded with ERROR status and goes on. A leaf group's span carries
    ``rl.bucket``: an explicit one, else that of the nearest `bucket_scope`, else the group's default.

    Args:
        group: Span group; see `RLSpanGroup`.
        name: ``rl.<algorithm>.<phase>``.
        tracer: An OpenTelemetry ``Tracer`` to make the span with, instead of ours. What is no tracer is ignored.
        attributes: Attributes at start: str, bool, int, float, short sequences of these, NumPy and CPU torch scalars,
            enums, paths. None is left out. What cannot be encoded loses itself alone, and is counted.

    Returns:
        A context manager that yields the span, or None if the group is disabled.
    """
    try:
        if group not in _state.enabled:
            return NO_SPAN  # type: ignore[no-any-return]
    except Exception as error:  # what cannot be hashed is no group
        return _no_group(group, name, error)
    if group in PER_PROMPT and _prompts.muted():
        return NO_SPAN  # type: ignore[no-any-return]
    if tracer is not None:
        return with_tracer(tracer, group, name, attributes)
    if group in _trees.ROOTS:
        return _trees.umbrella(group, name, attributes)
    return ManagedSpan(group, name, attributes)


def umbrella_span(
    group: str, name: str, /, *, tracer: Any = None, **attributes: Any
) -> AbstractContextManager[Span | None]:
    """Opens a span over other work: no bucket of its own, since its leaves carry theirs.

    On a leaf group it warns once and opens a bucketed leaf, so that no time is lost to goodput.

    Args:
        group: An umbrella group: ``RLSpanGroup.U_...`` or one that a library registered as an umbrella.
        name: ``rl.<algorithm>.<phase>``.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.

    Returns:
        A context manager that yields the span, or None if the group is disabled.
    """
    try:
        if group not in _state.enabled or (group in PER_PROMPT and _prompts.muted()):
            return NO_SPAN  # type: ignore[no-any-return]
    except Exception as error:
        return _no_group(group, name, error)
    if not _registry.is_umbrella(group):
        _state.warn_once(
            f"umbrella:{group}",
            "umbrella_span on the leaf group %r (span %r): it is recorded as a leaf, with a bucket. Use managed_span.",
            group,
            name,
        )
    if tracer is not None:
        return with_tracer(tracer, group, name, attributes)
    return _trees.umbrella(group, name, attributes)


def span_cm(name: str, /, *, tracer: Any = None, **attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens a span outside all groups: no gate, no bucket. For cold top-level paths.

    Args:
        name: Span name.
        tracer: As for `managed_span`.
        attributes: As for `managed_span`.

    Returns:
        A context manager that yields the span; None only while telemetry is off.
    """
    if not _state.tracing:
        return NO_SPAN  # type: ignore[no-any-return]
    if tracer is not None:
        return with_tracer(tracer, None, name, attributes)
    return ManagedSpan(None, name, attributes)


def trace_fn(group: str, name: str | None = None, *, tracer: Any = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of any kind (plain, coroutine, generator, async generator) with a `managed_span`.

    Args:
        group: Span group.
        name: Span name; by default the function's qualified name.
        tracer: As for `managed_span`.
    """
    return _around(managed_span, group, name, tracer)


def umbrella_trace_fn(
    group: str, name: str | None = None, *, tracer: Any = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of any kind with an `umbrella_span`.

    Args:
        group: An umbrella group.
        name: Span name; by default the function's qualified name.
        tracer: As for `managed_span`.
    """
    return _around(umbrella_span, group, name, tracer)


def _around(
    make: Callable[..., AbstractContextManager[Span | None]], group: str, name: str | None, tracer: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        label = name or str(getattr(fn, "__qualname__", repr(fn)))
        try:
            hash(group)  # each call of the function looks it up
        except Exception as error:
            _no_group(group, label, error)
            return fn
        return _decorators.around(fn, group, lambda: make(group, label, tracer=tracer))

    return decorate


def _no_group(group: object, name: object, error: Exception) -> AbstractContextManager[Span | None]:
    """Leaves out a span whose group is none: the body runs without it."""
    if is_interrupt(error):
        raise error
    _registry.warn_of_no_group(group, name)
    return NO_SPAN  # type: ignore[no-any-return]


class iteration_scope:
    """Spans opened inside, in remote workers too, carry ``rl.iteration``.

    Args:
        n: The training step. What is no integer is ignored with one warning.
    """

    __slots__ = ("_n", "_token")

    def __init__(self, n: int) -> None:
        self._n: int | None = None
        self._token: Token[_scopes.Scopes | None] | None = None
        try:
            self._n = int(n)
        except Exception as error:  # an int() of the user's that raises
            if is_interrupt(error):
                raise
            _state.warn_once("iteration", "iteration_scope(%.80r): a training step is an integer. It is ignored.", n)

    def __enter__(self) -> None:
        if self._n is not None and _state.tracing:
            self._token = _scopes.var.set(_scopes.make(_scopes.var.get(), iteration=self._n))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _scopes.leave(self._token)


def safe_set_span_attributes(span: Span | None, attributes: Mapping[str, Any]) -> None:
    """Sets attributes on a span that may be None (disabled). Never raises.

    Args:
        span: What ``with managed_span(...) as span`` yielded.
        attributes: As for `managed_span`.
    """
    if span is None:
        return
    try:
        span.set_attributes({key: value for key, value in attributes.items() if value is not None})
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.count_drop("attributes")
        _state.warn_once("set-attributes", "Span attributes could not be set: %r", error)


def with_tracer(
    tracer: Any, group: str | None, name: str, attributes: dict[str, Any]
) -> AbstractContextManager[Span | None]:
    """Makes the span with the caller's own tracer, into the pipeline behind it."""
    if not callable(getattr(tracer, "start_as_current_span", None)):
        _state.warn_once("tracer", "tracer=%.80r is no OpenTelemetry tracer and is ignored.", tracer)
        return ManagedSpan(group, name, attributes)
    scopes = _scopes.var.get()
    explicit = attributes.pop("rl.bucket", None)
    bucket = None
    if explicit is not NO_BUCKET:
        bucket = _registry.bucket_value(explicit)
        if bucket is None and (bucket := _registry.default_bucket(group)) is not None and scopes is not None:
            bucket = scopes.bucket or bucket
    fixed = {
        "rl.span_group": group,
        "rl.bucket": bucket,
        "rl.iteration": scopes.iteration if scopes is not None else None,
    }
    given = {key: value for key, value in {**fixed, **attributes}.items() if value is not None}
    return _TracersSpan(tracer, name, given)


class _TracersSpan:
    """A span of somebody else's tracer: what fails in it is a warning, what fails in the body goes its way."""

    __slots__ = ("_given", "_manager", "_name", "_tracer")

    def __init__(self, tracer: Any, name: str, given: dict[str, Any]) -> None:
        self._tracer = tracer
        self._name = name
        self._given = given
        self._manager: Any = None

    def __enter__(self) -> Span | None:
        try:
            manager = self._tracer.start_as_current_span(self._name, attributes=self._given)
            span: Span | None = manager.__enter__()
        except Exception as error:
            self._failed(error)
            return None
        self._manager = manager
        return span

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._manager is None:
            return
        try:
            # What it answers is not passed on: no span swallows an exception.
            self._manager.__exit__(exc_type, exc, traceback)
        except Exception as error:
            if error is not exc:  # else it is the body's own, on its way
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        if is_interrupt(error):
            raise error
        _state.count_drop("spans")
        _state.warn_once("tracer-failed", "The tracer given for span %r failed: %r", self._name, error)
