"""vLLM's ``LLMEngine``, driven by hand: requests are added, steps bring what they made, and spans tell of both."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import Any

from opentelemetry.context import Context

from raytrace_rl import _carrier, _otel_context
from raytrace_rl._clock import now_ns
from raytrace_rl.integrations import _vllm_requests
from raytrace_rl.integrations._vllm_batch import calling
from raytrace_rl.integrations._vllm_calls import (
    GENERATE_SPAN,
    Busy,
    TracedEngine,
    failed,
    headers_of,
    warn_without_timings,
)
from raytrace_rl.integrations._vllm_methods import Method, method_of
from raytrace_rl.integrations._vllm_requests import Progress


def stepping(state: TracedEngine, engine: Any) -> dict[str, Method]:
    """Returns the engine's methods, wrapped: each request is a span under what was current when it was added."""
    waiting = _Waiting(state)
    found = {name: method_of(engine, name) for name in ("add_request", "step", "abort_request")}
    return {
        "add_request": _adding(state, waiting, found["add_request"]),
        "step": _stepping(waiting, found["step"]),
        "abort_request": _aborting(waiting, found["abort_request"]),
    }


class _Request:
    """A request that has not been answered.

    Args:
        params: As they were given to the engine.
    """

    def __init__(self, request_id: str, params: Any) -> None:
        kind = getattr(getattr(params, "output_kind", None), "name", "")
        self.ids = {request_id}
        self.context = contextvars.copy_context()
        self.started = now_ns()
        self.progress = Progress(pieces=kind == "DELTA")
        self.progress.answer.request_id = request_id


class _Waiting:
    """The requests that an engine has not answered, by the ids that it knows them by: two may have the same."""

    def __init__(self, state: TracedEngine) -> None:
        self._state = state
        self._busy = Busy(GENERATE_SPAN)
        self._lock = threading.Lock()
        self._requests: dict[_Request, None] = {}
        self._by_id: dict[str, list[_Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: _Request, params: Any) -> None:
        with self._lock:
            self._requests[request] = None
            for one in request.ids:
                self._by_id.setdefault(one, []).append(request)
        self._busy.begin(self._state.attributes(params, None, "text_completion"))

    def see(self, output: Any) -> None:
        """Takes an output into account. Of requests with the same id the oldest is the one that is answered."""
        requests = self._by_id.get(getattr(output, "request_id", ""))
        if requests:
            request = requests[0]
            request.progress.see(output)
            if output.finished:
                self._finish(request, None)

    def abort(self, request_ids: Any) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            for request in list(self._by_id.get(request_id, ())):
                self._finish(request, "aborted")

    def lose(self, error: str) -> None:
        """The engine will answer none of them."""
        for request in list(self._requests):
            self._finish(request, error)

    def _finish(self, request: _Request, error: str | None) -> None:
        with self._lock:
            if request not in self._requests:
                return
            del self._requests[request]
            for one in request.ids:
                same = self._by_id[one]
                same.remove(request)
                if not same:
                    del self._by_id[one]
        answer = request.progress.answer
        self._state.count(answer, request.started, ended := now_ns())
        if error is not None or not self._state.tells(answer):
            request.context.run(self._emit, request, ended, error)
        self._busy.end([answer], self._state.version)

    def _emit(self, request: _Request, ended: int, error: str | None) -> None:
        if _vllm_requests.wanted():
            answer = request.progress.answer
            if error is None:
                warn_without_timings([answer])
            here: Context = _otel_context.otel_var.get()
            _vllm_requests.emit(answer, here, request.started, ended, version=self._state.version, error=error)


def _adding(state: TracedEngine, waiting: _Waiting, plain: Any) -> Method:
    @functools.wraps(plain)
    def add_request(engine: Any, request_id: Any, *args: Any, **kwargs: Any) -> Any:
        if calling.get() is not None:  # an ``LLM``'s own: it tells of the request
            return plain(engine, request_id, *args, **kwargs)
        params = kwargs.get("params", args[1] if len(args) > 1 else None)
        if state.native and len(args) < 6 and "trace_headers" not in kwargs:
            kwargs["trace_headers"] = headers_of(_carrier.current()) or None
        request = _Request(str(request_id), params)
        result = plain(engine, request_id, *args, **kwargs)
        try:
            if isinstance(result, str):  # by which it can be aborted as well
                request.ids.add(result)
            waiting.add(request, params)
        except Exception as error:
            failed(error)
        return result

    return add_request


def _stepping(waiting: _Waiting, plain: Any) -> Method:
    @functools.wraps(plain)
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            outputs = plain(engine, *args, **kwargs)
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":
                waiting.lose(type(error).__name__)
            raise
        try:
            for output in outputs:
                waiting.see(output)
            # Aborted in some other way: by going to sleep, say.
            if len(waiting) and getattr(engine, "get_num_unfinished_requests", lambda: 1)() == 0:
                waiting.lose("lost")
        except Exception as error:
            failed(error)
        return outputs

    return step


def _aborting(waiting: _Waiting, plain: Any) -> Method:
    @functools.wraps(plain)
    def abort_request(engine: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(engine, request_ids, *args, **kwargs)
        try:
            waiting.abort(request_ids)
        except Exception as error:
            failed(error)
        return result

    return abort_request
