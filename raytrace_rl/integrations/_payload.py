"""How many bytes of payload a value holds: read off arrays, tensors and buffers, never by serialising them.

What cannot be told cheaply is said to be missing, not guessed: the number is then a lower bound. Containers are looked
into past what their classes override: a lazy mapping would load its values for us.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import islice
from types import MemberDescriptorType
from typing import Any, Final, NamedTuple

from raytrace_rl._interrupts import is_interrupt

#: Objects that are looked at; some 0.5 ms.
_MOST: Final = 1024
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
#: A list of so many numbers steers an operation, such as sizes; one of more is data, such as tokens.
_SHORT: Final = 64
_NUMBERS: Final = (bool, int, float, complex)


class Payload(NamedTuple):
    """What was counted.

    Attributes:
        num_bytes: Bytes of array and tensor elements (of a view its own, whatever storage lies behind), of buffers,
            and of text (as UTF-8).
        complete: Nothing was met whose size cannot be told: long lists of numbers (single ones count nothing), objects
            of unknown classes, references to data that lies elsewhere, text beyond ASCII, more objects than are looked
            at.
    """

    num_bytes: int
    complete: bool


def payload_of(values: Iterable[Any]) -> Payload:
    """Counts the payload of several values, each object once. Never raises."""
    ahead = list(values)
    seen: set[int] = set()
    total = 0
    complete = True
    looked_at = 0
    while ahead:
        value = ahead.pop()
        if id(value) in seen:
            continue
        looked_at += 1
        if looked_at > _MOST:
            return Payload(total, complete=False)
        try:
            size, parts, known = _look(value, _MOST - looked_at)
        except Exception as error:  # a property of the user's object
            if is_interrupt(error):
                raise
            complete = False
            continue
        seen.add(id(value))  # ids stay good: each is held by its container, which the caller holds
        total += size
        complete = complete and known
        ahead += parts
    return Payload(total, complete)


def _look(value: Any, most: int) -> tuple[int, list[Any], bool]:
    """Returns the bytes that ``value`` holds itself, what to look at besides, and whether that is all of it."""
    if value is None or isinstance(value, (*_NUMBERS, Enum)):
        return 0, [], True
    if isinstance(value, str):
        return len(value), [], value.isascii()
    if isinstance(value, (bytes, bytearray)):
        return len(value), [], True
    kind = type(value)
    if hasattr(kind, "element_size") and hasattr(kind, "numel"):
        return _tensor(value)
    if hasattr(kind, "nbytes"):
        dtype = getattr(value, "dtype", None)
        return (0, [], False) if getattr(dtype, "hasobject", False) else (int(value.nbytes), [], True)
    if isinstance(value, _SEQUENCES):
        base: Any = next(base for base in _SEQUENCES if issubclass(kind, base))
        size = base.__len__(value)
        first = next(base.__iter__(value), None)
        stored = kind.__iter__ is base.__iter__
        if isinstance(first, _NUMBERS):
            return 0, [], stored and size <= _SHORT
        return 0, list(islice(base.__iter__(value), most)), stored and size <= most
    if issubclass(kind, UserDict):
        inner = _instance_dict(value).get("data")
        stored = kind.__getitem__ is UserDict.__getitem__ and kind.values is UserDict.values
        return (0, [inner], stored) if isinstance(inner, dict) else (0, [], False)
    if isinstance(value, dict):
        stored = kind.__getitem__ is dict.__getitem__ and kind.values in (dict.values, OrderedDict.values)
        return 0, list(islice(dict.values(value), most)), stored and len(dict.keys(value)) <= most
    if _is_tensordict(kind):
        parts = list(islice(iter(value.values()), most + 1))
        return 0, parts[:most], len(parts) <= most
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return 0, *_fields(value, kind)
    return 0, [], False


def _is_tensordict(kind: type) -> bool:
    """True for TensorDict's class that holds its tensors; its lazy ones stack, or read from a disk, when asked."""
    return kind.__name__ == "TensorDict" and hasattr(kind, "keys") and hasattr(kind, "values")


def _fields(value: Any, kind: type) -> tuple[list[Any], bool]:
    """Returns the stored fields of a dataclass; a property or descriptor in a field's place is not run."""
    held = _instance_dict(value)
    parts: list[Any] = []
    complete = True
    for field in dataclasses.fields(value):
        slot = next((vars(base)[field.name] for base in kind.__mro__ if field.name in vars(base)), None)
        if isinstance(slot, MemberDescriptorType):
            parts.append(slot.__get__(value))
        elif field.name in held and not hasattr(type(slot), "__set__"):
            parts.append(held[field.name])
        else:
            complete = False
    return parts, complete


def _instance_dict(value: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _tensor(value: Any) -> tuple[int, list[Any], bool]:
    """A tensor of torch's: its shape and type are on the host, wherever its elements are."""
    if getattr(value, "is_nested", False):
        return 0, [value.values()], True
    if getattr(value, "layout", None) is not None and "strided" not in str(value.layout):
        return 0, [], False  # a sparse one: how much of it there is takes a look at the device
    return int(value.numel()) * int(value.element_size()), [], True
