"""The span of one operation on a data plane, and methods each call of which is one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import update_wrapper
from types import TracebackType
from typing import Any, Final

from opentelemetry.trace import Span

from raytrace_rl import _decorators, _state
from raytrace_rl.instrumentation import in_per_prompt_scope, managed_span, safe_set_span_attributes
from raytrace_rl.integrations import _operations
from raytrace_rl.integrations._payload import payload_of
from raytrace_rl.span_groups import RLSpanGroup as G

#: Name of the partition that an operation is about.
RL_DATA_PLANE_PARTITION_ATTR: Final = "rl.data_plane.partition"
#: Number of keys (samples) that it is about.
RL_DATA_PLANE_NUM_KEYS_ATTR: Final = "rl.data_plane.num_keys"
#: Bytes of payload in its arguments and its result.
RL_DATA_PLANE_NUM_BYTES_ATTR: Final = "rl.data_plane.num_bytes"
#: True where that is a lower bound: something was met whose size cannot be told without serialising it.
RL_DATA_PLANE_BYTES_PARTIAL_ATTR: Final = "rl.data_plane.bytes_partial"
#: ``ok``, ``error``, ``timeout``, ``cancelled``, or ``submitted`` where what was returned is yet to be waited for.
RL_DATA_PLANE_STATUS_ATTR: Final = "rl.data_plane.status"

_PREFIX: Final = "rl.data_plane."


class Operation:
    """The span of one operation, if its group is on; notes how it ended."""

    __slots__ = ("_facts", "_span", "_submitted", "_with", "on")

    def __init__(
        self, name: str, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], **extra: Any
    ) -> None:
        group = G.PER_PROMPT if in_per_prompt_scope() else G.DATA_PLANE
        #: False: the operation is to be called as if we were not here.
        self.on = group in _state.enabled
        self._span: Span | None = None
        self._submitted = False
        if self.on:
            self._facts = _operations.guarded(_operations.of_call, _NO_FACTS, parameters, args, kwargs)
            attributes: dict[str, Any] = {
                RL_DATA_PLANE_PARTITION_ATTR: self._facts.partition,
                RL_DATA_PLANE_NUM_KEYS_ATTR: self._facts.num_keys,
            }
            self._with: AbstractContextManager[Span | None] = managed_span(
                group, _PREFIX + _operations.operation_name(name), **attributes, **extra
            )

    def __enter__(self) -> Operation:  # noqa: PYI034 - typing.Self is 3.11
        self._span = self._with.__enter__()
        return self

    def returned(self, result: Any) -> None:
        """Notes what the operation returned."""
        if self._span is not None:
            _operations.guarded(self._note, None, result)

    def _note(self, result: Any) -> None:
        if inspect.isawaitable(result) or isinstance(result, Future) or type(result).__name__ == "ObjectRefGenerator":
            self._submitted = True
            payload = self._facts.payload
        else:
            found = _operations.of_result(result)
            payload = [*self._facts.payload, *found.payload]
            missing: dict[str, Any] = {}
            if self._facts.partition is None:
                missing[RL_DATA_PLANE_PARTITION_ATTR] = found.partition
            if self._facts.num_keys is None:
                missing[RL_DATA_PLANE_NUM_KEYS_ATTR] = found.num_keys
            safe_set_span_attributes(self._span, missing)
        counted = payload_of(payload)
        bytes_partial = None if counted.complete else True
        safe_set_span_attributes(
            self._span,
            {RL_DATA_PLANE_NUM_BYTES_ATTR: counted.num_bytes, RL_DATA_PLANE_BYTES_PARTIAL_ATTR: bytes_partial},
        )

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = _status(exc) or ("submitted" if self._submitted else "ok")
        safe_set_span_attributes(self._span, {RL_DATA_PLANE_STATUS_ATTR: status})
        self._with.__exit__(exc_type, exc, traceback)


_NO_FACTS: Final = _operations.Facts(None, None, [])


def _status(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, GeneratorExit):  # a stream that is read no further
        return None
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return "timeout"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "error"


def traced_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of the same kind, each call of it a span."""
    parameters = _operations.parameters_of(method)
    traced: Callable[..., Any]
    if inspect.iscoroutinefunction(method):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            operation = Operation(name, parameters, args, kwargs)
            if not operation.on:
                return await method(*args, **kwargs)
            with operation:
                result = await method(*args, **kwargs)
                operation.returned(result)
                return result

        traced = coroutine
    elif inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):

        def stream(*args: Any, **kwargs: Any) -> Any:
            operation = Operation(name, parameters, args, kwargs)
            if not operation.on:
                return method(*args, **kwargs)
            group = G.PER_PROMPT if in_per_prompt_scope() else G.DATA_PLANE
            return _decorators.around(method, group, lambda: operation)(*args, **kwargs)

        traced = stream
    else:

        def plain(*args: Any, **kwargs: Any) -> Any:
            operation = Operation(name, parameters, args, kwargs)
            if not operation.on:
                return method(*args, **kwargs)
            with operation:
                result = method(*args, **kwargs)
                operation.returned(result)
                return result

        traced = plain
    return update_wrapper(traced, method)
