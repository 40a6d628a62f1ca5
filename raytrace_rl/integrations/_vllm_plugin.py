"""Telemetry in the processes that a vLLM engine starts: by vLLM's plugins, and instead of vLLM's own exporter."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any, Final

from opentelemetry import trace

from raytrace_rl import _process, _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.config import rank_identity
from raytrace_rl.integrations._vllm_process import ENDPOINT, group_of_engine, native_endpoint
from raytrace_rl.setup import get_telemetry_handle, init_telemetry_worker

#: What a process of an engine is called there: ``EngineCore``, ``VllmWorker-0``, ``RayWorkerWrapper``.
RL_VLLM_PROCESS_ATTR: Final = "rl.vllm.process"

#: An attribute of the resource of vLLM's own provider.
_VLLM_RESOURCE: Final = "vllm.instrumenting_module_name"


def plugin() -> None:
    """Starts telemetry in a process that vLLM has started (``vllm.general_plugins``), if the environment enables it.

    vLLM calls it in every one of its processes. In the one that made the engine nothing happens: who traces has started
    there already, or starts there in their own name.
    """
    try:
        name = _name()
        if name is None:
            return
        attributes = {RL_VLLM_PROCESS_ATTR: name}
        inherited = getattr(_state.writer, "open_spool", None)
        if inherited is not None:  # a forked process, which has its parent's telemetry from its first span on
            inherited()
        if get_telemetry_handle() is not None:
            _tell_apart(attributes)
        else:
            init_telemetry_worker(
                worker_group=group_of_engine(rank_identity().worker_group), resource_attributes=attributes
            )
            config = _state.config if get_telemetry_handle() is not None else None
            if config is not None and (
                config.vllm_native_tracing
                or config.exporter == "otlp"
                or os.environ.get(ENDPOINT) == native_endpoint()  # else it would come twice
            ):
                _take_over()
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("vllm-plugin", "A process of a vLLM engine has no telemetry: %r", error)


def _name() -> str | None:
    """Returns what vLLM calls this process if vLLM has started it; None where somebody makes an engine in it.

    That may be an actor, or a child process, as vLLM's own are.
    """
    process = multiprocessing.current_process()
    if multiprocessing.parent_process() is not None:
        target = getattr(process, "_target", None)
        return process.name if _is_vllms(target if target is not None else type(process)) else None
    ray: Any = sys.modules.get("ray")
    try:
        worker = ray._private.worker.global_worker
        kind = type(worker.actors.get(worker.actor_id))
        return kind.__name__ if worker.mode == ray.WORKER_MODE and _is_vllms(kind) else None
    except AttributeError:  # no Ray, or one that keeps this elsewhere
        return None


def _is_vllms(what: Any) -> bool:
    return str(getattr(what, "__module__", "")).partition(".")[0] == "vllm"


def _tell_apart(attributes: dict[str, str]) -> None:
    """Gives a process that was forked, with its parent's identity, its own: it is no rank of its parent's group."""
    process = _process.current
    if process is None or process.resource.get(RL_VLLM_PROCESS_ATTR) == attributes[RL_VLLM_PROCESS_ATTR]:
        return  # called before
    group = process.resource.get(semconv.RL_WORKER_GROUP)
    for key in (semconv.NV_DL_RANK, semconv.NV_DL_LOCAL_RANK, semconv.NV_DL_WORLD_SIZE):
        process.resource.pop(key, None)
    process.describe({**attributes, semconv.RL_WORKER_GROUP: group_of_engine(str(group) if group else None)})


def _take_over() -> None:
    """Detaches vLLM's own exporter, if it was there first: its spans reach the spool, and from there the same place."""
    provider: Any = trace.get_tracer_provider()
    resource = getattr(provider, "resource", None)
    if _VLLM_RESOURCE not in getattr(resource, "attributes", {}):
        return
    processors: Any = getattr(provider, "_active_span_processor", None)
    attached = getattr(processors, "_span_processors", None)
    if not isinstance(attached, tuple):
        _state.warn_once("vllm-exporter", "vLLM's own exporter stays: this OpenTelemetry SDK keeps it elsewhere.")
        return
    from raytrace_rl._foreign import SpoolSpanProcessor, _Ids
    from raytrace_rl.integrations._vllm_late import LateSpans

    # vLLM seeds Python's generator alike in all of its workers: their spans would have the same ids. In place, since
    # the tracers that are there already have it too.
    ids, generator = _Ids(), provider.id_generator
    generator.generate_span_id, generator.generate_trace_id = ids.generate_span_id, ids.generate_trace_id
    ours = tuple(one for one in attached if isinstance(one, SpoolSpanProcessor))
    processors._span_processors = (LateSpans(), *ours)
    for exporter in attached:
        if exporter not in ours:  # what is in its queue may wait for an endpoint that is not there
            threading.Thread(target=exporter.shutdown, name="raytrace_rl-vllm-exporter", daemon=True).start()
