"""What algorithm code imports: spans, decorators, scopes, and the trace context across Ray, from one module.

It has the names of ``nemo_rl.telemetry.instrumentation``. Each is owned by the module that it is imported from here.
"""

from __future__ import annotations

from raytrace_rl._phases import (
    checkpoint_finalize_span,
    efficiency_span,
    emit_span,
    evaluate_span,
    setup_span,
    span_attributes,
    start_efficiency_span,
    startup_span,
)
from raytrace_rl._primitives import (
    iteration_scope,
    managed_span,
    safe_set_span_attributes,
    span_cm,
    trace_fn,
    umbrella_span,
    umbrella_trace_fn,
)
from raytrace_rl._prompts import in_per_prompt_scope, per_prompt_scope
from raytrace_rl._streaming import streaming_umbrella_span
from raytrace_rl.buckets import Bucket, bucket_scope
from raytrace_rl.context import TraceContext, current_trace_carrier, remote_trace_context
from raytrace_rl.dispatch import accepts_trace_context, dispatch_with_trace_context, trace_context_kwargs, traced
from raytrace_rl.span_groups import is_span_group_enabled

__all__ = [
    "Bucket",
    "TraceContext",
    "accepts_trace_context",
    "bucket_scope",
    "checkpoint_finalize_span",
    "current_trace_carrier",
    "dispatch_with_trace_context",
    "efficiency_span",
    "emit_span",
    "evaluate_span",
    "in_per_prompt_scope",
    "is_span_group_enabled",
    "iteration_scope",
    "managed_span",
    "per_prompt_scope",
    "remote_trace_context",
    "safe_set_span_attributes",
    "setup_span",
    "span_attributes",
    "span_cm",
    "start_efficiency_span",
    "startup_span",
    "streaming_umbrella_span",
    "trace_context_kwargs",
    "trace_fn",
    "traced",
    "umbrella_span",
    "umbrella_trace_fn",
]
