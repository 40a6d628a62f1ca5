"""The MeterProvider that is installed: meters and instruments that outlive every start, shutdown and fork.

An instrument is made once, at the import of some module, and used for as long as the process lives; the SDK's own is
tied to one provider. So what is handed out here is a shell: it makes the SDK's instrument when it is first used after
a start, drops what is recorded while telemetry is off, and begins at zero in a forked child, where the parent's sums
would else be counted twice. Nothing here imports the SDK.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from raytrace_rl import _cardinality, _numbers, _state
from raytrace_rl._interrupts import is_interrupt

# Public only in newer releases of the API.
_GaugeBase: Final[Any] = getattr(metrics, "Gauge", None) or metrics._Gauge


class Scope(NamedTuple):
    """An instrumentation scope, as ``get_meter`` takes it."""

    name: str
    version: str | None
    schema_url: str | None
    attributes: tuple[tuple[str, Any], ...]


class Series(NamedTuple):
    """What an instrument is: equal ones are one series."""

    scope: Scope
    kind: str
    name: str
    unit: str
    description: str
    boundaries: tuple[float, ...] | None = None


class Backend(Protocol):
    """Where instruments record to, from one start to the next shutdown or fork."""

    def emitter(self, series: Series) -> Callable[..., None]:
        """Returns the SDK's ``add``, ``set`` or ``record`` for a series."""
        ...


#: None while metrics are off.
backend: Backend | None = None


class _Busy(threading.local):
    inside = False


#: A signal handler or finalizer that records while this thread does so would wait for the SDK's locks for ever.
_busy: Final = _Busy()


def recording_here() -> bool:
    """Whether this thread is in the midst of recording, and may hold the SDK's locks: asked by signal handlers."""
    return _busy.inside


class _Synchronous:
    """What counters, gauges and histograms share."""

    def __init__(self, series: Series, *, negative: bool) -> None:
        self._series = series
        self._negative = negative
        self._backend: Backend | None = None
        self._emitter: Callable[..., None] = _nothing

    def _emit(self, amount: Any, attributes: Mapping[str, Any] | None, context: Any) -> None:
        current = backend
        if current is None:
            return
        if _busy.inside:
            _state.count_drop("metrics")
            return
        _busy.inside = True
        try:
            if type(amount) is not float and type(amount) is not int:
                found = int(amount) if isinstance(amount, bool) else _numbers.number(amount)
                if found is None:
                    self._refuse("is no number", amount)
                    return
                amount = found
            if not math.isfinite(amount):
                self._refuse("is not finite", amount)
            elif amount < 0 and not self._negative:
                self._refuse("is negative", amount)
            else:
                if self._backend is not current:
                    self._emitter = current.emitter(self._series)
                    self._backend = current
                labels = _cardinality.bounded(self._series.name, attributes)
                if context is None:
                    self._emitter(amount, labels)
                else:
                    self._emitter(amount, labels, context)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._refuse("cannot be recorded", error)
        finally:
            _busy.inside = False

    def _refuse(self, why: str, what: object) -> None:
        _state.count_drop("metrics")
        _state.warn_once(
            f"metric:{self._series.name}:{why}",
            "A value of metric %s %s (%.80r); such values are dropped and counted.",
            self._series.name,
            why,
            what,
        )


def _nothing(*_: object) -> None:
    """Records nowhere."""


class SpoolCounter(_Synchronous, metrics.Counter):
    """A counter."""

    def add(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        """Adds ``amount``, not below zero."""
        self._emit(amount, attributes, context)


class SpoolUpDownCounter(_Synchronous, metrics.UpDownCounter):
    """A counter that goes down too."""

    def add(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        """Adds ``amount``."""
        self._emit(amount, attributes, context)


class SpoolHistogram(_Synchronous, metrics.Histogram):
    """A histogram."""

    def record(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        """Records ``amount``, not below zero."""
        self._emit(amount, attributes, context)


class SpoolGauge(_Synchronous, _GaugeBase):  # type: ignore[misc]
    """A gauge."""

    def set(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        """Sets the value."""
        self._emit(amount, attributes, context)


class _Asynchronous:
    """An observable instrument. Its callbacks run before the SDK collects, with no lock held, and under a deadline.

    Attributes:
        series: What it is.
        running: A callback of it runs, or hangs.
        backend: Where the SDK's instrument for it has been made.
        pending: What its callbacks returned, until the SDK fetches it.
    """

    def __init__(self, series: Series, callbacks: Sequence[Any] | None) -> None:
        self.series = series
        self._callbacks = list(callbacks or ())
        self._begun: set[int] = set()
        self.running = False
        self.backend: Backend | None = None
        self.pending: list[Observation] = []

    @property
    def name(self) -> str:
        """Its name, for a person."""
        return self.series.name

    def observe(self, timeout_s: float) -> list[Observation]:
        """Returns what its callbacks say now; a callback that fails says nothing, with one warning.

        Args:
            timeout_s: Told to the callbacks, in their options.
        """
        options = CallbackOptions(timeout_millis=timeout_s * 1000)
        found: list[Observation] = []
        for callback in self._callbacks:
            try:
                for one in self._call(callback, options):
                    value = _numbers.number(one.value)
                    if value is not None and math.isfinite(value):
                        labels: Any = _cardinality.bounded(self.name, one.attributes)
                        found.append(Observation(value, labels))
            except Exception as error:
                if is_interrupt(error):
                    raise
                _state.count_drop("metrics")
                _state.warn_once(f"callback:{self.name}", "The callback of metric %s failed: %r", self.name, error)
        return found

    def _call(self, callback: Any, options: CallbackOptions) -> Iterable[Observation]:
        if not isinstance(callback, Generator):
            return callback(options)  # type: ignore[no-any-return]
        try:
            if id(callback) not in self._begun:  # a generator's first yield takes no options
                self._begun.add(id(callback))
                next(callback)
            return callback.send(options)  # type: ignore[no-any-return]
        except StopIteration:
            return ()

    def take(self, _options: CallbackOptions) -> list[Observation]:
        """Hands over what was observed; what the SDK calls."""
        found, self.pending = self.pending, []
        return found


class SpoolObservableCounter(_Asynchronous, metrics.ObservableCounter):
    """An observable counter."""


class SpoolObservableUpDownCounter(_Asynchronous, metrics.ObservableUpDownCounter):
    """An observable counter that goes down too."""


class SpoolObservableGauge(_Asynchronous, metrics.ObservableGauge):
    """An observable gauge."""


#: Every observable instrument of this process, in the order in which they were made.
observables: Final[list[_Asynchronous]] = []


class SpoolMeter(metrics.Meter):
    """Makes instruments. Never raises: what cannot be recorded is found out, counted and named when it is."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope.name, scope.version, scope.schema_url)
        self._scope = scope

    def _series(self, kind: str, name: str, unit: str, description: str) -> Series:
        return Series(self._scope, kind, str(name), str(unit or ""), str(description or ""))

    def create_counter(self, name: str, unit: str = "", description: str = "") -> metrics.Counter:
        """Returns a counter."""
        return SpoolCounter(self._series("counter", name, unit, description), negative=False)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> metrics.UpDownCounter:
        """Returns an up-down counter."""
        return SpoolUpDownCounter(self._series("up_down_counter", name, unit, description), negative=True)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Any:
        """Returns a gauge."""
        return SpoolGauge(self._series("gauge", name, unit, description), negative=True)

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> metrics.Histogram:
        """Returns a histogram."""
        series = self._series("histogram", name, unit, description)
        if explicit_bucket_boundaries_advisory is not None:
            series = series._replace(boundaries=tuple(explicit_bucket_boundaries_advisory))
        return SpoolHistogram(series, negative=False)

    def create_observable_counter(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> metrics.ObservableCounter:
        """Returns an observable counter."""
        made = SpoolObservableCounter(self._series("observable_counter", name, unit, description), callbacks)
        observables.append(made)
        return made

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> metrics.ObservableUpDownCounter:
        """Returns an observable up-down counter."""
        series = self._series("observable_up_down_counter", name, unit, description)
        made = SpoolObservableUpDownCounter(series, callbacks)
        observables.append(made)
        return made

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[Any] | None = None, unit: str = "", description: str = ""
    ) -> metrics.ObservableGauge:
        """Returns an observable gauge."""
        made = SpoolObservableGauge(self._series("observable_gauge", name, unit, description), callbacks)
        observables.append(made)
        return made


class SpoolMeterProvider(metrics.MeterProvider):
    """Hands out meters, one for each instrumentation scope."""

    def __init__(self) -> None:
        self._meters: dict[Scope, SpoolMeter] = {}

    def get_meter(
        self,
        name: str,
        version: str | None = None,
        schema_url: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> SpoolMeter:
        """Returns the meter of a scope."""
        try:
            scope = Scope(str(name), version, schema_url, tuple(sorted((attributes or {}).items())))
            return self._meters.setdefault(scope, SpoolMeter(scope))
        except TypeError:  # attributes that cannot be hashed or sorted
            return SpoolMeter(Scope(str(name), version, schema_url, ()))


#: One for the process: the one that is installed, unless a program brought its own.
provider: Final = SpoolMeterProvider()
