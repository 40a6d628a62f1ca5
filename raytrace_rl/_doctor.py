"""What `raytrace-rl doctor` finds out about this machine: settings and where they come from, versions, room, clock."""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from raytrace_rl import _env_otlp, _run_place, span_groups
from raytrace_rl._fields import RULES
from raytrace_rl._version import VERSION
from raytrace_rl.config import TelemetryConfig, resolve, sdk_disabled, source
from raytrace_rl.spool import place

OK: Final = "ok"
INFO: Final = "info"
PROBLEM: Final = "problem"

_DISTRIBUTIONS: Final = (
    "ray",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "grpcio",
    "pyarrow",
    "duckdb",
    "torch",
    "vllm",
    "megatron-core",
    "verl",
)
_MIB: Final = 1 << 20
#: A run directory with less room than this soon drops spans.
_LITTLE_ROOM: Final = 256 * _MIB
#: ``adjtimex(2)``: what it returns when nothing disciplines the clock; where its status and errors stand.
_TIME_ERROR: Final = 5
_FAR_OFF_US: Final = 1_000_000


class Check(NamedTuple):
    """One finding.

    Attributes:
        area: What it is about, one word.
        state: `OK`, `INFO` or `PROBLEM`; a problem makes the exit code 1.
        text: One line.
    """

    area: str
    state: str
    text: str


def machine(environ: Mapping[str, str], timeout_s: float) -> Iterator[Check]:
    """Yields what can be said without a run.

    Args:
        environ: The environment whose settings are looked at.
        timeout_s: How long each endpoint may take to answer.
    """
    yield from versions()
    warnings: list[str] = []
    with _collected(warnings):
        config = resolve(None, strict=False, environ=environ)
        pending = span_groups.pending_words(config.span_groups)
        otlp = _env_otlp.settings(environ)
    yield from settings(config, environ, pending)
    yield from (Check("settings", PROBLEM, text) for text in warnings)
    if config.exporter not in ("console", "none"):
        yield from room(config)
    if config.enabled and config.exporter == "otlp":
        from raytrace_rl import _doctor_endpoints

        recorded = {name: point for name, point in otlp.endpoints.items() if getattr(config, f"{name}_enabled")}
        yield from _doctor_endpoints.checks(replace(otlp, endpoints=recorded), timeout_s)
    elif any(
        name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("ENDPOINT") and environ[name] for name in environ
    ):
        text = f"an OTLP endpoint is set, but exporter={config.exporter} sends nothing: RAYTRACE_RL_EXPORTER=otlp does"
        yield Check("endpoint", PROBLEM, text)
    yield clock()


@contextmanager
def _collected(found: list[str]) -> Iterator[None]:
    """Collects in ``found`` what this package warns of meanwhile."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("raytrace_rl")
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


def versions() -> Iterator[Check]:
    """Yields what is installed here. A worker's environment may be another one."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    python = f"raytrace-rl {VERSION}, Python {platform.python_version()} ({sys.executable})"
    yield Check("versions", INFO, python)
    yield Check("versions", INFO, ", ".join(found))
    from raytrace_rl.integrations import auto_ray

    ray = next((text.split()[1] for text in found if text.startswith("ray ")), None)
    if ray is None:
        yield Check("versions", INFO, "no Ray in this environment")
    elif not auto_ray.is_tried(ray):
        text = f"'raytrace-rl run' leaves the calls of Ray {ray} alone, and traces those of {auto_ray.TRIED[0]} to"
        yield Check("versions", INFO, f"{text} {auto_ray.TRIED[-1]}")


def settings(config: TelemetryConfig, environ: Mapping[str, str], pending: list[str]) -> Iterator[Check]:
    """Yields whether telemetry is on, and each setting that something says, with what says it."""
    said = source("enabled", environ)
    if sdk_disabled(environ):
        yield Check("settings", PROBLEM if config.enabled else INFO, "off: OTEL_SDK_DISABLED=true")
    elif said is None:
        text = "off unless the program switches it on: no variable says anything (RAYTRACE_RL_ENABLED=1 does)"
        yield Check("settings", INFO, text)
    else:
        yield Check("settings", OK if config.enabled else INFO, f"{'on' if config.enabled else 'off'}: {said}")
    for field in RULES:
        variable = source(field, environ)
        if field != "enabled" and variable is not None:
            yield Check("settings", INFO, f"{field}={getattr(config, field)} ({variable})")
    defaults = ("exporter", "span_groups")
    unsaid = [f"{field}={getattr(config, field)}" for field in defaults if source(field, environ) is None]
    if unsaid:
        yield Check("settings", INFO, f"{', '.join(unsaid)} (defaults, unless the program says otherwise)")
    off = [signal for signal in ("traces", "metrics", "logs") if not getattr(config, f"{signal}_enabled")]
    if off:
        yield Check("settings", INFO, f"not recorded: {', '.join(off)}")
    if pending:
        text = f"{', '.join(pending)}: no span group known here; works where the library that registers it is loaded"
        yield Check("settings", INFO, text)


def room(config: TelemetryConfig) -> Iterator[Check]:
    """Yields where files would go, and whether there is room. Makes no directory."""
    run_dir = str(_run_place.settle(config).run_dir)
    shown = run_dir if config.run_dir or config.run_id else f"{Path(run_dir).parent}/<run id>"
    yield Check("place", INFO, f"run directory: {shown}")
    parent = next(path for path in (Path(run_dir), *Path(run_dir).parents) if path.exists())
    kind = place.file_system_type(str(parent)) or "unknown file system"
    if not os.access(parent, os.W_OK | os.X_OK):
        yield Check("place", PROBLEM, f"{parent} cannot be written: spans will be dropped")
    yield _room("place", parent, f"{kind}{'' if place.is_local(str(parent)) else ', on which nothing is mapped'}")
    if config.spool_dir:
        spool = Path(config.spool_dir)
        if spool.is_dir() and os.access(spool, os.W_OK | os.X_OK):
            yield _room("place", spool, "active files, as spool_dir says")
        else:
            yield Check("place", PROBLEM, f"spool_dir {spool} is no directory that can be written")
        return
    shm = Path("/dev/shm")
    if place.file_system_type(str(shm)) != "tmpfs":
        yield Check("place", INFO, "no tmpfs at /dev/shm: active files are mapped on disk, where a write may wait")
        return
    free = _free(shm)
    if free < place.MIN_TMPFS_FREE:
        text = f"/dev/shm has {free // _MIB} MiB free of the {place.MIN_TMPFS_FREE // _MIB} that it takes"
        more = "docker run --shm-size, or in Kubernetes an emptyDir of medium Memory, gives more"
        yield Check("place", INFO, f"{text}: active files are mapped on disk ({more})")
    else:
        yield Check("place", OK, f"/dev/shm: {free // _MIB} MiB free for active files")


def _free(path: Path) -> int:
    usage = os.statvfs(path)
    return usage.f_bavail * usage.f_frsize


def _room(area: str, path: Path, what: str) -> Check:
    free = _free(path)
    return Check(area, OK if free >= _LITTLE_ROOM else PROBLEM, f"{path}: {free // _MIB} MiB free ({what})")


def clock() -> Check:
    """Returns whether something keeps this host's clock right: skew between hosts is what spoils a timeline."""
    buffer = (ctypes.c_long * 64)()  # struct timex, zeroed: modes 0 only asks
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return Check("clock", INFO, "the kernel does not say whether the clock is synchronised")
    error_us = buffer[3]  # maxerror; modes, offset and freq stand before it, a long each
    if state == _TIME_ERROR:
        text = (
            "nothing synchronises this host's clock (chrony, ntpd): reports estimate the skew, and its bound is wider"
        )
        return Check("clock", INFO, text)
    return Check("clock", OK if error_us < _FAR_OFF_US else INFO, f"synchronised, at most {error_us / 1000:.1f} ms off")
