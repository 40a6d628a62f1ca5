"""Writes OTLP traces as JSON: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.

Ids are hexadecimal, other bytes base64, 64-bit integers decimal strings, non-finite doubles strings, enums numbers.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from typing import Any

from raytrace_rl._decode import Attributes, Event, Link, Scope, Value
from raytrace_rl.monitor.model import KINDS, STATUSES, Process, SpanRow


def _any_value_json(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        if math.isfinite(value):
            return {"doubleValue": value}
        return {"doubleValue": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_any_value_json(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": _attributes_json(value)}}
    return {}


def _attributes_json(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any_value_json(value)} for key, value in attributes.items()]


def _present(**fields: Any) -> dict[str, Any]:
    """The fields that differ from their proto3 default, which JSON leaves out."""
    return {name: value for name, value in fields.items() if value}


def _span_json(row: SpanRow) -> dict[str, Any]:
    attributes, events, _ = row.dropped
    parent, linked, links = related(row)
    return {
        "traceId": row.trace_id,
        "spanId": row.span_id,
        **_present(parentSpanId=parent, traceState=row.trace_state, flags=row.flags),
        "name": row.name,
        "kind": number(KINDS, row.kind),
        "startTimeUnixNano": str(row.start_ns),
        "endTimeUnixNano": str(row.end_ns or 0),
        **_present(
            attributes=_attributes_json(row.attributes),
            events=[_event_json(event) for event in row.events],
            links=[_link_json(link) for link in linked],
            droppedAttributesCount=attributes,
            droppedEventsCount=events,
            droppedLinksCount=links,
            status=_present(message=row.status_message, code=number(STATUSES, row.status)),
        ),
    }


def number(names: tuple[str, ...], name: str) -> int:
    """Returns the number of an enum's name; one that is not known is its number in digits."""
    return names.index(name) if name in names else int(name)


def related(row: SpanRow) -> tuple[str, list[Link], int]:
    """Returns a span's parent (hexadecimal, empty without one), its links, and how many of them it has lost.

    An id of a wrong length is left out: a collector that meets one refuses the whole request.
    """
    parent = row.parent_span_id or ""
    links = [link for link in row.links if len(link.trace_id) in (0, 16) and len(link.span_id) in (0, 8)]
    return parent if len(parent) == 16 else "", links, row.dropped[2] + len(row.links) - len(links)


def _event_json(event: Event) -> dict[str, Any]:
    return {
        "timeUnixNano": str(event.time_ns),
        "name": event.name,
        **_present(attributes=_attributes_json(event.attributes), droppedAttributesCount=event.dropped_attributes),
    }


def _link_json(link: Link) -> dict[str, Any]:
    return {
        "traceId": link.trace_id.hex(),
        "spanId": link.span_id.hex(),
        **_present(
            traceState=link.trace_state,
            attributes=_attributes_json(link.attributes),
            droppedAttributesCount=link.dropped_attributes,
            flags=link.flags,
        ),
    }


def request_json(process: Process, scopes: Iterable[tuple[Scope, list[SpanRow]]]) -> dict[str, Any]:
    """Returns an ``ExportTraceServiceRequest`` holding spans of one process, as plain JSON values."""
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes_json(process.resource)},
                "scopeSpans": [
                    {
                        "scope": _present(
                            name=scope.name, version=scope.version, attributes=_attributes_json(scope.attributes)
                        ),
                        "spans": [_span_json(row) for row in rows],
                    }
                    for scope, rows in scopes
                ],
            }
        ]
    }
