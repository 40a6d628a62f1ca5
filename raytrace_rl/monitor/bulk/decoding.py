"""Decodes the records of a process into columns, thousands at a time; what is written oddly is decoded one by one.

The one decoder is `raytrace_rl._decode`: it says what each template means, what each shape means, and what a record is
that fits none. Here is only found out which records must have the same answer.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from raytrace_rl import _decode
from raytrace_rl.monitor import otlp_parts
from raytrace_rl.monitor.builder import check_ids
from raytrace_rl.monitor.bulk.arrays import Bytes, Codes, Ints, Words
from raytrace_rl.monitor.bulk.coder import Coder
from raytrace_rl.monitor.bulk.framing import Frames
from raytrace_rl.monitor.bulk.link_templates import LinkTemplate
from raytrace_rl.monitor.bulk.links import LinkCoders, Links, joined_links, links_of
from raytrace_rl.monitor.bulk.matrices import codes_of, links_in, text_of, words_at
from raytrace_rl.monitor.bulk.parts import LATEST_NS, Batch, Part, shape_of
from raytrace_rl.monitor.bulk.templates import MAX_LINKED_SIZE, NUMBERS, NoTemplateError, groups, varints
from raytrace_rl.monitor.bulk.threads import Threads, made
from raytrace_rl.monitor.model import Process, SpanRow
from raytrace_rl.spool import format as fmt

#: Templates that are tried for records of one length, and records from which on a new one is worth it.
_TEMPLATES: Final = 64
_WORTH: Final = 16
#: Rows that are looked at together, and their bytes: what they take stays in the processor's cache.
_CHUNK: Final = 8192
_CHUNK_BYTES: Final = 4 << 20
_NONE: Final = -1


class Decoder:
    """Decodes what one process left.

    Attributes:
        errors: Of the records of the last ``add`` that are no span, or hold one that is none: number of the record,
            where in its content that part starts, how long it is, what is wrong with it.
    """

    def __init__(self) -> None:
        self.errors: list[tuple[int, int, int, object]] = []
        self._shapes, self._traces, self._iterations, self._thread_names = Coder(), Coder(), Coder(), Coder()
        self._links = LinkCoders()
        self._templates: dict[int, list[LinkTemplate]] = {}
        self._nobody = Process("")
        self._kept: list[Batch] = []

    def add(self, frames: Frames) -> None:
        """Decodes the SPAN and SCOPE_SPANS records among ``frames``."""
        self.errors = []
        foreign = [
            (at, spans)
            for at in np.flatnonzero(frames.kind == fmt.Kind.SCOPE_SPANS).tolist()
            if (spans := self._foreign(frames, at))
        ]
        rows = np.flatnonzero(frames.kind == fmt.Kind.SPAN)
        if foreign:  # between the others, where they were met
            more = np.repeat([at for at, _ in foreign], [len(spans) for _, spans in foreign])
            place = np.argsort(np.concatenate((rows, more)), kind="stable")
            batch = Batch(len(place))
            where = np.empty(len(place), np.int64)
            where[place] = np.arange(len(place))
            self._own(batch, frames, rows, where[: len(rows)])
            spans = [span for _, of_one in foreign for span in of_one]
            for at, span in zip(where[len(rows) :].tolist(), spans, strict=True):
                self._place(batch, at, span)
        else:
            batch = Batch(len(rows))
            self._own(batch, frames, rows, np.arange(len(rows)))
        self._kept.append(batch)
        self.errors.sort(key=lambda error: error[0])

    def part(self) -> Part:
        """Returns all that was decoded."""
        batches, self._kept = self._kept, []
        good = [batch.shape >= 0 for batch in batches]

        def joined(of: str, kind: Any) -> Any:
            arrays = [getattr(batch, of)[keep] for batch, keep in zip(batches, good, strict=True)]
            return np.concatenate(arrays).astype(kind, copy=False) if arrays else np.zeros(0, kind)

        def number(key: str) -> tuple[Ints, Ints]:
            pairs = [(b.numbers[key][0][keep], b.numbers[key][1][keep]) for b, keep in zip(batches, good, strict=True)]
            if not pairs:
                return np.zeros(0, np.int64), np.zeros(0, np.int64)
            value, there = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
            at = np.flatnonzero(there)
            return at, value[at]

        start, end = joined("start", np.uint64), joined("end", np.uint64)
        at, values = number(NUMBERS[0])
        iteration = np.full(len(start), _NONE, np.int32)
        different, inverse = np.unique(values, return_inverse=True)
        codes = np.array([self._iterations.code(value) for value in different.tolist()], np.int32)
        if len(at):
            iteration[at] = codes[inverse]
        thread, threads = self._threads(joined("thread_name", np.int32), *number(NUMBERS[3]))
        links: list[Links] = []
        before = 0
        for batch, keep in zip(batches, good, strict=True):
            place = np.where(keep, np.cumsum(keep) - 1 + before, _NONE)
            links.append(joined_links([*batch.links, links_of(batch.linked, self._links)]).of_rows(place))
            before += int(keep.sum())
        return Part(
            joined("span", np.uint64),
            joined("parent", np.uint64),
            start.view(np.int64),
            end.view(np.int64),
            joined("shape", np.int32),
            joined("trace", np.int32),
            thread,
            iteration,
            self._shapes.things,
            self._traces.things,
            threads,
            self._iterations.things,
            number(NUMBERS[1]),
            number(NUMBERS[2]),
            joined_links(links),
            self._links.traces.things,
            self._links.nodes.things,
            bool(len(start) and (start.max() >= LATEST_NS or end.max() >= LATEST_NS)),
        )

    def _threads(self, names: Codes, at: Ints, ids: Ints) -> tuple[Codes, Threads]:
        """Numbers for pairs of a thread's name and id, and the pairs; ``ids`` are those of the rows ``at``."""
        different, inverse = np.unique(ids, return_inverse=True)
        of_id = np.full(len(names), _NONE, np.int64)
        of_id[at] = inverse
        count = len(different) + 1
        pairs, codes = np.unique((names.astype(np.int64) + 1) * count + of_id + 1, return_inverse=True)
        name, thread_id = pairs // count - 1, pairs % count - 1
        known = thread_id >= 0
        own_id = np.append(different, 0)[np.where(known, thread_id, _NONE)]
        return codes.astype(np.int32), made(self._thread_names.things, name, name >= 0, known, own_id)

    # -- one by one

    def _foreign(self, frames: Frames, at: int) -> list[_decode.Span]:
        """The spans of a SCOPE_SPANS record."""
        wrong = otlp_parts.Wrong(lambda *part: self.errors.append((at, *part)))
        return otlp_parts.scope_spans(frames.payload(at), wrong, check_ids).spans

    def _single(self, batch: Batch, frames: Frames, record: int, row: int) -> None:
        try:
            span = _decode.span(frames.payload(record))
            check_ids(span)
        except (ValueError, RecursionError) as error:
            self.errors.append((record, 0, int(frames.size[record]), error))
            return
        self._place(batch, row, span)

    def _place(self, batch: Batch, at: int, span: _decode.Span) -> None:
        row = SpanRow(span, self._nobody)
        batch.span[at] = int.from_bytes(span.span_id, "big")
        batch.parent[at] = int.from_bytes(span.parent_span_id, "big") if len(span.parent_span_id) == 8 else 0
        batch.start[at], batch.end[at] = span.start_ns, span.end_ns
        batch.trace[at] = self._traces.code(span.trace_id)
        batch.thread_name[at] = _NONE if row.thread is None else self._thread_names.code(row.thread)
        batch.shape[at] = self._shapes.code(shape_of(row))
        for key, value in _numbers(row).items():
            batch.numbers[key][0][at], batch.numbers[key][1][at] = value, True
        batch.linked += [(at, link) for link in span.links]

    # -- many at once

    def _own(self, batch: Batch, frames: Frames, records: Ints, rows: Ints) -> None:
        size = frames.size[records]
        order = np.argsort(np.minimum(size, MAX_LINKED_SIZE + 1).astype(np.uint16), kind="stable")
        edges = np.flatnonzero(np.diff(np.minimum(size[order], MAX_LINKED_SIZE + 1))) + 1
        for some in np.split(order, edges):
            if not len(some):
                continue
            length = int(size[some[0]])
            if length > MAX_LINKED_SIZE:
                for at in some.tolist():
                    self._single(batch, frames, int(records[at]), int(rows[at]))
                continue
            size_of_chunk = min(_CHUNK, max(_WORTH, _CHUNK_BYTES // max(1, length)))
            for begin in range(0, len(some), size_of_chunk):
                chunk = some[begin : begin + size_of_chunk]
                self._alike(batch, frames, records[chunk], rows[chunk], length)

    def _alike(self, batch: Batch, frames: Frames, records: Ints, rows: Ints, length: int) -> None:
        """Records of one length."""
        known = self._templates.setdefault(length, [])
        width = -(-length // 8) * 8
        if width:
            windows = np.lib.stride_tricks.sliding_window_view(frames.data, width)
            matrix: Bytes = windows[frames.begin[records]]
        tried = 0
        while len(records) and width:
            if tried < len(known):
                template = known[tried]
            elif len(records) < _WORTH or len(known) >= _TEMPLATES:
                break
            else:
                try:
                    template = LinkTemplate(frames.payload(int(records[0])))
                except NoTemplateError:
                    self._single(batch, frames, int(records[0]), int(rows[0]))
                    records, rows, matrix = records[1:], rows[1:], matrix[1:]
                    continue
                known.append(template)
            tried += 1
            fits = template.fits(matrix.view("<u8"))
            if fits.all():
                self._fill(batch, frames, template, matrix, records, rows)
                return
            if fits.any():
                self._fill(batch, frames, template, matrix[fits], records[fits], rows[fits])
                records, rows, matrix = records[~fits], rows[~fits], matrix[~fits]
        for record, row in zip(records.tolist(), rows.tolist(), strict=True):
            self._single(batch, frames, record, row)

    def _fill(
        self, batch: Batch, frames: Frames, template: LinkTemplate, matrix: Bytes, records: Ints, rows: Ints
    ) -> None:
        place = template.places

        def field_of(name: str, kind: str) -> Words:
            begin = place[name]
            found: Words = matrix[:, begin : begin + 8].copy().view(kind).ravel().astype(np.uint64, copy=False)
            return found

        span = field_of("span", ">u8")
        begin = place["trace"]
        trace = matrix[:, begin : begin + 16].copy().view("<u8")
        good = (span != 0) & (trace != 0).any(axis=1)
        if not good.all():
            for record, row in zip(records[~good].tolist(), rows[~good].tolist(), strict=True):
                self._single(batch, frames, record, row)
            matrix, records, rows = matrix[good], records[good], rows[good]
            if len(records):
                self._fill(batch, frames, template, matrix, records, rows)
            return
        alike, examples = groups(matrix.view("<u8"), template.shape)
        shapes = np.empty(len(examples), np.int32)
        for number, example in enumerate(examples.tolist()):
            try:
                decoded = _decode.span(frames.payload(int(records[example])))
            except (ValueError, RecursionError):
                shapes[number] = _NONE
                continue
            row = SpanRow(decoded, self._nobody)
            shapes[number] = self._shapes.code(shape_of(row))
            for key, value in _numbers(row).items():
                if key not in template.numbers:
                    some = rows[alike == number]
                    batch.numbers[key][0][some], batch.numbers[key][1][some] = value, True
            if template.thread is None and row.thread is not None:
                batch.thread_name[rows[alike == number]] = self._thread_names.code(row.thread)
        batch.shape[rows] = shapes[alike]
        batch.span[rows] = span
        if "parent" in place:
            batch.parent[rows] = field_of("parent", ">u8")
        for name, column in (("start", batch.start), ("end", batch.end)):
            if name in place:
                column[rows] = field_of(name, "<u8")
        for key, (at, size) in template.numbers.items():
            batch.numbers[key][0][rows] = varints(matrix, at, size)
            batch.numbers[key][1][rows] = True
        batch.trace[rows] = codes_of(trace, self._traces, bytes)
        if template.thread is not None:
            at, size = template.thread
            batch.thread_name[rows] = codes_of(words_at(matrix, at, size), self._thread_names, text_of(size))
        good = shapes[alike] != _NONE
        if template.links and good.any():
            batch.links += links_in(template, matrix[good], rows[good], self._links)
        if not good.all():
            bad = ~good
            for record, at in zip(records[bad].tolist(), rows[bad].tolist(), strict=True):
                for _, there in batch.numbers.values():
                    there[at] = False
                batch.thread_name[at] = _NONE
                self._single(batch, frames, record, at)


def _numbers(row: SpanRow) -> dict[str, int]:
    return {key: value for key in NUMBERS if type(value := row.attributes.get(key)) is int}
