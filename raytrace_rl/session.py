"""The whole lifecycle of a driver in one ``with`` statement: start, `ray.init`, flush, close, goodput summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from raytrace_rl import _ray_alarm, _state, actors
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.config import TelemetryConfig
from raytrace_rl.setup import (
    TelemetryHandle,
    attach_to_cluster,
    init_telemetry_driver,
    shutdown_telemetry,
    telemetry_runtime_env,
)

#: A session is asked for telemetry: on, and step by step, unless the configuration or the environment says otherwise.
_DEFAULTS: Final[dict[str, Any]] = {"enabled": True, "span_groups": "per_step"}
#: A larger spool is not summed up at the end of the driver: reading it takes about 2 s and 60 MiB for each 10 MiB.
_SUMMARY_MAX_BYTES: Final = 64 << 20


class telemetry_session:
    """Runs a driver under telemetry, and prints a one-screen goodput summary at its end.

    Example::

        with telemetry_session() as session:
            session.init_ray(num_cpus=4)
            ...

    Args:
        config: As for `init_telemetry_driver`; what it leaves open is ``enabled`` and ``per_step`` here.
        algorithm: ``rl.algorithm`` of the run.
        resource_attributes: What else is known of the run, such as ``rl.model``; as for `init_telemetry_driver`.
        flush_timeout_s: Seconds that all registered actors together have to flush at the end.
        summary: Print the summary.

    Raises:
        ConfigError: On entry, if a setting cannot be used.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        algorithm: str | None = None,
        resource_attributes: Mapping[str, Any] | None = None,
        flush_timeout_s: float = 15.0,
        summary: bool = True,
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._resource_attributes = resource_attributes
        self._flush_timeout_s = flush_timeout_s
        self._summary = summary
        self._handle: TelemetryHandle | None = None
        self._actors: list[Any] = []
        self._run_dir: str | None = None

    @property
    def handle(self) -> TelemetryHandle | None:
        """The driver's telemetry handle; None if the environment switched telemetry off."""
        return self._handle

    @property
    def run_dir(self) -> str | None:
        """The run directory, absolute; None if telemetry is off. Still known after the session."""
        return self._run_dir

    def __enter__(self) -> telemetry_session:  # noqa: PYI034 - typing.Self is 3.11
        self._handle = init_telemetry_driver(
            TelemetryConfig.from_any(self._config, **_DEFAULTS),
            algorithm=self._algorithm,
            resource_attributes=self._resource_attributes,
        )
        self._run_dir = self._handle.run_dir if self._handle is not None else None
        return self

    def init_ray(self, **kwargs: Any) -> Any:
        """Calls ``ray.init`` with our variables merged into its ``runtime_env``, then `attach_to_cluster`.

        A cluster that is sure to be started here needs no merging: its processes inherit the variables. Its first
        workers, which Ray starts before it knows of any ``runtime_env``, can then be used, and none stays idle.

        Args:
            kwargs: What ``ray.init`` takes.

        Returns:
            What ``ray.init`` returns.
        """
        import ray

        if not _starts_cluster(kwargs):
            runtime_env = telemetry_runtime_env(kwargs.get("runtime_env"))
            if runtime_env:
                kwargs["runtime_env"] = runtime_env
        result = ray.init(**kwargs)
        attach_to_cluster()
        return result

    def register(self, actor: Any) -> None:
        """Has ``actor`` flushed at the end. Actors reached by `dispatch_with_trace_context` or `traced` are known."""
        self._actors.append(actor)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is None:
            return
        with _ray_alarm.held_off():
            self._flush()
            shutdown_telemetry()
            if self._summary and self._run_dir is not None and Path(self._run_dir, "spool").is_dir():
                self._print_summary(self._run_dir)

    def _flush(self) -> None:
        """Lets actors that still live end their spans and close their spools, before the cluster takes them down."""
        try:
            known = [*self._actors, *actors.registered_actors()]
            unique = list({id(actor): actor for actor in known}.values())
            ray = sys.modules.get("ray")
            if unique and ray is not None and ray.is_initialized():
                actors.flush_actors(unique, self._flush_timeout_s)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("session-flush", "The actors could not be flushed: %r", error)

    def _print_summary(self, run_dir: str) -> None:
        try:
            size = sum(path.stat().st_size for path in Path(run_dir).glob("spool/*/*.rts"))
            if size > _SUMMARY_MAX_BYTES:
                print(f"{size >> 20} MiB of spans in {run_dir}: raytrace-rl report {run_dir}")
                return
            from raytrace_rl.monitor import load_run
            from raytrace_rl.monitor.report import summary

            print(summary(load_run(run_dir)))
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once("session-summary", "No summary of %s: %s", run_dir, error)


def _starts_cluster(kwargs: Mapping[str, Any]) -> bool:
    """True if ``ray.init`` starts a cluster or fails: with ``num_cpus`` it refuses to connect to one that is up."""
    address = kwargs.get("address")
    if address is None:
        return kwargs.get("num_cpus") is not None and not os.environ.get("RAY_ADDRESS")
    return bool(address == "local")
