"""Collectives of ``torch.distributed`` as spans: its functions are wrapped while somebody asks for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.integrations import _gpu_time, _versions
from raytrace_rl.span_groups import register_span_groups

#: The group of these spans. An umbrella: collectives overlap each other and lie inside bucketed work.
COLLECTIVE: Final = "collective"
register_span_groups("raytrace_rl.integrations.torch", [COLLECTIVE], umbrellas=[COLLECTIVE])

#: Bytes of the tensors of one call, as this rank gives them.
RL_COLLECTIVE_BYTES_ATTR: Final = "rl.collective.num_bytes"
#: Ranks that take part; absent for the default group before it is initialised.
RL_COLLECTIVE_RANKS_ATTR: Final = "rl.collective.ranks"
#: The call returned before the collective was done: the span is over its start alone.
RL_COLLECTIVE_ASYNC_ATTR: Final = "rl.collective.async"

#: Not ``isend`` and ``irecv``: torch tells the operations of a batch apart by which of the two functions they are, so
#: that one taken before tracing began would be refused, or received where it should be sent.
_FUNCTIONS: Final = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
_NEVER_WAIT: Final = frozenset({"batch_isend_irecv"})


class _Inside(threading.local):
    #: ``all_gather_object`` is made of two ``all_gather``: one span, not three.
    here = False


_inside: Final = _Inside()
_installed: list[tuple[Any, str, Any, Any]] = []
_wanted = 0
_lock: Final = threading.Lock()


class CollectiveSpans:
    """What `trace_collectives` returns: ``stop()``, or the end of a ``with`` statement, ends it.

    Nested requests add up: the functions are given back when the last has ended.
    """

    def __init__(self) -> None:
        global _wanted
        with _lock:
            self._ended = False
            _wanted += 1
            if _wanted == 1:
                _install()

    def stop(self) -> None:
        """Ends the request."""
        global _wanted
        with _lock:
            if self._ended:
                return
            self._ended = True
            _wanted -= 1
            if not _wanted:
                _restore()

    def __enter__(self) -> CollectiveSpans:  # noqa: PYI034 - typing.Self is 3.11
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _install() -> None:
    try:
        import torch.distributed
        from torch.distributed import distributed_c10d
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("collectives", "Collectives are not traced: %r", error)
        return
    missing = _versions.lacking(torch.distributed, _FUNCTIONS)
    for name in missing:
        _versions.unknown_api("torch", f"torch.distributed.{name}", "it makes no spans")
    for name in _FUNCTIONS:
        if name not in missing:
            original = getattr(torch.distributed, name)
            traced = _traced(name, original)
            for module in (torch.distributed, distributed_c10d):
                if getattr(module, name, None) is original:
                    setattr(module, name, traced)
                    _installed.append((module, name, original, traced))


def _restore() -> None:
    for module, name, original, traced in _installed:
        if getattr(module, name, None) is traced:  # else somebody wrapped it after us, and calls us
            setattr(module, name, original)
    _installed.clear()


def _traced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None) or (lambda: False)

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        # A compiler must see the function that it knows.
        if compiling() or COLLECTIVE not in _state.enabled or _inside.here or not _wanted:
            return function(*args, **kwargs)
        _inside.here = True
        try:
            span = managed_span(COLLECTIVE, f"rl.collective.{name}", **_facts(name, args, kwargs))
            with _gpu_time.timed(span):
                return function(*args, **kwargs)
        finally:
            _inside.here = False

    return collective


def _facts(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        from torch.distributed import distributed_c10d as c10d

        found = {
            RL_COLLECTIVE_BYTES_ATTR: sum(map(_bytes, (*args, *kwargs.values()))),
            RL_COLLECTIVE_ASYNC_ATTR: bool(kwargs.get("async_op")) or name in _NEVER_WAIT,
        }
        groups = [value for value in (*args, *kwargs.values()) if isinstance(value, c10d.ProcessGroup)]
        if c10d.is_initialized():
            found[RL_COLLECTIVE_RANKS_ATTR] = c10d.get_world_size(groups[0] if groups else None)
    except Exception as error:
        if is_interrupt(error):
            raise
        return {}
    return found


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0
