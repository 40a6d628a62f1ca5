"""Spans that are written alike: where in such records the ids, times and numbers are, found out once for thousands.

A template is made of one record. Another of the same length is written alike where all that says how it is to be read
(tags, lengths, keys, the top bits of numbers) is the same. What then differs is of two sorts: *values*, which are taken
out of all records at once, and *shape* (names, groups, buckets), of which there are few different ones.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from raytrace_rl import _decode, semconv
from raytrace_rl.integrations._trajectories import RL_WEIGHT_VERSION_ATTR
from raytrace_rl.monitor.bulk.arrays import Bytes, Ints, Mask, Words

#: A longer record is decoded by itself; where links are taken apart, one that is longer than the second.
MAX_SIZE: Final = 4096
MAX_LINKED_SIZE: Final = 16384
_WORD: Final = 8
#: Odd multipliers, one a word, that make a hash of a record's shape.
_MIX: Final = np.random.Generator(np.random.PCG64(7)).integers(1, 1 << 63, MAX_LINKED_SIZE // 8, np.uint64) | np.uint64(
    1
)
_TOP: Final = 0x80
_ALL: Final = 0xFF

#: Attributes whose integers are columns; and those of which the shape depends.
NUMBERS: Final = (semconv.RL_ITERATION, semconv.RL_QUEUED_NS, RL_WEIGHT_VERSION_ATTR, "thread.id")
#: A text of which there may be as many as there are spans: a thread for each rollout.
_THREAD_NAME: Final = "thread.name"
_SHAPE: Final = frozenset(
    (
        semconv.RL_SPAN_GROUP,
        semconv.RL_BUCKET,
        semconv.RL_TRUNCATED,
        semconv.RL_QUEUED_FROM,
        _THREAD_NAME,
        *NUMBERS,
    )
)
_EVENT: Final = 0x5A
_LINK: Final = 0x6A


class NoTemplateError(Exception):
    """The record is not of the simple kind."""


class Template:
    """How records of one length are written.

    Args:
        record: One of them.

    Attributes:
        places: Offsets of ``trace``, ``span``, ``parent``, ``start`` and ``end``, those that are there.
        numbers: Offset and length of the varint of each of `NUMBERS` that is an integer.
        thread: Offset and length of the thread's name, if it is plain ASCII.
        shape: Mask of the bytes that make up the shape, as 64-bit words.

    Raises:
        NoTemplateError: It has events or links, odd ids, or is damaged.
    """

    def __init__(self, record: bytes) -> None:
        self.size = len(record)
        self.width = -(-self.size // _WORD) * _WORD
        self.places: dict[str, int] = {}
        self.numbers: dict[str, tuple[int, int]] = {}
        self.thread: tuple[int, int] | None = None
        self._record = record
        self._same = np.zeros(self.width, np.uint8)
        self._shape = np.zeros(self.width, np.uint8)
        try:
            self._fields()
            _decode.span(record)
        except (ValueError, IndexError, RecursionError):
            raise NoTemplateError from None
        if "trace" not in self.places or "span" not in self.places:
            raise NoTemplateError
        self._own: Words = np.frombuffer(record.ljust(self.width, b"\0"), "<u8")
        self._mask: Words = self._same.view("<u8")
        self.shape: Words = self._shape.view("<u8")

    def fits(self, words: Words) -> Mask:
        """Returns which rows of ``words`` (a record each) are written like this one."""
        different: Mask = (((words ^ self._own) & self._mask) != 0).any(axis=1)
        return ~different

    # -- taking one record apart

    def _keep(self, start: int, stop: int) -> None:
        self._same[start:stop] = _ALL

    def _fields(self) -> None:
        data, pos = self._record, 0
        while pos < len(data):
            tag = data[pos]
            if tag == _EVENT:
                raise NoTemplateError
            wire = tag & 7
            if wire == 2 and tag < 128:
                begin, stop = _length(data, pos + 1)
                self._keep(pos, begin)
                self._delimited(tag, begin, stop)
            elif wire == 1 and tag < 128:
                begin, stop = pos + 1, pos + 9
                self._keep(pos, begin)
                if tag in {0x39, 0x41}:
                    self.places["start" if tag == 0x39 else "end"] = begin
                else:
                    self._shape[begin:stop] = _ALL
            else:
                # Flags, counts of what was dropped, the kind: whole, since numbers like these hardly differ.
                stop = _after(data, pos)
                self._keep(pos, stop)
            pos = stop
        if pos != len(data):
            raise NoTemplateError

    def _delimited(self, tag: int, begin: int, stop: int) -> None:
        name = {0x0A: ("trace", 16), 0x12: ("span", 8), 0x22: ("parent", 8)}.get(tag)
        if name is not None:
            if stop - begin != name[1]:
                raise NoTemplateError
            self.places[name[0]] = begin
        elif tag == 0x4A:
            self._attribute(begin, stop)
        elif tag == _LINK:
            self._link(begin, stop)
        else:
            self._shape[begin:stop] = _ALL

    def _link(self, begin: int, stop: int) -> None:
        """Takes a link apart."""
        del begin, stop
        raise NoTemplateError

    def _varint(self, value: int, stop: int) -> None:
        """An integer that may be any other of its length."""
        self._keep(value, value + 1)
        self._same[value + 1 : stop] = _TOP

    def _key(self, begin: int, stop: int) -> tuple[str, int]:
        """The key of an attribute, and where its value is: a key, then a value, as every encoder writes them."""
        data = self._record
        if begin == stop or data[begin] != 0x0A:
            raise NoTemplateError
        key_begin, key_stop = _length(data, begin + 1)
        if key_stop >= stop or data[key_stop] != 0x12:
            raise NoTemplateError
        value, value_stop = _length(data, key_stop + 1)
        if value_stop != stop or value == stop:
            raise NoTemplateError
        return data[key_begin:key_stop].decode(), value

    def _attribute(self, begin: int, stop: int) -> None:
        data = self._record
        key, value = self._key(begin, stop)
        self.numbers.pop(key, None)
        self.thread = None if key == _THREAD_NAME else self.thread
        self._keep(begin, value)
        sort = data[value]
        if sort == 0x18 and _after(data, value) == stop and (key not in _SHAPE or key in NUMBERS):
            self._varint(value, stop)
            if key in NUMBERS:
                self.numbers[key] = value + 1, stop - value - 1
        elif sort == 0x21 and stop - value == 9 and key not in _SHAPE:
            self._keep(value, value + 1)
        elif sort == 0x0A and (key not in _SHAPE or key == _THREAD_NAME) and (text := self._text(value, stop)):
            self.thread = text if key == _THREAD_NAME else self.thread
        else:
            self._shape[value:stop] = _ALL

    def _text(self, value: int, stop: int) -> tuple[int, int] | None:
        """Where a text is that may be any other of its length, as long as it is plain ASCII."""
        begin, end = _length(self._record, value + 1)
        if end != stop or not self._record[begin:end].isascii():
            return None
        self._keep(value, begin)
        self._same[begin:end] = _TOP
        return begin, end - begin


def _length(data: bytes, pos: int) -> tuple[int, int]:
    """Where a length-delimited field's content begins and ends; ``pos`` is behind its tag."""
    size = shift = 0
    while True:
        byte = data[pos]
        pos += 1
        size |= (byte & 0x7F) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise ValueError("varint of more than ten bytes")
    if pos + size > len(data):
        raise ValueError("field reaches beyond its message")
    return pos, pos + size


def _after(data: bytes, pos: int) -> int:
    """Where the field that begins at ``pos`` ends."""
    wire = data[pos] & 7
    while data[pos] > 127:
        pos += 1
    pos += 1
    if wire == 0:
        while data[pos] > 127:
            pos += 1
        return pos + 1
    if wire == 2:
        return _length(data, pos)[1]
    if wire not in {1, 5}:
        raise ValueError(f"wire type {wire}")
    return pos + (8 if wire == 1 else 4)


def varints(records: Bytes, begin: int, size: int) -> Ints:
    """Returns the integers that are written in the same bytes of each record."""
    value = np.zeros(len(records), np.uint64)
    for at in range(min(size, 10)):
        value |= (records[:, begin + at] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * at)
    return value.view(np.int64)


def groups(words: Words, mask: Words) -> tuple[Ints, Ints]:
    """Numbers the groups of rows that are the same under a mask; returns each row's group, and a row of each."""
    used = np.flatnonzero(mask)
    masked = words[:, used] & mask[used]
    if (masked == masked[0]).all():
        return np.zeros(len(words), np.int64), np.zeros(1, np.int64)
    key = (masked * _MIX[: len(used)]).sum(axis=1, dtype=np.uint64)
    _, examples, alike = np.unique(key, return_index=True, return_inverse=True)
    # Two that have the same hash and are not the same, which someone may have made so: each gets a group of its own.
    wrong = np.flatnonzero((masked != masked[examples[alike]]).any(axis=1))
    if len(wrong):
        alike[wrong] = len(examples) + np.arange(len(wrong))
        examples = np.concatenate((examples, wrong))
    return alike, examples
