"""Bounds the values of metric labels: each value of a label is a series of its own, kept for as long as the run lasts.

A prompt id or a step number as a label would grow without end, here and in every backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from raytrace_rl import _state

#: Values that one label of one series may take.
MAX_VALUES: Final = 256
#: What takes the place of the values beyond.
OTHER: Final = "other"
#: Labels of all series together; one beyond has no value but `OTHER`.
_MAX_LABELS: Final = 4096

_values: Final[dict[tuple[str, str], set[Any]]] = {}


def forget() -> None:
    """Starts counting anew (a new run, a forked child)."""
    _values.clear()


def bounded(series: str, attributes: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns ``attributes`` with the values of labels that have too many replaced by `OTHER`, with one warning each.

    Args:
        series: Name of the series.
        attributes: Its labels; None or empty for none.
    """
    if not attributes:
        return attributes
    cut: dict[str, Any] | None = None
    for label, value in attributes.items():
        known = _values.get((series, label))
        key = value if isinstance(value, (str, bool, int, float)) else repr(value)
        if known is not None and key in known:
            continue
        if known is None and len(_values) < _MAX_LABELS:
            known = _values[series, label] = set()
        if known is not None and len(known) < MAX_VALUES:
            known.add(key)
            continue
        if cut is None:
            cut = dict(attributes)
        cut[label] = OTHER
        _state.warn_once(
            f"cardinality:{series}:{label}" if known is not None else "cardinality",
            "Label %r of metric %s has over %d values: further ones are recorded as %r. "
            "What grows with steps, prompts or requests belongs on spans.",
            label,
            series,
            MAX_VALUES,
            OTHER,
        )
    return attributes if cut is None else cut
