"""What the collector's components that we use take, as JSON schemas; and that a configuration hangs together.

No validator of the collector's is to be had as a package. Read off the components' sources (their config.go, and the
config.schema.yaml beside it): a setting that is not listed here is a mistake until somebody has looked it up there.
Types are the sources' own, since the collector converts none (its `confmap` is strictly typed since 0.106).
"""

from __future__ import annotations

import re
from typing import Any

import jsonschema

_DURATION: dict[str, Any] = {"type": "string", "pattern": r"^(\d+(ms|s|m|h))+$"}
_ADDRESS: dict[str, Any] = {"type": "string", "pattern": r"^(\$\{env:\w+\}|[\w.-]+)(:\d+)?$"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_PERCENT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 100}
_TLS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"insecure": {"type": "boolean"}, "ca_file": {"type": "string"}},
}


def _closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required or []}


_QUEUE = _closed({"enabled": {"type": "boolean"}, "num_consumers": _COUNT, "queue_size": _COUNT})
_OTLP_EXPORTER = _closed({"endpoint": _ADDRESS, "tls": _TLS, "sending_queue": _QUEUE, "timeout": _DURATION})


def _policy(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    return _closed({"name": {"type": "string"}, "type": {"const": kind}, kind: settings}, ["name", "type", kind])


#: Component to what it takes.
COMPONENTS: dict[str, dict[str, dict[str, Any]]] = {
    "receivers": {
        "otlp": _closed(
            {"protocols": _closed({"grpc": _closed({"endpoint": _ADDRESS, "max_recv_msg_size_mib": _COUNT})})},
            ["protocols"],
        )
    },
    "processors": {
        "memory_limiter": _closed(
            {"check_interval": _DURATION, "limit_percentage": _PERCENT, "spike_limit_percentage": _PERCENT},
            ["check_interval", "limit_percentage"],
        ),
        "batch": _closed({"send_batch_size": _COUNT, "send_batch_max_size": _COUNT, "timeout": _DURATION}),
        "tail_sampling": _closed(
            {
                "decision_wait": _DURATION,
                "num_traces": _COUNT,
                "decision_cache": _closed({"sampled_cache_size": _COUNT, "non_sampled_cache_size": _COUNT}),
                "policies": {
                    "type": "array",
                    "items": {
                        "oneOf": [
                            _policy(
                                "status_code",
                                _closed(
                                    {"status_codes": {"type": "array", "items": {"enum": ["OK", "ERROR", "UNSET"]}}},
                                    ["status_codes"],
                                ),
                            ),
                            _policy("latency", _closed({"threshold_ms": _COUNT}, ["threshold_ms"])),
                            _policy(
                                "boolean_attribute",
                                _closed({"key": {"type": "string"}, "value": {"type": "boolean"}}, ["key", "value"]),
                            ),
                            _policy(
                                "string_attribute",
                                _closed(
                                    {
                                        "key": {"type": "string"},
                                        "values": {"type": "array", "items": {"type": "string"}},
                                    },
                                    ["key", "values"],
                                ),
                            ),
                            _policy(
                                "probabilistic",
                                _closed({"sampling_percentage": {"type": "number", "minimum": 0, "maximum": 100}}),
                            ),
                        ]
                    },
                },
            },
            ["policies"],
        ),
    },
    "exporters": {
        "otlp": _OTLP_EXPORTER,
        "loadbalancing": _closed(
            {
                "routing_key": {"enum": ["traceID", "service"]},
                "protocol": _closed({"otlp": _OTLP_EXPORTER}, ["otlp"]),
                "resolver": _closed(
                    {
                        "dns": _closed(
                            {
                                "hostname": {"type": "string"},
                                "port": {"type": "string", "pattern": r"^\d+$"},  # so in the source
                                "interval": _DURATION,
                                "timeout": _DURATION,
                            },
                            ["hostname"],
                        )
                    }
                ),
            },
            ["protocol", "resolver"],
        ),
        "prometheus": _closed(
            {
                "endpoint": _ADDRESS,
                "metric_expiration": _DURATION,
                "resource_to_telemetry_conversion": _closed({"enabled": {"type": "boolean"}}),
            },
            ["endpoint"],
        ),
    },
    "connectors": {
        "spanmetrics": _closed(
            {
                "namespace": {"type": "string"},
                "histogram": _closed(
                    {
                        "unit": {"enum": ["ms", "s"]},
                        "explicit": _closed({"buckets": {"type": "array", "items": _DURATION}}),
                    }
                ),
                "dimensions": {
                    "type": "array",
                    "items": _closed({"name": {"type": "string"}, "default": {"type": "string"}}, ["name"]),
                },
                "resource_metrics_key_attributes": {"type": "array", "items": {"type": "string"}},
                "metrics_flush_interval": _DURATION,
                "metrics_expiration": _DURATION,
            }
        )
    },
    "extensions": {"health_check": _closed({"endpoint": _ADDRESS})},
}
_TELEMETRY = _closed(
    {
        "metrics": _closed(
            {
                "readers": {
                    "type": "array",
                    "items": _closed(
                        {
                            "pull": _closed(
                                {
                                    "exporter": _closed(
                                        {
                                            "prometheus": _closed(
                                                {
                                                    "host": {"type": "string"},
                                                    "port": _COUNT,
                                                    "without_scope_info": {"type": "boolean"},
                                                    "without_type_suffix": {"type": "boolean"},
                                                    "without_units": {"type": "boolean"},
                                                },
                                                ["host", "port"],
                                            )
                                        }
                                    )
                                }
                            )
                        }
                    ),
                }
            }
        )
    }
)


def check(config: dict[str, Any]) -> None:
    """Fails where the collector would refuse ``config``, or a part of it would do nothing."""
    assert config.keys() <= {*COMPONENTS, "service"}
    for section, known in COMPONENTS.items():
        for name, settings in (config.get(section) or {}).items():
            jsonschema.validate(settings or {}, known[name.partition("/")[0]])
    _check_values(config.get("processors") or {})
    service = config["service"]
    assert service.keys() <= {"extensions", "telemetry", "pipelines"}
    jsonschema.validate(service["telemetry"], _TELEMETRY)
    used: dict[str, set[str]] = {section: set() for section in COMPONENTS}
    used["extensions"] |= set(service["extensions"])
    connectors = set(config.get("connectors") or {})
    given, taken = set(), set()
    for name, pipeline in service["pipelines"].items():
        assert re.fullmatch(r"(traces|metrics|logs)(/\w+)?", name)
        assert pipeline.keys() == {"receivers", "processors", "exporters"}
        assert pipeline["processors"][0] == "memory_limiter", f"{name}: memory is limited first, or not at all"
        assert "batch" not in pipeline["processors"][:-1], f"{name}: batches are made last"
        used["receivers"] |= set(pipeline["receivers"]) - connectors
        used["processors"] |= set(pipeline["processors"])
        used["exporters"] |= set(pipeline["exporters"]) - connectors
        given |= set(pipeline["exporters"]) & connectors
        taken |= set(pipeline["receivers"]) & connectors
    assert given == taken == connectors, "a connector ends one pipeline and begins another"
    for section, names in used.items():
        if section != "connectors":
            assert names == set(config.get(section) or {}), f"{section}: named and not defined, or the other way round"


def _check_values(processors: dict[str, Any]) -> None:
    """What the processors' own `Validate` refuses, and what they advise."""
    for name, settings in processors.items():
        kind = name.partition("/")[0]
        if kind == "memory_limiter":
            assert settings["spike_limit_percentage"] < settings["limit_percentage"]
        elif kind == "batch":
            assert settings["send_batch_max_size"] >= settings["send_batch_size"]
        elif kind == "tail_sampling":
            names = [policy["name"] for policy in settings["policies"]]
            assert len(names) == len(set(names)), "each policy has a name of its own"
            assert min(settings["decision_cache"].values()) >= 10 * settings["num_traces"], "as config.go says"
