"""What counts as a number in a logged dict: Python's, NumPy's, and zero-dimensional tensors on the CPU."""

from __future__ import annotations

from typing import Any

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt


def number(value: Any) -> int | float | None:
    """Returns ``value`` as a Python number; None for what is none, booleans included. Never raises.

    A tensor on a device is none: reading it would wait for the GPU in the middle of a step.
    """
    kind = type(value)
    if kind is float or kind is int:
        return value  # type: ignore[no-any-return]
    try:
        if isinstance(value, bool):
            return None
        if isinstance(value, float):
            return float(value)
        if isinstance(value, int):
            return int(value)
        if not hasattr(value, "dtype") or tuple(value.shape) != ():
            return None
        device = getattr(value, "device", None)
        place = getattr(device, "type", None) or getattr(device, "platform", None) or "cpu"
        if place != "cpu":
            _state.warn_once(
                "number:device", "A metric on device %s is left out: log value.item() where its wait is wanted.", place
            )
            return None
        item = value.item()
    except Exception as error:
        if is_interrupt(error):
            raise
        return None
    return item if type(item) in (int, float) else None
