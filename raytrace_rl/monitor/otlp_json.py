"""OTLP traces as JSON, both ways: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.

Ids are hexadecimal, other bytes base64, 64-bit integers decimal strings, non-finite doubles strings, enums numbers.
Reading takes what any exporter writes: snake_case names, enums by name, integers as numbers, base64 ids.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from raytrace_rl._decode import MAX_DEPTH, Attributes, Event, Link, ResourceSpans, Scope, ScopeSpans, Span, Value
from raytrace_rl.monitor.model import KINDS, STATUSES, Process, SpanRow

_UINT64: Final = 1 << 64
_OTHER_SIGNALS: Final = frozenset({"resourceMetrics", "resource_metrics", "resourceLogs", "resource_logs"})


def _get(message: Mapping[str, Any], name: str, snake: str, default: Any) -> Any:
    value = message.get(name)
    if value is None:
        value = message.get(snake)
    return default if value is None else value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"an object is expected, not a {type(value).__name__}")
    return value


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"an array is expected, not a {type(value).__name__}")
    return [_object(item) for item in value]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a string is expected, not a {type(value).__name__}")
    return value


def _integer(value: object, low: int, bound: int) -> int:
    """An integer, which JSON may hold as a string; a float is one only if it is whole."""
    if isinstance(value, (str, int)) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    else:
        raise ValueError(f"{value!r:.40} is no integer")
    if not low <= number < bound:
        raise ValueError(f"{value!r:.40} is out of range")
    return number


def _uint(value: object, bound: int = _UINT64) -> int:
    return _integer(value, 0, bound)


def _double(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{value!r:.40} is out of range") from None


def _id(value: object, size: int) -> bytes:
    text = _text(value)
    if len(text) != 2 * size and text.endswith("="):  # of 8 and of 16 bytes it always does
        return base64.b64decode(text, validate=True)
    return bytes.fromhex(text)


def _enum(value: object, names: tuple[str, ...], prefix: str) -> int:
    if isinstance(value, str) and value.startswith(prefix) and value[len(prefix) :] in names:
        return names.index(value[len(prefix) :])
    return _uint(value, 1 << 31)


def any_value(value: object, depth: int = 0) -> Value:
    """Reads an ``AnyValue``.

    Raises:
        ValueError: It is none, or is nested too deep.
    """
    message = _object(value)
    if depth > MAX_DEPTH:
        raise ValueError(f"attribute nested deeper than {MAX_DEPTH}")
    for name, content in message.items():
        if content is None:
            continue
        if name in ("stringValue", "string_value"):
            return _text(content)
        if name in ("boolValue", "bool_value"):
            return bool(content)
        if name in ("intValue", "int_value"):
            return _integer(content, -(_UINT64 >> 1), _UINT64 >> 1)
        if name in ("doubleValue", "double_value"):
            return _double(content)
        if name in ("arrayValue", "array_value"):
            return [any_value(item, depth + 1) for item in _objects(_object(content).get("values") or [])]
        if name in ("kvlistValue", "kvlist_value"):
            return _attributes(_object(content).get("values") or [], depth + 1)
        if name in ("bytesValue", "bytes_value"):
            return base64.b64decode(_text(content))
    return None


def _attributes(value: object, depth: int = 0) -> Attributes:
    return {_text(item.get("key", "")): any_value(item.get("value") or {}, depth) for item in _objects(value)}


def _event(message: dict[str, Any]) -> Event:
    return Event(
        _uint(_get(message, "timeUnixNano", "time_unix_nano", 0)),
        _text(message.get("name") or ""),
        _attributes(message.get("attributes") or []),
        _uint(_get(message, "droppedAttributesCount", "dropped_attributes_count", 0), 1 << 32),
    )


def _link(message: dict[str, Any]) -> Link:
    return Link(
        _id(_get(message, "traceId", "trace_id", ""), 16),
        _id(_get(message, "spanId", "span_id", ""), 8),
        _text(_get(message, "traceState", "trace_state", "")),
        _attributes(message.get("attributes") or []),
        _uint(_get(message, "droppedAttributesCount", "dropped_attributes_count", 0), 1 << 32),
        _uint(message.get("flags") or 0, 1 << 32),
    )


def span(message: dict[str, Any]) -> Span:
    """Reads a ``Span``.

    Raises:
        ValueError, TypeError: It is none.
    """
    result = Span()
    result.trace_id = _id(_get(message, "traceId", "trace_id", ""), 16)
    result.span_id = _id(_get(message, "spanId", "span_id", ""), 8)
    result.parent_span_id = _id(_get(message, "parentSpanId", "parent_span_id", ""), 8)
    result.name = _text(message.get("name") or "")
    result.kind = _enum(message.get("kind") or 0, KINDS, "SPAN_KIND_")
    result.start_ns = _uint(_get(message, "startTimeUnixNano", "start_time_unix_nano", 0))
    result.end_ns = _uint(_get(message, "endTimeUnixNano", "end_time_unix_nano", 0))
    result.attributes = _attributes(message.get("attributes") or [])
    result.events = tuple(_event(item) for item in _objects(message.get("events") or []))
    result.links = tuple(_link(item) for item in _objects(message.get("links") or []))
    status = _object(message.get("status") or {})
    result.status_code = _enum(status.get("code") or 0, STATUSES, "STATUS_CODE_")
    result.status_message = _text(status.get("message") or "")
    result.trace_state = _text(_get(message, "traceState", "trace_state", ""))
    result.flags = _uint(message.get("flags") or 0, 1 << 32)
    result.dropped_attributes = _uint(_get(message, "droppedAttributesCount", "dropped_attributes_count", 0), 1 << 32)
    result.dropped_events = _uint(_get(message, "droppedEventsCount", "dropped_events_count", 0), 1 << 32)
    result.dropped_links = _uint(_get(message, "droppedLinksCount", "dropped_links_count", 0), 1 << 32)
    return result


def _scope_spans(message: dict[str, Any]) -> ScopeSpans:
    scope = _object(message.get("scope") or {})
    attributes = _attributes(scope.get("attributes") or [])
    return ScopeSpans(
        Scope(_text(scope.get("name") or ""), _text(scope.get("version") or ""), attributes),
        [span(item) for item in _objects(message.get("spans") or [])],
    )


def resource_spans(message: object) -> list[ResourceSpans]:
    """Reads an ``ExportTraceServiceRequest``; one of metrics or logs gives an empty list.

    Raises:
        ValueError, TypeError: It is no OTLP message.
    """
    request = _object(message)
    batches = _get(request, "resourceSpans", "resource_spans", None)
    if batches is None:
        if request and request.keys().isdisjoint(_OTHER_SIGNALS):
            raise ValueError("no resourceSpans in it")
        return []
    return [
        ResourceSpans(
            _attributes(_object(batch.get("resource") or {}).get("attributes") or []),
            [_scope_spans(item) for item in _objects(_get(batch, "scopeSpans", "scope_spans", []))],
        )
        for batch in _objects(batches)
    ]


# -- writing ----------------------------------------------------------------------------------------------------------


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
    attributes, events, links = row.dropped
    return {
        "traceId": row.trace_id,
        "spanId": row.span_id,
        **_present(parentSpanId=row.parent_span_id, traceState=row.trace_state, flags=row.flags),
        "name": row.name,
        "kind": number(KINDS, row.kind),
        "startTimeUnixNano": str(row.start_ns),
        "endTimeUnixNano": str(row.end_ns or 0),
        **_present(
            attributes=_attributes_json(row.attributes),
            events=[_event_json(event) for event in row.events],
            links=[_link_json(link) for link in row.links],
            droppedAttributesCount=attributes,
            droppedEventsCount=events,
            droppedLinksCount=links,
            status=_present(message=row.status_message, code=number(STATUSES, row.status)),
        ),
    }


def number(names: tuple[str, ...], name: str) -> int:
    """Returns the number of an enum's name; one that is not known is its number in digits."""
    return names.index(name) if name in names else int(name)


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
