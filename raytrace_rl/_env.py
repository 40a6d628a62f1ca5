"""The variables of the environment that are no fields of `TelemetryConfig`: OpenTelemetry's own, and ranks.

Every function takes the mapping to read instead of ``os.environ``; none raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from raytrace_rl import _state

TRUE: Final = frozenset({"1", "true", "yes", "on"})
FALSE: Final = frozenset({"0", "false", "no", "off"})


def forwarded_env(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the standard variables that a worker on another node needs and would not inherit.

    Never credentials: what is in a ``runtime_env`` stands in clear in Ray's logs.
    """
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if value and _may_travel(name, value)}


def _may_travel(name: str, value: str) -> bool:
    if name == "RAYTRACE_RL_CAPTURE_CONTENT":
        return True
    if not name.startswith("OTEL_") or name.endswith(("HEADERS", "CLIENT_KEY", "CLIENT_CERTIFICATE")):
        return False
    return not (name.endswith("ENDPOINT") and "@" in value)  # a URL with a user and a password in it


def sdk_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``OTEL_SDK_DISABLED`` switches all of OpenTelemetry off, and hence us. Only ``true`` does, in any case.

    Source: OpenTelemetry specification, "Environment variable specification", Boolean values.
    """
    environ = os.environ if environ is None else environ
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def capture_content(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``RAYTRACE_RL_CAPTURE_CONTENT`` lets string attributes pass that by their key hold prompts or secrets."""
    environ = os.environ if environ is None else environ
    text = environ.get("RAYTRACE_RL_CAPTURE_CONTENT", "").strip().lower()
    if text and text not in TRUE | FALSE:
        _state.warn_once(
            "config:capture_content", "RAYTRACE_RL_CAPTURE_CONTENT=%r is no boolean. Content is not captured.", text
        )
    return text in TRUE


@dataclass(frozen=True)
class Limits:
    """What a span may hold. Defaults are ours for the length (64 KiB) and OpenTelemetry's for the counts.

    Source: OpenTelemetry specification, "Environment variable specification", attribute and span limits.

    Attributes:
        value_length: Characters of an attribute's string value.
        attributes, events, links: How many a span may have.
        event_attributes, link_attributes: How many an event or a link may have.
    """

    value_length: int = 64 * 1024
    attributes: int = 128
    events: int = 128
    links: int = 128
    event_attributes: int = 128
    link_attributes: int = 128


#: The variables of each limit; the first that is set holds.
_LIMIT_VARIABLES: Final = {
    "value_length": ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    "attributes": ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT"),
    "events": ("OTEL_SPAN_EVENT_COUNT_LIMIT",),
    "links": ("OTEL_SPAN_LINK_COUNT_LIMIT",),
    "event_attributes": ("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT"),
    "link_attributes": ("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT"),
}


def limits(environ: Mapping[str, str] | None = None) -> Limits:
    """Reads the standard limits; a value that is no count is a warning and the next variable, or the default, holds."""
    environ = os.environ if environ is None else environ
    found = {}
    for field, variables in _LIMIT_VARIABLES.items():
        for variable in variables:
            if (value := _count(environ, variable)) is not None:
                found[field] = value
                break
    return Limits(**found)


@dataclass(frozen=True)
class RankIdentity:
    """Place of this process in its worker group; None where the environment does not say.

    Attributes:
        rank: Rank within the group, from 0. It is not unique in a run: identity is group and rank.
        local_rank: Rank within the group on this node.
        world_size: Ranks in the group.
        worker_group: Name of the group.
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    worker_group: str | None = None


def rank_identity(environ: Mapping[str, str] | None = None) -> RankIdentity:
    """Reads ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``RAYTRACE_RL_WORKER_GROUP``, else ``NRL_WORKER_GROUP``.

    A number that is none, or negative, is a warning and counts as unset.
    """
    environ = os.environ if environ is None else environ
    group = environ.get("RAYTRACE_RL_WORKER_GROUP") or environ.get("NRL_WORKER_GROUP") or None
    return RankIdentity(_count(environ, "RANK"), _count(environ, "LOCAL_RANK"), _count(environ, "WORLD_SIZE"), group)


def _count(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable)
    if not text:
        return None
    try:
        if 0 <= (value := parse_int(text)) < 1 << 63:  # what an OTLP attribute holds
            return value
    except ValueError:
        pass
    _state.warn_once(f"config:{variable}={text}", "%s=%r is no number from 0 up. It is ignored.", variable, text)
    return None


def resource_attributes(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns what ``OTEL_RESOURCE_ATTRIBUTES`` says; unreadable, it is a warning and discarded whole, as specified."""
    environ = os.environ if environ is None else environ
    text = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    try:
        return parse_resource_attributes(text)
    except ValueError as error:
        _state.warn_once(f"config:resource:{text}", "OTEL_RESOURCE_ATTRIBUTES is ignored: %s.", error)
        return {}


def parse_resource_attributes(text: str) -> dict[str, str]:
    """Reads the form of ``OTEL_RESOURCE_ATTRIBUTES``: ``key=value`` pairs, comma-separated, values percent-encoded.

    Returns:
        The attributes.

    Raises:
        ValueError: A pair has no ``=`` or no key. The whole value is then to be discarded (OpenTelemetry
            specification, "Resource SDK", "Specifying resource information via an environment variable").
    """
    attributes = {}
    for pair in text.split(","):
        if not pair.strip():
            continue
        key, equals, value = pair.partition("=")
        key = unquote(key.strip())
        if not equals or not key:
            raise ValueError(f"{pair.strip()!r} is not of the form key=value")
        attributes[key] = unquote(value.strip())
    return attributes


def parse_int(text: str) -> int:
    """Reads a base-10 integer, without the underscores that Python's own ``int`` lets through.

    Raises:
        ValueError: It is none.
    """
    if "_" in text:
        raise ValueError(f"invalid integer {text!r}")
    return int(text)
