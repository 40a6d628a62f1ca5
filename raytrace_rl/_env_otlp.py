"""The standard variables of OpenTelemetry that say where OTLP is sent, and which traces; unreadable ones are a warning.

As `_env`: every function takes the mapping to read instead of ``os.environ``; none raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from raytrace_rl import _state
from raytrace_rl._env import FALSE, TRUE, parse_int

SIGNALS: Final = ("traces", "metrics", "logs")
PROTOCOLS: Final = ("grpc", "http/protobuf")
_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
_DEFAULT_URL: Final = {"grpc": "http://localhost:4317", "http/protobuf": "http://localhost:4318"}
_TIMEOUT_MS: Final = 10_000
#: What is beyond these is no sampler that a relay can be.
_SAMPLERS: Final = ("always_on", "always_off", "traceidratio")


@dataclass(frozen=True)
class Endpoint:
    """Where one signal is sent, and how. It holds credentials: never to be logged, nor put into an environment.

    Attributes:
        protocol: ``grpc`` or ``http/protobuf``.
        url: As given, with the signal's path for HTTP; without credentials.
        target: For gRPC: ``host:port``, or ``unix:/path``.
        secure: Over TLS.
        headers: Sent with each request; names in lower case.
        compression: ``gzip`` or ``none``.
        timeout_s: Seconds that one request may take.
        certificate, client_key, client_certificate: Contents of the PEM files; None for the defaults.
    """

    protocol: str
    url: str
    target: str
    secure: bool
    headers: tuple[tuple[str, str], ...] = ()
    compression: str = "none"
    timeout_s: float = _TIMEOUT_MS / 1000
    certificate: bytes | None = None
    client_key: bytes | None = None
    client_certificate: bytes | None = None

    def __repr__(self) -> str:
        return f"<Endpoint {self.protocol} {self.url}>"


@dataclass(frozen=True)
class Settings:
    """Where a relay sends what. Its representation tells no secret.

    Attributes:
        endpoints: By signal; None for one that is not sent.
        sampled_share: Share of the traces that are sent, 0 to 1.
    """

    endpoints: dict[str, Endpoint | None]
    sampled_share: float = 1.0


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads all that says where OTLP is sent."""
    return Settings({signal: endpoint(signal, environ) for signal in SIGNALS}, sampled_share(environ))


def endpoint(signal: str, environ: Mapping[str, str] | None = None) -> Endpoint | None:
    """Reads ``OTEL_EXPORTER_OTLP_*`` for one signal, whose own variables stand before the common ones.

    Args:
        signal: One of `SIGNALS`.
        environ: Where to look.

    Returns:
        None where ``OTEL_<SIGNAL>_EXPORTER`` is ``none``.

    Source: OpenTelemetry specification, "OpenTelemetry Protocol Exporter".
    """
    environ = os.environ if environ is None else environ
    if environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
        return None
    found = _Variables(signal, environ)
    protocol = found.choice("PROTOCOL", PROTOCOLS, "grpc")
    url, own = found.url(_DEFAULT_URL[protocol])
    parts = urlsplit(url if "//" in url or url.startswith("unix:") else f"//{url}")
    scheme = parts.scheme.lower()
    if protocol == "http/protobuf" and not own:
        url = f"{url.rstrip('/')}/v1/{signal}"
    secure = scheme == "https" or (not scheme and not found.flag("INSECURE"))
    target = url if scheme == "unix" else parts.netloc.rpartition("@")[2] or url
    result = Endpoint(protocol, _without_user(url), target, secure and scheme != "unix", found.headers())
    return replace(
        result,
        compression=found.choice("COMPRESSION", ("none", "gzip"), "none"),
        timeout_s=found.timeout_s(),
        certificate=found.file("CERTIFICATE"),
        client_key=found.file("CLIENT_KEY"),
        client_certificate=found.file("CLIENT_CERTIFICATE"),
    )


def sampled_share(environ: Mapping[str, str] | None = None) -> float:
    """Reads ``OTEL_TRACES_SAMPLER`` and its argument; returns the share of traces that are sent, 0 to 1.

    Source: OpenTelemetry specification, "Environment variable specification", general SDK configuration.
    """
    environ = os.environ if environ is None else environ
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    sampler = name.removeprefix("parentbased_") or "always_on"
    if sampler not in _SAMPLERS:
        _warn("OTEL_TRACES_SAMPLER", name, "one of " + ", ".join(_SAMPLERS) + " or parentbased_*", "Everything is sent")
        return 1.0
    if sampler != "traceidratio":
        return 1.0 if sampler == "always_on" else 0.0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    try:
        share = float(text or 1.0)
        if 0 <= share <= 1:
            return share
    except ValueError:
        pass
    _warn("OTEL_TRACES_SAMPLER_ARG", text, "a number from 0 to 1", "Everything is sent")
    return 1.0


class _Variables:
    """The variables of one signal: its own, else the common one. Empty counts as unset."""

    def __init__(self, signal: str, environ: Mapping[str, str]) -> None:
        self._signal = signal.upper()
        self._environ = environ

    def find(self, name: str) -> tuple[str, str]:
        """Returns the variable that holds for ``name``, and its value; empty if there is none."""
        for variable in (f"{_PREFIX}{self._signal}_{name}", f"{_PREFIX}{name}"):
            if value := self._environ.get(variable, "").strip():
                return variable, value
        return f"{_PREFIX}{name}", ""

    def url(self, default: str) -> tuple[str, bool]:
        """Returns the endpoint, and whether it is this signal's own (whose path, over HTTP, is taken as it is)."""
        variable, value = self.find("ENDPOINT")
        try:
            urlsplit(value)
        except ValueError:
            _warn(variable, _without_user(value), "a URL", f"{default} is used")
            return default, False
        return (value, variable != f"{_PREFIX}ENDPOINT") if value else (default, False)

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        variable, value = self.find(name)
        if not value or value.lower() in allowed:
            return value.lower() or default
        _warn(variable, value, "one of " + ", ".join(allowed), f"{default} is used")
        return default

    def flag(self, name: str) -> bool:
        variable, value = self.find(name)
        if value.lower() in TRUE:
            return True
        if value and value.lower() not in FALSE:
            _warn(variable, value, "a boolean", "It is taken for false")
        return False

    def timeout_s(self) -> float:
        variable, value = self.find("TIMEOUT")
        if not value:
            return _TIMEOUT_MS / 1000
        try:
            if (milliseconds := parse_int(value)) > 0:
                return milliseconds / 1000
        except ValueError:
            pass
        _warn(variable, value, "a positive number of milliseconds", f"{_TIMEOUT_MS} are used")
        return _TIMEOUT_MS / 1000

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Reads ``name=value`` pairs, comma-separated, values percent-encoded."""
        variable, value = self.find("HEADERS")
        found = {}
        for pair in value.split(","):
            name, equals, text = pair.partition("=")
            name = unquote(name).strip().lower()
            if equals and name:
                found[name] = unquote(text).strip()
            elif pair.strip():
                # Without the pair: it may hold a secret.
                _state.warn_once(f"config:{variable}", "%s has a part that is not of the form name=value.", variable)
        return tuple(found.items())

    def file(self, name: str) -> bytes | None:
        variable, value = self.find(name)
        if not value:
            return None
        try:
            return Path(value).read_bytes()
        except OSError as error:
            _state.warn_once(f"config:{variable}", "%s=%s cannot be read (%s) and is ignored.", variable, value, error)
            return None


def _without_user(url: str) -> str:
    scheme, separator, rest = url.rpartition("//")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _warn(variable: str, value: str, allowed: str, instead: str) -> None:
    _state.warn_once(f"config:{variable}", "%s=%r is not %s. %s.", variable, value, allowed, instead)
