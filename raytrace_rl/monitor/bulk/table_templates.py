"""Templates of records that become rows of the ``spans`` table: they know what each attribute's text is made of."""

from __future__ import annotations

from typing import Final, NamedTuple

from raytrace_rl.monitor.bulk.templates import NoTemplateError, Template, _length

#: The tags of an OTLP ``AnyValue`` whose value may differ between records that are written alike.
INT: Final = 0x18
REAL: Final = 0x21
TEXT: Final = 0x0A


class Attribute(NamedTuple):
    """An attribute of a template: its key, and where its value is.

    Attributes:
        key: The key.
        sort: `INT` (a varint), `REAL` (eight bytes) or `TEXT` (ASCII); 0 where the value is part of the shape.
        begin, size: Offset and length of the value, bytes.
    """

    key: str
    sort: int
    begin: int
    size: int


class TableTemplate(Template):
    """How records of one length are written.

    Attributes:
        attributes: In the order in which they are written.

    Raises:
        NoTemplateError: As for `Template`, or a key comes twice.
    """

    def __init__(self, record: bytes) -> None:
        self.attributes: list[Attribute] = []
        super().__init__(record)
        if len({attribute.key for attribute in self.attributes}) < len(self.attributes):
            raise NoTemplateError

    def _attribute(self, begin: int, stop: int) -> None:
        super()._attribute(begin, stop)
        data = self._record
        key_begin, key_stop = _length(data, begin + 1)
        value = _length(data, key_stop + 1)[0]
        key = data[key_begin:key_stop].decode()
        sort = 0 if self._shape[value] else data[value]
        at = _length(data, value + 1)[0] if sort == TEXT else value + 1
        self.attributes.append(Attribute(key, sort, at, stop - at))
