"""Tracing one vLLM engine: its methods are wrapped by what kind of engine it is."""

from __future__ import annotations

import inspect
from typing import Any, Final

from raytrace_rl.integrations import _versions
from raytrace_rl.integrations._vllm_batch import adding, batch
from raytrace_rl.integrations._vllm_calls import TracedEngine
from raytrace_rl.integrations._vllm_methods import Method, method_of, replace
from raytrace_rl.integrations._vllm_refit import managed
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
    generate = method_of(engine, "generate")
    methods: dict[str, Method]
    if generate is not None and inspect.isasyncgenfunction(getattr(engine, "generate", None)):
        methods = {"generate": streaming(state, generate)}
    elif hasattr(engine, "llm_engine") and generate is not None:
        methods = _batches(state, engine)
    elif not _versions.lacking(engine, ("add_request", "step", "abort_request")):
        methods = stepping(state, engine)
    else:
        _versions.unknown_api("vllm", f"engine of the shape of {type(engine).__name__}", "its calls make no spans")
        return
    engine.__dict__[_STATE] = state
    replace(engine, {**methods, **managed(state, engine)})


def _batches(state: TracedEngine, llm: Any) -> dict[str, Method]:
    methods: dict[str, Method] = {}
    for name, operation in _BATCHES.items():
        if (plain := method_of(llm, name)) is not None:
            methods[name] = batch(state, plain, operation)
    add_request = method_of(llm.llm_engine, "add_request")
    if add_request is None:
        _versions.unknown_api("vllm", "LLM.llm_engine.add_request", "requests that come to nothing make no spans")
    else:
        replace(llm.llm_engine, {"add_request": adding(state, add_request)})
    return methods
