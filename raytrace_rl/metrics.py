"""Metrics of a training loop: the registry of series, and the tee from what it logs anyway.

Names follow ``nemo_rl.telemetry.metrics``. The rows that say which logged key is which series stand with the code that
logs them, by way of `vocabulary`; everything is recorded through ``get_telemetry_handle().meter`` into the spool.
"""

from __future__ import annotations

from raytrace_rl._metric_registry import (
    MetricSpec,
    record_metrics,
    register_metric_group,
    registered_metric_groups,
)
from raytrace_rl._setup_timing import SETUP_TIMING_PREFIX, SetupTimingMetrics, map_setup_seconds, setup_phase
from raytrace_rl._tee import (
    RL_EFFICIENCY_CATEGORY_ATTR,
    RL_EFFICIENCY_MEASUREMENT_ATTR,
    RL_EFFICIENCY_WINDOW_ATTR,
    RL_SETUP_PHASE_ATTR,
    TeeingLogger,
    map_efficiency_seconds,
    map_teed_scalars,
    tee_rl_metrics_to_otel,
)
from raytrace_rl.efficiency import efficiency_measurements
from raytrace_rl.vocabulary import RL_EFFICIENCY_SECONDS_METRIC, RL_METRIC_GROUP, RL_SETUP_DURATION_METRIC

__all__ = [
    "RL_EFFICIENCY_CATEGORY_ATTR",
    "RL_EFFICIENCY_MEASUREMENT_ATTR",
    "RL_EFFICIENCY_SECONDS_METRIC",
    "RL_EFFICIENCY_WINDOW_ATTR",
    "RL_METRIC_GROUP",
    "RL_SETUP_DURATION_METRIC",
    "RL_SETUP_PHASE_ATTR",
    "SETUP_TIMING_PREFIX",
    "MetricSpec",
    "SetupTimingMetrics",
    "TeeingLogger",
    "efficiency_measurements",
    "map_efficiency_seconds",
    "map_setup_seconds",
    "map_teed_scalars",
    "record_metrics",
    "register_metric_group",
    "registered_metric_groups",
    "setup_phase",
    "tee_rl_metrics_to_otel",
]
