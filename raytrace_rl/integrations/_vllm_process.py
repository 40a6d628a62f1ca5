"""What a vLLM engine does to processes: its children get telemetry by environment, and its own tracing stays in hand.

vLLM (0.32) makes a TracerProvider of its own where it is given an OTLP endpoint, and writes that endpoint into the
environment, whence each child does the same; so do the children of an engine that was never asked for spans, if the
variable was there for somebody else. Here, spans that vLLM makes go to the spool like any others: our provider stands
first in a traced process, and in vLLM's children takes over from vLLM's. The variable is hidden while an engine starts,
and what vLLM writes there is taken back.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import Span

from raytrace_rl import _env_carrier, _process, _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.config import rank_identity
from raytrace_rl.instrumentation import umbrella_span
from raytrace_rl.setup import get_telemetry_handle, init_telemetry_worker
from raytrace_rl.span_groups import RLSpanGroup as G

LOAD_SPAN: Final = "rl.vllm.load_model"
#: What a process of an engine is called there: ``EngineCore``, ``VllmWorker-0``.
RL_VLLM_PROCESS_ATTR: Final = "rl.vllm.process"

_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PLUGINS: Final = "VLLM_PLUGINS"
_PLUGIN: Final = "raytrace_rl"
_GROUP: Final = "RAYTRACE_RL_WORKER_GROUP"
#: Processes of an engine are no ranks of their actor's group: identity is the pair of group and rank.
_SUFFIX: Final = ".engine"
#: An attribute of the resource of vLLM's own provider.
_VLLM_RESOURCE: Final = "vllm.instrumenting_module_name"


def plugin() -> None:
    """Starts telemetry in a process that vLLM has started (``vllm.general_plugins``), if the environment enables it.

    vLLM calls it in every one of its processes. In the one that made the engine nothing happens: who traces has started
    there already.
    """
    try:
        if get_telemetry_handle() is None and (multiprocessing.parent_process() is not None or _is_ray_worker()):
            group = rank_identity().worker_group or "vllm"
            init_telemetry_worker(
                worker_group=group if group.endswith(_SUFFIX) else group + _SUFFIX,
                resource_attributes={RL_VLLM_PROCESS_ATTR: multiprocessing.current_process().name},
            )
            config = _state.config if get_telemetry_handle() is not None else None
            if config is not None and (config.vllm_native_tracing or config.exporter == "otlp"):
                _take_over()
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("vllm-plugin", "A process of a vLLM engine has no telemetry: %r", error)


def engine_args() -> dict[str, Any]:
    """Returns what an engine is to be built with: timings of its requests, and, if asked for, spans of its own."""
    found: dict[str, Any] = {"disable_log_stats": False}
    config = _state.config
    handle = get_telemetry_handle()
    if handle is None or config is None or not (config.vllm_native_tracing and config.traces_enabled):
        return found
    allowed = os.environ.get(_PLUGINS)
    if allowed is not None and _PLUGIN not in allowed.split(","):
        _state.warn_once(
            "vllm-native", "vLLM's own spans stay off: %s leaves out %r, which keeps them.", _PLUGINS, _PLUGIN
        )
        return found
    found["otlp_traces_endpoint"] = native_endpoint()
    return found


def native_endpoint() -> str:
    """Returns the endpoint that switches vLLM's own tracing on."""
    handle = get_telemetry_handle()
    # Nothing is sent there: it is a name by which our own is told from one that a user has given vLLM.
    return f"unix:{handle.run_dir if handle is not None else ''}/vllm.sock"


def forget_endpoint(endpoint: str | None) -> None:
    """Takes our endpoint out of the environment, where vLLM has written it for its children."""
    if endpoint is not None and endpoint == native_endpoint() == os.environ.get(_ENDPOINT):
        del os.environ[_ENDPOINT]


class LoadingModel:
    """The ``rl.vllm.load_model`` umbrella, with an environment for the engine's children while it is open."""

    __slots__ = ("_before", "_span")

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._span: AbstractContextManager[Span | None] = umbrella_span(G.U_MODEL_INIT, LOAD_SPAN, **attributes)
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> Span | None:
        span = self._span.__enter__()
        try:
            if _state.tracing:
                self._set({**_env_carrier.written(), _ENDPOINT: None})
                process = _process.current
                group = process.resource.get(semconv.RL_WORKER_GROUP) if process is not None else None
                if group and rank_identity().worker_group is None:
                    self._set({_GROUP: str(group)})
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("vllm-environment", "An engine's processes are traced only in part: %r", error)
        return span

    def _set(self, values: dict[str, str | None]) -> None:
        for name, value in values.items():
            self._before.setdefault(name, os.environ.get(name))
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._span.__exit__(exc_type, exc, traceback)


def _is_ray_worker() -> bool:
    ray = sys.modules.get("ray")
    try:
        return bool(ray is not None and ray._private.worker.global_worker.mode == ray.WORKER_MODE)
    except AttributeError:
        return False


def _take_over() -> None:
    """Detaches vLLM's own exporter, if it was there first: its spans reach the spool, and from there the same place."""
    provider = trace.get_tracer_provider()
    resource = getattr(provider, "resource", None)
    if _VLLM_RESOURCE not in getattr(resource, "attributes", {}):
        return
    processors: Any = getattr(provider, "_active_span_processor", None)
    attached = getattr(processors, "_span_processors", None)
    if not isinstance(attached, tuple):
        _state.warn_once("vllm-exporter", "vLLM's own exporter stays: this OpenTelemetry SDK keeps it elsewhere.")
        return
    from raytrace_rl._foreign import SpoolSpanProcessor
    from raytrace_rl.integrations._vllm_late import LateSpans

    ours = tuple(one for one in attached if isinstance(one, SpoolSpanProcessor))
    processors._span_processors = (LateSpans(), *ours)
    for exporter in attached:
        if exporter not in ours:  # what is in its queue may wait for an endpoint that is not there
            threading.Thread(target=exporter.shutdown, name="raytrace_rl-vllm-exporter", daemon=True).start()
