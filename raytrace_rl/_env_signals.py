"""The standard variables of OpenTelemetry that say how metrics are collected; what is unreadable is a warning.

As `_env`: every function takes the mapping to read instead of ``os.environ``; none raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from raytrace_rl import _state
from raytrace_rl._env import parse_int

#: Ten seconds and not the specification's sixty: a process that is killed loses what it had not collected, and a
#: collection costs well under a millisecond.
DEFAULT_INTERVAL_MS: Final = 10_000

TEMPORALITIES: Final = ("cumulative", "delta", "lowmemory")
HISTOGRAMS: Final = ("explicit_bucket_histogram", "base2_exponential_bucket_histogram")


def metric_interval_s(environ: Mapping[str, str] | None = None) -> float:
    """Reads ``OTEL_METRIC_EXPORT_INTERVAL`` (milliseconds); returns seconds.

    Source: OpenTelemetry specification, "Environment variable specification", periodic exporting MetricReader.
    """
    environ = os.environ if environ is None else environ
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if text:
        try:
            if (value := parse_int(text)) > 0:
                return value / 1000
        except ValueError:
            pass
        _state.warn_once(
            "config:metric-interval",
            "OTEL_METRIC_EXPORT_INTERVAL=%r is no positive number of milliseconds. %d are used.",
            text,
            DEFAULT_INTERVAL_MS,
        )
    return DEFAULT_INTERVAL_MS / 1000


def temporality(environ: Mapping[str, str] | None = None) -> str:
    """Reads ``OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE``; returns one of `TEMPORALITIES`.

    Source: OpenTelemetry specification, "OTLP metrics exporter", additional environment variables.
    """
    return _choice("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", TEMPORALITIES, environ)


def histogram_aggregation(environ: Mapping[str, str] | None = None) -> str:
    """Reads ``OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION``; returns one of `HISTOGRAMS`.

    Source: as `temporality`.
    """
    return _choice("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", HISTOGRAMS, environ)


def _choice(variable: str, allowed: tuple[str, ...], environ: Mapping[str, str] | None) -> str:
    environ = os.environ if environ is None else environ
    text = environ.get(variable, "").strip()
    if not text:
        return allowed[0]
    if text.lower() in allowed:
        return text.lower()
    _state.warn_once(
        f"config:{variable}", "%s=%r: allowed are %s. %s is used.", variable, text, ", ".join(allowed), allowed[0]
    )
    return allowed[0]
