"""The bound on per-prompt spans: the first N prompts of a step are recorded, whole groups or not at all.

Whether a prompt is recorded is decided where its `per_prompt_scope` is entered, once; it then travels with the scope,
so that every sample of a prompt, in whatever process, is recorded or none is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from raytrace_rl import _scopes, _state

PER_PROMPT: Final = frozenset({"per_prompt"})
#: Steps whose prompts are remembered at once: asynchronous rollouts work ahead of training.
_STEPS: Final = 64

_lock: Final = threading.RLock()
_admitted: Final[OrderedDict[int | None, set[object]]] = OrderedDict()


def admit(iteration: int | None, prompt: object) -> bool:
    """Decides whether the spans of a prompt are recorded.

    Args:
        iteration: The step that it belongs to.
        prompt: What names it; the same one gets the same answer within a step. A fresh object counts by itself.

    Returns:
        True for all, unless ``per_prompt_limit`` is set and was reached by other prompts of the step.
    """
    config = _state.config
    limit = config.per_prompt_limit if config is not None else None
    if limit is None:
        return True
    with _lock:
        known = _admitted.get(iteration)
        if known is None:
            known = _admitted[iteration] = set()
            while len(_admitted) > _STEPS:
                _admitted.popitem(last=False)
        if prompt in known:
            return True
        if len(known) >= limit:
            return False
        known.add(prompt)
        return True


def forget() -> None:
    """Starts counting anew (a new start of telemetry, a forked child)."""
    _admitted.clear()


def muted() -> bool:
    """True inside a prompt that is not recorded."""
    scopes = _scopes.var.get()
    return scopes is not None and scopes.muted
