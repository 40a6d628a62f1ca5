"""What the calls of all kinds of vLLM engines share: what is kept of an engine, and the time in which it is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

from raytrace_rl import _otel_context, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._span import RecordingSpan
from raytrace_rl.integrations import _vllm_requests
from raytrace_rl.integrations._trajectories import RL_WEIGHT_VERSION_ATTR
from raytrace_rl.integrations._vllm_requests import Answer
from raytrace_rl.integrations._vllm_stats import GenerationStats
from raytrace_rl.span_groups import RLSpanGroup as G

GENERATE_SPAN: Final = "rl.vllm.generate"
#: While prompts' own spans, which overlap and carry no bucket, say what an engine does: the time in which it does any.
BUSY_SPAN: Final = "rl.vllm.busy"


class Busy:
    """The time in which an engine has any request at all, as a span that does not overlap itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        self._span: RecordingSpan | None = None
        self._answers: list[Answer] = []

    def begin(self, attributes: dict[str, Any]) -> None:
        """A call has begun."""
        with self._lock:
            self._count += 1
            if self._count == 1 and G.GENERATION in _state.enabled:
                self._span = RecordingSpan(G.GENERATION, self._name, attributes)
                self._span.begin(_otel_context.otel_var.get())

    def end(self, answers: Iterable[Answer], version: Any) -> None:
        """A call has ended; ``answers`` are its requests."""
        with self._lock:
            self._count = max(0, self._count - 1)
            span = self._span
            if span is None:
                return
            self._answers += answers
            if not self._count:
                span.set_attributes(_vllm_requests.totals(self._answers, version))
                span.end()
                self._span = None
                self._answers = []


class TracedEngine:
    """What is kept of one engine.

    Attributes:
        version: Weights that it generates with, as far as it has been told.
    """

    def __init__(self, engine: Any, version: Any) -> None:
        self.version = version
        self._lock = threading.Lock()
        self._stats = GenerationStats()
        config = getattr(engine, "model_config", None)
        model = getattr(config, "served_model_name", None) or getattr(config, "model", None)
        self.model = model[0] if isinstance(model, (list, tuple)) and model else model
        settings = getattr(getattr(engine, "llm_engine", engine), "vllm_config", None)
        observability = getattr(settings, "observability_config", None)
        #: Where vLLM, asked for request spans of its own, would send them.
        self.endpoint: str | None = getattr(observability, "otlp_traces_endpoint", None)

    @property
    def native(self) -> bool:
        """VLLM makes request spans of its own."""
        return bool(self.endpoint)

    def tells(self, answer: Answer) -> bool:
        """VLLM makes a span of this request: of none that was aborted, or never answered."""
        return self.native and bool(answer.reasons) and "abort" not in answer.reasons

    def take_stats(self) -> GenerationStats:
        """Returns the counts since they were taken last."""
        with self._lock:
            taken, self._stats = self._stats, GenerationStats()
        return taken

    def count(self, answer: Answer, started_ns: int, ended_ns: int) -> None:
        """Counts one request."""
        stats = answer.stats
        stats.started_ns, stats.ended_ns = started_ns, ended_ns
        with self._lock:
            self._stats.add(stats)

    def attributes(self, params: Any, prompts: int | None, operation: str) -> dict[str, Any]:
        """Returns what is known of a call at its start."""
        try:
            if isinstance(params, (list, tuple)):
                params = params[0] if params else None
            found = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": self.model,
                "gen_ai.request.max_tokens": getattr(params, "max_tokens", None),
                "gen_ai.request.temperature": getattr(params, "temperature", None),
                "gen_ai.request.top_p": getattr(params, "top_p", None),
                "rl.num_prompt_groups": prompts,
                "rl.num_generations_per_prompt": getattr(params, "n", None),
                RL_WEIGHT_VERSION_ATTR: self.version,
            }
        except Exception as error:  # parameters of the user's own making
            failed(error)
            return {}
        return {key: value for key, value in found.items() if value is not None}


def headers_of(carrier: Mapping[str, str]) -> dict[str, str]:
    """Returns those of a carrier's keys that are W3C trace headers."""
    return {name: carrier[name] for name in ("traceparent", "tracestate") if name in carrier}


def failed(error: Exception) -> None:
    if is_interrupt(error):
        raise error
    _state.count_drop("spans")
    _state.warn_once("vllm", "A vLLM call is traced only in part: %r", error)


def warn_without_timings(answers: Iterable[Answer]) -> None:
    if any(answer.timings is None for answer in answers):
        _state.warn_once(
            "vllm-timings",
            "The engine keeps no timings of its requests, so that their spans last as long as the call: "
            "build it with disable_log_stats=False (integrations.vllm.engine_args() has it).",
        )
