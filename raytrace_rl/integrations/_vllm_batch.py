"""vLLM's ``LLM``: each offline call is a span over its whole batch, and its requests are told when it has returned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import Span

from raytrace_rl import _carrier, _otel_context, _state
from raytrace_rl._clock import now_ns
from raytrace_rl._contextvar import safe
from raytrace_rl.instrumentation import in_per_prompt_scope, managed_span
from raytrace_rl.integrations import _vllm_requests
from raytrace_rl.integrations._vllm_calls import (
    BUSY_SPAN,
    GENERATE_SPAN,
    Busy,
    TracedEngine,
    failed,
    warn_without_timings,
)
from raytrace_rl.integrations._vllm_requests import Answer, Progress
from raytrace_rl.span_groups import RLSpanGroup as G

#: Carriers of the requests of the next batch, in order.
parents: Final[ContextVar[Sequence[Any] | None]] = safe(ContextVar("raytrace_rl_vllm_parents", default=None))


def batch(state: TracedEngine, plain: Callable[..., Any], operation: str | None) -> Callable[..., Any]:
    """Returns a method that generates, as a span.

    Args:
        state: What is kept of the engine.
        plain: The engine's method.
        operation: ``text_completion`` or ``chat``; None for a method that brings requests added before.
    """
    busy = Busy(BUSY_SPAN)

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        started = now_ns()
        prompts = args[0] if args else kwargs.get("prompts", kwargs.get("messages"))
        count = _count(prompts, operation)
        params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        per_prompt = in_per_prompt_scope()
        given = state.attributes(params, count, operation or "text_completion")
        answers: list[Answer] = []
        if per_prompt:
            busy.begin(given)
        try:
            with managed_span(G.PER_PROMPT if per_prompt else G.GENERATION, GENERATE_SPAN, **given) as span:
                started = now_ns()  # not before the span, which its requests lie inside
                outputs = plain(*args, **kwargs)
                # None: when a request was added before this call, the engine alone knows when.
                answers = _finish(state, outputs, span, started, started if operation is not None else None)
            return outputs
        except BaseException:
            for _ in range(count or 1):
                state.count(Answer(), started, now_ns())
            raise
        finally:
            if per_prompt:
                busy.end(answers, state.version)

    return generate


def _count(prompts: Any, operation: str | None) -> int | None:
    """Returns the number of prompts: a string, a dict, or a conversation (a list of messages) is one."""
    if operation is None or prompts is None:
        return None
    if not isinstance(prompts, (list, tuple)):
        return 1
    if operation == "chat" and prompts and isinstance(prompts[0], Mapping):
        return 1
    if prompts and isinstance(prompts[0], int):  # token ids of one prompt
        return 1
    return len(prompts)


def _finish(state: TracedEngine, outputs: Any, span: Span | None, call_ns: int, started_ns: int | None) -> list[Answer]:
    """Tells of the requests of a call that has returned."""
    answers: list[Answer] = []
    try:
        ended = now_ns()
        answers = [Progress().see(output) for output in outputs if hasattr(output, "outputs")]
        for answer in answers:
            state.count(answer, call_ns, ended)
        if span is not None:
            span.set_attributes(_vllm_requests.totals(answers, state.version))
        if state.native or not _vllm_requests.wanted():
            return answers
        warn_without_timings(answers)
        here: Context = _otel_context.otel_var.get()
        call = span.get_span_context() if span is not None else None
        for answer, own in zip(answers, _own_parents(len(answers)), strict=True):
            parent, link = (here, None) if own is None else (own, call)
            _vllm_requests.emit(answer, parent, started_ns, ended, version=state.version, call=link)
    except Exception as error:
        failed(error)
    return answers


def _own_parents(count: int) -> list[Context | None]:
    """Returns, for each request, the context that it was given a carrier of; None for those that have none."""
    carriers = parents.get()
    if carriers is not None and len(carriers) != count:
        _state.warn_once(
            "vllm-parents",
            "request_parents() names %d parents for %d requests: all of them hang under the call.",
            len(carriers),
            count,
        )
        carriers = None
    if carriers is None:
        return [None] * count
    attached = [_carrier.read(carrier, False) for carrier in carriers]
    return [found[0] if found is not None else None for found in attached]
