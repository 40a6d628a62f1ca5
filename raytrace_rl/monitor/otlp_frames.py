"""Where the requests of an OTLP protobuf file lie: under none, a varint, or four bytes big-endian as their length.

A frame that is no request costs itself: where its length holds, the next one begins behind it, else at the next place
at which a whole request stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

#: Tags of a batch in a request; of its scopes, and of a scope's spans.
_FIELD: Final = 0x0A
_INNER: Final = 0x12
#: How a request begins that holds anything: a batch, its length, and in it a resource or scope spans.
_BEGIN: Final = re.compile(rb"\x0a(?=(?:[\x00-\x7f]|[\x80-\xff]{1,4}[\x00-\x7f])[\x0a\x12])", re.DOTALL)
_LONGEST_VARINT: Final = 5
#: Bytes of what is looked at may be this many times the file's; and what a look costs besides.
_WORK: Final = 8
_LOOK: Final = 200


class Frame(NamedTuple):
    """From where to where a request lies.

    ``good``: its length and that of each batch in it hold; ``torn``: it would go on behind the end of the file.
    """

    start: int
    stop: int
    good: bool
    torn: bool = False


#: Begin and end of the frame at a place; None if there is none.
_Length = Callable[[bytes, int], "tuple[int, int] | None"]


def frames(data: bytes) -> list[Frame]:
    """Returns the frames of a file, under the framing under which most of it makes sense; they leave nothing out."""
    whole = [[Frame(start, stop, good=True) for start, stop in _strict(data, length)] for length in _LENGTHS]
    best = max(whole, key=_end)
    if _end(best) == len(data):
        return best
    found = [list(_Damaged(data, length).frames(0, len(data))) for length in _LENGTHS]
    most = max(map(_readable, found))
    # Under a wrong framing the lengths themselves are damage, and the rest may still be read.
    chosen = min((one for one in found if 2 * _readable(one) >= most), key=partial(_strange, data))
    batches: list[Frame] = []
    alone = _Damaged(data, _no_length)
    for frame in chosen:
        batches += [frame] if frame.good or frame.torn else alone.frames(frame.start, frame.stop)
    return batches


def _end(found: list[Frame]) -> int:
    return found[-1].stop if found else 0


def _readable(found: list[Frame]) -> int:
    return sum(frame.stop - frame.start for frame in found if frame.good)


def _strange(data: bytes, found: list[Frame]) -> tuple[int, int]:
    """How many frames are none, and how many of these do not even begin as one (the last one may be torn off)."""
    bad = [frame for frame in found if not frame.good]
    return len(bad), sum(_BEGIN.match(data, frame.start) is None for frame in bad)


def _strict(data: bytes, length: _Length) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(data) and (found := length(data, at)) is not None and _is_request(data, *found, len(data)):
        yield found
        at = found[1]


class _Damaged:
    """Finds the frames of a file in which not all is one."""

    def __init__(self, data: bytes, length: _Length) -> None:
        self._data = data
        self._length = length
        self._left = _WORK * len(data)

    def frames(self, at: int, end: int) -> Iterator[Frame]:
        """Yields what lies between two places: frames that hold spans, and what lies between these."""
        while at < end:
            found = self._length(self._data, at)
            if found is not None and self._holds_spans(found, end):
                yield Frame(*found, good=True)
                at = found[1]
                continue
            start = at if found is None else min(found[0], end)
            behind = self._length(self._data, found[1]) if found is not None and found[1] < end else None
            if found is not None and behind is not None and self._holds_spans(behind, end):
                again = found[1]
            else:
                again = self._next(start, end)
            yield Frame(start, again, good=False, torn=again == end and found is not None and found[1] > end)
            at = again

    def _next(self, at: int, end: int) -> int:
        """Where the next frame begins that holds a span; the end without one."""
        for match in _BEGIN.finditer(self._data, at + 1, end):
            start = match.start()
            for begin in range(max(at, start - _LONGEST_VARINT), start + 1):
                found = self._length(self._data, begin)
                if found is not None and found[0] == start and self._holds_spans(found, end):
                    return begin
            if self._left < 0:
                break
        return end

    def _holds_spans(self, found: tuple[int, int], end: int) -> bool:
        if found[1] > end or self._left < 0:
            return False
        self._left -= found[1] - found[0] + _LOOK
        return _holds_spans(self._data, *found, end)


def _holds_spans(data: bytes, start: int, stop: int, end: int) -> bool:
    """Whether it is a request with a span in it: 16 bytes of trace id come first in each.

    Much else has the form of a request, where one does not know where to look: an attribute, a text.
    """
    return _is_request(data, start, stop, end) and any(
        data[at : at + 2] == b"\x0a\x10"
        for batch in _fields(data, start, stop, _FIELD)
        for scope in _fields(data, *batch, _INNER)
        for at, _ in _fields(data, *scope, _INNER)
    )


def _fields(data: bytes, at: int, stop: int, tag: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each field with that tag, as long as all are length-delimited."""
    while at < stop:
        found = _varint(data, at + 1)
        if found is None or data[at] & 7 != 2 or found[0] + found[1] > stop:
            return
        if data[at] == tag:
            yield found[1], found[0] + found[1]
        at = found[0] + found[1]


def _varint(data: bytes, at: int) -> tuple[int, int] | None:
    value = shift = 0
    for pos in range(at, min(at + _LONGEST_VARINT, len(data))):
        value |= (data[pos] & 0x7F) << shift
        if data[pos] < 128:
            return value, pos + 1
        shift += 7
    return None


def _is_request(data: bytes, start: int, stop: int, end: int) -> bool:
    """Whether the bytes are a sequence of length-delimited fields number 1, which is all that a request has."""
    if stop > end:
        return False
    while start < stop:
        if data[start] != _FIELD or (length := _varint(data, start + 1)) is None:
            return False
        start = length[1] + length[0]
    return start == stop


def _no_length(data: bytes, at: int) -> tuple[int, int] | None:
    """One request without a length: each batch is taken by itself."""
    if data[at] != _FIELD or (length := _varint(data, at + 1)) is None:
        return None
    return at, length[1] + length[0]


def _varint_length(data: bytes, at: int) -> tuple[int, int] | None:
    length = _varint(data, at)
    return None if length is None else (length[1], length[1] + length[0])


def _four_bytes_length(data: bytes, at: int) -> tuple[int, int] | None:
    start = at + 4
    return (start, start + int.from_bytes(data[at:start], "big")) if start <= len(data) else None


_LENGTHS: Final[tuple[_Length, ...]] = (_no_length, _varint_length, _four_bytes_length)
