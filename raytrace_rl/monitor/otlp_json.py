"""Reads OTLP traces as JSON: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.

Taken is what any exporter writes: snake_case names, enums by name, integers as numbers, base64 ids. What is damaged
costs itself: a span, an attribute of a resource or scope.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from raytrace_rl._decode import MAX_DEPTH, Attributes, Event, Link, ResourceSpans, Scope, ScopeSpans, Span, Value
from raytrace_rl.monitor.model import KINDS, STATUSES
from raytrace_rl.monitor.otlp_parts import checked

T = TypeVar("T")

_UINT64: Final = 1 << 64
_OTHER_SIGNALS: Final = frozenset({"resourceMetrics", "resource_metrics", "resourceLogs", "resource_logs"})


#: Told of a part that cannot be read: which, and why.
Wrong = Callable[[str, object], None]

#: What bytes that are no UTF-8, and escapes of half a character, become: no OTLP string holds it.
_NO_CHARACTER: Final = re.compile("[\ud800-\udfff]")


class Damaged(dict[str, Any]):
    """An object that JSON's grammar allows and OTLP does not: ``why`` says what is wrong with its names."""

    why = "a name comes twice in one object"


class _Unreadable(Damaged):
    why = "a name that is no UTF-8"


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object: the ``object_pairs_hook`` of who parses what is read here."""
    made = dict(pairs)
    if len(made) != len(pairs):
        return Damaged(made)
    for name in made:
        if not name.isascii() and _NO_CHARACTER.search(name):
            return _Unreadable(made)
    return made


def _get(message: Mapping[str, Any], name: str, snake: str, default: Any) -> Any:
    value = message.get(name)
    if value is None:
        value = message.get(snake)
    return default if value is None else value


def _of(message: Mapping[str, Any], name: str, default: Any) -> Any:
    value = message.get(name)
    return default if value is None else value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"an object is expected, not a {type(value).__name__}")
    if isinstance(value, Damaged):
        raise ValueError(value.why)
    return value


def _array(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"an array is expected, not a {type(value).__name__}")
    return value


def _objects(value: object) -> list[dict[str, Any]]:
    return [_object(item) for item in _array(value)]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a string is expected, not a {type(value).__name__}")
    if not value.isascii() and _NO_CHARACTER.search(value):
        raise ValueError("a string that is no UTF-8")
    return value


def _integer(value: object, low: int, bound: int) -> int:
    """An integer, which JSON may hold as a string; a float is one only if it is whole."""
    if type(value) in (str, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)  # type: ignore[call-overload]
    else:
        raise ValueError(f"{value!r:.40} is no integer")
    if not low <= number < bound:
        raise ValueError(f"{value!r:.40} is out of range")
    return int(number)


def _uint(value: object, bound: int = _UINT64) -> int:
    return _integer(value, 0, bound)


def _double(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r:.40} is no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{value!r:.40} is out of range") from None


def _id(value: object, size: int) -> bytes:
    text = _text(value)
    if len(text) != 2 * size and text.endswith("="):  # of 8 and of 16 bytes it always does
        return _base64(text)
    return bytes.fromhex(text)


def _base64(text: str) -> bytes:
    """Of either alphabet, padded or not, as protobuf's own JSON takes it."""
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_" if "-" in text or "_" in text else None, validate=True)


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
            if not isinstance(content, bool):
                raise ValueError(f"{content!r:.40} is neither true nor false")
            return content
        if name in ("intValue", "int_value"):
            return _integer(content, -(_UINT64 >> 1), _UINT64 >> 1)
        if name in ("doubleValue", "double_value"):
            return _double(content)
        if name in ("arrayValue", "array_value"):
            return [any_value(item, depth + 1) for item in _array(_of(_object(content), "values", []))]
        if name in ("kvlistValue", "kvlist_value"):
            return _attributes(_of(_object(content), "values", []), depth + 1)
        if name in ("bytesValue", "bytes_value"):
            return _base64(_text(content))
    return None


def _attributes(value: object, depth: int = 0) -> Attributes:
    return dict(_attribute(item, depth) for item in _array(value))


def _attribute(value: object, depth: int = 0) -> tuple[str, Value]:
    item = _object(value)
    return _text(item.get("key", "")), any_value(_of(item, "value", {}), depth)


def _event(message: dict[str, Any]) -> Event:
    return Event(
        _uint(_get(message, "timeUnixNano", "time_unix_nano", 0)),
        _text(_of(message, "name", "")),
        _attributes(_of(message, "attributes", [])),
        _uint(_get(message, "droppedAttributesCount", "dropped_attributes_count", 0), 1 << 32),
    )


def _link(message: dict[str, Any]) -> Link:
    return Link(
        _id(_get(message, "traceId", "trace_id", ""), 16),
        _id(_get(message, "spanId", "span_id", ""), 8),
        _text(_get(message, "traceState", "trace_state", "")),
        _attributes(_of(message, "attributes", [])),
        _uint(_get(message, "droppedAttributesCount", "dropped_attributes_count", 0), 1 << 32),
        _uint(_of(message, "flags", 0), 1 << 32),
    )


def span(value: object) -> Span:
    """Reads a ``Span``.

    Raises:
        ValueError: It is none.
    """
    message = _object(value)
    result = Span()
    result.trace_id = _id(_get(message, "traceId", "trace_id", ""), 16)
    result.span_id = _id(_get(message, "spanId", "span_id", ""), 8)
    result.parent_span_id = _id(_get(message, "parentSpanId", "parent_span_id", ""), 8)
    result.name = _text(_of(message, "name", ""))
    result.kind = _enum(_of(message, "kind", 0), KINDS, "SPAN_KIND_")
    result.start_ns = _uint(_get(message, "startTimeUnixNano", "start_time_unix_nano", 0))
    result.end_ns = _uint(_get(message, "endTimeUnixNano", "end_time_unix_nano", 0))
    result.attributes = _attributes(_of(message, "attributes", []))
    result.events = tuple(_event(item) for item in _objects(_of(message, "events", [])))
    result.links = tuple(_link(item) for item in _objects(_of(message, "links", [])))
    status = _object(_of(message, "status", {}))
    result.status_code = _enum(_of(status, "code", 0), STATUSES, "STATUS_CODE_")
    result.status_message = _text(_of(status, "message", ""))
    result.trace_state = _text(_get(message, "traceState", "trace_state", ""))
    result.flags = _uint(_of(message, "flags", 0), 1 << 32)
    result.dropped_attributes = _uint(_get(message, "droppedAttributesCount", "dropped_attributes_count", 0), 1 << 32)
    result.dropped_events = _uint(_get(message, "droppedEventsCount", "dropped_events_count", 0), 1 << 32)
    result.dropped_links = _uint(_get(message, "droppedLinksCount", "dropped_links_count", 0), 1 << 32)
    return checked(result)


def _each(value: object, place: str, wrong: Wrong, read: Callable[[Any, str], T]) -> list[T]:
    """Reads each item of an array; what is none costs itself."""
    found: list[T] = []
    try:
        items = _array(value)
    except ValueError as error:
        wrong(place, error)
        return found
    for number, item in enumerate(items):
        where = f"{place}[{number}]"
        try:
            found.append(read(item, where))
        except (ValueError, RecursionError) as error:
            wrong(where, error)
    return found


def _outer(value: object, place: str, wrong: Wrong) -> dict[str, Any]:
    """An object that holds records: one with bad names is read all the same, as far as JSON gives what it holds."""
    if isinstance(value, Damaged):
        wrong(place, value.why)
        return value
    return _object(value)


def resource(value: object, place: str, wrong: Wrong) -> Attributes:
    """Reads what is not damaged of a ``Resource``, or of another object with attributes."""
    try:
        message = _outer(value, place, wrong)
    except ValueError as error:
        wrong(place, error)
        return {}
    attributes = _of(message, "attributes", [])
    return dict(_each(attributes, f"{place}.attributes", wrong, lambda item, _: _attribute(item)))


def scope(value: object, place: str, wrong: Wrong) -> Scope:
    """Reads what is not damaged of an ``InstrumentationScope``."""
    attributes = resource(value, place, wrong)
    about = {"name": "", "version": ""}
    for name in about:
        try:
            about[name] = _text(_of(value, name, "")) if isinstance(value, dict) else ""
        except ValueError as error:
            wrong(f"{place}.{name}", error)
    return Scope(**about, attributes=attributes)


def resource_spans(value: object, wrong: Wrong) -> list[ResourceSpans]:
    """Reads what is not damaged of an ``ExportTraceServiceRequest``; one of metrics or logs gives an empty list.

    Args:
        value: What JSON gives, objects made by `object_of`.
        wrong: Called with the place of each part that is left out, and why.

    Raises:
        ValueError: It is no OTLP message.
    """
    request = _outer(value, "message", wrong)
    batches = _get(request, "resourceSpans", "resource_spans", None)
    if batches is None:
        if request and request.keys().isdisjoint(_OTHER_SIGNALS):
            raise ValueError("no resourceSpans in it")
        return []

    def scope_spans(item: object, place: str) -> ScopeSpans:
        message = _outer(item, place, wrong)
        about = scope(_of(message, "scope", {}), f"{place}.scope", wrong)
        spans = _of(message, "spans", [])
        return ScopeSpans(about, _each(spans, f"{place}.spans", wrong, lambda one, _: span(one)))

    def batch(item: object, place: str) -> ResourceSpans:
        message = _outer(item, place, wrong)
        attributes = resource(_of(message, "resource", {}), f"{place}.resource", wrong)
        scopes = _get(message, "scopeSpans", "scope_spans", [])
        return ResourceSpans(attributes, _each(scopes, f"{place}.scopeSpans", wrong, scope_spans))

    return _each(batches, "resourceSpans", wrong, batch)
