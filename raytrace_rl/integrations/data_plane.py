"""A transfer queue or replay buffer, whose operations are spans: how long they take, on what, and how much they move.

`traced_data_plane` wraps the client, and leaves it and all that it returns as they are.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry.trace import SpanKind

from raytrace_rl import _state, _targets
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.dispatch import dispatch_with_trace_context
from raytrace_rl.integrations import _operations
from raytrace_rl.integrations._operation_spans import (
    RL_DATA_PLANE_BYTES_PARTIAL_ATTR,
    RL_DATA_PLANE_NUM_BYTES_ATTR,
    RL_DATA_PLANE_NUM_KEYS_ATTR,
    RL_DATA_PLANE_PARTITION_ATTR,
    RL_DATA_PLANE_STATUS_ATTR,
    Operation,
    traced_method,
)

__all__ = [
    "RL_DATA_PLANE_BYTES_PARTIAL_ATTR",
    "RL_DATA_PLANE_NUM_BYTES_ATTR",
    "RL_DATA_PLANE_NUM_KEYS_ATTR",
    "RL_DATA_PLANE_PARTITION_ATTR",
    "RL_DATA_PLANE_STATUS_ATTR",
    "traced_data_plane",
]

T = TypeVar("T")


def traced_data_plane(client: T, *, operations: Iterable[str] | None = None) -> T:
    """Returns a view of a data plane's client in which each operation is an ``rl.data_plane.<operation>`` span.

    The spans are of group ``DATA_PLANE``, or, inside a `per_prompt_scope`, of ``PER_PROMPT``: their number grows with
    the prompts there, and they overlap. They carry partition, keys, bytes and status (the constants of this module).
    The view passes for the client (``isinstance``, attributes, ``with``), pickles to the plain client, and adds nothing
    while the group is off.

    Args:
        client: An object with plain and coroutine methods (generators, too), a module of functions, or the handle of a
            Ray actor. For a handle the span is of the submission (kind PRODUCER, status ``submitted``), and the call
            brings the trace context: what the actor does in it is the actor's to record, by a view of its own store.
        operations: Names of the methods that are operations; by default all that do not begin with an underscore.
    """
    try:
        names = None if operations is None else frozenset(operations)
        kind: Any = type(client)
        if issubclass(kind, _DataPlaneView):
            return client
        view: T = _view_class(kind)(client, names)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("data-plane", "%s is not traced: %r", type(client).__name__, error)
        return client
    return view


class _RemoteOperation:
    """An actor's method whose ``remote`` is a span, and dispatches with the trace context."""

    __slots__ = ("_raytrace_method", "_raytrace_name", "_raytrace_parameters")

    def __init__(self, name: str, parameters: tuple[str, ...], method: Any) -> None:
        self._raytrace_name = name
        self._raytrace_parameters = parameters
        self._raytrace_method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        operation = Operation(self._raytrace_name, self._raytrace_parameters, args, kwargs, kind=SpanKind.PRODUCER)
        if not operation.on:
            return dispatch_with_trace_context(self._raytrace_method, *args, **kwargs)
        with operation:
            result = dispatch_with_trace_context(self._raytrace_method, *args, **kwargs)
            operation.returned(result)
            return result

    def options(self, *args: Any, **kwargs: Any) -> _RemoteOperation:
        method = self._raytrace_method.options(*args, **kwargs)
        return _RemoteOperation(self._raytrace_name, self._raytrace_parameters, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raytrace_method, name)


class _DataPlaneView:
    """The client, its operations traced."""

    __slots__ = ("_raytrace_operations", "_raytrace_target")

    def __init__(self, target: Any, operations: frozenset[str] | None) -> None:
        object.__setattr__(self, "_raytrace_target", target)
        object.__setattr__(self, "_raytrace_operations", operations)

    # So that whoever asks ``isinstance`` takes the view for the client.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._raytrace_target)

    def __getattr__(self, name: str) -> Any:
        target = self._raytrace_target
        value = getattr(target, name)
        operations = self._raytrace_operations
        if name.startswith("_") if operations is None else name not in operations:
            return value
        if _targets.is_actor(target):
            method = getattr(value, "_raytrace_target", value)  # behind a `traced` view of the handle
            if _targets.resolve(method) is None:
                return value
            parameters = _operations.parameter_names(_targets.method_signature(target, name))
            return _RemoteOperation(name, parameters, method)
        if isinstance(value, partial) or inspect.isroutine(value):
            return traced_method(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._raytrace_target, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._raytrace_target, name)

    def __dir__(self) -> Any:
        return dir(self._raytrace_target)

    def __eq__(self, other: object) -> bool:
        return bool(self._raytrace_target == getattr(other, "_raytrace_target", other))

    def __hash__(self) -> int:
        return hash(self._raytrace_target)

    def __repr__(self) -> str:
        return f"traced_data_plane({self._raytrace_target!r})"

    def __copy__(self) -> Any:
        return copy.copy(self._raytrace_target)

    def __reduce__(self) -> Any:
        # To the plain client, by a builtin: the reader of the pickle need not have this package.
        return operator.getitem, ((self._raytrace_target,), 0)


_BINARY: Final = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift"),
    *("and", "xor", "or"),
)
#: Operators with a second operand, which may be a view as well.
_OPERATORS: Final = frozenset(
    [
        *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "ne")),
        *(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r", "i")),
    ]
)
#: Looked up on the type, past ``__getattr__``; the view has those that its client has of its own.
_SPECIAL: Final = (
    *("__len__", "__length_hint__", "__bool__", "__iter__", "__next__", "__reversed__"),
    *("__contains__", "__getitem__", "__setitem__", "__delitem__"),
    *("__call__", "__enter__", "__exit__", "__await__", "__aiter__", "__anext__", "__aenter__", "__aexit__"),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__round__", "__trunc__", "__floor__", "__ceil__"),
    *("__int__", "__float__", "__complex__", "__index__", "__bytes__", "__str__", "__format__", "__fspath__"),
    *("__array__", "__deepcopy__"),
    *sorted(_OPERATORS),
)
#: These give the client back: to the user that is the view. An operator in place is one of them.
_GIVES_ITSELF: Final = frozenset(["__enter__", *(f"__i{name}__" for name in _BINARY)])

_view_classes: WeakKeyDictionary[type, type[Any]] = WeakKeyDictionary()


def _view_class(kind: type) -> type[Any]:
    known = _view_classes.get(kind)
    if known is None:
        own = (name for name in _SPECIAL if getattr(kind, name, None) is not getattr(object, name, None))
        special = {name: _forwarded(name) for name in own}
        known = type("_DataPlaneView", (_DataPlaneView,), {"__slots__": (), **special})
        _view_classes[kind] = known
    return known


def _forwarded(name: str) -> Callable[..., Any]:
    if name == "__aenter__":

        async def aenter(self: Any) -> Any:
            entered = await self._raytrace_target.__aenter__()
            return self if entered is self._raytrace_target else entered

        return aenter

    def forward(self: Any, *args: Any) -> Any:
        if name in _OPERATORS:
            args = tuple(arg._raytrace_target if issubclass(type(arg), _DataPlaneView) else arg for arg in args)
        result = getattr(self._raytrace_target, name)(*args)
        return self if name in _GIVES_ITSELF and result is self._raytrace_target else result

    return forward
