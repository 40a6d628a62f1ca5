"""The lifecycle of a process's telemetry: whether it starts, where its files go, and who it says it is.

A driver settles the run and projects its settings into the environment; a worker is gated by that environment. A
driver's mistakes in configuration are errors, everything else is a warning and counted drops.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics, trace

from raytrace_rl import _clock, _metrics_pipeline, _process, _state, semconv, span_groups
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._version import VERSION
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
from raytrace_rl.resources import process_resource, ray_resource

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

_ATTEMPT_VARIABLE: Final = "RAYTRACE_RL_ATTEMPT"
#: A Ray worker's working directory lies in its session's; files there go with the session.
_RAY_SESSION: Final = re.compile(r"/session_\d{4}-\d{2}-\d{2}_")

#: More cannot be waited for: `threading.Thread.join` overflows, and infinity would.
_LONGEST_WAIT_S: Final = 1e6

_lock: Final = threading.RLock()
#: Process that flushed for the last time: a carrier that arrives later does not start telemetry again.
_finished_pid: int = 0


class TelemetryHandle:
    """What telemetry is in this process; from `get_telemetry_handle`."""

    def __init__(self, process: _process.Process, role: str) -> None:
        self._process = process
        self.role = role

    def moved_to(self, process: _process.Process) -> None:
        """In a forked child: stands for the telemetry that has started in it."""
        self._process = process
        self.role = semconv.ROLE_WORKER

    @property
    def tracer(self) -> trace.Tracer:
        """An OTel tracer whose spans reach the spool."""
        return trace.get_tracer("raytrace_rl", VERSION)

    @property
    def meter(self) -> metrics.Meter:
        """An OTel meter whose instruments reach the spool, whichever MeterProvider is installed."""
        return _metrics_pipeline.meter("raytrace_rl", VERSION)

    @property
    def is_exporting(self) -> bool:
        """True only while spans really go somewhere."""
        return self._process is _process.current and self._process.exporting and _state.tracing

    @property
    def run_dir(self) -> str | None:
        """The run directory, absolute."""
        return self._process.config.run_dir

    @property
    def run_id(self) -> str | None:
        """The run's id."""
        return self._process.config.run_id

    @property
    def dropped(self) -> Mapping[str, int]:
        """What was lost in this process since telemetry started: spans, attributes, metrics, logs, bytes."""
        return MappingProxyType(dict(_state.drops))


def init_telemetry_driver(config: Any = None, algorithm: str | None = None) -> TelemetryHandle | None:
    """Starts telemetry on the driver; to be called before ``ray.init``, so that workers inherit the settings.

    Settles the run id (environment, else configuration, else a short uuid), the attempt (a restart of the same run id
    in the same directory counts up) and the run directory (``./raytrace_runs/<run id>``), and projects the settings
    into ``os.environ``.

    Args:
        config: A `TelemetryConfig`, a mapping of its fields, or a master configuration that has one under
            ``telemetry``. The environment beats it.
        algorithm: ``rl.algorithm`` of the run, such as ``grpo``.

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
            settled = _settle_run(settled)
            attempt = _claim_attempt(settled, algorithm)
            values = {**to_env(settled), _ATTEMPT_VARIABLE: str(attempt)}
            projection.project(os.environ, values)
            attributes: dict[str, AttributeValue] = {semconv.RL_ALGORITHM: algorithm} if algorithm else {}
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
    resource_attributes: Mapping[str, AttributeValue] | None = None,
    gpus: Sequence[str | int] | None = None,
) -> TelemetryHandle | None:
    """Starts telemetry in a worker, if the environment enables it. Never raises. Once per process (pid).

    A later call that knows more completes the identity of the whole process: what is missing is filled in, what is
    set stays.

    Args:
        rank: Rank within the worker group, from 0; by default ``RANK``.
        world_size: Ranks in the group; by default ``WORLD_SIZE``.
        worker_group: Name of the group; by default ``RAYTRACE_RL_WORKER_GROUP``, then ``NRL_WORKER_GROUP``.
        resource_attributes: Further attributes of the process; they win over detected ones.
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
                _complete_identity(identity, resource_attributes, gpus)
                return running
            settled = resolve(None, strict=False)
            if not settled.enabled or sdk_disabled():
                return None
            _finished_pid = 0
            settled = _settle_run(settled)
            attempt = _inherited_attempt()
            return _start(settled, semconv.ROLE_WORKER, identity, attempt, resource_attributes, gpus)
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
    if _ATTEMPT_VARIABLE in os.environ:
        values[_ATTEMPT_VARIABLE] = os.environ[_ATTEMPT_VARIABLE]
    merged["env_vars"] = {**values, **dict(merged.get("env_vars") or {})}
    return merged


def attach_to_cluster() -> None:
    """After ``ray.init`` on the driver: adds Ray's ids of this process (job, node) to its identity. Never raises."""
    try:
        process = _process.current
        if process is not None:
            process.describe(ray_resource())
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
            span_groups.apply_spec(None)
            _finished_pid = os.getpid()
            if handle is not None and handle.role == semconv.ROLE_DRIVER:
                projection.restore()
                process.adopt_orphans(deadline)
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
) -> TelemetryHandle:
    resource = process_resource(config, role=role, rank=identity, attempt=attempt, gpus=gpus, attributes=attributes)
    process = _process.start(config, resource)
    handle = TelemetryHandle(process, role)
    _state.handle = handle
    if config.traces_enabled:
        # Last of all, and the gate of carriers behind that of spans: a call that arrives meanwhile on another thread
        # waits for this start instead of running without spans.
        span_groups.apply_spec(config.span_groups)
        _state.tracing = True
    return handle


def _complete_identity(
    identity: RankIdentity, attributes: Mapping[str, AttributeValue] | None, gpus: Sequence[str | int] | None
) -> None:
    process = _process.current
    if process is None:
        return
    known = process.resource
    found = process_resource(
        process.config, role=str(known.get(semconv.RL_ROLE)), rank=identity, gpus=gpus, attributes=attributes
    )
    missing = {key: value for key, value in found.items() if key not in known}
    if missing:
        process.describe(missing)


def _settle_run(config: TelemetryConfig) -> TelemetryConfig:
    """Returns ``config`` with a run id and an absolute run directory."""
    run_id = config.run_id or uuid.uuid4().hex[:8]
    if config.run_dir:
        run_dir = config.run_dir if Path(config.run_dir).is_absolute() else str(_base() / config.run_dir)
    else:
        base = _base()
        if _RAY_SESSION.search(str(base)):
            base = _home()
        run_dir = str(base / "raytrace_runs" / run_id)
    return replace(config, run_id=run_id, run_dir=run_dir)


def _base() -> Path:
    try:
        return Path.cwd()
    except OSError:  # somebody has deleted it
        return _home()


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry, as in many containers
        return Path(tempfile.gettempdir())


def _claim_attempt(config: TelemetryConfig, algorithm: str | None) -> int:
    """Makes the run directory and returns this attempt's number, from 1. An unusable directory is found out later."""
    if config.exporter in ("none", "console") or config.run_dir is None:
        return 1
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _hide(run_dir)
        about = {"run_id": config.run_id, "algorithm": algorithm, "started_ns": _clock.now_ns(), "version": VERSION}
        attempts = run_dir / "attempts"
        attempts.mkdir(mode=0o700, exist_ok=True)
        for attempt in range(1, 1_000_000):
            try:
                with (attempts / f"{attempt}.json").open("x", encoding="utf-8") as file:
                    json.dump({**about, "attempt": attempt}, file)
                return attempt
            except FileExistsError:
                continue
    except OSError as error:
        _state.logger.debug("run directory %s: %s", run_dir, error)  # the spool meets it next, and warns
    return 1


def _hide(run_dir: Path) -> None:
    """Hides a run from git and from Ray, which packs the working directory. Files that are there already hold.

    A directory that holds other things is the user's own, perhaps all of the code: only what we put into it is hidden.
    """
    ours = {"spool", "attempts", ".gitignore", ".rayignore", "control.json"}
    foreign = any(entry.name not in ours for entry in run_dir.iterdir())
    for directory in (run_dir / "spool", run_dir / "attempts") if foreign else (run_dir,):
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in (".gitignore", ".rayignore"):
            path = directory / name
            if not path.exists():
                path.write_text("*\n", encoding="ascii")


def _inherited_attempt() -> int:
    text = os.environ.get(_ATTEMPT_VARIABLE, "1")
    return int(text) if text.isdecimal() and len(text) < 10 else 1


def _at_exit() -> None:
    if _state.pid == os.getpid():
        shutdown_telemetry()


atexit.register(_at_exit)
