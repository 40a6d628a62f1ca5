"""Which span groups are umbrellas, the tree's own registrations included; and which prefixes their owners name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from raytrace_rl.lint import api
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.strings import HOLE, Strings
from raytrace_rl.span_groups import ALL_GROUPS, UMBRELLA_GROUPS, RLSpanGroup


@dataclass(frozen=True)
class SpanCall:
    """A call that opens a span, or decorates a function with one."""

    module: Module
    call: ast.Call
    opener_name: str
    opener: api.Opener

    @property
    def group(self) -> ast.expr | None:
        """The span group that it is given."""
        return _argument(self.call, self.opener.group, "group") if self.opener.group is not None else None

    @property
    def name(self) -> ast.expr | None:
        """The span's name that it is given."""
        keyword = "name" if self.opener is not api.TIMED else "label"
        return _argument(self.call, self.opener.name, keyword) if self.opener.name is not None else None


@dataclass(frozen=True)
class Group:
    """A span group as a call spells it.

    Attributes:
        umbrella: It is an umbrella.
        alias: For one of `RLSpanGroup`, the constant's name.
        shown: For people.
    """

    umbrella: bool
    alias: str | None
    shown: str


class Groups:
    """The span groups and namespaces of a project."""

    def __init__(self, strings: Strings) -> None:
        self.strings = strings
        self.project = strings.project
        self._umbrellas: set[str] = set()
        self._leaves: set[str] = set()
        self.namespaces: set[str] = set()
        #: Who registered metrics of its own.
        self.metric_owners: set[str] = set()
        for module in self.project.interesting:
            if "register_" in module.text:
                for call in module.calls:
                    called = self.project.api(module, call.func)
                    if called == "register_span_groups":
                        self._register(module, call)
                    elif called == "register_metric_group" and call.args:
                        self.metric_owners.update(strings.texts(module, call.args[0]))

    def span_calls(self, module: Module) -> Iterator[SpanCall]:
        """Yields the calls of a file that open spans."""
        for call in module.calls:
            name = self.project.api(module, call.func)
            if name in api.OPENERS:
                yield SpanCall(module, call, name, api.OPENERS[name])

    def timer_calls(self, module: Module) -> Iterator[SpanCall]:
        """Yields the calls of a file that open a span by way of ``Timer.time(label, group=...)``."""
        for call in module.calls:
            is_time = isinstance(call.func, ast.Attribute) and call.func.attr == "time"
            if is_time and any(keyword.arg == "group" for keyword in call.keywords):
                yield SpanCall(module, call, "Timer.time", api.TIMED)

    def timer_names(self, span: SpanCall) -> list[str]:
        """Returns the names that the span of a ``Timer.time`` may have, with `HOLE` for an unknown prefix."""
        prefix = self._timer_prefix(span.module, span.call)
        labels = self.strings.texts(span.module, span.name)
        return [f"{prefix}.{label.replace('/', '.')}" for label in labels]

    def _timer_prefix(self, module: Module, call: ast.Call) -> str:
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        bindings = module.lookup(holder.id, holder) if isinstance(holder, ast.Name) else []
        if isinstance(holder, ast.Attribute) and (owner := module.class_of(holder)) is not None:
            bindings = module.attributes.get(module.qualified_name(owner), {}).get(holder.attr, [])
        made = [binding.node for binding in bindings if binding.kind == "value" and binding.index is None]
        if len(bindings) != 1 or len(made) != 1 or not isinstance(made[0], ast.Call):
            return HOLE
        if self.project.api(module, made[0].func) != api.TIMER:
            return HOLE
        return self.timer_prefix(module, made[0]) or HOLE

    def timer_prefix(self, module: Module, call: ast.Call) -> str | None:
        """Returns what ``Timer(span_prefix=...)`` begins the names of its spans with; None if it cannot be told."""
        if any(keyword.arg is None for keyword in call.keywords):
            return None
        given = _argument(call, None, "span_prefix")
        return "rl" if given is None else self.strings.text(module, given)

    def group(self, span: SpanCall) -> Group | None:
        """Returns the group of a span, None if it is not known."""
        node = span.group
        if node is None:
            return None
        name = self.project.api(span.module, node) or ""
        if name.startswith("RLSpanGroup."):
            alias = name.partition(".")[2]
            value = getattr(RLSpanGroup, alias, None)
            return Group(value in UMBRELLA_GROUPS, alias, f"RLSpanGroup.{alias}") if isinstance(value, str) else None
        word = self.strings.text(span.module, node)
        if word is None or HOLE in word:
            return None
        word = word.lower()
        if word in ALL_GROUPS or word in self._leaves or word in self._umbrellas:
            return Group(word in UMBRELLA_GROUPS or word in self._umbrellas, None, repr(word))
        return None

    def is_umbrella(self, span: SpanCall) -> bool | None:
        """True if a span is an umbrella for certain, False if it is a leaf, None if its group is not known."""
        group = self.group(span)
        return group.umbrella if group is not None else span.opener.umbrella

    def _register(self, module: Module, call: ast.Call) -> None:
        namespace = self.strings.text(module, _argument(call, 0, "namespace"))
        if namespace and HOLE not in namespace:
            self.namespaces.add(namespace)
        groups = {word.lower() for word in self._words(module, _argument(call, 1, "groups"))}
        umbrellas = {word.lower() for word in self._words(module, _argument(call, None, "umbrellas"))}
        self._umbrellas |= umbrellas - ALL_GROUPS
        self._leaves |= groups - umbrellas - ALL_GROUPS

    def _words(self, module: Module, node: ast.expr | None) -> list[str]:
        """The strings of a literal collection, or of a class's upper-case constants."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [text for element in node.elts if (text := self.strings.text(module, element)) is not None]
        if isinstance(node, ast.Call) and node.args:  # frozenset({...})
            return self._words(module, node.args[0])
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return []
        cls = self.project.definition(module, node)
        if cls is not None:
            names = cls.module.bindings.get(cls.node, {})
            values = [bindings[0].node for name, bindings in names.items() if name.isupper()]
            return [text for value in values if (text := self.strings.text(cls.module, value)) is not None]
        if isinstance(node, ast.Name):
            values = [binding.node for binding in module.lookup(node.id, node) if binding.kind == "value"]
            return self._words(module, values[0]) if len(values) == 1 and isinstance(values[0], ast.expr) else []
        return []


def _argument(call: ast.Call, position: int | None, keyword: str) -> ast.expr | None:
    """Returns an argument by position, then by keyword; None where ``*args`` hide it."""
    if position is not None and position < len(call.args):
        before = call.args[: position + 1]
        return None if any(isinstance(argument, ast.Starred) for argument in before) else call.args[position]
    return next((each.value for each in call.keywords if each.arg == keyword), None)
