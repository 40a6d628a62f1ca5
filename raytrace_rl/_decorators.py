"""Spans around functions: one decorator that keeps the kind of function (plain, coroutine, generator, async generator).

A generator's span lives from its first step to its end, in a copied context of its own (`_invocation.drive`): never
current in the consumer's code between steps, and ended once, on exhaustion, close, throw or cancellation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any, ParamSpec, TypeVar

from raytrace_rl import _invocation, _state

P = ParamSpec("P")
R = TypeVar("R")
#: Makes the span of one call.
MakeSpan = Callable[[], AbstractContextManager[Any]]


def around(fn: Callable[P, R], group: str, make: MakeSpan) -> Callable[P, R]:
    """Returns ``fn`` as the same kind of function, each call of it a span from ``make`` while ``group`` is enabled."""
    wrapper: Any
    if inspect.isasyncgenfunction(fn):

        async def asyncgen(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            span = context = None
            if group in _state.enabled:
                span, context = make(), copy_context()
                context.run(span.__enter__)
            try:
                made = fn(*args, **kwargs) if context is None else context.run(fn, *args, **kwargs)
                steps = _invocation.adrive(context, made)
                step = steps.asend(None)
                while True:  # "yield from", which async generators lack
                    try:
                        value = await step
                    except StopAsyncIteration:
                        break
                    try:
                        sent = yield value
                    except GeneratorExit:
                        await steps.aclose()
                        raise
                    except BaseException as error:
                        step = steps.athrow(error)
                    else:
                        step = steps.asend(sent)
            except BaseException as error:
                _leave(context, span, error)
                raise
            _leave(context, span, None)

        wrapper = asyncgen
    elif inspect.isgeneratorfunction(fn):

        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            if group not in _state.enabled:
                return (yield from fn(*args, **kwargs))
            span = make()
            context = copy_context()
            context.run(span.__enter__)
            try:
                result = yield from _invocation.drive(context, context.run(fn, *args, **kwargs))
            except BaseException as error:
                _leave(context, span, error)
                raise
            _leave(context, span, None)
            return result

        wrapper = generator
    elif inspect.iscoroutinefunction(fn):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            if group not in _state.enabled:
                return await fn(*args, **kwargs)
            with make():
                return await fn(*args, **kwargs)

        wrapper = coroutine
    else:

        def plain(*args: Any, **kwargs: Any) -> Any:
            if group not in _state.enabled:
                return fn(*args, **kwargs)
            with make():
                return fn(*args, **kwargs)

        wrapper = plain
    wrapped: Callable[P, R] = functools.wraps(fn)(wrapper)
    return wrapped


def _leave(context: Context | None, span: AbstractContextManager[Any] | None, error: BaseException | None) -> None:
    """Ends the span where it began, with the exception that is on its way out, if any.

    Not `sys.exc_info`: inside a generator that also knows the exception which its consumer is handling.
    """
    if span is not None and context is not None:
        context.run(span.__exit__, type(error) if error is not None else None, error, None)
