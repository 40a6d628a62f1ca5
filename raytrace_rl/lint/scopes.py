"""Where names get their values: assignments, loops, ``with``, parameters, imports and definitions, by scope."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from raytrace_rl.lint.module import Module

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Methods of containers that put their last argument in.
_ADDING: Final = frozenset(
    {"add", "append", "appendleft", "extend", "extendleft", "insert", "put", "put_nowait", "push", "setdefault"}
)
#: In place of a class, for the attributes that code gives to objects other than ``self``.
OUTSIDE: Final = ""


@dataclass(frozen=True)
class Binding:
    """One place where a name gets its value.

    Attributes:
        kind: ``value`` (of ``node``), ``element`` (of the iterable ``node``), ``with`` (what ``node`` yields),
            ``update`` (``node`` is put into it), ``param`` (of the function ``node``), ``import`` (of ``dotted``)
            or ``definition``.
        node: See ``kind``.
        index: Position in a tuple that is taken apart.
        dotted: What is imported.
    """

    kind: str
    node: ast.AST
    index: int | None = None
    dotted: str = ""


Names = dict[str, list[Binding]]


def bind(module: Module) -> tuple[dict[ast.AST, Names], dict[str, Names], list[str]]:
    """Returns the bindings of a file by scope, those of attributes by class, and its star imports."""
    collector = _Collector(module)
    for node in module.parents:
        collector.visit(node)
    return collector.scopes, collector.attributes, collector.stars


class _Collector:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.scopes: dict[ast.AST, Names] = {}
        self.attributes: dict[str, Names] = {}
        self.stars: list[str] = []

    def visit(self, node: ast.AST) -> None:
        """Notes what ``node`` itself binds."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._target(target, Binding("value", node.value), node)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                self._target(node.target, Binding("value", node.value), node)
        elif isinstance(node, ast.AugAssign):
            self._target(node.target, Binding("update", node.value), node)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._target(node.target, Binding("element", node.iter), node)
            self._target(node.target, Binding("element", node.iter), node, scope=node)
        elif isinstance(node, _COMPREHENSIONS):
            for generator in node.generators:
                self._target(generator.target, Binding("element", generator.iter), node, scope=node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None:
                    self._target(item.optional_vars, Binding("with", item.context_expr), node)
                    self._target(item.optional_vars, Binding("with", item.context_expr), node, scope=node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._add(self._scope(node), node.name, Binding("definition", node))
            if not isinstance(node, ast.ClassDef):
                self._parameters(node)
        elif isinstance(node, ast.Lambda):
            self._parameters(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.Call):
            self._update(node)

    def _target(self, target: ast.expr, binding: Binding, node: ast.AST, scope: ast.AST | None = None) -> None:
        if isinstance(target, ast.Name):
            self._add(scope or self._scope(node), target.id, binding)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for index, element in enumerate(target.elts):
                self._target(element, Binding(binding.kind, binding.node, index), node, scope)
        elif isinstance(target, ast.Starred):
            self._target(target.value, binding, node, scope)
        elif isinstance(target, ast.Attribute):
            self._attribute(target, binding)
        elif isinstance(target, ast.Subscript):
            self._put(target.value, binding.node)

    def _update(self, call: ast.Call) -> None:
        """``xs.append(v)``: what ``xs`` may hold then."""
        if isinstance(call.func, ast.Attribute) and (call.func.attr in _ADDING or call.func.attr == "update"):
            for value in call.args[-1:]:
                self._put(call.func.value, value)

    def _put(self, container: ast.expr, value: ast.AST) -> None:
        binding = Binding("update", value)
        if isinstance(container, ast.Name):
            scope = self._scope(container)
            # The name belongs to whatever scope made the container; it is enough to find it from here.
            self._add(scope, container.id, binding)
        elif isinstance(container, ast.Attribute):
            self._attribute(container, binding)
        elif isinstance(container, ast.Subscript):
            self._put(container.value, value)

    def _attribute(self, target: ast.Attribute, binding: Binding) -> None:
        """``self.x = value`` in a method, and ``anything.x = value``."""
        owner = self.module.class_of(target)
        own = owner is not None and isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"}
        key = self.module.qualified_name(owner) if own and owner is not None else OUTSIDE
        self.attributes.setdefault(key, {}).setdefault(target.attr, []).append(binding)

    def _parameters(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        for index, parameter in enumerate([*arguments.posonlyargs, *arguments.args]):
            self._add(node, parameter.arg, Binding("param", node, index))
        for parameter in arguments.kwonlyargs:
            self._add(node, parameter.arg, Binding("param", node))
        for variable in (arguments.vararg, arguments.kwarg):
            if variable is not None:
                self._add(node, variable.arg, Binding("param", node))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        scope = self._scope(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                dotted = alias.name if alias.asname else top
                self._add(scope, alias.asname or top, Binding("import", node, dotted=dotted))
            return
        base = node.module or ""
        if node.level:
            parts = self.module.package.split(".")
            parts = parts[: len(parts) - node.level + 1]
            base = ".".join([*parts, *filter(None, [node.module])])
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(base)
            else:
                self._add(scope, alias.asname or alias.name, Binding("import", node, dotted=f"{base}.{alias.name}"))

    def _add(self, scope: ast.AST, name: str, binding: Binding) -> None:
        self.scopes.setdefault(scope, {}).setdefault(name, []).append(binding)

    def _scope(self, node: ast.AST) -> ast.AST:
        for above in self.module.enclosing(node):
            if isinstance(above, (*_FUNCTIONS, ast.ClassDef)):
                return above
        return self.module.tree
