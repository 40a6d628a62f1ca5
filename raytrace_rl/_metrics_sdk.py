"""The OpenTelemetry SDK behind the metrics of one process: aggregation, and a reader that collects when it is told.

Imports the SDK's metrics, 50 to 100 ms of a worker's start; so only the first measurement leads here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from opentelemetry.sdk.metrics import (
    Counter,
    Histogram,
    MeterProvider,
    ObservableCounter,
)
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation
from opentelemetry.sdk.resources import Resource

from raytrace_rl._env_signals import HISTOGRAMS, histogram_aggregation, temporality
from raytrace_rl._metrics_api import Series

#: What is a delta under each preference; all else is cumulative. OpenTelemetry specification, "OTLP metrics exporter".
_DELTA: Final[dict[str, tuple[type, ...]]] = {
    "cumulative": (),
    "delta": (Counter, Histogram, ObservableCounter),
    "lowmemory": (Counter, Histogram),
}

_EMIT: Final = {"counter": "add", "up_down_counter": "add", "gauge": "set", "histogram": "record"}


class SpoolReader(MetricReader):
    """Collects when it is told, and hands over what there is.

    Args:
        receive: Takes the SDK's ``MetricsData``.
    """

    def __init__(self, receive: Callable[[Any], None]) -> None:
        deltas: dict[type, AggregationTemporality] = dict.fromkeys(_DELTA[temporality()], AggregationTemporality.DELTA)
        exponential = histogram_aggregation() == HISTOGRAMS[1]
        super().__init__(
            preferred_temporality=deltas,
            preferred_aggregation={Histogram: ExponentialBucketHistogramAggregation()} if exponential else None,
        )
        self._receive = receive

    def _receive_metrics(
        self,
        metrics_data: Any,
        timeout_millis: float = 10_000,  # noqa: ARG002 - OpenTelemetry's interface
        **kwargs: Any,  # noqa: ARG002 - as above
    ) -> None:
        self._receive(metrics_data)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Nothing to end."""


class SdkMetrics:
    """An SDK MeterProvider of our own, from a start to the next shutdown or fork.

    Args:
        receive: As `SpoolReader`'s.
    """

    def __init__(self, receive: Callable[[Any], None]) -> None:
        self.reader = SpoolReader(receive)
        # Without a resource: who this process is stands in its spool, once.
        self._provider = MeterProvider([self.reader], resource=Resource.get_empty(), shutdown_on_exit=False)
        self._made: dict[Series, Any] = {}

    def instrument(self, series: Series, callback: Callable[..., Any] | None = None) -> Any:
        """Returns the SDK's instrument for a series; the same for equal ones.

        Args:
            series: Which.
            callback: For an observable one, which is made anew each time.
        """
        made = self._made.get(series) if callback is None else None
        if made is not None:
            return made
        scope = series.scope
        if scope.attributes:
            meter = self._provider.get_meter(scope.name, scope.version, scope.schema_url, dict(scope.attributes))
        else:
            meter = self._provider.get_meter(scope.name, scope.version, scope.schema_url)
        create: Any = getattr(meter, f"create_{series.kind}")
        about = {"unit": series.unit, "description": series.description}
        if callback is not None:
            return create(series.name, callbacks=[callback], **about)
        if series.boundaries is not None:
            about["explicit_bucket_boundaries_advisory"] = list(series.boundaries)  # type: ignore[assignment]
        # Two threads may come here at once: the SDK has them share the series, whichever is kept.
        return self._made.setdefault(series, create(series.name, **about))

    def emitter(self, series: Series) -> Callable[..., None]:
        """Returns ``add``, ``set`` or ``record`` of the SDK's instrument for a series."""
        return getattr(self.instrument(series), _EMIT[series.kind])  # type: ignore[no-any-return]
