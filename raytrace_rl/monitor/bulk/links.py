"""`Links`: what the spans of a run link to, one link an element, with what links say of trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from raytrace_rl.integrations._trajectories import (
    RL_TRAJECTORY_AGE_ATTR,
    RL_TRAJECTORY_COUNT_ATTR,
    RL_TRAJECTORY_LAG_ATTR,
    RL_TRAJECTORY_MADE_ATTR,
    RL_TRAJECTORY_NODE_ATTR,
    RL_WEIGHT_VERSION_ATTR,
)
from raytrace_rl.monitor.believed import believed_count, believed_s
from raytrace_rl.monitor.bulk.arrays import Codes, Ints, Ranks, Reals, Words
from raytrace_rl.monitor.bulk.coder import Coder

if TYPE_CHECKING:
    from raytrace_rl._decode import Link

#: Attributes of links whose integers are columns, in the order of their bits in ``there``.
LINK_NUMBERS: Final = (
    RL_TRAJECTORY_COUNT_ATTR,
    RL_TRAJECTORY_MADE_ATTR,
    RL_WEIGHT_VERSION_ATTR,
    RL_TRAJECTORY_LAG_ATTR,
)
COUNTED, MADE, VERSION, LAG = (1 << n for n in range(len(LINK_NUMBERS)))
_NONE: Final = -1

#: A trace id, and a span id too where that is not one of eight bytes; then ``span`` is 0.
Trace = tuple[bytes, "bytes | None"]


class Links(NamedTuple):
    """Links in the order of their spans' rows, and of each span in their own.

    Attributes:
        row: Of the span that links.
        trace, span: What it links to: place of the trace among those of the coder, and span id.
        there: Which of `LINK_NUMBERS` it has; the bit of the count also where that is no integer.
        number: Trajectories that it stands for.
        made, version, lag: Where they are there.
        age: Seconds; NaN where it says none that can be believed.
        node: Place among the nodes of the coder, -1 without one.
    """

    row: Ints
    trace: Codes
    span: Words
    there: Ranks
    number: Ints
    made: Ints
    version: Ints
    lag: Ints
    age: Reals
    node: Codes

    def taken(self, which: Any) -> Links:
        """Returns some of them: a mask, or places."""
        return Links._make(column[which] for column in self)

    def of_rows(self, place: Ints) -> Links:
        """Returns those whose span is kept, by its new row: ``place`` of its row, -1 where it is not kept."""
        row = np.where(self.row < len(place), place[np.minimum(self.row, len(place) - 1)] if len(place) else _NONE, -1)
        found = self._replace(row=row).taken(row >= 0)
        return found.taken(np.argsort(found.row, kind="stable"))


_KINDS: Final = ("i8", "i4", "u8", "i1", "i8", "i8", "i8", "i8", "f8", "i4")


class LinkCoders:
    """The numbers of what links of one lot of spans lead to: traces, and nodes."""

    def __init__(self) -> None:
        self.traces, self.nodes = Coder(), Coder()


def joined_links(pieces: Sequence[Links]) -> Links:
    """Returns pieces, one behind the other."""
    if not pieces:
        return Links._make(np.zeros(0, kind) for kind in _KINDS)
    return Links._make(np.concatenate(columns) for columns in zip(*pieces, strict=True))


def links_of(linked: Iterable[tuple[int, Link]], coders: LinkCoders) -> Links:
    """Returns decoded links, each with the row of its span."""
    rows = [(row, *_one(link, coders)) for row, link in linked]
    if not rows:
        return joined_links(())
    return Links._make(np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), _KINDS, strict=True))


def _one(link: Link, coders: LinkCoders) -> tuple[Any, ...]:
    attributes = link.attributes
    there = COUNTED if RL_TRAJECTORY_COUNT_ATTR in attributes else 0
    numbers = []
    for n, key in enumerate(LINK_NUMBERS[1:], 1):
        value = attributes.get(key)
        there |= (type(value) is int) << n
        numbers.append(value if type(value) is int else 0)
    age, node = believed_s(attributes.get(RL_TRAJECTORY_AGE_ATTR)), attributes.get(RL_TRAJECTORY_NODE_ATTR)
    regular = len(link.span_id) == 8
    return (
        coders.traces.code((link.trace_id, None if regular else link.span_id)),
        int.from_bytes(link.span_id, "big") if regular else 0,
        there,
        believed_count(attributes.get(RL_TRAJECTORY_COUNT_ATTR)),
        *numbers,
        np.nan if age is None else age,
        coders.nodes.code(node) if isinstance(node, str) else _NONE,
    )
