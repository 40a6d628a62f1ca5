"""The spans that a process left open, closed for it once its death is proven: at its last sign of life, marked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from raytrace_rl import _decode, _encode, semconv
from raytrace_rl.relay.follow import Basket, Follower, Reading, baskets
from raytrace_rl.relay.raw import span_ids
from raytrace_rl.spool import format as fmt
from raytrace_rl.spool.listing import ProcessFiles, read_slots
from raytrace_rl.spool.reader import Cursor

_END: Final = b"\x41"  # Span.end_time_unix_nano, fixed64
_PIECE: Final = 1 << 20
_MARK: Final = _encode.key_value(_encode.SPAN_ATTRIBUTE, semconv.RL_TRUNCATED, True)


def closed_for(files: ProcessFiles) -> list[bytes]:
    """Returns the spans that a process proven dead left open, as ended OTLP ``Span`` messages, always in one order.

    A span that it opened since its last heartbeat has no attributes there; one that it ended since is in a segment, and
    not among them.
    """
    found, heartbeats = _noted(files)
    if not found:
        return []
    last_ns, ended = _ended(files, found.keys())
    last_ns = max([last_ns, files.start_ns, *heartbeats])
    closed = []
    for ids, (payload, start_ns) in sorted(found.items()):
        if ids not in ended:
            closed.append(payload + _END + max(last_ns, start_ns).to_bytes(8, "little") + _MARK)
    return closed


def _noted(files: ProcessFiles) -> tuple[dict[bytes, tuple[bytes, int]], list[int]]:
    """Returns what is open by the table and the journals, by ids, with its start; and signs of life."""
    found: dict[bytes, tuple[bytes, int]] = {}
    heartbeats = []
    if files.slots is not None:
        header, slots, _ = read_slots(files.slots)
        if header is not None:
            heartbeats.append(header.heartbeat_ns)
        for payload in slots:
            _note(found, payload)
    for _, path in sorted(files.journals.items()):
        with Cursor(path) as cursor:
            for record in cursor.poll(final=True):
                if record.kind == fmt.Kind.OPEN_SPAN:
                    _note(found, record.payload)
                elif record.kind == fmt.Kind.SPAN_GONE:
                    found.pop(record.payload[:24], None)
            if cursor.header is not None:
                heartbeats.append(cursor.header.heartbeat_ns)
    return found, heartbeats


def _note(found: dict[bytes, tuple[bytes, int]], payload: bytes) -> None:
    try:
        span = _decode.span(payload)
    except ValueError:
        return  # a slot torn by the death
    if len(span.trace_id) == 16 and len(span.span_id) == 8:
        found[span.trace_id + span.span_id] = payload, span.start_ns


def _ended(files: ProcessFiles, candidates: Iterable[bytes]) -> tuple[int, set[bytes]]:
    """Returns the process's last sign of life in its segments, and which of ``candidates`` have ended there."""
    wanted = set(candidates)
    last_ns = 0
    ended: set[bytes] = set()
    for _, path in sorted(files.segments.items()):
        follower = Follower(path)
        reading = Reading.FULL
        while reading is Reading.FULL:
            into = baskets((fmt.Kind.SPAN, fmt.Kind.SCOPE_SPANS))
            reading = follower.read(into, Basket(_PIECE, 1 << 30), final=True)
            ended.update(wanted & {ids for payload in into[fmt.Kind.SPAN] if (ids := span_ids(payload)) is not None})
            for payload in into[fmt.Kind.SCOPE_SPANS]:
                ended.update(wanted & set(_scope_ids(payload)))
            if into[fmt.Kind.SPAN]:
                last_ns = max(last_ns, _end_of(into[fmt.Kind.SPAN][-1]))
        follower.close()
        if follower.header is not None:
            last_ns = max(last_ns, follower.header.heartbeat_ns)
    return last_ns, ended


def _scope_ids(payload: bytes) -> list[bytes]:
    try:
        return [span.trace_id + span.span_id for span in _decode.scope_spans(payload).spans]
    except ValueError:
        return []


def _end_of(payload: bytes) -> int:
    try:
        return _decode.span(payload).end_ns
    except ValueError:
        return 0
