"""Spans decoded many at once, and one by one: both as plain values, to be held against each other."""

from __future__ import annotations

import numpy as np

from raytrace_rl import _decode
from raytrace_rl.monitor.believed import believed_count, believed_s
from raytrace_rl.monitor.builder import Builder
from raytrace_rl.monitor.bulk import framing, links
from raytrace_rl.monitor.bulk.decoding import Decoder
from raytrace_rl.monitor.bulk.parts import shape_of
from raytrace_rl.monitor.model import Process, SpanRow
from raytrace_rl.spool.format import Kind


def frames_of(payloads):
    """Payloads of SPAN records, as a file has them."""
    return framing._gathered([(Kind.SPAN, payload, n) for n, payload in enumerate(payloads)])


def decoded_alone(monkeypatch):
    """A list that gets an entry for each span that is decoded by itself from now on."""
    calls = []
    plain = _decode.span

    def counted(data):
        calls.append(1)
        return plain(data)

    monkeypatch.setattr(_decode, "span", counted)
    return calls


def one_by_one(payloads):
    """What plain decoding says: the columns of each span, and the records that are none."""
    rows, errors = [], []
    for n, payload in enumerate(payloads):
        try:
            span = _decode.span(payload)
            Builder("x").add(span, Process("x"))
        except ValueError as error:
            errors.append((n, str(error)))
            continue
        row = SpanRow(span, Process("x"))
        version = row.attributes.get("rl.weight_version")
        parent = int(row.parent_span_id, 16) if len(span.parent_span_id) == 8 else 0
        rows.append(
            (
                int(row.span_id, 16),
                parent,
                span.start_ns,
                span.end_ns,
                shape_of(row),
                span.trace_id,
                (row.thread, row.thread_id),
                row.iteration,
                row.queued_ns,
                version if type(version) is int else None,
                tuple(plain_link(link) for link in row.links),
            )
        )
    return rows, errors


def plain_link(link):
    """What is kept of a link."""
    said = [link.attributes.get(key) for key in links.LINK_NUMBERS]
    age, node = (link.attributes.get(f"rl.trajectory.{key}") for key in ("age_s", "node"))
    return (
        (link.trace_id, link.span_id),
        "rl.trajectory.count" in link.attributes,
        believed_count(said[0]),
        *(value if type(value) is int else None for value in said[1:]),
        believed_s(age),
        node if isinstance(node, str) else None,
    )


def link_of(part, trace, span, there, number, made, version, lag, age, node):
    """The same of columns."""
    trace_id, odd = part.link_traces[trace]
    numbers = [
        value if there & bit else None
        for value, bit in ((made, links.MADE), (version, links.VERSION), (lag, links.LAG))
    ]
    return (
        (trace_id, span.to_bytes(8, "big") if odd is None else odd),
        bool(there & links.COUNTED),
        number,
        *numbers,
        None if np.isnan(age) else age,
        part.nodes[node] if node >= 0 else None,
    )


def many_at_once(payloads, lots=1):
    """The same of the columns."""
    decoder = Decoder()
    errors = []
    size = -(-len(payloads) // lots) or 1
    for begin in range(0, len(payloads), size):
        decoder.add(frames_of(payloads[begin : begin + size]))
        errors += [(begin + n, str(error)) for n, *_, error in decoder.errors]
    part = decoder.part()
    queued, version = (
        dict(zip(at.tolist(), values.tolist(), strict=True)) for at, values in (part.queued, part.version)
    )
    linked: dict[int, list] = {}
    for link in zip(*(column.tolist() for column in part.links), strict=True):
        linked.setdefault(link[0], []).append(link_of(part, *link[1:]))
    rows = [
        (
            int(part.span[n]),
            int(part.parent[n]),
            int(part.start.view(np.uint64)[n]),
            int(part.end.view(np.uint64)[n]),
            part.shapes[part.shape[n]],
            part.traces[part.trace[n]],
            part.threads.thread(part.thread[n]),
            part.iterations[part.iteration[n]] if part.iteration[n] >= 0 else None,
            queued.get(n),
            version.get(n),
            tuple(linked.get(n, ())),
        )
        for n in range(len(part.span))
    ]
    return rows, errors
