"""The scopes of a call (iteration, bucket, per-prompt, shared attributes): one immutable value in one context variable.

Kept apart from OpenTelemetry's context: a library that starts a fresh context for an incoming request must not lose
the training step that the request belongs to.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Final

from raytrace_rl._contextvar import safe
from raytrace_rl._interrupts import is_interrupt

_UNCHANGED: Final[Any] = object()


class Scopes:
    """What spans opened now inherit. Never changed once made, but for the shared ``queued`` cell.

    Attributes:
        iteration: Training step, or None.
        bucket: Bucket for leaf spans, or None for each group's own.
        per_prompt: Inside the work for one prompt.
        muted: That prompt's per-prompt spans are not recorded (``per_prompt_limit``).
        attributes: ``(key, value)`` pairs put on every span.
        queued: Empty, or one queueing delay (ns) of the dispatched call. All scopes derived within the call share the
            list, and the first span opened in it, whatever scope it is in, takes the number out.
        sender: The node that the call came from, by which half of the delay was read; empty for this one.
    """

    __slots__ = ("attributes", "bucket", "chunk", "iteration", "muted", "per_prompt", "queued", "sender")

    def __init__(
        self,
        iteration: int | None,
        bucket: str | None,
        per_prompt: bool,
        attributes: tuple[tuple[str, Any], ...],
        queued: list[int],
        muted: bool = False,
        sender: str = "",
    ) -> None:
        self.iteration = iteration
        self.bucket = bucket
        self.per_prompt = per_prompt
        self.muted = muted
        self.attributes = attributes
        self.queued = queued
        self.sender = sender
        #: OTLP bytes of what every span inside gets; encoded by the first span that needs them.
        self.chunk: bytes | None = None

    def take_queued(self) -> int | None:
        """Returns the queueing delay to the first caller, None to all others."""
        try:
            return self.queued.pop()
        except IndexError as error:
            if is_interrupt(error):
                raise
            return None  # another thread of the same call was first


#: None: no scope is open.
var: Final[ContextVar[Scopes | None]] = safe(ContextVar("raytrace_rl_scopes", default=None))


def make(
    base: Scopes | None,
    *,
    iteration: int | None = _UNCHANGED,
    bucket: str | None = _UNCHANGED,
    per_prompt: bool = _UNCHANGED,
    muted: bool = _UNCHANGED,
    attributes: tuple[tuple[str, Any], ...] = _UNCHANGED,
    queued_ns: int | None = _UNCHANGED,
) -> Scopes:
    """Returns ``base`` with the named parts replaced. ``queued_ns`` (None: no delay) begins a new dispatched call."""
    if base is None:
        base = _EMPTY
    return Scopes(
        base.iteration if iteration is _UNCHANGED else iteration,
        base.bucket if bucket is _UNCHANGED else bucket,
        base.per_prompt if per_prompt is _UNCHANGED else per_prompt,
        base.attributes if attributes is _UNCHANGED else attributes,
        base.queued if queued_ns is _UNCHANGED else [] if queued_ns is None else [queued_ns],
        base.muted if muted is _UNCHANGED else muted,
        base.sender if queued_ns is _UNCHANGED else "",
    )


def leave(token: Token[Scopes | None] | None) -> None:
    """Ends a scope. One ended in another context than it began in (a generator finalised elsewhere) is left alone."""
    if token is not None:
        try:
            var.reset(token)
        except (ValueError, RuntimeError) as error:
            if is_interrupt(error):
                raise


_EMPTY: Final = Scopes(None, None, False, (), [])
