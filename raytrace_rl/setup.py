"""The lifecycle of a process's telemetry: whether it starts, where its files go, and who it says it is.

A driver settles the run and projects its settings into the environment; a worker is gated by that environment. A
driver's mistakes in configuration are errors, everything else is a warning and counted drops.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _env_carrier, _process, _run_attributes, _run_place, _state, semconv, span_groups
from raytrace_rl._handle import TelemetryHandle
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.config import (
    RankIdentity,
    TelemetryConfig,
    forwarded_env,
    projection,
    rank_identity,
    resolve,
    sdk_disabled,
    to_env,
)
from raytrace_rl.config import resource_attributes as env_resource_attributes
from raytrace_rl.resources import process_resource, ray_resource

__all__ = [
    "TelemetryHandle",
    "attach_to_cluster",
    "get_telemetry_handle",
    "init_telemetry_driver",
    "init_telemetry_worker",
    "shutdown_telemetry",
    "start_from_carrier",
    "telemetry_runtime_env",
]

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

#: More cannot be waited for: `threading.Thread.join` overflows, and infinity would.
_LONGEST_WAIT_S: Final = 1e6

_lock: Final = threading.RLock()
#: Process that flushed for the last time: a carrier that arrives later does not start telemetry again.
_finished_pid: int = 0


def init_telemetry_driver(
    config: Any = None,
    algorithm: str | None = None,
    *,
    resource_attributes: Mapping[str, Any] | None = None,
) -> TelemetryHandle | None:
    """Starts telemetry on the driver; to be called before ``ray.init``, so that workers inherit the settings.

    Settles the run id (environment, else configuration, else a short uuid), the attempt (a restart of the same run id
    in the same directory counts up) and the run directory (``./raytrace_runs/<run id>``), and projects the settings
    into ``os.environ``.

    Args:
        config: A `TelemetryConfig`, a mapping of its fields, or a master configuration that has one under
            ``telemetry``. The environment beats it.
        algorithm: ``rl.algorithm`` of the run, such as ``grpo``.
        resource_attributes: What else the driver says of itself, and of the run: ``rl.model``, ``rl.algorithm``,
            ``rl.backend``, ``rl.generation.backend``, ``rl.reward``, ``rl.num_rollouts``, ``rl.num_prompt_groups``,
            ``rl.num_generations_per_prompt`` and ``nv.dl.topology.size.*`` reach every worker, which may say otherwise
            of itself; any other stays with the driver (``OTEL_RESOURCE_ATTRIBUTES`` is for those that shall not). What
            cannot be used is left out with a warning.

    Returns:
        The handle; None if telemetry is not enabled. Called again, the handle that there is.

    Raises:
        ConfigError: A setting cannot be used; the message names it, its value and the way out.
    """
    with _lock:
        settled = resolve(config, strict=True)
        if not settled.enabled or sdk_disabled():
            return None
        running = get_telemetry_handle()
        if running is not None:
            _state.warn_once(
                "driver-again", "Telemetry runs in this process already; shutdown_telemetry() first to change settings."
            )
            return running
        try:
            algorithm = str(algorithm) if algorithm is not None else None  # enumerations, nodes of a configuration
            settled = _run_place.settle(settled)
            attempt = _run_place.claim_attempt(settled, algorithm)
            users = projection.user_value(os.environ, _run_attributes.VARIABLE) or ""
            by_user = _run_attributes.of_environment(os.environ, users).all
            named: dict[str, AttributeValue] = {semconv.RL_ALGORITHM: algorithm} if algorithm else {}
            attributes = {**named, **_run_attributes.checked(resource_attributes), **by_user}
            values = {**to_env(settled), _run_place.ATTEMPT_VARIABLE: str(attempt)}
            overruled = set(attributes) & set(env_resource_attributes())
            if run_wide := _run_attributes.to_text(attributes, also=by_user, overruled=overruled):
                values[_run_attributes.VARIABLE] = run_wide
            projection.project(os.environ, values)
            return _start(settled, semconv.ROLE_DRIVER, RankIdentity(), attempt, attributes, None)
        except Exception as error:
            projection.restore()
            if is_interrupt(error):
                raise
            _state.warn_once("driver-start", "Telemetry could not start: %r", error)
            return None


def init_telemetry_worker(
    rank: int | None = None,
    world_size: int | None = None,
    worker_group: str | None = None,
    resource_attributes: Mapping[str, Any] | None = None,
    gpus: Sequence[str | int] | None = None,
) -> TelemetryHandle | None:
    """Starts telemetry in a worker, if the environment enables it. Never raises. Once per process (pid).

    A later call that knows more completes the identity of the whole process: what is missing is filled in, what is
    set stays.

    Args:
        rank: Rank within the worker group, from 0; by default ``RANK``.
        world_size: Ranks in the group; by default ``WORLD_SIZE``.
        worker_group: Name of the group; by default ``RAYTRACE_RL_WORKER_GROUP``, then ``NRL_WORKER_GROUP``.
        resource_attributes: Further attributes of the process; they win over detected ones, and over what the driver
            says of the run. What cannot be used is left out with a warning.
        gpus: Physical GPUs of the process: indices on the node, or UUIDs; by default what Ray assigned.

    Returns:
        The handle, or None if telemetry is off.
    """
    global _finished_pid
    try:
        with _lock:
            inherited = rank_identity()
            identity = RankIdentity(
                rank=rank if rank is not None else inherited.rank,
                local_rank=inherited.local_rank,
                world_size=world_size if world_size is not None else inherited.world_size,
                worker_group=worker_group if worker_group is not None else inherited.worker_group,
            )
            running = get_telemetry_handle()
            if running is not None:
                _complete_identity(identity, _run_attributes.checked(resource_attributes), gpus)
                return running
            settled = resolve(None, strict=False)
            if not settled.enabled or sdk_disabled():
                return None
            _finished_pid = 0
            settled = _run_place.settle(settled)
            attempt = _run_place.inherited_attempt()
            of_run = _run_attributes.of_environment(os.environ)
            attributes = {**of_run.strong, **_run_attributes.checked(resource_attributes)}
            return _start(settled, semconv.ROLE_WORKER, identity, attempt, attributes, gpus, of_run.weak)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("worker-start", "Telemetry could not start in this worker: %r", error)
        return None


def start_from_carrier() -> None:
    """Starts telemetry in a process that a carrier reached first: plain remote functions have no ``__init__``."""
    if _finished_pid != os.getpid():
        init_telemetry_worker()


def get_telemetry_handle() -> TelemetryHandle | None:
    """Returns this process's handle, None while telemetry is off."""
    handle: TelemetryHandle | None = _state.handle
    if handle is None or _process.current is None:
        return None
    return handle


def telemetry_runtime_env(base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a Ray ``runtime_env`` that carries our settings to the workers of a cluster that is up already.

    Only our own and the standard ``OTEL_*`` variables; never credentials (``OTEL_EXPORTER_OTLP_*HEADERS``), which
    would stand in clear in Ray's logs.

    Args:
        base: A ``runtime_env`` to merge into; variables that it sets itself hold.
    """
    merged = dict(base or {})
    process = _process.current
    if process is None:
        return merged
    values = {**to_env(process.config), **forwarded_env()}
    for variable in (_run_place.ATTEMPT_VARIABLE, _run_attributes.VARIABLE):
        if variable in os.environ:
            values[variable] = os.environ[variable]
    merged["env_vars"] = {**values, **dict(merged.get("env_vars") or {})}
    return merged


def attach_to_cluster() -> None:
    """After ``ray.init`` on the driver: adds Ray's ids of this process (job, node) to its identity. Never raises.

    With ``exporter="otlp"`` it also asks for the relay of the driver's node, and leaves the settings (headers among
    them) where the relays of other nodes find them.
    """
    try:
        process = _process.current
        if process is not None:
            process.describe(ray_resource())
            if process.asker is not None:
                process.asker.attach()
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("attach", "Ray's identity of this process is missing: %r", error)


def shutdown_telemetry(timeout_ms: float = 5000) -> None:
    """Ends telemetry in this process: open spans (innermost first, marked truncated), then the spool, then the gates.

    Idempotent, and never raises. On the driver it also brings home what killed processes of this node left in a tmpfs.
    Starting again afterwards works.

    Args:
        timeout_ms: Milliseconds after which it returns whatever is left; no finished span depends on the rest.
    """
    global _finished_pid
    try:
        with _lock:
            process = _process.current
            if process is None:
                return
            handle = _state.handle
            deadline = monotonic() + min(timeout_ms / 1000, _LONGEST_WAIT_S)
            _process.stop(deadline)
            _env_carrier.release()
            span_groups.apply_spec(None)
            _finished_pid = os.getpid()
            if handle is not None and handle.role == semconv.ROLE_DRIVER:
                projection.restore()
                process.adopt_orphans(deadline)
            if process.asker is not None:
                process.asker.finish(deadline, driver=handle is None or handle.role == semconv.ROLE_DRIVER)
            lost = {kind: n for kind, n in _state.drops.items() if n}
            if lost:
                _state.logger.warning("Telemetry of this process lost: %s", json.dumps(lost))
            _state.forget_warnings()  # here and not at a start, which has warned of its settings by then
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("shutdown", "Telemetry could not be shut down cleanly: %r", error)


def _start(
    config: TelemetryConfig,
    role: str,
    identity: RankIdentity,
    attempt: int,
    attributes: Mapping[str, AttributeValue] | None,
    gpus: Sequence[str | int] | None,
    of_run: Mapping[str, AttributeValue] | None = None,
) -> TelemetryHandle:
    resource = process_resource(
        config, role=role, rank=identity, attempt=attempt, gpus=gpus, attributes=attributes, of_run=of_run
    )
    process = _process.start(config, resource)
    handle = TelemetryHandle(process, role)
    _state.handle = handle
    if config.traces_enabled:
        # Last of all, and the gate of carriers behind that of spans: a call that arrives meanwhile on another thread
        # waits for this start instead of running without spans.
        span_groups.apply_spec(config.span_groups)
        _state.tracing = True
        _env_carrier.adopt()
    return handle


def _complete_identity(
    identity: RankIdentity, attributes: Mapping[str, AttributeValue], gpus: Sequence[str | int] | None
) -> None:
    process = _process.current
    if process is None:
        return
    known = process.resource
    role = str(known.get(semconv.RL_ROLE))
    found = process_resource(process.config, role=role, rank=identity, gpus=gpus, attributes=attributes)
    # A worker that is started before its constructor runs knows only what the driver said of the run until then.
    of_run = _run_attributes.of_environment(os.environ).all if role == semconv.ROLE_WORKER else {}
    new = {
        key: value
        for key, value in found.items()
        if key not in known or (key in attributes and key in of_run and known[key] == of_run[key] != value)
    }
    if new:
        process.describe(new)


def _at_exit() -> None:
    if _state.pid == os.getpid():
        shutdown_telemetry()


atexit.register(_at_exit)
