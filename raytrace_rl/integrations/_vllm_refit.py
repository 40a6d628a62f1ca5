"""A vLLM engine gets new weights, goes to sleep or wakes: spans around its methods, and which weights it has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

from opentelemetry.trace import Span

from raytrace_rl._contextvar import safe
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.integrations._vllm_calls import TracedEngine
from raytrace_rl.integrations._vllm_methods import Method, method_of
from raytrace_rl.integrations._vllm_requests import version_of
from raytrace_rl.span_groups import RLSpanGroup as G

REFIT_SPAN: Final = "rl.vllm.refit"
#: The engine's method behind a span that several share.
RL_VLLM_METHOD_ATTR: Final = "rl.vllm.method"

#: Methods that are one span each, by engine method.
_MANAGEMENT: Final = {
    "sleep": "rl.vllm.sleep",
    "wake_up": "rl.vllm.wake",
    "init_weight_transfer_engine": REFIT_SPAN,
    "start_weight_update": REFIT_SPAN,
    "update_weights": REFIT_SPAN,
    "finish_weight_update": REFIT_SPAN,
}
#: Methods that set the version of the weights.
_VERSIONING: Final = ("finish_weight_update", "update_weight_version", "set_weight_version")

_refitting: Final[ContextVar[bool]] = safe(ContextVar("raytrace_rl_vllm_refitting", default=False))


def managed(state: TracedEngine, engine: Any) -> dict[str, Method]:
    """Returns, wrapped, those methods that this engine has: what each release calls them differs."""
    methods: dict[str, Method] = {}
    for name, span_name in _MANAGEMENT.items():
        if (plain := method_of(engine, name)) is not None:
            methods[name] = _around(plain, functools.partial(_management, name, span_name))
    if (plain := method_of(engine, "collective_rpc")) is not None:
        methods["collective_rpc"] = _around(plain, _remote)
    for name in _VERSIONING:
        if (plain := methods.get(name) or method_of(engine, name)) is not None:
            methods[name] = _versioned(state, plain)
    return methods


def _around(plain: Method, make: Callable[..., AbstractContextManager[Span | None]]) -> Method:
    """Returns ``plain``, function or coroutine function, inside what ``make`` returns for its arguments."""
    if inspect.iscoroutinefunction(plain):

        @functools.wraps(plain)
        async def awaited(engine: Any, *args: Any, **kwargs: Any) -> Any:
            with make(*args, **kwargs):
                return await plain(engine, *args, **kwargs)

        return awaited

    @functools.wraps(plain)
    def called(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with make(*args, **kwargs):
            return plain(engine, *args, **kwargs)

    return called


def _management(method: str, name: str, *_args: Any, **_kwargs: Any) -> AbstractContextManager[Span | None]:
    if name == REFIT_SPAN:
        return Refitting(managed_span(G.DATA_PLANE, name, **{RL_VLLM_METHOD_ATTR: method}))
    return managed_span(G.DATA_PLANE, name)


def _remote(method: Any = None, *_args: Any, **_kwargs: Any) -> AbstractContextManager[Span | None]:
    """The span of a call on all of the engine's workers: only of those by which trainers bring weights."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    if "weight" in name:
        return _management(name, REFIT_SPAN)
    return Refitting(None)


class Refitting:
    """A refit's span, unless one is open around it: vLLM's calls are made of other calls of vLLM's."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: AbstractContextManager[Span | None] | None) -> None:
        self._span = None if _refitting.get() else span
        self._token: Any = None

    def __enter__(self) -> Span | None:
        if self._span is None:
            return None
        self._token = _refitting.set(True)
        return self._span.__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is not None:
            _refitting.reset(self._token)
            self._span.__exit__(exc_type, exc, traceback)


def _versioned(state: TracedEngine, plain: Method) -> Method:
    """Returns ``plain``, after which the weights have the version that was given to it."""

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("weight_version", kwargs.get("new_version"))
        if given is not None:
            state.version = version_of(given)

    if inspect.iscoroutinefunction(plain):

        @functools.wraps(plain)
        async def awaited(engine: Any, *args: Any, **kwargs: Any) -> Any:
            result = await plain(engine, *args, **kwargs)
            note(args, kwargs)
            return result

        return awaited

    @functools.wraps(plain)
    def called(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(engine, *args, **kwargs)
        note(args, kwargs)
        return result

    return called
