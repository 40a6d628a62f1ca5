"""Whether the OTLP endpoints answer: an empty request to each, by the senders that relays use, with a deadline."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from raytrace_rl._doctor import INFO, OK, PROBLEM, Check
from raytrace_rl.relay.requests import SIGNALS
from raytrace_rl.relay.sender import sender_for

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Endpoint, Settings


def checks(settings: Settings, timeout_s: float) -> Iterator[Check]:
    """Yields one check a signal.

    Args:
        settings: Where each is sent.
        timeout_s: How long each may take.
    """
    for name, endpoint in settings.endpoints.items():
        if endpoint is None:
            yield Check("endpoint", INFO, f"{name}: not sent (OTEL_{name.upper()}_EXPORTER=none)")
            continue
        try:
            problem, took_s = _ask(name, endpoint, timeout_s)
        except ImportError:
            yield Check("endpoint", PROBLEM, "grpcio is not installed here: pip install 'raytrace-rl[otlp]'")
            return
        where = f"{name} -> {endpoint.url} ({endpoint.protocol}{', TLS' if endpoint.secure else ''})"
        if problem:
            yield Check("endpoint", PROBLEM, f"{where}: {problem}")
        else:
            yield Check("endpoint", OK, f"{where}: answers in {took_s * 1000:.0f} ms")
    if settings.sampled_share < 1:
        yield Check("endpoint", INFO, f"{settings.sampled_share:.1%} of the traces are sent (OTEL_TRACES_SAMPLER)")


def _ask(name: str, endpoint: Endpoint, timeout_s: float) -> tuple[str, float]:
    """Returns what is wrong with an endpoint, empty if nothing is, and how long it took to answer.

    Raises:
        ImportError: grpcio is not installed here.
    """
    deadline = monotonic() + timeout_s
    problem = _unreachable(endpoint, timeout_s)
    if problem:
        return problem, 0.0
    sender = sender_for(SIGNALS[name], endpoint)
    began = monotonic()
    try:
        answer = sender.send(b"", max(0.1, deadline - began))
    finally:
        sender.close()
    took_s = monotonic() - began
    if answer.accepted:
        return "", took_s
    hint = ""
    if "UNIMPLEMENTED" in answer.message or "404" in answer.message:
        hint = f" (it takes no {name}? OTEL_{name.upper()}_EXPORTER=none sends it none)"
    return f"{answer.message or 'refused'}{hint}", took_s


def _unreachable(endpoint: Endpoint, timeout_s: float) -> str:
    """Returns why no connection can be made, empty if one can: said plainer than gRPC would."""
    if endpoint.target.startswith("unix:"):
        path = endpoint.target.removeprefix("unix:").removeprefix("//")
        family, address = socket.AF_UNIX, path
        try:
            with socket.socket(family) as probe:
                probe.settimeout(timeout_s)
                probe.connect(address)
        except OSError as error:
            return f"no connection: {error.strerror or error}"
        return ""
    parts = urlsplit(endpoint.url if "//" in endpoint.url else f"//{endpoint.url}")
    try:
        port = parts.port or (443 if endpoint.secure else 80 if endpoint.protocol != "grpc" else 4317)
        with socket.create_connection((parts.hostname or "localhost", port), timeout_s):
            return ""
    except (OSError, ValueError) as error:
        return f"no connection: {getattr(error, 'strerror', None) or error}"
