"""Tracing one vLLM engine: its methods are wrapped by what kind of engine it is, and the object stays what it was."""

from __future__ import annotations

import inspect
from typing import Any, Final

from raytrace_rl.integrations import _versions
from raytrace_rl.integrations._vllm_batch import batch
from raytrace_rl.integrations._vllm_calls import TracedEngine
from raytrace_rl.integrations._vllm_refit import manage
from raytrace_rl.integrations._vllm_steps import stepping
from raytrace_rl.integrations._vllm_stream import streaming

_STATE: Final = "_raytrace_engine"
#: Methods of an ``LLM`` that generate, and the operation that each is.
_BATCHES: Final = {"generate": "text_completion", "chat": "chat", "wait_for_completion": None}


def state_of(engine: Any) -> TracedEngine | None:
    """Returns what is kept of a traced engine; None of any other object."""
    found = getattr(engine, "__dict__", {}).get(_STATE)
    return found if isinstance(found, TracedEngine) else None


def trace(engine: Any, version: Any) -> None:
    """Wraps the methods of an engine: an ``LLM``, an ``LLMEngine`` or an ``AsyncLLM``, told apart by what they have."""
    state = state_of(engine)
    if state is not None:
        if version is not None:
            state.version = version
        return
    state = TracedEngine(engine, version)
    if inspect.isasyncgenfunction(getattr(engine, "generate", None)):
        engine.generate = streaming(state, engine.generate)
    elif hasattr(engine, "llm_engine") and callable(getattr(engine, "generate", None)):
        missing = _versions.lacking(engine, _BATCHES)
        for name in missing:
            _versions.unknown_api("vllm", f"LLM.{name}", "it makes no spans")
        for name in _BATCHES.keys() - missing:
            setattr(engine, name, batch(state, getattr(engine, name), _BATCHES[name]))
    elif not _versions.lacking(engine, ("add_request", "step", "abort_request")):
        stepping(state, engine)
    else:
        _versions.unknown_api("vllm", f"engine of the shape of {type(engine).__name__}", "its calls make no spans")
        return
    engine.__dict__[_STATE] = state
    manage(state, engine)
