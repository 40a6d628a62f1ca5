"""What strings an expression may be: literals, constants of any file, and f-strings with holes."""

from __future__ import annotations

import ast
from typing import Final

from raytrace_rl import semconv
from raytrace_rl.lint import api
from raytrace_rl.lint.handles import Handles
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.scopes import Binding

#: Stands in a text for a part that is known only at run time.
HOLE: Final = "\0"
_MAX_DEPTH: Final = 6


class Strings:
    """Reads strings off syntax trees."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.project = handles.project

    def text(self, module: Module, node: ast.AST | None) -> str | None:
        """Returns a string with `HOLE` for each part that is not known; None if nothing of it is."""
        texts = self.texts(module, node)
        return texts[0] if len(texts) == 1 else None

    def texts(self, module: Module, node: ast.AST | None, depth: int = 0) -> list[str]:
        """Returns every string that an expression may be; empty if that is not known."""
        if node is None or depth > _MAX_DEPTH:
            return []
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return self._joined(module, node, depth)
        if isinstance(node, ast.IfExp):
            return self._all(module, [node.body, node.orelse], depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
            return self._formatted(module, node, depth)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return [_filled(text) for text in self.texts(module, node.func.value, depth + 1)]
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._named(module, node, depth)
        return []

    def _all(self, module: Module, nodes: list[ast.expr], depth: int) -> list[str]:
        found = [self.texts(module, node, depth + 1) for node in nodes]
        return [text for texts in found for text in texts] if all(found) else []

    def _joined(self, module: Module, node: ast.JoinedStr, depth: int) -> list[str]:
        text = ""
        for part in node.values:
            value = part.value if isinstance(part, ast.FormattedValue) else part
            known = self.texts(module, value, depth + 1)
            text += known[0] if len(known) == 1 else HOLE
        return [text] if text.strip(HOLE) else []

    def _formatted(self, module: Module, node: ast.BinOp, depth: int) -> list[str]:
        left = self.texts(module, node.left, depth + 1)
        if isinstance(node.op, ast.Mod):
            return [_without_percent(text) for text in left]
        right = self.texts(module, node.right, depth + 1)
        if len(left) > 1 or len(right) > 1 or not (left or right):
            return []
        return [(left or [HOLE])[0] + (right or [HOLE])[0]]

    def _named(self, module: Module, node: ast.Name | ast.Attribute, depth: int) -> list[str]:
        if isinstance(node, ast.Name):
            bindings = module.lookup(node.id, node)
            if bindings and all(binding.kind == "value" and binding.index is None for binding in bindings):
                return self._all(module, [b.node for b in bindings if isinstance(b.node, ast.expr)], depth)
            if bindings and all(binding.kind == "param" for binding in bindings):
                return []
        qualified = self.project.qualify(module, node)
        if qualified is None:
            return []
        owner, _, name = qualified.rpartition(".")
        own = getattr(semconv, name, None) if api.in_library(qualified) and owner.endswith(".semconv") else None
        if isinstance(own, str):
            return [own]
        other = self.project.module_named(owner, module)
        if other is not None:
            return self._constant(other, other.bindings.get(other.tree, {}).get(name, []), depth)
        cls = self.project.definition_named(owner, module)
        if cls is not None:
            return self._constant(cls.module, cls.module.bindings.get(cls.node, {}).get(name, []), depth)
        return []

    def _constant(self, module: Module, bindings: list[Binding], depth: int) -> list[str]:
        if len(bindings) != 1 or bindings[0].kind != "value" or bindings[0].index is not None:
            return []
        return self.texts(module, bindings[0].node, depth + 1)


def _filled(text: str) -> str:
    """``"rl.{}.step".format(...)``."""
    filled, rest = "", text
    while "{" in rest and "}" in rest:
        before, _, rest = rest.partition("{")
        filled += before + HOLE
        rest = rest.partition("}")[2]
    return filled + rest


def _without_percent(text: str) -> str:
    filled, skip = "", False
    for character in text:
        if character == "%":
            filled, skip = filled + HOLE, True
        elif skip and (character in ".0123456789-+ #" or character.isalpha()):
            skip = not character.isalpha()
        else:
            filled, skip = filled + character, False
    return filled
