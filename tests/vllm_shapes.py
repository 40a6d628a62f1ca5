"""Engines of the shape of vLLM's, and what they answer with."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PARAMS = SimpleNamespace(max_tokens=8, temperature=0.5, top_p=1.0, n=2, output_kind=None)
PHASES = ["rl.vllm.request.queued", "rl.vllm.request.prefill", "rl.vllm.request.decode"]


def output(request_id: str = "r", tokens: int = 3, reasons: tuple[str | None, ...] = ("length",), **more: Any) -> Any:
    """A ``RequestOutput``: four prompt tokens, and ``tokens`` in each sample."""
    samples = [
        SimpleNamespace(index=i, token_ids=[1] * tokens, finish_reason=reason, weight_versions=more.get("versions"))
        for i, reason in enumerate(reasons)
    ]
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3, 4],
        num_cached_tokens=0,
        outputs=samples,
        metrics=more.get("metrics"),
        finished=all(reasons),
    )


def timings(clock_s: float = 0.0) -> Any:
    """``RequestStateStats`` of a request answered just now, on a monotonic clock that is ``clock_s`` off."""
    last = monotonic() + clock_s
    return SimpleNamespace(
        queued_ts=last - 4e-3, scheduled_ts=last - 3e-3, first_token_ts=last - 2e-3, last_token_ts=last
    )


class LLM:
    """The shape of vLLM's ``LLM``."""

    def __init__(self, answers: Any = (), endpoint: str | None = None) -> None:
        self.model_config = SimpleNamespace(model="tiny")
        self.llm_engine = LLMEngine(endpoint)
        self.answers = answers
        self.added: Any = None  # ids, where they are not those of the answers

    def generate(self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True) -> Any:
        failure = self.answers if isinstance(self.answers, BaseException) else None
        answers = [] if failure else list(self.answers)
        for request_id in [answer.request_id for answer in answers] if self.added is None else self.added:
            self.llm_engine.add_request(request_id, "prompt", sampling_params)
        if failure is not None:
            raise failure
        return answers

    def chat(self, messages: Any, sampling_params: Any = None) -> Any:
        return list(self.answers)

    def wait_for_completion(self) -> Any:
        return list(self.answers)

    def sleep(self, level: int = 1) -> int:
        return level

    def wake_up(self) -> str:
        return "awake"

    def collective_rpc(self, method: Any, args: tuple = ()) -> Any:
        return [method, args]

    def update_weights(self, request: Any) -> Any:
        return self.collective_rpc("update_weights", (request,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.collective_rpc("finish_weight_update")


class AsyncLLM:
    """The shape of vLLM's ``AsyncLLM``."""

    def __init__(self, answers: list[Any], endpoint: str | None = None) -> None:
        self.model_config = SimpleNamespace(model="tiny", served_model_name=["served"])
        self.vllm_config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
        self.answers = answers
        self.headers: list[Any] = []
        self.closed = 0

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, trace_headers: Any = None
    ) -> AsyncIterator[Any]:
        self.headers.append(trace_headers)
        try:
            for answer in self.answers:
                await asyncio.sleep(0)
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            self.closed += 1

    async def sleep(self, level: int = 1) -> int:
        return level

    async def collective_rpc(self, method: Any) -> Any:
        await asyncio.sleep(0)
        return method

    async def update_weights(self, request: Any) -> Any:
        return await self.collective_rpc("update_weights")

    async def update_weight_version(self, new_version: str) -> None:
        await asyncio.sleep(0)


class LLMEngine:
    """The shape of vLLM's ``LLMEngine``."""

    def __init__(self, endpoint: str | None = None) -> None:
        self.vllm_config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))
        self.queue: list[Any] = []
        self.headers: list[Any] = []
        self.unfinished = 1
        self.failure: Exception | None = None

    def add_request(self, request_id: str, prompt: Any, params: Any, trace_headers: Any = None) -> str:
        self.headers.append(trace_headers)
        return f"internal-{request_id}"

    def get_num_unfinished_requests(self) -> int:
        return self.unfinished

    def abort_request(self, request_ids: Any) -> None:
        pass

    def step(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return [self.queue.pop(0)] if self.queue else []

    def set_weight_version(self, weight_version: str) -> None:
        pass


def names(telemetry: Any) -> list[str]:
    """The names of all ended spans, in the order in which they ended."""
    return [span.name for span in telemetry.spans()]


async def collect(stream: Any) -> list[Any]:
    """All that a stream brings."""
    return [one async for one in stream]


class EngineDeadError(Exception):
    """As vLLM calls it."""
