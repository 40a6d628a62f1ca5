"""The attributes and labels that code sets: key, value, and what they are set on, through dictionaries in variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.groups import Groups, SpanCall
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.strings import Strings

_MAX_DEPTH: Final = 4
#: Functions and methods with a mapping of attributes, and its position.
_MAPPINGS: Final = {
    "safe_set_span_attributes": 1,
    "span_attributes": 0,
    "set_attributes": 0,
    "add_event": 1,
}
#: Calls whose keyword ``attributes`` is such a mapping.
_KEYWORD_MAPPINGS: Final = frozenset({"start_as_current_span", "start_span", "emit_span", "add_event", "add_link"})
#: Keywords of span openers that are no attributes.
_SETTINGS: Final = frozenset(
    {"group", "name", "tracer", "kind", "links", "context", "attributes", "label", "should_log", "span"}
)


@dataclass(frozen=True)
class Pair:
    """One attribute.

    Attributes:
        key: Its key, None if that is not known.
        value: Its value.
        node: What a finding points at.
        span: The call that opens the span, if that is known.
    """

    key: str | None
    value: ast.expr
    node: ast.AST
    span: SpanCall | None = None


class Pairs:
    """Reads attributes off calls."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.strings: Strings = groups.strings
        self.project = groups.project

    def of_module(self, module: Module) -> Iterator[Pair]:
        """Yields every attribute that a file sets on a span."""
        for span in (*self.groups.span_calls(module), *self.groups.timer_calls(module)):
            if span.opener.decorator:
                continue
            for keyword in span.call.keywords:
                if keyword.arg is None:
                    for pair in self.of_mapping(module, keyword.value):
                        yield Pair(pair.key, pair.value, pair.node, span)
                elif keyword.arg not in _SETTINGS:
                    yield Pair(keyword.arg, keyword.value, keyword, span)
        for call in module.calls:
            yield from self._of_setter(module, call)

    def _of_setter(self, module: Module, call: ast.Call) -> Iterator[Pair]:
        name = self.project.api(module, call.func) or (call.func.attr if isinstance(call.func, ast.Attribute) else "")
        holder = call.args[0] if name == "safe_set_span_attributes" and call.args else getattr(call.func, "value", None)
        span = self._span_of(module, holder)
        if name == "set_attribute" and len(call.args) > 1:
            yield Pair(self.strings.text(module, call.args[0]), call.args[1], call, span)
        position = _MAPPINGS.get(name)
        if position is not None and position < len(call.args):
            for pair in self.of_mapping(module, call.args[position]):
                yield Pair(pair.key, pair.value, pair.node, span)
        if name in _KEYWORD_MAPPINGS or position is not None:
            if name in api.OPENERS:  # emit_span(..., attributes=...)
                span = SpanCall(module, call, name, api.OPENERS[name])
            for keyword in call.keywords:
                if keyword.arg == "attributes":
                    for pair in self.of_mapping(module, keyword.value):
                        yield Pair(pair.key, pair.value, pair.node, span)

    def _span_of(self, module: Module, holder: ast.AST | None) -> SpanCall | None:
        """Returns the call behind ``with umbrella_span(...) as span``, for ``span``."""
        if not isinstance(holder, ast.Name):
            return None
        calls = [binding.node for binding in module.lookup(holder.id, holder) if binding.kind == "with"]
        if len(calls) != 1 or not isinstance(calls[0], ast.Call):
            return None
        name = self.project.api(module, calls[0].func)
        return SpanCall(module, calls[0], name, api.OPENERS[name]) if name in api.OPENERS else None

    def of_mapping(self, module: Module, node: ast.AST, depth: int = 0) -> Iterator[Pair]:
        """Yields what a dictionary holds: a literal, ``dict(...)``, a variable with one, and what is put into it."""
        if depth > _MAX_DEPTH:
            return
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    yield from self.of_mapping(module, value, depth + 1)
                else:
                    yield Pair(self.strings.text(module, key), value, key)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            for inner in node.args:
                yield from self.of_mapping(module, inner, depth + 1)
            for keyword in node.keywords:
                if keyword.arg is None:
                    yield from self.of_mapping(module, keyword.value, depth + 1)
                else:
                    yield Pair(keyword.arg, keyword.value, keyword)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield from self.of_mapping(module, node.left, depth + 1)
            yield from self.of_mapping(module, node.right, depth + 1)
        elif isinstance(node, ast.IfExp):
            yield from self.of_mapping(module, node.body, depth + 1)
            yield from self.of_mapping(module, node.orelse, depth + 1)
        elif isinstance(node, ast.Name):
            for binding in module.lookup(node.id, node):
                if binding.kind in {"value", "update"} and binding.index is None:
                    yield from self.of_mapping(module, binding.node, depth + 1)
            yield from self._items_put(module, node)
        else:
            yield from self._constant_elsewhere(module, node, depth)

    def _items_put(self, module: Module, name: ast.Name) -> Iterator[Pair]:
        """``attributes["rl.x"] = value``, in the same function."""
        function = module.function_of(name)
        for node in module.by_type.get(ast.Assign, ()):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                into = target.value if isinstance(target, ast.Subscript) else None
                same = isinstance(into, ast.Name) and into.id == name.id and module.function_of(node) is function
                if same and isinstance(target, ast.Subscript):
                    yield Pair(self.strings.text(module, target.slice), node.value, node)

    def _constant_elsewhere(self, module: Module, node: ast.AST, depth: int) -> Iterator[Pair]:
        """A constant dictionary of another file; a finding in it would be that file's."""
        qualified = self.project.qualify(module, node) if isinstance(node, ast.Attribute) else None
        owner, _, name = (qualified or "").rpartition(".")
        other = self.project.module_named(owner, module) if owner else None
        if other is not None:
            for binding in other.bindings.get(other.tree, {}).get(name, ()):
                for pair in self.of_mapping(other, binding.node, depth + 1):
                    yield Pair(pair.key, pair.value, node)
