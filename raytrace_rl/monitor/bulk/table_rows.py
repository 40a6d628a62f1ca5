"""Rows of the ``spans`` table by the thousand: from records to Arrow columns without a Python object for each span.

A row is what `raytrace_rl.monitor.columns` makes of it: one record of each shape is decoded and becomes a row there,
and the others differ from it in ids, times, and the values of some attributes alone. What is not of that kind is left
to be read row by row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from raytrace_rl import _decode, semconv
from raytrace_rl.monitor.bulk import table_texts
from raytrace_rl.monitor.bulk.arrays import Bytes, Ints, Mask, Words
from raytrace_rl.monitor.bulk.framing import Frames
from raytrace_rl.monitor.bulk.parts import LATEST_NS
from raytrace_rl.monitor.bulk.table_templates import INT, REAL, TEXT, Attribute, TableTemplate
from raytrace_rl.monitor.bulk.templates import MAX_SIZE, NoTemplateError, groups, varints
from raytrace_rl.monitor.columns import SCHEMAS, as_table, json_text
from raytrace_rl.monitor.model import Process, SpanRow
from raytrace_rl.spool import format as fmt

#: Templates that are tried for records of one length; records from which on a new one, or a shape, is worth it.
_TEMPLATES: Final = 64
_WORTH: Final = 16
#: Rows that are looked at together: what they take stays in the processor's cache.
_CHUNK: Final = 16384

#: Columns of integers, with the attribute of each; columns that the shape decides; those that are null in this kind of
#: span.
_NUMBERS: Final = {"iteration": semconv.RL_ITERATION, "queued_ns": semconv.RL_QUEUED_NS, "thread_id": "thread.id"}
_OF_SHAPE: Final = ("name", "kind", "status", "status_message", "span_group", "bucket", "truncated")
_ABSENT: Final = ("scope", "events", "links")


class TableRows:
    """Makes rows of the records of one process.

    Args:
        lane: Key of the process.
    """

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._templates: dict[int, list[TableTemplate]] = {}

    def lot(self, frames: Frames, apart: Words) -> Lot:
        """Decodes the SPAN records among ``frames``, but for those of spans ``apart`` (ids as numbers)."""
        lot = Lot(frames, self._lane, apart)
        records = np.flatnonzero(frames.kind == fmt.Kind.SPAN)
        size = frames.size[records]
        order = np.argsort(size, kind="stable")
        order = order[(size[order] > 0) & (size[order] <= MAX_SIZE)]
        for some in np.split(order, np.flatnonzero(np.diff(size[order])) + 1):
            for begin in range(0, len(some), _CHUNK):
                chunk = records[some[begin : begin + _CHUNK]]
                self._alike(lot, chunk, int(frames.size[chunk[0]]))
        return lot

    def _alike(self, lot: Lot, records: Ints, length: int) -> None:
        """Records of one length."""
        known = self._templates.setdefault(length, [])
        windows = np.lib.stride_tricks.sliding_window_view(lot.frames.data, -(-length // 8) * 8)
        matrix: Bytes = windows[lot.frames.begin[records]]
        tried = 0
        while len(records) >= _WORTH:
            if tried == len(known):
                if len(known) >= _TEMPLATES:
                    return
                try:
                    known.append(TableTemplate(lot.frames.payload(int(records[0]))))
                except NoTemplateError:
                    records, matrix = records[1:], matrix[1:]
                    continue
            template = known[tried]
            tried += 1
            fits = template.fits(matrix.view("<u8"))
            lot.fill(template, matrix[fits], records[fits])
            records, matrix = records[~fits], matrix[~fits]


class Lot:
    """What came of one lot of records.

    Attributes:
        frames: The records.
    """

    def __init__(self, frames: Frames, lane: str, apart: Words) -> None:
        size = len(frames.kind)
        self.frames = frames
        self._lane = lane
        self._apart = apart
        self._nobody = Process("")
        self._done: Mask = np.zeros(size, np.bool_)
        self._shape = np.zeros(size, np.int32)
        self._shapes: list[SpanRow] = []
        self._ids = {name: np.zeros((size, width), np.uint8) for name, width in _IDS.items()}
        self._has_parent: Mask = np.zeros(size, np.bool_)
        self._numbers = {name: np.zeros(size, np.int64) for name in ("start_ns", "end_ns", *_NUMBERS)}
        self._there = {name: np.zeros(size, np.bool_) for name in _NUMBERS}
        self._order: list[Ints] = []
        self._texts: dict[str, list[Any]] = {"thread": [], "attributes": []}

    def left(self) -> list[int]:
        """The numbers of the records of which no row was made."""
        numbers: list[int] = np.flatnonzero(~self._done).tolist()
        return numbers

    def count(self) -> int:
        """How many rows were made."""
        return int(self._done.sum())

    def last_ns(self) -> int:
        """The latest time among the rows, ns since the epoch; 0 without any."""
        return int(self._numbers["end_ns"].max(initial=0))

    # -- from records of one template to columns

    def fill(self, template: TableTemplate, matrix: Bytes, records: Ints) -> None:
        """Makes rows of records that are written alike; ``matrix`` has their bytes."""
        good = self._good(template, matrix)
        if not good.all():
            matrix, records = matrix[good], records[good]
        if len(records) < _WORTH:
            return
        alike, _ = groups(matrix.view("<u8"), template.shape)
        order = np.argsort(alike, kind="stable")
        for some in np.split(order, np.flatnonzero(np.diff(alike[order])) + 1):
            if len(some) >= _WORTH:
                self._group(template, matrix[some], records[some])

    def _good(self, template: TableTemplate, matrix: Bytes) -> Mask:
        """Which records are ended spans with ids and times that there are, and texts that JSON has as they are."""
        place = template.places
        if "end" not in place:
            return np.zeros(len(matrix), np.bool_)
        span = _words(matrix, place["span"], ">u8")
        trace = matrix[:, place["trace"] : place["trace"] + 16]
        good: Mask = (span != 0) & trace.any(axis=1)
        if len(self._apart):
            good &= ~np.isin(span, self._apart)
        end = _words(matrix, place["end"], "<u8")
        good &= (end > 0) & (end < LATEST_NS)
        if "start" in place:
            good &= _words(matrix, place["start"], "<u8") < LATEST_NS
        for attribute in template.attributes:
            if attribute.sort == TEXT:
                good &= table_texts.plain(_bytes(matrix, attribute))
        return good

    def _group(self, template: TableTemplate, matrix: Bytes, records: Ints) -> None:
        """Records of one shape."""
        try:
            example = SpanRow(_decode.span(self.frames.payload(int(records[0]))), self._nobody)
        except (ValueError, RecursionError):
            return
        for name, width in _IDS.items():
            if name in template.places:
                begin = template.places[name]
                self._ids[name][records] = matrix[:, begin : begin + width]
        for name in ("start", "end"):
            if name in template.places:
                self._numbers[f"{name}_ns"][records] = _words(matrix, template.places[name], "<u8")
        self._done[records] = True
        self._has_parent[records] = "parent" in template.places
        self._shape[records] = len(self._shapes)
        self._shapes.append(example)
        self._order.append(records)
        self._values(template, matrix, records, example)

    def _values(self, template: TableTemplate, matrix: Bytes, records: Ints, example: SpanRow) -> None:
        """The columns that attributes decide, and their text."""
        parts: list[Any] = ["{"]
        numbers: dict[str, Any] = {name: getattr(example, name) for name in _NUMBERS}
        thread: Any = example.thread
        for n, attribute in enumerate(template.attributes):
            parts.append(f"{',' if n else ''}{json.dumps(attribute.key, ensure_ascii=False)}:")
            if attribute.sort == INT:
                values = varints(matrix, attribute.begin, attribute.size)
                parts.append(str(values[0]) if (values == values[0]).all() else table_texts.integers(values))
                numbers.update({name: values for name, key in _NUMBERS.items() if key == attribute.key})
            elif attribute.sort == REAL:
                parts.append(table_texts.reals(_words(matrix, attribute.begin, "<u8").view(np.float64)))
            elif attribute.sort == TEXT:
                found = table_texts.texts(_bytes(matrix, attribute))
                parts += ['"', found, '"']
                thread = found if attribute.key == "thread.name" else thread
            else:
                parts.append(json_text(example.attributes[attribute.key]))
        parts.append("}")
        for name, value in numbers.items():
            if value is not None:
                self._numbers[name][records] = value
                self._there[name][records] = True
        if thread is None or isinstance(thread, str):
            thread = pa.repeat(pa.scalar(thread, pa.string()), len(records))
        self._texts["thread"].append(thread)
        self._texts["attributes"].append(table_texts.joined(parts, len(records)))

    # -- from columns to a table

    def table(self, caught: Sequence[tuple[int, SpanRow]]) -> Any:
        """Returns the rows as a table in the order of their records.

        Args:
            caught: Rows that were read one by one, each with the number of its record; those ascend.
        """
        schema = SCHEMAS["spans"]
        made = pa.Table.from_arrays([column.cast(field.type) for field, column in self._columns()], schema=schema)
        if not caught:
            return made
        both = pa.concat_tables([made, as_table("spans", [row for _, row in caught])])
        places = np.concatenate((np.flatnonzero(self._done), [at for at, _ in caught]))
        return both.take(pa.array(np.argsort(places, kind="stable")))

    def _columns(self) -> list[tuple[Any, Any]]:
        rows = np.flatnonzero(self._done)
        numbers = {name: values[rows] for name, values in self._numbers.items()}
        made: dict[str, Any] = {
            "trace_id": table_texts.hexadecimal(self._ids["trace"][rows]),
            "span_id": table_texts.hexadecimal(self._ids["span"][rows]),
            "parent_span_id": table_texts.hexadecimal(self._ids["parent"][rows], self._has_parent[rows]),
            "lane": pa.repeat(pa.scalar(self._lane, pa.string()), len(rows)).dictionary_encode(),
        }
        for name, values in numbers.items():
            made[name] = pa.array(values, mask=~self._there[name][rows] if name in self._there else None)
        shapes = pa.array(self._shape[rows])
        of_shapes = as_table("spans", self._shapes)
        for name in _OF_SHAPE:
            made[name] = _looked_up(of_shapes.column(name).combine_chunks(), shapes)
        for name in _ABSENT:
            made[name] = pa.nulls(len(rows), SCHEMAS["spans"].field(name).type)
        if len(rows):
            place = np.empty(len(self._done), np.int64)
            place[np.concatenate(self._order)] = np.arange(len(rows))
            in_order = pa.array(place[rows])
            made.update({name: pa.concat_arrays(arrays).take(in_order) for name, arrays in self._texts.items()})
            made["thread"] = made["thread"].dictionary_encode()
        else:
            made.update({name: pa.array([], SCHEMAS["spans"].field(name).type) for name in self._texts})
        return [(field, made[field.name]) for field in SCHEMAS["spans"]]


_IDS: Final = {"trace": 16, "span": 8, "parent": 8}


def _words(matrix: Bytes, begin: int, kind: str) -> Words:
    found: Words = matrix[:, begin : begin + 8].copy().view(kind).ravel().astype(np.uint64, copy=False)
    return found


def _bytes(matrix: Bytes, attribute: Attribute) -> Bytes:
    return matrix[:, attribute.begin : attribute.begin + attribute.size]


def _looked_up(things: Any, places: Any) -> Any:
    """Takes things by their places; of a dictionary the numbers alone."""
    if isinstance(things, pa.DictionaryArray):
        return pa.DictionaryArray.from_arrays(things.indices.take(places), things.dictionary)
    return things.take(places)
