"""Values out of records that are written alike, of which there is one in each row of a matrix of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raytrace_rl.integrations._trajectories import RL_TRAJECTORY_AGE_ATTR, RL_TRAJECTORY_NODE_ATTR
from raytrace_rl.monitor.believed import LONGEST_S, MOST
from raytrace_rl.monitor.bulk.arrays import Bytes, Codes, Ints, Reals, Words
from raytrace_rl.monitor.bulk.links import LINK_NUMBERS, LinkCoders, Links
from raytrace_rl.monitor.bulk.templates import groups, varints

if TYPE_CHECKING:
    from raytrace_rl.monitor.bulk.coder import Coder
    from raytrace_rl.monitor.bulk.link_templates import LinkPlaces, LinkTemplate

_NONE: Final = -1


def words_at(matrix: Bytes, begin: int, size: int) -> Words:
    """Returns the same bytes of each record, with zeros behind them up to whole words."""
    found = np.zeros((len(matrix), -(-max(size, 1) // 8) * 8), np.uint8)
    found[:, :size] = matrix[:, begin : begin + size]
    return found.view("<u8")


def text_of(size: int) -> Callable[[bytes], str]:
    """Returns what decodes a text of so many bytes."""
    return lambda raw: raw[:size].decode()


def _seconds(words: Words) -> Reals:
    """Doubles, those of them that `believed_s` believes; NaN for the others."""
    found = words.view("<f8").ravel()
    return np.where(np.abs(found) <= LONGEST_S, found, np.nan)


def codes_of(words: Words, coder: Coder, thing: Callable[[bytes], Any]) -> Codes:
    """Returns numbers for what is written in each row of words."""
    alike, examples = groups(words, np.full(words.shape[1], ~np.uint64(0)))
    codes = np.array([coder.code(thing(words[at].tobytes())) for at in examples.tolist()], np.int32)
    return codes[alike]


def links_in(template: LinkTemplate, matrix: Bytes, rows: Ints, coders: LinkCoders) -> list[Links]:
    """Returns the links of records by the number of the link in its record, each with the row of its record."""
    return [_link(link, matrix, rows, coders) for link in template.links]


def _link(link: LinkPlaces, matrix: Bytes, rows: Ints, coders: LinkCoders) -> Links:
    size = len(rows)
    there, numbers = 0, []
    for n, key in enumerate(LINK_NUMBERS):
        found = link.sized.get(key)
        there |= (found is not None) << n
        numbers.append(varints(matrix, *found) if found else np.zeros(size, np.int64))
    number, made, version, lag = numbers
    age, node = link.at.get(RL_TRAJECTORY_AGE_ATTR), link.sized.get(RL_TRAJECTORY_NODE_ATTR)
    nodes = np.full(size, _NONE, np.int32)
    if node is not None:
        nodes = codes_of(words_at(matrix, *node), coders.nodes, text_of(node[1]))
    return Links(
        rows,
        codes_of(words_at(matrix, link.at["trace"], 16), coders.traces, lambda raw: (raw, None)),
        words_at(matrix, link.at["span"], 8).view(">u8").ravel().astype(np.uint64),
        np.full(size, there, np.int8),
        np.where((number >= 1) & (number <= MOST), number, 1),
        made,
        version,
        lag,
        np.full(size, np.nan) if age is None else _seconds(words_at(matrix, age, 8)),
        nodes,
    )
