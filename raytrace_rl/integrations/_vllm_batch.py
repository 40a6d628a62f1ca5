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
    headers_of,
    warn_without_timings,
)
from raytrace_rl.integrations._vllm_requests import Answer, Progress
from raytrace_rl.span_groups import RLSpanGroup as G

#: Carriers of the requests of the next batch, in order.
parents: Final[ContextVar[Sequence[Any] | None]] = safe(ContextVar("raytrace_rl_vllm_parents", default=None))
#: The offline call that is under way.
calling: Final[ContextVar[Batch | None]] = safe(ContextVar("raytrace_rl_vllm_calling", default=None))


def batch(state: TracedEngine, plain: Callable[..., Any], operation: str | None) -> Callable[..., Any]:
    """Returns a method that generates, as a span.

    Args:
        state: What is kept of the engine.
        plain: The engine's method, as a function of the engine.
        operation: ``text_completion`` or ``chat``; None for a method that brings requests added before.
    """
    busy = Busy(BUSY_SPAN)

    @functools.wraps(plain)
    def generate(engine: Any, *args: Any, **kwargs: Any) -> Any:
        prompts = args[0] if args else kwargs.get("prompts", kwargs.get("messages"))
        params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        count = _count(prompts, operation)
        per_prompt = in_per_prompt_scope()
        given = state.attributes(params, count, operation or "text_completion")
        call = Batch(state, count, added_before=operation is None)
        if per_prompt:
            busy.begin(given)
        try:
            with managed_span(G.PER_PROMPT if per_prompt else G.GENERATION, GENERATE_SPAN, **given) as span:
                call.begin()
                token = calling.set(call)
                try:
                    outputs = plain(engine, *args, **kwargs)
                except BaseException as error:
                    call.fail(type(error).__name__)
                    raise
                finally:
                    calling.reset(token)
                call.finish(outputs, span)
            return outputs
        finally:
            if per_prompt:
                busy.end(call.answers, state.version)

    return generate


def adding(state: TracedEngine, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``add_request`` of an ``LLM``'s own engine, which tells the call under way what its requests are."""

    @functools.wraps(plain)
    def add_request(engine: Any, request_id: Any, *args: Any, **kwargs: Any) -> Any:
        call = calling.get()
        if call is not None:
            headers = call.headers()
            if state.native and len(args) < 6 and "trace_headers" not in kwargs:
                kwargs["trace_headers"] = headers or None
        result = plain(engine, request_id, *args, **kwargs)
        if call is not None:
            call.added.append(str(request_id))
        return result

    return add_request


class Batch:
    """One offline call.

    Args:
        state: What is kept of the engine.
        count: Its prompts; None where that is not known.
        added_before: Its requests were added before it.

    Attributes:
        added: The ids of its requests, in order; empty where vLLM does not tell.
        answers: What came of them.
    """

    def __init__(self, state: TracedEngine, count: int | None, *, added_before: bool) -> None:
        self.added: list[str] = []
        self.answers: list[Answer] = []
        self._state = state
        self._count = count
        self._added_before = added_before
        self._carriers = parents.get()
        if count is not None:
            self._check(count)
        self._started = now_ns()

    def begin(self) -> None:
        """Its span has begun: none of its requests begins before that."""
        self._started = now_ns()

    def headers(self) -> dict[str, str]:
        """Returns the W3C headers of the request that is added next."""
        return headers_of(self._carrier(len(self.added)) or _carrier.current())

    def finish(self, outputs: Any, span: Span | None) -> None:
        """Tells of its requests: it has returned."""
        try:
            ended = now_ns()
            answers = [Progress().see(output) for output in outputs if hasattr(output, "outputs")]
            for answer in answers:
                self._state.count(answer, self._started, ended)
            if self._count is None:
                self._check(len(answers))
            self.answers = answers
            if span is not None:
                span.set_attributes(_vllm_requests.totals(answers, self._state.version))
            if not self._state.native:
                warn_without_timings(answers)
            # vLLM returns a batch in the order of its prompts, without those that were aborted.
            answered = {answer.request_id for answer in answers}
            told = {request_id: place for place, request_id in enumerate(self.added)}
            call = span.get_span_context() if span is not None else None
            for place, answer in enumerate(answers):
                # What this call has not added was there before it: when it was asked, the engine alone knows.
                here = not self._added_before and (answer.request_id in told or not told)
                place = told.get(answer.request_id, -1 if told else place)  # noqa: PLW2901
                self._emit(answer, place, self._started if here else None, ended, call)
            for request_id, place in told.items():
                if request_id not in answered:
                    self._lost(request_id, place, ended, "aborted", call)
        except Exception as error:
            failed(error)

    def fail(self, error: str) -> None:
        """Tells of its requests: it has raised."""
        try:
            ended = now_ns()
            for place, request_id in enumerate(self.added):
                self._lost(request_id, place, ended, error, None)
            for _ in range(max(self._count or 1, len(self.added)) - len(self.added)):
                self._state.count(Answer(), self._started, ended)
        except Exception as failure:
            failed(failure)

    def _lost(self, request_id: str, place: int, ended: int, error: str, call: Any) -> None:
        answer = Answer(request_id)
        self._state.count(answer, self._started, ended)
        self._emit(answer, place, self._started, ended, call, error)

    def _emit(
        self, answer: Answer, place: int, started: int | None, ended: int, call: Any, error: str | None = None
    ) -> None:
        if self._state.tells(answer) or not _vllm_requests.wanted():
            return
        here: Context = _otel_context.otel_var.get()
        own = _carrier.read(self._carrier(place) or {}, False)
        parent, link = (here, None) if own is None else (own[0], call)
        _vllm_requests.emit(answer, parent, started, ended, version=self._state.version, call=link, error=error)

    def _carrier(self, place: int) -> Mapping[str, str] | None:
        carriers = self._carriers
        return carriers[place] if carriers is not None and 0 <= place < len(carriers) else None

    def _check(self, count: int) -> None:
        if self._carriers is not None and len(self._carriers) != count:
            _state.warn_once(
                "vllm-parents",
                "request_parents() names %d parents for %d requests: all of them hang under the call.",
                len(self._carriers),
                count,
            )
            self._carriers = None


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
