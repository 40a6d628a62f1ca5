"""What a worker group knows of its workers, without Ray: handles with a table of signatures, and two methods for it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from raytrace_rl import accepts_trace_context

if TYPE_CHECKING:
    from collections.abc import Callable


class Worker:
    """A mock of a worker's handle, as far as `dispatch` asks it."""

    def __init__(self, *methods: Callable[..., Any]) -> None:
        self._ray_method_signatures = {
            method.__name__: list(inspect.signature(method).parameters.values()) for method in methods
        }


@accepts_trace_context
def train(batch: Any) -> None:
    """A worker's method."""


def score(**kwargs: Any) -> None:
    """A worker's method that would swallow a carrier."""
