"""Goodput buckets: the four values of ``rl.bucket``, each group's default, and the scope that overrides it."""

from __future__ import annotations

from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

from raytrace_rl import _scopes
from raytrace_rl._registry import bucket_value

if TYPE_CHECKING:
    from contextvars import Token


class Bucket(str, Enum):
    """What a leaf span's time was: DESIGN's four buckets, in their order of precedence within a lane."""

    PRODUCTIVE = "productive"
    OVERHEAD = "overhead"
    WASTED = "wasted"
    IDLE = "idle"

    def __str__(self) -> str:
        return self.value


class bucket_scope:
    """Leaf spans opened inside, in remote workers too, get this bucket unless they name their own.

    Args:
        bucket: A `Bucket` or its string. Anything else is ignored with one warning.
    """

    __slots__ = ("_bucket", "_token")

    def __init__(self, bucket: Bucket | str) -> None:
        self._bucket = bucket_value(bucket)
        self._token: Token[_scopes.Scopes | None] | None = None

    def __enter__(self) -> None:
        if self._bucket is not None:
            self._token = _scopes.var.set(_scopes.make(_scopes.var.get(), bucket=self._bucket))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _scopes.leave(self._token)
