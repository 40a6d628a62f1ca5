"""Ray-native actor tracing for RL post-training: one trace from the driver to every actor, and goodput that adds up.

The everyday names, imported when first used; everything else comes from the module that owns it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl._version import VERSION

if TYPE_CHECKING:
    from raytrace_rl.actors import FlushReport, TracedActor, flush_actors, flush_and_kill
    from raytrace_rl.buckets import Bucket, bucket_scope
    from raytrace_rl.config import ConfigError, TelemetryConfig
    from raytrace_rl.context import TraceContext, current_trace_carrier, remote_trace_context
    from raytrace_rl.dispatch import accepts_trace_context, dispatch_with_trace_context, trace_context_kwargs, traced
    from raytrace_rl.instrumentation import (
        iteration_scope,
        managed_span,
        safe_set_span_attributes,
        span_cm,
        trace_fn,
        umbrella_span,
        umbrella_trace_fn,
    )
    from raytrace_rl.session import telemetry_session
    from raytrace_rl.setup import (
        attach_to_cluster,
        get_telemetry_handle,
        init_telemetry_driver,
        init_telemetry_worker,
        shutdown_telemetry,
        telemetry_runtime_env,
    )
    from raytrace_rl.span_groups import RLSpanGroup, register_span_groups
    from raytrace_rl.threads import TracedThread, TracedThreadPoolExecutor, inherit_trace_context

__version__: Final = VERSION

_OWNERS: Final = {
    "actors": ("FlushReport", "TracedActor", "flush_actors", "flush_and_kill"),
    "buckets": ("Bucket", "bucket_scope"),
    "config": ("ConfigError", "TelemetryConfig"),
    "context": ("TraceContext", "current_trace_carrier", "remote_trace_context"),
    "dispatch": ("accepts_trace_context", "dispatch_with_trace_context", "trace_context_kwargs", "traced"),
    "instrumentation": (
        "iteration_scope",
        "managed_span",
        "safe_set_span_attributes",
        "span_cm",
        "trace_fn",
        "umbrella_span",
        "umbrella_trace_fn",
    ),
    "session": ("telemetry_session",),
    "setup": (
        "attach_to_cluster",
        "get_telemetry_handle",
        "init_telemetry_driver",
        "init_telemetry_worker",
        "shutdown_telemetry",
        "telemetry_runtime_env",
    ),
    "span_groups": ("RLSpanGroup", "register_span_groups"),
    "threads": ("TracedThread", "TracedThreadPoolExecutor", "inherit_trace_context"),
}
_OWNER: Final = {name: module for module, names in _OWNERS.items() for name in names}

__all__ = [
    "Bucket",
    "ConfigError",
    "FlushReport",
    "RLSpanGroup",
    "TelemetryConfig",
    "TraceContext",
    "TracedActor",
    "TracedThread",
    "TracedThreadPoolExecutor",
    "__version__",
    "accepts_trace_context",
    "attach_to_cluster",
    "bucket_scope",
    "current_trace_carrier",
    "dispatch_with_trace_context",
    "flush_actors",
    "flush_and_kill",
    "get_telemetry_handle",
    "inherit_trace_context",
    "init_telemetry_driver",
    "init_telemetry_worker",
    "iteration_scope",
    "managed_span",
    "register_span_groups",
    "remote_trace_context",
    "safe_set_span_attributes",
    "shutdown_telemetry",
    "span_cm",
    "telemetry_runtime_env",
    "telemetry_session",
    "trace_context_kwargs",
    "trace_fn",
    "traced",
    "umbrella_span",
    "umbrella_trace_fn",
]


def __getattr__(name: str) -> Any:
    module = _OWNER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
