"""vLLM's ``AsyncLLM``: each call is one request, and a span that ends with its stream."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from opentelemetry.context import Context

from raytrace_rl import _carrier, _otel_context, _state
from raytrace_rl._clock import now_ns
from raytrace_rl._span import RecordingSpan
from raytrace_rl.instrumentation import in_per_prompt_scope
from raytrace_rl.integrations import _vllm_requests
from raytrace_rl.integrations._vllm_calls import (
    BUSY_SPAN,
    GENERATE_SPAN,
    Busy,
    TracedEngine,
    failed,
    headers_of,
    warn_without_timings,
)
from raytrace_rl.integrations._vllm_requests import Answer, Progress
from raytrace_rl.span_groups import RLSpanGroup as G


def streaming(state: TracedEngine, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``AsyncLLM.generate`` (``plain``, as a function of the engine) as a span."""
    busy = Busy(BUSY_SPAN)

    @functools.wraps(plain)
    async def generate(engine: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        per_prompt = in_per_prompt_scope()
        call = _Call(state, G.PER_PROMPT if per_prompt else G.GENERATION, params)
        call.name(kwargs.get("request_id", args[2] if len(args) > 2 else ""))
        if per_prompt:
            # Spans of a prompt's own carry no bucket, and they overlap: the engine's time is this one's.
            busy.begin(state.attributes(params, None, "text_completion"))
        stream: Any = None
        try:
            if state.native and "trace_headers" not in kwargs:
                kwargs["trace_headers"] = call.headers() or None
            stream = plain(engine, *args, **kwargs)
            async for output in stream:
                call.see(output)
                yield output
        except BaseException as error:
            call.fail(error)
            raise
        finally:
            try:
                if stream is not None:  # at once, not when it is collected: the engine shall stop working on it
                    await stream.aclose()
            finally:
                answer = call.end()
                if per_prompt:
                    busy.end([answer], state.version)

    return generate


class _Call:
    """One streamed call, which is one request. Its span is never current: its steps run in whoever awaits them."""

    def __init__(self, state: TracedEngine, group: str, params: Any) -> None:
        self._state = state
        self._context: Context = _otel_context.otel_var.get()
        kind = getattr(getattr(params, "output_kind", None), "name", "")
        self._progress = Progress(pieces=kind == "DELTA")
        self._error: str | None = None
        self._span: RecordingSpan | None = None
        try:
            if group in _state.enabled and (group != G.PER_PROMPT or _vllm_requests.wanted()):
                span = RecordingSpan(group, GENERATE_SPAN, state.attributes(params, 1, "text_completion"))
                span.begin(self._context)
                self._span = span
                self._context = Context({**self._context, _otel_context.SPAN_KEY: span})
        except Exception as error:
            failed(error)
        self._started = now_ns()

    def name(self, request_id: Any) -> None:
        """Notes what the caller calls the request: one that is never answered has no other name."""
        self._progress.answer.request_id = request_id if isinstance(request_id, str) else ""

    def headers(self) -> dict[str, str]:
        """Returns the W3C headers of the call, for vLLM's own spans."""
        token = _otel_context.otel_var.set(self._context)
        try:
            return headers_of(_carrier.current())
        finally:
            _otel_context.otel_var.reset(token)

    def see(self, output: Any) -> None:
        try:
            self._progress.see(output)
        except Exception as error:
            failed(error)

    def fail(self, error: BaseException) -> None:
        self._error = type(error).__name__
        if self._span is not None:
            self._span.fail(error)

    def end(self) -> Answer:
        state, answer, ended = self._state, self._progress.answer, now_ns()
        try:
            state.count(answer, self._started, ended)
            if self._span is not None:
                self._span.set_attributes(_vllm_requests.totals([answer], state.version))
            if not state.tells(answer) and _vllm_requests.wanted():
                error = self._error if self._error != "GeneratorExit" or not answer.reasons else None
                if answer.reasons:
                    warn_without_timings([answer])
                _vllm_requests.emit(answer, self._context, self._started, ended, version=state.version, error=error)
        except Exception as failure:
            failed(failure)
        if self._span is not None:
            self._span.end(ended)
        return answer
