"""The tee: what a training loop logs for itself also becomes OpenTelemetry metrics, step by step.

A dict is known by the prefix it is logged under, and read only for the series that belong there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from raytrace_rl import _metrics_pipeline, _state, semconv
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._metric_registry import MetricSpec, record_metrics, register_metric_group
from raytrace_rl._setup_timing import SETUP_TIMING_PREFIX, map_setup_seconds
from raytrace_rl.efficiency import efficiency_categories, efficiency_key, efficiency_measurements
from raytrace_rl.setup import get_telemetry_handle
from raytrace_rl.vocabulary import (
    RL_EFFICIENCY_SECONDS_METRIC,
    RL_METRIC_GROUP,
    RL_SETUP_DURATION_METRIC,
    TeedMetric,
    as_scalar,
    registry_key,
    teed_metrics,
)

RL_EFFICIENCY_CATEGORY_ATTR: Final = "rl.efficiency.category"
RL_EFFICIENCY_MEASUREMENT_ATTR: Final = "rl.efficiency.measurement"
RL_EFFICIENCY_WINDOW_ATTR: Final = "rl.efficiency.window"
RL_SETUP_PHASE_ATTR: Final = "rl.setup.phase"

_EFFICIENCY: Final = MetricSpec(
    registry_key(RL_EFFICIENCY_SECONDS_METRIC),
    RL_EFFICIENCY_SECONDS_METRIC,
    unit="s",
    description="Seconds of one efficiency category, on the clock and over the window that the labels name.",
)
_SETUP: Final = MetricSpec(
    registry_key(RL_SETUP_DURATION_METRIC),
    RL_SETUP_DURATION_METRIC,
    unit="s",
    description="Seconds of one phase of startup. Phases overlap: they do not add up.",
)
register_metric_group(RL_METRIC_GROUP, (_EFFICIENCY, _SETUP))

#: The rows that have become series of the group.
_declared: tuple[TeedMetric, ...] = ()


def map_efficiency_seconds(metrics: Mapping[str, Any], measurement_by_category: Mapping[str, str]) -> dict[str, float]:
    """Returns ``{category: seconds}`` for the categories that a logged dict has seconds of.

    Only the categories named are looked up: sums under the same prefix (``efficiency/total_waste_s``) are none.

    Args:
        metrics: The dict, with the seconds of a category under ``efficiency/<category>_s``.
        measurement_by_category: The categories, each with its clock; see `efficiency_measurements`.
    """
    found = {}
    for category in measurement_by_category:
        seconds = as_scalar(metrics.get(efficiency_key(category)))
        if seconds is not None:
            found[category] = seconds
    return found


def map_teed_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns ``{registry key: value}`` for every declared row whose key is in a logged dict with a number."""
    found = {}
    for row in teed_metrics():
        value = as_scalar(metrics.get(row.logger_key))
        if value is not None:
            found[row.key] = value
    return found


def tee_rl_metrics_to_otel(metrics: Mapping[str, Any], prefix: str | None = "") -> None:
    """Records what a training loop logs as OpenTelemetry metrics too. Never raises.

    On the driver alone, and only while telemetry records metrics there; elsewhere it does nothing.

    Args:
        metrics: The dict given to ``log_metrics``; keys without a row are passed over, as is what is no number.
        prefix: What it is logged under. ``train``, empty or None: the rows of `register_teed_metrics` and the
            efficiency categories. ``timing/setup``: the phases of startup. Any other: nothing.
    """
    try:
        families = _FAMILIES.get(prefix)
        if families is None or not metrics or not _metrics_pipeline.recording():
            return
        handle = get_telemetry_handle()
        if handle is None or handle.role != semconv.ROLE_DRIVER:
            return
        for family in families:
            _guarded(family, handle.meter, metrics)
        _metrics_pipeline.collect_step()
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once("tee", "Metrics under %r could not be recorded: %r", prefix, error)


def _guarded(family: Callable[[Any, Mapping[str, Any]], None], meter: Any, metrics: Mapping[str, Any]) -> None:
    """Records one family; a broken one does not cost the others."""
    try:
        family(meter, metrics)
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.count_drop("metrics")
        _state.warn_once(f"tee:{family.__name__}", "Metrics could not be recorded: %r", error)


def _efficiency(meter: Any, metrics: Mapping[str, Any]) -> None:
    categories = efficiency_categories()
    for name, seconds in map_efficiency_seconds(metrics, efficiency_measurements()).items():
        category = categories[name]
        labels = {
            RL_EFFICIENCY_CATEGORY_ATTR: name,
            RL_EFFICIENCY_MEASUREMENT_ATTR: category.measurement,
            RL_EFFICIENCY_WINDOW_ATTR: category.window,
            semconv.RL_BUCKET: category.bucket.value,
        }
        record_metrics(meter, RL_METRIC_GROUP, {_EFFICIENCY.key: seconds}, labels)


def _scalars(meter: Any, metrics: Mapping[str, Any]) -> None:
    _declare(teed_metrics())
    record_metrics(meter, RL_METRIC_GROUP, map_teed_scalars(metrics))


def _setup(meter: Any, metrics: Mapping[str, Any]) -> None:
    # Without a bucket: phases overlap, and summed by bucket startup would count several times.
    for phase, seconds in map_setup_seconds(metrics).items():
        record_metrics(meter, RL_METRIC_GROUP, {_SETUP.key: seconds}, {RL_SETUP_PHASE_ATTR: phase})


#: What is looked for under each prefix.
_FAMILIES: Final[dict[str | None, tuple[Callable[[Any, Mapping[str, Any]], None], ...]]] = {
    "train": (_efficiency, _scalars),
    "": (_efficiency, _scalars),
    None: (_efficiency, _scalars),
    SETUP_TIMING_PREFIX: (_setup,),
}


def _declare(rows: tuple[TeedMetric, ...]) -> None:
    """Makes new rows series of the group."""
    global _declared
    if rows == _declared:
        return
    for row in rows:
        try:
            spec = MetricSpec(row.key, row.name, row.kind, row.unit, row.description)
            register_metric_group(RL_METRIC_GROUP, (spec,))
        except ValueError as error:
            _state.warn_once(f"row:{row.name}", "Logger key %r is not teed: %s", row.logger_key, error)
    _declared = rows


class TeeingLogger:
    """A logger whose ``log_metrics`` also tees; everything else is the wrapped one's.

    Args:
        inner: Any object with ``log_metrics(metrics, step, prefix=...)``. What it raises is the caller's.
    """

    __slots__ = ("_inner",)

    _inner: Any

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    def log_metrics(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Tees ``metrics``, then has the wrapped logger log them.

        Args:
            metrics: Values by key.
            args, kwargs: As the wrapped logger takes them: ``step``, then ``prefix``.
        """
        # First: what the step logged is kept even where the wrapped logger fails or never returns.
        tee_rl_metrics_to_otel(metrics, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return self._inner.log_metrics(metrics, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._inner, name)

    def __repr__(self) -> str:
        return f"TeeingLogger({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TeeingLogger, (self._inner,)
