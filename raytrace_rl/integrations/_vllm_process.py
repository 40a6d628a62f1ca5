"""What making a vLLM engine does to the environment: its children get telemetry by it, its own tracing stays in hand.

vLLM (0.32) makes a TracerProvider of its own where it is given an OTLP endpoint, and writes that endpoint into the
environment, whence each child does the same; so do the children of an engine that was never asked for spans, if the
variable was there for somebody else. Here, spans that vLLM makes go to the spool like any others: our provider stands
first in a traced process, and in vLLM's children takes over from vLLM's. Where the plugin that does this is left out,
vLLM's exporter sends to the node's local OTLP receiver, if that is on. The variable is hidden while an engine starts,
and what vLLM writes there is taken back.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote

from opentelemetry.trace import Span

from raytrace_rl import _env_carrier, _process, _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.config import rank_identity
from raytrace_rl.instrumentation import umbrella_span
from raytrace_rl.relay.address import local_endpoint
from raytrace_rl.setup import get_telemetry_handle
from raytrace_rl.span_groups import RLSpanGroup as G

LOAD_SPAN: Final = "rl.vllm.load_model"

#: By which vLLM's own tracing is switched on.
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_SAMPLER: Final = "OTEL_TRACES_SAMPLER"
_RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"
_PLUGINS: Final = "VLLM_PLUGINS"
_PLUGIN: Final = "raytrace_rl"
_GROUP: Final = "RAYTRACE_RL_WORKER_GROUP"
#: Processes of an engine are no ranks of their actor's group: identity is the pair of group and rank.
_SUFFIX: Final = ".engine"


def engine_args() -> dict[str, Any]:
    """Returns what an engine is to be built with: timings of its requests, and, if asked for, spans of its own."""
    found: dict[str, Any] = {"disable_log_stats": False}
    if not _native():
        return found
    allowed = os.environ.get(_PLUGINS)
    if allowed is not None and _PLUGIN not in allowed.split(",") and not _receives():
        _state.warn_once(
            "vllm-native",
            "vLLM's own spans stay off: %s leaves out %r, which keeps them, and the local OTLP receiver "
            "(otlp_receiver), which would take them, is off.",
            _PLUGINS,
            _PLUGIN,
        )
        return found
    found["otlp_traces_endpoint"] = native_endpoint()
    return found


def native_endpoint() -> str:
    """Returns the endpoint that switches vLLM's own tracing on: the node's local OTLP receiver.

    Whether that is on or not: where the plugin is loaded nothing is sent there.
    """
    config = _state.config
    return local_endpoint(config.run_id or "" if config is not None else "")


def forget_endpoint(endpoint: str | None) -> None:
    """Takes our endpoint out of the environment, where vLLM has written it for its children."""
    if endpoint is not None and endpoint == native_endpoint() == os.environ.get(ENDPOINT):
        del os.environ[ENDPOINT]


#: Those that are open, in the order in which they were entered.
_loading: Final[list[LoadingModel]] = []
_lock: Final = threading.Lock()


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
                values = {**_env_carrier.written(), ENDPOINT: None, **_for_children()}
                with _lock:
                    self._before = {name: os.environ.get(name) for name in values}
                    _put(values)
                    _loading.append(self)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("vllm-environment", "An engine's processes are traced only in part: %r", error)
        return span

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            if self in _loading:
                place = _loading.index(self)
                del _loading[place]
                if place < len(_loading):
                    # Another engine is still loading: what it found here was this one's.
                    _loading[place]._before.update(self._before)
                else:
                    _put(self._before)
        self._span.__exit__(exc_type, exc, traceback)


def _put(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _for_children() -> dict[str, str | None]:
    """Returns what tells an engine's children whose they are; None for what they are not to see."""
    found: dict[str, str | None] = {}
    process = _process.current
    group = process.resource.get(semconv.RL_WORKER_GROUP) if process is not None else None
    if group and rank_identity().worker_group is None:
        found[_GROUP] = str(group)
    if _native():
        found[_SAMPLER] = None  # a child's provider is vLLM's until ours takes over: the relay samples, not the spool
    if _native() and _receives():
        # For a child without the plugin: vLLM's exporter speaks as the environment says, and that is said for the
        # relay. All that it knows of the run is its resource.
        config = _state.config
        known = {
            semconv.RL_WORKER_GROUP: group_of_engine(str(group) if group else None),
            semconv.PROCESS_PARENT_PID: str(os.getpid()),
            semconv.SERVICE_NAME: config.service_name if config is not None else None,
        }
        pairs = [f"{key}={quote(value)}" for key, value in known.items() if value]
        given = os.environ.get(_RESOURCE, "").strip()
        found.update({_PROTOCOL: None, _RESOURCE: ",".join([*pairs, given] if given else pairs)})
    return found


def _native() -> bool:
    """True if vLLM's own spans are asked for."""
    config = _state.config
    return (
        get_telemetry_handle() is not None
        and config is not None
        and config.vllm_native_tracing
        and config.traces_enabled
    )


def _receives() -> bool:
    """True if the node's relay listens for OTLP."""
    config = _state.config
    return config is not None and config.otlp_receiver and config.exporter in ("spool", "otlp")


def group_of_engine(group: str | None) -> str:
    """Returns the worker group of an engine's processes: they are no ranks of their actor's."""
    group = group or "vllm"
    return group if group.endswith(_SUFFIX) else group + _SUFFIX
