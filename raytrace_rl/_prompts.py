"""The scope of one prompt's work, and the bound on per-prompt spans: whole groups of samples or none of them.

Whether a prompt is recorded is decided where its `per_prompt_scope` is entered, once; it then travels with the scope.
Processes that enter scopes of one prompt on their own decide alike where the name and the number of prompts decide.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextvars import Token
from enum import Enum
from operator import index
from types import TracebackType
from typing import Any, Final
from uuid import UUID

from raytrace_rl import _otel_context, _scopes, _state, semconv
from raytrace_rl._interrupts import is_interrupt

PER_PROMPT: Final = frozenset({"per_prompt"})
_ROLLOUT: Final = "rollout"
#: Windows (steps, rollouts) whose prompts are remembered at once: asynchronous rollouts work ahead of training.
_WINDOWS: Final = 1024
#: Spans around a prompt that are looked through for its rollout.
_MAX_DEPTH: Final = 64

_lock: Final = threading.RLock()
_admitted: Final[OrderedDict[object, set[object]]] = OrderedDict()


class per_prompt_scope:
    """Marks the work inside as one prompt's, so that `in_per_prompt_scope` says so, in remote workers too.

    With ``per_prompt_limit`` set, the spans of ``PER_PROMPT`` groups inside are recorded for so many prompts of each
    step (outside any `iteration_scope`: of each rollout): every sample of a prompt or none. A scope inside another one,
    in a remote worker that was dispatched to from inside it too, belongs to the same prompt, and so has its answer.

    Scopes that processes enter on their own are counted by each process, the first prompts being recorded. Where
    samples of *one* prompt do so in several processes, give ``of``: then nothing is counted, and they all agree.

    Args:
        prompt: Names the prompt where its samples enter scopes of their own, such as an index or a hash; by default
            each scope is a prompt by itself.
        of: How many prompts the step has. A name from 0 to ``of - 1`` is then recorded if it is below the limit, which
            is the limit exactly; any other one (text, a UUID, a tuple of such) by its hash, which is the limit on
            average.
    """

    __slots__ = ("_of", "_prompt", "_token")

    def __init__(self, prompt: Hashable | None = None, *, of: int | None = None) -> None:
        self._prompt = prompt
        self._of = of
        self._token: Token[_scopes.Scopes | None] | None = None

    def __enter__(self) -> None:
        base = _scopes.var.get()
        if base is not None and base.per_prompt:
            return
        admitted = True
        try:
            admitted = admit(self._prompt, self._of)
        except Exception as error:  # a name of the user's that cannot be hashed or compared
            if is_interrupt(error):
                raise
            _state.warn_once("prompt", "per_prompt_scope(%.80r): name a prompt by something hashable.", self._prompt)
        self._token = _scopes.var.set(_scopes.make(base, per_prompt=True, muted=not admitted))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _scopes.leave(self._token)


def in_per_prompt_scope() -> bool:
    """True inside a `per_prompt_scope`."""
    scopes = _scopes.var.get()
    return scopes is not None and scopes.per_prompt


def muted() -> bool:
    """True inside a prompt that is not recorded."""
    scopes = _scopes.var.get()
    return scopes is not None and scopes.muted


def admit(prompt: Any, of: Any) -> bool:
    """Decides whether the spans of a prompt are recorded; arguments as for `per_prompt_scope`."""
    config = _state.config
    limit = config.per_prompt_limit if config is not None else None
    if limit is None:
        return True
    if prompt is None:
        return _counted(object(), limit)
    if of is not None:
        agreed = _agreed(prompt, of, limit)
        if agreed is not None:
            return agreed
    admitted = _counted(prompt, limit)
    if not admitted and of is None and getattr(_state.handle, "role", None) == semconv.ROLE_WORKER:
        _state.warn_once(
            "prompt-alone",
            "per_prompt_scope(%.80r) counts prompts in this process alone: where other processes work on samples of "
            "the same prompts, say how many the step has, per_prompt_scope(prompt, of=...), and all decide alike.",
            prompt,
        )
    return admitted


def forget() -> None:
    """Starts counting anew (a new start of telemetry, a forked child)."""
    _admitted.clear()


# -- in one process: the first ones ------------------------------------------------------------------------------------


def _counted(prompt: object, limit: int) -> bool:
    window = _window()
    with _lock:
        known = _admitted.get(window)
        if known is None:
            known = _admitted[window] = set()
            while len(_admitted) > _WINDOWS:
                _admitted.popitem(last=False)
        else:
            _admitted.move_to_end(window)
        if prompt in known:
            return True
        if len(known) >= limit:
            return False
        known.add(prompt)
        return True


def _window() -> object:
    """Returns what the limit is for: the step; without one the rollout around; else the call from outside; else None.

    Looked for and not kept: only a run with a bound pays for it.
    """
    scopes = _scopes.var.get()
    if scopes is not None and scopes.iteration is not None:
        return scopes.iteration
    context: Any = _otel_context.otel_var.get()
    for _ in range(_MAX_DEPTH):
        span = context.get(_otel_context.HELD_KEY)
        if span is None:
            break
        if span.group == _ROLLOUT:
            return span.span_id
        before = getattr(span._token, "old_value", None)  # what was current before it
        if before is None or before is Token.MISSING:
            return None
        context = before
    outside = context.get(_otel_context.SPAN_KEY)
    found = outside.get_span_context() if outside is not None else None
    return found.span_id if found is not None and found.is_valid else None


# -- in all processes alike: by the name -------------------------------------------------------------------------------


def _agreed(prompt: Any, of: Any, limit: int) -> bool | None:
    """Decides by nothing but the name, the number of prompts and the limit; None, with one warning, if it cannot.

    The step has no part in it: one process may work on a prompt in a rollout, another in a step.
    """
    try:
        number = index(of)
        if number < 1:
            raise ValueError
    except (TypeError, ValueError):
        _state.warn_once("prompt-of", "per_prompt_scope(of=%.80r): a whole number of prompts, from 1 up.", of)
        return None
    try:
        place = index(prompt)
    except TypeError:
        pass
    else:
        if 0 <= place < number:
            return place < limit
    text = _text(prompt)
    if text is None:
        _state.warn_once(
            "prompt-name",
            "per_prompt_scope(%.80r): a %s need not be the same in every process: name a prompt by an index, text, a "
            "UUID or a tuple of such. It is counted in this process alone.",
            prompt,
            type(prompt).__name__,
        )
        return None
    from hashlib import blake2b  # costs every worker 2 ms, and few name prompts

    share = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return share * number < limit << 64


def _text(prompt: Any) -> str | None:
    """Returns a name as text that is the same in every process, None if that cannot be told."""
    if isinstance(prompt, Enum):
        prompt = prompt.value
    if isinstance(prompt, str):
        return f"s{len(prompt)}:{prompt}"
    if isinstance(prompt, (bytes, UUID, float)) or prompt is None:
        return repr(prompt)
    if isinstance(prompt, tuple):
        parts = [_text(part) for part in prompt]
        return None if None in parts else f"({','.join(map(str, parts))})"
    try:
        return str(index(prompt))
    except TypeError:
        return None
