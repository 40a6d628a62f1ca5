"""Texts of many rows at once: Arrow arrays of strings out of NumPy's bytes. Needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrace_rl.monitor.bulk.arrays import Bytes, Ints, Mask, Reals

_HEX: Final = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)
_NOTHING: Final = pa.scalar("", pa.string())
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_SPACE: Final = ord(" ")


def texts(rows: Bytes, there: Mask | None = None) -> Any:
    """Returns the ASCII texts that the rows of a matrix are; null where they are not ``there``."""
    count, width = rows.shape
    if there is None:
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
        bits = None
    else:
        offsets = np.zeros(count + 1, np.int32)
        offsets[1:] = np.cumsum(there, dtype=np.int32) * np.int32(width)
        bits = pa.py_buffer(np.packbits(there, bitorder="little"))
        rows = rows[there]
    data = pa.py_buffer(np.ascontiguousarray(rows))
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), data, bits)


def hexadecimal(rows: Bytes, there: Mask | None = None) -> Any:
    """Returns the bytes of each row as hexadecimal text; null where they are not ``there``."""
    return texts(_HEX[rows].view(np.uint8), there)


def plain(rows: Bytes) -> Mask:
    """Returns which rows of ASCII stand in JSON as they are."""
    special = (rows < _SPACE) | (rows == _QUOTE) | (rows == _BACKSLASH)
    found: Mask = ~special.any(axis=1)
    return found


def integers(values: Ints) -> Any:
    """Returns integers as JSON has them."""
    return pa.array(values).cast(pa.string())


def reals(values: Reals) -> Any:
    """Returns numbers as JSON has them; text for those that it has no word for, as `columns.json_text` writes it."""
    return pa.array(
        [repr(value) if isfinite(value) else json.dumps(str(value)) for value in values.tolist()], pa.string()
    )


def joined(parts: Sequence[Any], count: int) -> Any:
    """Returns ``count`` texts, each joined of what is the same for all (``str``) and of arrays."""
    parts = _merged(parts)
    # With the type said: to find it out takes longer than to join a thousand texts.
    whole = [pa.scalar(part, pa.string()) if isinstance(part, str) else part for part in parts]
    if len(parts) == 1 and isinstance(parts[0], str):
        return pa.repeat(whole[0], count)
    return pc.binary_join_element_wise(*whole, _NOTHING)


def _merged(parts: Sequence[Any]) -> list[Any]:
    """The same parts with neighbours that are the same for all made one."""
    merged: list[Any] = []
    for part in parts:
        if merged and isinstance(part, str) and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged
