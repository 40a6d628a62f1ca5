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
        if isinstance(node, ast.Subscript):  # METHODS[mode]: any of them
            return self._elements(module, node.value, None, depth)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            found = [self._elements(module, node.func.value, None, depth)]
            found += [self.texts(module, default, depth + 1) for default in node.args[1:]]
            return [text for texts in found for text in texts] if all(found) else []
        return []

    def _elements(self, module: Module, node: ast.AST, index: int | None, depth: int) -> list[str]:
        """Returns what a loop over an expression may give, at a position of each element; a dictionary: its values."""
        where, literal = self._literal(module, node, depth)
        if isinstance(literal, ast.Call):
            return self._iterated(where, literal, index, depth)
        if isinstance(literal, ast.Dict):
            return self._all(where, literal.values, depth) if index is None else []
        if not isinstance(literal, (ast.List, ast.Tuple, ast.Set)):
            return []
        elements = literal.elts
        if index is not None:
            rows = [each for each in elements if isinstance(each, (ast.List, ast.Tuple)) and index < len(each.elts)]
            elements = [row.elts[index] for row in rows] if len(rows) == len(elements) else []
        return self._all(where, elements, depth)

    def _iterated(self, module: Module, call: ast.Call, index: int | None, depth: int) -> list[str]:
        """What a loop over ``enumerate(names)``, ``zip(names, values)``, ``table.items()`` gives at a position."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if isinstance(call.func, ast.Attribute) and name in {"items", "keys", "values"}:
            where, table = self._literal(module, call.func.value, depth)
            if not isinstance(table, ast.Dict) or None in table.keys:
                return []
            values = name == "values" or (name == "items" and index == 1)
            keys = [key for key in table.keys if key is not None]
            known = index is None if name != "items" else index is not None
            return self._all(where, table.values if values else keys, depth) if known else []
        if name == "enumerate" and index == 1 and call.args:
            return self._elements(module, call.args[0], None, depth + 1)
        if name == "zip" and index is not None and index < len(call.args):
            return self._elements(module, call.args[index], None, depth + 1)
        if name in {"list", "tuple", "set", "sorted", "reversed", "frozenset"} and call.args:
            return self._elements(module, call.args[0], index, depth + 1)
        return []

    def _looped(self, module: Module, binding: Binding, depth: int) -> list[str]:
        """What a loop's own name may be; of a dictionary, its keys."""
        where, iterable = self._literal(module, binding.node, depth)
        if isinstance(iterable, ast.Dict):
            keys = [key for key in iterable.keys if key is not None]
            return self._all(where, keys, depth) if len(keys) == len(iterable.keys) else []
        return self._elements(where, iterable, binding.index, depth)

    def _literal(self, module: Module, node: ast.AST, depth: int) -> tuple[Module, ast.AST]:
        """Returns the expression behind a name that is given a value once, in any file."""
        for _ in range(_MAX_DEPTH - depth):
            if not isinstance(node, (ast.Name, ast.Attribute)):
                break
            where, bindings = self.bindings(module, node)
            if len(bindings) != 1 or bindings[0].kind != "value" or bindings[0].index is not None:
                break
            module, node = where, bindings[0].node
        return module, node

    def bindings(self, module: Module, node: ast.Name | ast.Attribute) -> tuple[Module, list[Binding]]:
        """Returns where a name, an attribute of ``self``, or a constant of a class or another file gets its values."""
        if isinstance(node, ast.Name):
            bindings = module.lookup(node.id, node)
            if bindings and not any(binding.kind == "import" for binding in bindings):
                return module, bindings
        elif getattr(node.value, "id", "") in {"self", "cls"}:
            owner = module.class_of(node)
            definition = module.definitions.get(module.qualified_name(owner)) if owner is not None else None
            for cls in self.handles.classes.line(definition)[0] if definition is not None else ():
                values = cls.module.attributes.get(cls.name, {}).get(node.attr, [])
                values = values + cls.module.bindings.get(cls.node, {}).get(node.attr, [])
                if values:
                    return cls.module, values
            return module, []
        owner_name, _, name = (self.project.qualify(module, node) or "").rpartition(".")
        other = self.project.module_named(owner_name, module) if owner_name else None
        if other is not None:
            return other, other.bindings.get(other.tree, {}).get(name, [])
        cls_found = self.project.definition_named(owner_name, module) if owner_name else None
        if cls_found is not None:
            return cls_found.module, cls_found.module.bindings.get(cls_found.node, {}).get(name, [])
        return module, []

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
            if bindings and all(binding.kind in {"value", "element"} for binding in bindings):
                return self._given(module, bindings, depth)
            if bindings and all(binding.kind == "param" for binding in bindings):
                return self._of_lambda(module, bindings, depth)
        elif getattr(node.value, "id", "") in {"self", "cls"}:
            where, own = self.bindings(module, node)
            known = own and all(binding.kind == "value" for binding in own)
            return self._given(where, own, depth) if known else []
        qualified = self.project.qualify(module, node) or ""
        owner, _, name = qualified.rpartition(".")
        own_name = getattr(semconv, name, None) if api.in_library(qualified) and owner.endswith(".semconv") else None
        if isinstance(own_name, str):
            return [own_name]
        where, constant = self.bindings(module, node)
        return self._constant(where, constant, depth)

    def _of_lambda(self, module: Module, bindings: list[Binding], depth: int) -> list[str]:
        """``map(lambda name: ..., names)``: any of the names. What other parameters are, the callers know."""
        node = bindings[0].node
        if len(bindings) != 1 or not isinstance(node, ast.Lambda):
            return []
        handed = self.handles.callers.of_lambda(module, node, bindings[0].index)
        return self._elements(module, handed, None, depth + 1) if handed is not None else []

    def _given(self, module: Module, bindings: list[Binding], depth: int) -> list[str]:
        """What a name is that is given values, or runs through them in a loop."""
        found: list[list[str]] = []
        for binding in bindings:
            if binding.kind == "element":
                found.append(self._looped(module, binding, depth + 1))
            elif binding.index is None:
                found.append(self.texts(module, binding.node, depth + 1))
            else:  # a, b = "x", "y"
                parts = getattr(binding.node, "elts", [])
                part = parts[binding.index] if binding.index < len(parts) else None
                found.append(self.texts(module, part, depth + 1))
        return list(dict.fromkeys(text for texts in found for text in texts)) if all(found) else []

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
