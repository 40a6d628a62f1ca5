"""Runs one call of any kind of function with a trace context current, and leaves the caller's context as it was.

Generators and async generators run in one copied `contextvars.Context` per call, entered anew at each step. So the
context is never the consumer's, a ``with`` span of the user's stays current across its own yields, and closing or
cancelling in another task or thread detaches nothing ("Failed to detach context" cannot come up).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import Context, Token, copy_context
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from raytrace_rl import _scopes, _span
from raytrace_rl._interrupts import is_interrupt

#: What is current while a call runs: OTel's context, and the scopes. A plain tuple, for one is made per call.
Attachment = tuple[Any, "_scopes.Scopes | None"]

#: Asked at the start of each call, with its keywords, for what should be current in it; None: whatever is.
Enter = Callable[[dict[str, Any]], "Attachment | None"]


def here() -> Attachment:
    """Returns what is current now, for work that starts elsewhere (a thread, a task) and belongs here."""
    return _span.otel_var.get(), _scopes.var.get()


def call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], attachment: Attachment) -> Any:
    """Calls a plain function with ``attachment`` current.

    A generator or coroutine that it returns (a decorator without ``functools.wraps`` hid what kind it is) keeps the
    context while it is iterated.
    """
    otel_var, scopes_var = _span.otel_var, _scopes.var
    otel_before, scopes_before = otel_var.get(), scopes_var.get()
    # Restored by value and not by token: an exception out of a signal handler may come between any two lines here, and
    # whatever the user's function left attached must not be there for the actor's next call either.
    try:
        otel_var.set(attachment[0])
        scopes_var.set(attachment[1])
        result = fn(*args, **kwargs)
        if isinstance(result, (GeneratorType, CoroutineType, AsyncGeneratorType)):
            result = _deferred(result, copy_context())
        return result
    finally:
        otel_var.set(otel_before)
        scopes_var.set(scopes_before)


def attached(fn: Callable[..., Any], enter: Enter) -> Callable[..., Any]:
    """Returns a function of the same kind as ``fn``, each call of which runs with what ``enter`` then answers.

    It is bare: no name, no ``__wrapped__``. Where it is pickled by value (a class of ``__main__``), the globals that it
    names are copied, hence only functions and modules.
    """
    if inspect.isasyncgenfunction(fn):

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Context | None, Any]:
            attachment = enter(kwargs)
            if attachment is None:
                return None, fn(*args, **kwargs)
            context = _copied(attachment)
            return context, context.run(fn, *args, **kwargs)

        made: Callable[..., Any] = async_generator(begin)
        return made

    if inspect.isgeneratorfunction(fn):

        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            attachment = enter(kwargs)
            if attachment is None:
                return (yield from fn(*args, **kwargs))
            context = _copied(attachment)
            return (yield from drive(context, context.run(fn, *args, **kwargs)))

        return generator

    if inspect.iscoroutinefunction(fn):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            attachment = enter(kwargs)
            if attachment is None:
                return await fn(*args, **kwargs)
            otel_token: Token[Any] | None = None
            scopes_token: Token[Any] | None = None
            try:
                otel_token = _span.otel_var.set(attachment[0])
                scopes_token = _scopes.var.set(attachment[1])
                return await fn(*args, **kwargs)
            finally:
                # A coroutine dropped unfinished is closed in whatever context the collector runs: there the tokens
                # are refused, and there is nothing of ours to take away.
                _scopes.leave(scopes_token)
                detach(otel_token)

        return coroutine

    def plain(*args: Any, **kwargs: Any) -> Any:
        attachment = enter(kwargs)
        return fn(*args, **kwargs) if attachment is None else call(fn, args, kwargs, attachment)

    return plain


def named_after(fn: Any, wrapper: Any) -> Any:
    """Gives ``wrapper`` the name, documentation and ``__wrapped__`` of ``fn``."""
    try:
        return functools.wraps(fn)(wrapper)
    except (AttributeError, TypeError):  # a callable without a dict to copy
        return wrapper


def detach(token: Token[Any] | None) -> None:
    """Ends an attachment of OTel's context. One that began in another `contextvars.Context` is left alone."""
    if token is not None:
        try:
            _span.otel_var.reset(token)
        except (ValueError, RuntimeError) as error:
            if is_interrupt(error):
                raise


def drive(context: Context, steps: Any) -> Generator[Any, Any, Any]:
    """Runs a generator (or the iterator behind an awaitable) inside ``context``, step by step: PEP 380, spelled out."""
    try:
        value = context.run(next, steps)
        while True:
            try:
                sent = yield value
            except GeneratorExit:
                context.run(steps.close)
                raise
            except BaseException as error:
                value = context.run(steps.throw, error)
            else:
                value = context.run(steps.send, sent)
    except StopIteration as stop:
        return stop.value


def adrive(context: Context | None, steps: Any) -> AsyncGenerator[Any, Any]:
    """Runs an async generator inside ``context`` (None: where it is), step by step."""
    running: AsyncGenerator[Any, Any] = async_generator(lambda _args, _kwargs: (context, steps))()
    return running


def async_generator(begin: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Context | None, Any]]) -> Any:
    """Returns an async generator function. Each call runs, step by step, what ``begin(args, kwargs)`` answers.

    Args:
        begin: Called at the first step; returns the context to run in (None: where it is) and an async generator.
    """

    async def asyncgen(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        context, steps = begin(args, kwargs)
        step: Any = steps.asend(None)
        while True:
            try:
                value = await (step if context is None else _InContext(context, step))
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                closing = steps.aclose()
                await (closing if context is None else _InContext(context, closing))
                raise
            except BaseException as error:
                step = steps.athrow(error)
            else:
                step = steps.asend(sent)

    return asyncgen


class _InContext:
    """Awaits something inside a context of its own, each step of it."""

    __slots__ = ("_awaitable", "_context")

    def __init__(self, context: Context, awaitable: Any) -> None:
        self._context = context
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        return drive(self._context, self._awaitable.__await__())


async def _await_in(context: Context, coroutine: Any) -> Any:
    return await _InContext(context, coroutine)


def _deferred(result: Any, context: Context) -> Any:
    if isinstance(result, GeneratorType):
        return drive(context, result)
    if isinstance(result, CoroutineType):
        return _await_in(context, result)
    return adrive(context, result)


def _copied(attachment: Attachment) -> Context:
    context = copy_context()
    context.run(_span.otel_var.set, attachment[0])
    context.run(_scopes.var.set, attachment[1])
    return context
