"""Metrics of one process on their way to its spool: who collects, when, and what becomes of a callback that hangs.

The heartbeat calls `tick`, a step's tee `collect_step`, flush and shutdown `collect` and `stop`. Callbacks of
observable instruments are the program's code: they run before the SDK collects, with no lock held (`_metrics_rounds`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics

from raytrace_rl import _cardinality, _encode_metrics, _metrics_api, _state
from raytrace_rl._env_signals import metric_interval_s
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._metrics_rounds import CALLBACK_S, Installed, Round, Source, within
from raytrace_rl.spool.format import Kind

if TYPE_CHECKING:
    from raytrace_rl._metrics_api import Series, SpoolMeter
    from raytrace_rl._metrics_sdk import SdkMetrics
    from raytrace_rl.config import TelemetryConfig

#: Nobody waits longer (seconds), whatever the deadline; locks take no infinity.
_LONGEST_S: Final = 3600.0
#: Collecting after each step may cost this share of the time; what would cost more waits for the next beat.
_STEP_SHARE: Final = 0.02


class Pipeline:
    """What collects in this process from a start to the next shutdown or fork.

    Args:
        interval_s: Seconds between two collections.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._sdk: dict[str, SdkMetrics] = {}
        self._installed: list[Installed] = []
        self._round: Round | None = None
        self._collecting = threading.Lock()
        self._owner = 0
        self._due = monotonic() + interval_s
        self._wanted = False
        self._step_from = 0.0

    # -- what instruments record to -------------------------------------------------------------------------------

    def _sdk_metrics(self) -> SdkMetrics:
        sdk = self._sdk.get("sdk")
        if sdk is None:
            from raytrace_rl._metrics_sdk import SdkMetrics

            sdk = self._sdk.setdefault("sdk", SdkMetrics(self.receive))  # atomic: no lock that a handler could meet
        return sdk

    def emitter(self, series: Series) -> Callable[..., None]:
        """Returns the SDK's ``add``, ``set`` or ``record`` for a series; imports the SDK at the first."""
        return self._sdk_metrics().emitter(series)

    def observed(self, source: Any, found: list[Any]) -> None:
        """Keeps what an observable instrument's callbacks returned until the SDK fetches it."""
        source.pending = found
        if source.backend is not self:
            self._sdk_metrics().instrument(source.series, source.take)
            source.backend = self

    # -- collecting -----------------------------------------------------------------------------------------------

    def _sources(self) -> list[Source]:
        return [*_metrics_api.observables, *self._installed]

    def tick(self) -> None:
        """Collects if it is time to; never waits for a callback."""
        now = monotonic()
        if now < self._due and not self._wanted:
            return
        round_ = self._round
        if round_ is not None and round_.thread.is_alive():
            if now - round_.started < CALLBACK_S:
                return  # it collects at its end
            round_.give_up()
        self._round = None
        self._wanted = False
        sources = self._sources() if now >= self._due else []
        if now >= self._due:
            self._due = now + self.interval_s
        if not sources or self._begin(sources, self._collect) is None:
            self._collect()

    def collect(self, deadline: float) -> bool:
        """Collects everything now.

        Args:
            deadline: `time.monotonic` moment to be done by. Callbacks have half of the time until then.

        Returns:
            Whether everything was collected.
        """
        complete = True
        deadline = min(deadline, monotonic() + _LONGEST_S)
        round_ = self._round if self._round is not None and self._round.thread.is_alive() else None
        sources = self._sources()
        if round_ is None and sources:
            round_ = self._begin(sources, _nothing)
        if round_ is not None and round_.thread is not threading.current_thread():
            round_.thread.join(max(0.0, (deadline - monotonic()) / 2))
            if round_.thread.is_alive():
                round_.give_up()
                complete = False
            self._round = None
        return self._collect(max(0.0, deadline - monotonic())) and complete

    def collect_step(self) -> None:
        """Collects what has been recorded, without asking callbacks; leaves it to the next beat if that is dear."""
        if monotonic() < self._step_from:
            self._wanted = True
        else:
            self._collect()

    def _begin(self, sources: list[Source], then: Callable[[], object]) -> Round | None:
        round_ = self._round = Round(sources, self.observed, then)
        try:
            round_.thread.start()
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._round = None
            return None
        return round_

    def _collect(self, timeout_s: float = 0.0) -> bool:
        """Has the SDK collect. False if another thread, or an outer call of this one, is at it and does not end."""
        sdk = self._sdk.get("sdk")
        if sdk is None:
            return True  # nothing was recorded yet
        me = threading.get_ident()
        if _metrics_api.recording_here():  # a signal handler: the SDK would wait for the thread that it interrupts
            _state.count_drop("metrics")
            return False
        if self._owner == me or not self._collecting.acquire(timeout=timeout_s):
            return False
        try:
            self._owner = me
            start = monotonic()
            sdk.reader.collect()
            end = monotonic()
            self._step_from = end + (end - start) / _STEP_SHARE
        finally:
            self._owner = 0
            self._collecting.release()
        return True

    def receive(self, data: Any) -> None:
        """Encodes what the SDK collected and places it in the spool. Nothing after the end, for readers that linger."""
        if self is not current:
            return
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                url = getattr(scope.scope, "schema_url", None) or ""
                for payload, points in _encode_metrics.scope_metrics(scope.scope, scope.metrics, url):
                    _place(payload, points)

    # -- the provider that is installed -----------------------------------------------------------------------------

    def join(self) -> None:
        """Installs our MeterProvider, or joins the one that is there."""
        provider = metrics.get_meter_provider()
        if provider is _metrics_api.provider or isinstance(provider, metrics.NoOpMeterProvider):
            return
        if type(provider).__name__ == "_ProxyMeterProvider":  # the API's word for "none is installed"
            metrics.set_meter_provider(_metrics_api.provider)
        elif not hasattr(provider, "add_metric_reader"):
            _state.warn_once(
                "meter-provider",
                "The MeterProvider that is installed (%s) takes no further reader: what is recorded through it stays "
                "out of the spool. get_telemetry_handle().meter reaches it.",
                type(provider).__name__,
            )
        else:
            installed = Installed(provider, self.receive)
            if within(1.0, installed.join):
                self._installed.append(installed)

    def leave(self) -> None:
        """Takes our reader out of the provider that was there before us; one whose callback hangs keeps it, unheard."""
        for installed in self._installed:
            if not installed.running:
                within(0.5, installed.leave)


def _nothing() -> None:
    """After a round whose caller collects."""


def _place(payload: bytes, points: int) -> None:
    writer = _state.writer
    if writer is None or not writer.append(Kind.METRICS, payload):
        _state.count_drop("metrics", points)
        _state.count_drop("bytes", len(payload))


#: What collects in this process; None while metrics are off.
current: Pipeline | None = None


def start(config: TelemetryConfig) -> None:
    """Starts metrics in this process, unless they are switched off. Never raises.

    Installs the global MeterProvider if there is none; one that is there stays, and its metrics reach the spool too
    where the SDK lets a reader be added. Started already (a forked child inherits it), nothing changes.

    Args:
        config: The settings in force.
    """
    global current
    if not config.metrics_enabled or config.exporter == "none" or current is not None:
        return
    try:
        _cardinality.forget()
        current = _metrics_api.backend = Pipeline(metric_interval_s())
        current.join()
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("metrics-start", "Metrics could not be started: %r", error)


def meter(name: str, version: str | None = None) -> SpoolMeter:
    """Returns a meter whose instruments reach the spool, whichever MeterProvider is installed."""
    return _metrics_api.provider.get_meter(name, version)


def recording() -> bool:
    """Whether metrics are on in this process."""
    return current is not None


def tick() -> None:
    """Collects if it is time to; for the heartbeat. Never raises, never waits."""
    _guarded(lambda pipeline: pipeline.tick())


def collect(deadline: float) -> bool:
    """Collects everything now; for a flush. Never raises.

    Args:
        deadline: `time.monotonic` moment to be done by.

    Returns:
        Whether everything was collected.
    """
    return _guarded(lambda pipeline: pipeline.collect(deadline)) is not False


def collect_step() -> None:
    """Collects what a step has just recorded, so that each step's values are kept. Never raises, never waits."""
    _guarded(lambda pipeline: pipeline.collect_step())


def stop(deadline: float) -> None:
    """Collects once more and ends metrics in this process; to be called while the spool is open. Never raises.

    Args:
        deadline: `time.monotonic` moment to be done by.
    """
    global current
    collect(deadline)
    pipeline, current = current, None
    _metrics_api.backend = None
    if pipeline is not None:
        pipeline.leave()


def _guarded(call: Callable[[Pipeline], Any]) -> Any:
    pipeline = current
    if pipeline is None:
        return None
    try:
        return call(pipeline)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.count_drop("metrics")
        _state.warn_once("metrics-collect", "Metrics could not be collected: %r", error)
        return False


def _after_fork_in_child() -> None:
    """Begins anew: sums of the parent's are the parent's, and its locks may be held by threads that are not here."""
    global current
    if current is not None:
        current = _metrics_api.backend = Pipeline(current.interval_s)
        _cardinality.forget()
    for each in _metrics_api.observables:
        each.running = False
        each.pending = []


os.register_at_fork(after_in_child=_after_fork_in_child)
