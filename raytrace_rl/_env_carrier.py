"""A carrier in environment variables: what a process is born under, as far as the environment says.

The variables are those of OpenTelemetry's specification ("Environment variables as context propagation carriers"):
engines such as vLLM, and children of the process, look there too.

A process of Ray's inherits them from whoever started Ray on its node: another job perhaps, days ago. What its raylet
has in its own environment is therefore no parent; what a ``runtime_env``, or the parent of a child process, put there
instead, is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import get_current_span

from raytrace_rl import _carrier, _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._otel_context import otel_var

#: The W3C's headers by variable. `raytrace` belongs to one dispatched call and stays out.
_VARIABLES: Final = {"traceparent": "TRACEPARENT", "tracestate": "TRACESTATE", "baggage": "BAGGAGE"}
#: Ray sets it in its workers; their children inherit it.
_RAYLET: Final = "RAY_RAYLET_PID"

#: What `adopt` has made current.
_adopted: Context | None = None


def written() -> dict[str, str]:
    """Returns what is current here as variables; empty with nothing to carry, or with telemetry off."""
    carrier = _carrier.current()
    return {variable: carrier[header] for header, variable in _VARIABLES.items() if header in carrier}


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns ``base`` (``os.environ``) for a child process, under what is current here; see `trace_context_env`."""
    environ = dict(os.environ if base is None else base)
    own = written()
    if "TRACEPARENT" in own:
        for variable in _VARIABLES.values():
            environ.pop(variable, None)  # the state and the baggage of another parent are not this one's
    return {**environ, **own}


def inherited(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the carrier that this process was given by its environment; empty without one, or with a stale one."""
    environ = os.environ if environ is None else environ
    found = {header: value for header, variable in _VARIABLES.items() if (value := environ.get(variable))}
    if not found or (_RAYLET in environ and _is_raylets(environ)):
        return {}
    return found


def adopt() -> None:
    """Makes the environment's parent current in the context of the caller, unless something is current there.

    Not in a process of Ray's: each call that arrives there brings its own parent, or has none. Never fails.
    """
    global _adopted
    try:
        if get_current_span().get_span_context().is_valid or _is_ray_worker():
            return
        attachment = _carrier.read(inherited(), dispatched=False)
        if attachment is not None:
            _adopted = attachment[0]
            otel_var.set(attachment[0])
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("env-carrier", "TRACEPARENT of the environment is ignored: %r", error)


def release() -> None:
    """Takes away what `adopt` made current, where it still is."""
    global _adopted
    if _adopted is not None and otel_var.get() is _adopted:
        otel_var.set(Context())
    _adopted = None


def _is_raylets(environ: Mapping[str, str]) -> bool:
    """True if the raylet has the same ``TRACEPARENT``, or cannot be asked."""
    try:
        raylets = Path("/proc", environ[_RAYLET], "environ").read_bytes()
    except (OSError, ValueError):
        return True
    return f"TRACEPARENT={environ.get('TRACEPARENT', '')}".encode() in raylets.split(b"\0")


def _is_ray_worker() -> bool:
    ray: Any = sys.modules.get("ray")
    try:
        return bool(ray._private.worker.global_worker.mode == ray.WORKER_MODE)
    except AttributeError:  # no Ray, or one that keeps this elsewhere
        return False
