"""Whether the keywords of a call bring a carrier, through variables, ``common_kwargs`` and one helper's parameters."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.handles import Handles, Place
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.scopes import Binding

_MAX_DEPTH: Final = 6
#: Keywords of a group's calls that reach every worker as they are.
_BROADCAST: Final = frozenset({None, "common_kwargs", "kwargs"})


@dataclass(frozen=True)
class Carry:
    """Whether a carrier comes along.

    Attributes:
        yes: It does.
        plain_at: Where a helper's parameter decides: the callers that bring none, while others do.
    """

    yes: bool
    plain_at: tuple[Place, ...] = ()


YES: Final = Carry(True)
NO: Final = Carry(False)


def any_of(found: list[Carry]) -> Carry:
    """A carrier comes along if one of these brings it."""
    if any(each.yes and not each.plain_at for each in found):
        return YES
    return next((each for each in found if each.yes), NO)


class Evidence:
    """Looks for carriers."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.project = handles.project
        self._parameters: dict[tuple[Definition, str], Carry] = {}

    def of_call(self, module: Module, call: ast.Call, depth: int = 0) -> Carry:
        """Looks through the keywords of a call."""
        found = []
        for keyword in call.keywords:
            if keyword.arg == api.KEYWORD:
                return YES
            if keyword.arg in _BROADCAST:
                found.append(self.of_value(module, keyword.value, depth + 1))
        return any_of(found)

    def of_value(self, module: Module, node: ast.AST, depth: int = 0) -> Carry:
        """Looks for a carrier in what an expression is made of."""
        if depth > _MAX_DEPTH:
            return NO
        found = []
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                name = self.project.api(module, part.func)
                if name == api.KWARGS or any(keyword.arg == api.KEYWORD for keyword in part.keywords):
                    return YES
                function = self.project.definition(module, part.func) or self.handles.callers.own_method(
                    module, part.func
                )
                if function is not None and self._returns_carrier(function, depth + 1):
                    return YES
            elif isinstance(part, ast.Constant) and part.value == api.KEYWORD:
                return YES
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                found += [self._binding(module, part.id, each, depth) for each in module.lookup(part.id, part)]
            elif isinstance(part, ast.Attribute) and getattr(part.value, "id", "") in {"self", "cls"}:
                found.append(self._attribute(module, part, depth))
        return any_of(found)

    def _binding(self, module: Module, name: str, binding: Binding, depth: int) -> Carry:
        if binding.kind in {"value", "update"}:
            return self.of_value(module, binding.node, depth + 1)
        if binding.kind != "param" or isinstance(binding.node, ast.Lambda):
            return NO
        function = module.definitions.get(module.qualified_name(binding.node))
        if function is None or isinstance(function.node, ast.ClassDef):
            return NO
        if (function, name) not in self._parameters:
            self._parameters[function, name] = NO  # what it hands to itself adds nothing
            self._parameters[function, name] = self._parameter(function, name, binding, depth)
        return self._parameters[function, name]

    def _parameter(self, function: Definition, name: str, binding: Binding, depth: int) -> Carry:
        """What the callers of a helper pass on through a parameter."""
        keywords = function.node.args.kwarg if not isinstance(function.node, ast.ClassDef) else None
        found: list[tuple[Place, Carry]] = []
        if keywords is not None and keywords.arg == name:
            calls = self.project.calls_of(function)
            if not calls:
                return YES  # whoever calls it is not in the tree: nothing is known, so nothing is said
            found = [((module, call), self.of_call(module, call, depth + 1)) for module, call in calls]
        else:
            for module, call, argument in self.handles.callers.arguments(function, name, binding.index):
                found.append(((module, call), self.of_value(module, argument, depth + 1)))
        if not any(carry.yes for _, carry in found):
            return NO
        return Carry(True, tuple(place for place, carry in found if not carry.yes))

    def _attribute(self, module: Module, node: ast.Attribute, depth: int) -> Carry:
        owner = module.class_of(node)
        names = module.attributes.get(module.qualified_name(owner), {}) if owner is not None else {}
        return any_of(
            [
                self.of_value(module, binding.node, depth + 1)
                for binding in names.get(node.attr, ())
                if binding.kind in {"value", "update"}
            ]
        )

    def _returns_carrier(self, function: Definition, depth: int) -> bool:
        """``def keywords(): return {"a": 1, **trace_context_kwargs()}``."""
        if isinstance(function.node, ast.ClassDef):
            return False
        return any(
            self.of_value(function.module, node.value, depth).yes
            for node in ast.walk(function.node)
            if isinstance(node, ast.Return) and node.value is not None
        )
