"""Finds the spans in text that was OTLP JSON and is no JSON any more: torn off, or with a byte that is wrong.

Each is looked for by how every exporter begins one, with its trace id, and parsed by itself. A resource and a scope
hold for the spans that follow, as long as they stand before them, which the specification's own order has them do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from raytrace_rl._decode import Attributes, ResourceSpans, Scope, ScopeSpans
from raytrace_rl.monitor.otlp_json import object_of, resource, scope, span

#: What is looked for: a key that is none of an attribute (those are values), or the begin of a span.
_FOUND: Final = re.compile(
    r'(?<!\\)"(?P<key>resource|scope|scopeSpans|scope_spans)"\s*:|\{\s*"(?:traceId|trace_id)"\s*:', re.ASCII
)
#: Links begin as spans do, and have neither.
_OF_A_SPAN: Final = ("startTimeUnixNano", "start_time_unix_nano", "name")
#: Text of spans that turn out to be none may be this many times the whole: each could else go on to its end.
_FAILURES: Final = 16

_SPACE: Final = re.compile(r"\s*")
_NO_SCOPE: Final = Scope("", "", {})

#: Told where a part begins and ends (characters), and why it cannot be read.
Wrong = Callable[[int, int, object], None]


class _Finder:
    def __init__(self, text: str, wrong: Wrong) -> None:
        self.batches: list[ResourceSpans] = []
        self._text = text
        self._wrong = wrong
        self._parse = json.JSONDecoder(object_pairs_hook=object_of).raw_decode
        self._resource: Attributes = {}
        self._scope = _NO_SCOPE
        #: Whether resources stand before their spans: known from the first batch on.
        self._in_order: bool | None = None
        self._batches_of_resource = 0
        #: Characters of what turned out to be none, and where the last of them could not be read.
        self._failed = 0
        self._failed_at = -1

    def find(self) -> None:
        at = 0
        while self._failed <= _FAILURES * len(self._text) and (found := _FOUND.search(self._text, at)) is not None:
            key = found["key"]
            if key is None:
                at = self._span(found.start())
            elif key in ("resource", "scope"):
                at = self._about(key, found.end())
            else:
                self._batch()
                at = found.end()

    def _batch(self) -> None:
        self._batches_of_resource += 1
        if self._in_order is None:
            self._in_order = False
        if not self._in_order or self._batches_of_resource > 1:  # its own is not known
            self._resource = {}

    def _about(self, key: str, at: int) -> int:
        at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
        value: Any = {}
        end = at
        try:
            value, end = self._parse(self._text, at)
        except (ValueError, RecursionError) as error:
            self._wrong(at, at, f"{key}: {error}")

        def noted(place: str, why: object) -> None:
            self._wrong(at, end, f"{place}: {why}")

        if key == "scope":
            self._scope = scope(value, key, noted)
            return end
        self._resource, self._scope, self._batches_of_resource = resource(value, key, noted), _NO_SCOPE, 0
        if self._in_order is None:
            self._in_order = True
        return end

    def _span(self, at: int) -> int:
        try:
            value, end = self._parse(self._text, at)
        except (ValueError, RecursionError) as error:
            failed_at = error.pos if isinstance(error, json.JSONDecodeError) else at + 1
            self._failed += max(0, failed_at - at)
            if failed_at != self._failed_at:  # else it is a link of the span that has been told
                following = _FOUND.search(self._text, max(at + 1, failed_at))
                self._wrong(at, following.start() if following else len(self._text), error)
            self._failed_at = failed_at
            return at + 1
        if not any(name in value for name in _OF_A_SPAN):
            return end
        try:
            made = span(value)
        except (ValueError, RecursionError) as error:
            self._wrong(at, end, error)
            return end
        if not self.batches or self.batches[-1].resource is not self._resource or self._scope is not self._last().scope:
            self.batches.append(ResourceSpans(self._resource, [ScopeSpans(self._scope, [])]))
        self._last().spans.append(made)
        return end

    def _last(self) -> ScopeSpans:
        return self.batches[-1].scopes[-1]


def spans_in(text: str, wrong: Wrong) -> list[ResourceSpans]:
    """Returns the spans that are whole, a batch each, and tells of those that are not.

    Args:
        text: What is no JSON.
        wrong: Called with where a part begins and ends, in characters, and why it cannot be read.
    """
    finder = _Finder(text, wrong)
    finder.find()
    return finder.batches
