"""Templates of records with links: where the ids and attributes of each link are, too."""

from __future__ import annotations

from typing import Final, NamedTuple

from raytrace_rl.integrations._trajectories import RL_TRAJECTORY_AGE_ATTR, RL_TRAJECTORY_NODE_ATTR
from raytrace_rl.monitor.bulk.links import LINK_NUMBERS
from raytrace_rl.monitor.bulk.templates import NoTemplateError, Template, _after, _length

_KNOWN: Final = frozenset((*LINK_NUMBERS, RL_TRAJECTORY_AGE_ATTR, RL_TRAJECTORY_NODE_ATTR))
_FLAGS: Final = 0x35


class LinkPlaces(NamedTuple):
    """Where the ids and doubles of a link are, and what of it has a length, with that."""

    at: dict[str, int]
    sized: dict[str, tuple[int, int]]


class LinkTemplate(Template):
    """How records of one length are written.

    Attributes:
        links: Of each link the offsets of ``trace``, ``span`` and the age; offset and length of the varints of
            `LINK_NUMBERS`, and of the node's name.

    Raises:
        NoTemplateError: As for `Template`, except that links may have ids, attributes and flags.
    """

    def __init__(self, record: bytes) -> None:
        self.links: list[LinkPlaces] = []
        super().__init__(record)

    def _link(self, pos: int, end: int) -> None:
        """A link with its ids and attributes, each once, and flags."""
        data, link = self._record, LinkPlaces({}, {})
        while pos < end:
            tag = data[pos]
            if tag == _FLAGS:
                self._keep(pos, pos + 1)
                pos += 5
                continue
            if tag not in {0x0A, 0x12, 0x22}:
                raise NoTemplateError
            begin, stop = _length(data, pos + 1)
            self._keep(pos, begin)
            if tag == 0x22:
                self._link_attribute(link, begin, stop)
            else:
                name, size = ("trace", 16) if tag == 0x0A else ("span", 8)
                if stop - begin != size or name in link.at:
                    raise NoTemplateError
                link.at[name] = begin
            pos = stop
        if pos != end or not {"trace", "span"} <= link.at.keys():
            raise NoTemplateError
        self.links.append(link)

    def _link_attribute(self, link: LinkPlaces, begin: int, stop: int) -> None:
        data = self._record
        key, value = self._key(begin, stop)
        self._keep(begin, value)
        known = key in _KNOWN
        if key in link.at or key in link.sized:
            raise NoTemplateError
        if data[value] == 0x18 and _after(data, value) == stop and (not known or key in LINK_NUMBERS):
            self._varint(value, stop)
            link.sized[key] = value + 1, stop - value - 1
        elif data[value] == 0x21 and stop - value == 9 and (not known or key == RL_TRAJECTORY_AGE_ATTR):
            self._keep(value, value + 1)
            link.at[key] = value + 1
        elif (
            data[value] == 0x0A and (not known or key == RL_TRAJECTORY_NODE_ATTR) and (text := self._text(value, stop))
        ):
            link.sized[key] = text
        else:
            raise NoTemplateError
