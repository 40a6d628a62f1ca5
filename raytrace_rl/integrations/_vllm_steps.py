"""vLLM's ``LLMEngine``, driven by hand: requests are added, steps bring what they made, and spans tell of both."""

from __future__ import annotations

import contextvars
import functools
from typing import Any

from opentelemetry.context import Context

from raytrace_rl import _carrier, _otel_context
from raytrace_rl._clock import now_ns
from raytrace_rl.integrations import _vllm_requests
from raytrace_rl.integrations._vllm_calls import (
    GENERATE_SPAN,
    Busy,
    TracedEngine,
    failed,
    headers_of,
    warn_without_timings,
)
from raytrace_rl.integrations._vllm_requests import Answer, Progress


def stepping(state: TracedEngine, engine: Any) -> None:
    """Wraps the engine: each request is a span under what was current when it was added."""
    busy = Busy(GENERATE_SPAN)
    waiting: dict[str, tuple[contextvars.Context, int, Progress]] = {}
    plain_add, plain_step, plain_abort = engine.add_request, engine.step, engine.abort_request

    def finish(request_id: str, output: Any) -> None:
        context, started, progress = waiting.pop(request_id)
        answer = progress.answer
        state.count(answer, started, ended := now_ns())
        error = None if output is not None else "aborted"
        if not state.native:
            context.run(_emit_here, state, answer, started, ended, error)
        busy.end([answer], state.version)

    @functools.wraps(plain_add)
    def add_request(request_id: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("params", args[1] if len(args) > 1 else None)
        if state.native and len(args) < 6 and "trace_headers" not in kwargs:
            kwargs["trace_headers"] = headers_of(_carrier.current()) or None
        result = plain_add(request_id, *args, **kwargs)
        try:
            kind = getattr(getattr(params, "output_kind", None), "name", "")
            waiting[request_id] = contextvars.copy_context(), now_ns(), Progress(pieces=kind == "DELTA")
            busy.begin(state.attributes(params, None, "text_completion"))
        except Exception as error:
            failed(error)
        return result

    @functools.wraps(plain_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        outputs = plain_step(*args, **kwargs)
        try:
            for output in outputs:
                request_id = getattr(output, "request_id", None)
                if request_id in waiting:
                    waiting[request_id][2].see(output)
                    if output.finished:
                        finish(request_id, output)
        except Exception as error:
            failed(error)
        return outputs

    @functools.wraps(plain_abort)
    def abort_request(request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_abort(request_ids, *args, **kwargs)
        try:
            for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
                if request_id in waiting:
                    finish(request_id, None)
        except Exception as error:
            failed(error)
        return result

    engine.add_request, engine.step, engine.abort_request = add_request, step, abort_request


def _emit_here(state: TracedEngine, answer: Answer, started: int, ended: int, error: str | None) -> None:
    if _vllm_requests.wanted():
        if error is None:
            warn_without_timings([answer])
        here: Context = _otel_context.otel_var.get()
        _vllm_requests.emit(answer, here, started, ended, version=state.version, error=error)
