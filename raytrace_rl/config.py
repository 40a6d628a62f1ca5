"""The settings of a run: `TelemetryConfig`, where its values come from, and every other setting read from outside.

For each field the environment beats code: ``RAYTRACE_RL_<FIELD>``, then ``NEMO_RL_OTEL_<FIELD>``, then what the program
gave, then the default. This is the one module that reads the environment for settings.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from raytrace_rl import _state
from raytrace_rl._env import (
    Limits,
    RankIdentity,
    capture_content,
    forwarded_env,
    limits,
    rank_identity,
    resource_attributes,
    sdk_disabled,
)
from raytrace_rl._fields import RULES, FieldError, Value
from raytrace_rl._projection import Projection

__all__ = [
    "ConfigError",
    "Limits",
    "Projection",
    "RankIdentity",
    "TelemetryConfig",
    "capture_content",
    "forwarded_env",
    "limits",
    "projection",
    "rank_identity",
    "resolve",
    "resource_attributes",
    "sdk_disabled",
    "source",
    "to_env",
]

PREFIX: Final = "RAYTRACE_RL_"
#: NeMo-RL's own prefix, so that its launch scripts go on working.
FALLBACK_PREFIX: Final = "NEMO_RL_OTEL_"

#: What this process has projected into its environment; `resolve` looks through it.
projection: Final = Projection()

#: Fields of NeMo-RL's configuration that choose which ranks export. Here every rank has a spool, so they do nothing.
_NEMO_RL_ONLY: Final = frozenset({"export_strategy", "export_rank", "export_sample_rate", "sampler_enabled"})

#: Variables with our prefix that are no fields.
_OTHER_VARIABLES: Final = frozenset({"WORKER_GROUP", "CAPTURE_CONTENT", "ATTEMPT", "RESOURCE_ATTRIBUTES", "AUTO_RAY"})


class ConfigError(ValueError):
    """A setting cannot be used; the message names it, its value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Settings of telemetry for a run. An instance is always valid: values are checked when it is made.

    Attributes:
        enabled: Master switch. False touches no global and costs one set lookup a span.
        service_name: ``service.name`` of every process.
        span_groups: Which spans are recorded: presets and group names, joined by commas (a list is joined).
        traces_enabled, metrics_enabled, logs_enabled: The three signals.
        exporter: ``spool`` (files in ``run_dir`` alone), ``otlp``, ``console`` or ``none``.
        run_dir: Where the run's files go; None for ``./raytrace_runs/<run id>``.
        run_id: Name of the run; None for a short random one.
        vllm_native_tracing: Also switch on vLLM's own engine spans.
        trace_per: ``run`` (one trace), ``step`` (a trace for each step and rollout) or ``auto``.
        spool_dir: Where processes write their spools; None for a place that suits ``run_dir``'s file system.
        heartbeat_s: Seconds between two signs of life of a process, 0.01 to 3600.
        stack_after_s: Seconds a span is open before its Python stack is noted, 0 to 1e9 (in effect never).
        spool_max_mib: Bound of a node's spools in MiB; None for the lesser of 4 GiB and 5 % of free space.
        otlp_receiver: Each node listens for OTLP (`raytrace_rl.relay.address`), and keeps what comes with the run.
        relay_idle_s: Seconds without work after which a node's relay ends, 1 to 1e9.
        per_prompt_limit: Prompts of a step (outside any, of a rollout) whose ``PER_PROMPT`` spans are recorded, whole
            groups; None for all.

    Raises:
        ConfigError: A value is of the wrong type or not allowed.
    """

    enabled: bool = False
    service_name: str = "raytrace-rl"
    span_groups: str = "default"
    traces_enabled: bool = True
    metrics_enabled: bool = True
    logs_enabled: bool = False
    exporter: str = "spool"
    run_dir: str | None = None
    run_id: str | None = None
    vllm_native_tracing: bool = False
    trace_per: str = "auto"
    spool_dir: str | None = None
    heartbeat_s: float = 1.0
    stack_after_s: float = 60.0
    spool_max_mib: int | None = None
    otlp_receiver: bool = False
    relay_idle_s: float = 30.0
    per_prompt_limit: int | None = None

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            try:
                object.__setattr__(self, name, rule(getattr(self, name)))
            except FieldError as error:
                raise ConfigError(f"{name}={getattr(self, name)!r} cannot be used: {error}") from None

    @classmethod
    def from_any(cls, config: Any = None, /, **defaults: Any) -> TelemetryConfig:
        """Finds the settings in whatever a program has.

        Args:
            config: None (the defaults), a `TelemetryConfig`, a mapping or object (dataclass, pydantic model, namespace)
                of its fields, or a master configuration that has one of these under ``telemetry``. A field that is
                None has its default.
            defaults: Other defaults for the fields that ``config`` does not name; a `TelemetryConfig` names all.

        Raises:
            ConfigError: A key is no field (the closest one is named), or a value cannot be used.
        """
        if isinstance(config, TelemetryConfig):
            return config
        if config is None:
            return cls(**defaults)
        values = _as_mapping(config)
        if values is None:
            raise ConfigError(
                f"the telemetry configuration is a {type(config).__name__}: give a TelemetryConfig, a mapping of its "
                "fields, or a configuration that has one under 'telemetry'"
            )
        if "telemetry" in values:
            return cls.from_any(values["telemetry"], **defaults)
        if not RULES.keys() & values.keys() and any(_as_mapping(value) is not None for value in values.values()):
            return cls(**defaults)  # a master configuration (it has sections) that says nothing about telemetry
        for key in values:
            if key in _NEMO_RL_ONLY:
                message = "Telemetry setting %r has no effect here: every rank's spans are kept."
                _state.warn_once(f"config:{key}", message, key)
            elif key not in RULES:
                raise ConfigError(f"{key!r} is no telemetry setting{_closest(str(key), RULES)}")
        named = {key: value for key, value in values.items() if key in RULES and value is not None}
        return cls(**{**defaults, **named})


def resolve(config: Any = None, *, strict: bool, environ: Mapping[str, str] | None = None) -> TelemetryConfig:
    """Settles the settings of this process: what the environment says, else what the program gave, else the default.

    Values that this process projected itself are looked through; in a worker that inherited them they count.

    Args:
        config: As `TelemetryConfig.from_any` takes it.
        strict: True on the driver: an unusable value is an error. False in a worker: a warning, and the default.
        environ: Where to look instead of ``os.environ``.

    Raises:
        ConfigError: Only if ``strict``: the message names the variable or field, its value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    try:
        base = TelemetryConfig.from_any(config)
    except ConfigError as error:
        if strict:
            raise
        _state.warn_once(f"config:{error}", "%s. The defaults are used.", error)
        base = TelemetryConfig()
    found: dict[str, Value] = {}
    for field in RULES:
        for variable, text in _candidates(field, environ):
            try:
                found[field] = RULES[field](text)
            except FieldError as error:
                problem = f"{variable}={text!r} cannot be used: {error}"
                if strict:
                    raise ConfigError(problem) from None
                default = getattr(base, field)
                _state.warn_once(f"config:{variable}={text}", "%s. %s=%r is used.", problem, field, default)
            break
    _warn_of_misspelt(environ)
    return dataclasses.replace(base, **found)  # type: ignore[arg-type]


def to_env(config: TelemetryConfig) -> dict[str, str]:
    """Returns ``RAYTRACE_RL_<FIELD>`` for every field that has a value; `resolve` reads the same settings from them."""
    values = {field: getattr(config, field) for field in RULES}
    return {PREFIX + field.upper(): _env_text(value) for field, value in values.items() if value is not None}


def source(field: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the variable that a field's value comes from; None if no variable says anything of it."""
    found = _candidates(field, os.environ if environ is None else environ)
    return found[0][0] if found else None


def _candidates(field: str, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns (variable, value) for what the user set, strongest first."""
    names = [PREFIX + field.upper(), FALLBACK_PREFIX + field.upper()]
    if field == "service_name":
        names.append("OTEL_SERVICE_NAME")
    found = [(name, text) for name in names if (text := projection.user_value(environ, name)) is not None]
    if field == "service_name" and not found and (name := resource_attributes(environ).get("service.name")):
        found.append(("OTEL_RESOURCE_ATTRIBUTES", name))
    return found


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Warns of a variable that is almost one of ours: nothing else would ever say that it has no effect."""
    known = {field.upper() for field in RULES} | _OTHER_VARIABLES
    for name in environ:
        if name.startswith(PREFIX) and (word := name.removeprefix(PREFIX)) not in known:
            _state.warn_once(f"config:{name}", "%s is no telemetry setting%s", name, _closest(word, known, PREFIX))


def _closest(name: str, known: Iterable[str], prefix: str = "") -> str:
    import difflib

    matches = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {prefix}{matches[0]}?" if matches else ""


def _as_mapping(config: Any) -> Mapping[Any, Any] | None:
    """Returns the attributes of a mapping, a dataclass, a pydantic model or a plain object, None of anything else."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, type) or callable(config):
        return None
    if hasattr(config, "telemetry"):  # a master configuration of any class, slots and properties included
        return {"telemetry": config.telemetry}
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    attributes = getattr(config, "__dict__", None)
    return None if attributes is None else {k: v for k, v in attributes.items() if not k.startswith("_")}


def _env_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
