"""A driver that knows nothing of us: starts telemetry in it under a span of the job, and ends both in time."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any, Final

from opentelemetry import trace

from raytrace_rl import _carrier, _flush, _handles, _ray_alarm, _state, _trees, setup
from raytrace_rl._otel_context import otel_var
from raytrace_rl.integrations import _auto_entry
from raytrace_rl.span_groups import is_span_group_enabled

JOB_SPAN: Final = "rl.run.job"
#: Seconds that actors have, before the driver leaves them, to close their spools; their spans are safe without.
_FLUSH_S: Final = 3.0

_job: Any = None


def is_rays_own_program() -> bool:
    """True in ``ray start``, the dashboard and the like: they may connect to a cluster, and drive nothing."""
    program = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    home = Path(sys.modules["ray"].__file__ or "").parent
    return Path(program).name == "ray" or home in Path(program).parents


def begin(began_ns: int) -> None:
    """Starts telemetry under a span of the job, unless the program has started it and has spans of its own.

    Args:
        began_ns: Start of the job's span, ns since the epoch.
    """
    global _job
    if setup.get_telemetry_handle() is not None or setup.init_telemetry_driver() is None:
        return
    atexit.register(_end, os.getpid())
    if not is_span_group_enabled("job"):
        return
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    _job = _trees.umbrella("job", JOB_SPAN, {"rl.run.script": script})
    _job.begin(otel_var.get(), began_ns)
    otel_var.set(trace.set_span_in_context(_job, otel_var.get()))
    _auto_entry.root = _carrier.without_scopes(_carrier.current())


def _end(pid: int) -> None:
    """At the driver's exit, before Ray's own: ends the job, with the program's exception if there is one."""
    if pid != os.getpid():
        return
    with _ray_alarm.held_off():
        close_actors()
        if _job is not None:
            error = getattr(sys, "last_value", None)
            if isinstance(error, BaseException):  # Ctrl-C, too
                _job.record_exception(error)
                _job.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
            _job.end()
        setup.shutdown_telemetry()


def close_actors() -> None:
    """Lets the actors that this driver has made close their spools, within a few seconds."""
    ray = sys.modules["ray"]
    if _state.tracing and not is_client() and ray.is_initialized() and ray._private.worker.global_worker.mode == 0:
        _flush.flush_workers(_handles.registered(), _FLUSH_S)


def is_client() -> bool:
    """True in a Ray Client: its actors are made by a server elsewhere."""
    client = sys.modules.get("ray.util.client")
    return client is not None and bool(client.ray.is_connected())
