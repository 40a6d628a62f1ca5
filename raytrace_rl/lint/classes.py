"""What the tree's classes and functions are: actors or not, what they inherit, which of them accept a trace context."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.project import Project

#: Bases that bring no methods which matter here.
_EMPTY_BASES: Final = frozenset({"object", "ABC", "Generic", "Protocol", "NamedTuple", "TypedDict", "Enum"})
#: Decorators that leave a function what it is to its callers.
_TRANSPARENT: Final = frozenset(
    {"staticmethod", "classmethod", "abstractmethod", "override", "final", "overload", "property", "method", "remote"}
)


class Classes:
    """Answers about the definitions of a project, each worked out once."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._accepting: dict[Definition, bool | None] = {}
        self._lines: dict[Definition, tuple[list[Definition], bool]] = {}

    # ------------------------------------------------------------------------------------------------------- accepting

    def accepts(self, function: Definition) -> bool | None:
        """True if a function takes a carrier, False if it does not, None if a decorator that is not known may do it."""
        if function not in self._accepting:
            self._accepting[function] = self._accepts(function)
        return self._accepting[function]

    def is_decorated(self, function: Definition) -> bool:
        """True for ``@accepts_trace_context``, ``f = accepts_trace_context(f)`` or a decorator that applies it."""
        node, module = function.node, function.module
        if isinstance(node, ast.ClassDef):
            return False
        if any(self._applies(module, decorator) for decorator in node.decorator_list):
            return True
        return any(
            binding.kind == "value"
            and isinstance(binding.node, ast.Call)
            and self.project.api(module, binding.node.func) == api.ACCEPTS
            for binding in module.bindings.get(self._scope(function), {}).get(node.name, ())
        )

    def _accepts(self, function: Definition) -> bool | None:
        node = function.node
        if isinstance(node, ast.ClassDef):
            return False
        arguments = node.args
        names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        if api.KEYWORD in names or self.is_decorated(function):
            return True
        return False if all(self._is_transparent(function.module, each) for each in node.decorator_list) else None

    def _applies(self, module: Module, decorator: ast.expr) -> bool:
        if self.project.api(module, decorator) == api.ACCEPTS:
            return True
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        helper = self.project.definition(module, target)
        return helper is not None and any(
            self.project.api(helper.module, node) == api.ACCEPTS
            for node in ast.walk(helper.node)
            if isinstance(node, (ast.Name, ast.Attribute))
        )

    def _is_transparent(self, module: Module, decorator: ast.expr) -> bool:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        return name in _TRANSPARENT or self.project.api(module, target) in api.OPENERS

    def _scope(self, function: Definition) -> ast.AST:
        enclosing = function.module.enclosing(function.node)
        scopes = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return next((above for above in enclosing if isinstance(above, scopes)), function.module.tree)

    # ----------------------------------------------------------------------------------------------------- inheritance

    def line(self, owner: Definition) -> tuple[list[Definition], bool]:
        """Returns a class and its bases, nearest first, and whether all of them are in the tree."""
        if owner not in self._lines:
            found, complete, todo = [owner], True, [owner]
            while todo:
                cls = todo.pop(0)
                for base in getattr(cls.node, "bases", ()):
                    target = base.value if isinstance(base, ast.Subscript) else base
                    known = self._behind(cls.module, target)
                    if known is not None and known not in found:
                        found.append(known)
                        todo.append(known)
                    elif known is None and not self._is_empty_base(cls.module, target):
                        complete = False
            self._lines[owner] = found, complete
        return self._lines[owner]

    def method(self, owner: Definition, name: str) -> tuple[Definition | None, bool]:
        """Returns a class's method, and whether that is certain: a base outside the tree may have one of the name."""
        line, complete = self.line(owner)
        for cls in line:
            found = cls.module.definitions.get(f"{cls.name}.{name}")
            if found is not None:
                return found, True
        return None, complete

    def related(self, one: Definition, other: Definition) -> bool:
        """True if one of two classes inherits from the other."""
        return other in self.line(one)[0] or one in self.line(other)[0]

    def is_traced_actor(self, owner: Definition) -> bool:
        """True for a subclass of `TracedActor`."""
        return self._derives(owner, api.TRACED_ACTORS)

    def is_collector(self, owner: Definition) -> bool:
        """True for a subclass of `TracedCollector`."""
        return self._derives(owner, frozenset({api.TRACED_COLLECTOR}))

    def _derives(self, owner: Definition, names: frozenset[str]) -> bool:
        return any(
            self.project.api(cls.module, base) in names
            for cls in self.line(owner)[0]
            for base in getattr(cls.node, "bases", ())
        )

    def _behind(self, module: Module, base: ast.expr) -> Definition | None:
        found = self.project.definition(module, base)
        return found if found is not None and isinstance(found.node, ast.ClassDef) else None

    def _is_empty_base(self, module: Module, base: ast.expr) -> bool:
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        return name in _EMPTY_BASES or self.project.api(module, base) in api.TRACED_ACTORS

    # ---------------------------------------------------------------------------------------------------------- actors

    @cached_property
    def actors(self) -> list[Definition]:
        """The classes that are, or take part in, actors: what a handle of unknown origin may stand for."""
        found = {owner for owner in self._all_classes() if self._looks_like_actor(owner)} | set(self._made_remote())
        bases = {base for owner in found for base in self.line(owner)[0]}
        below = (owner for owner in self._all_classes() if owner not in bases and self._inherits(owner, found))
        return sorted({*bases, *below}, key=lambda owner: (owner.module.shown, owner.node.lineno))

    @cached_property
    def actor_methods(self) -> dict[str, list[Definition]]:
        """Name to the methods of all actors that have it."""
        found: dict[str, list[Definition]] = {}
        for owner in self.actors:
            for node in _functions(owner.node):
                method = owner.module.definitions.get(f"{owner.name}.{node.name}")
                if method is not None:
                    found.setdefault(node.name, []).append(method)
        return found

    @cached_property
    def methods(self) -> dict[str, list[Definition]]:
        """Name to the methods of all classes that have it."""
        found: dict[str, list[Definition]] = {}
        for module in self.project.interesting:
            for definition in module.definitions.values():
                if self.owner(definition) is not None:
                    found.setdefault(definition.node.name, []).append(definition)
        return found

    @cached_property
    def decorated(self) -> list[Definition]:
        """All functions and methods with `accepts_trace_context`."""
        return [
            definition
            for module in self.project.interesting
            for definition in module.definitions.values()
            if not isinstance(definition.node, ast.ClassDef) and self.is_decorated(definition)
        ]

    def owner(self, function: Definition) -> Definition | None:
        """Returns the class of a method, None for a function."""
        above = function.module.parents.get(function.node)
        if not isinstance(above, ast.ClassDef):
            return None
        return function.module.definitions.get(function.module.qualified_name(above))

    def is_remote(self, definition: Definition) -> bool:
        """True if ``@ray.remote`` stands above it."""
        return any(
            self._is_ray_remote(definition.module, decorator.func if isinstance(decorator, ast.Call) else decorator)
            for decorator in definition.node.decorator_list
        )

    def _is_ray_remote(self, module: Module, node: ast.AST) -> bool:
        return self.project.qualify(module, node) in {"ray.remote", "ray.worker.remote"}

    def _all_classes(self) -> Iterator[Definition]:
        for module in self.project.interesting:
            for definition in module.definitions.values():
                if isinstance(definition.node, ast.ClassDef):
                    yield definition

    def _looks_like_actor(self, owner: Definition) -> bool:
        if self.is_remote(owner) or self.is_traced_actor(owner):
            return True
        methods = (owner.module.definitions.get(f"{owner.name}.{node.name}") for node in _functions(owner.node))
        return any(method is not None and self.is_decorated(method) for method in methods)

    def _made_remote(self) -> Iterator[Definition]:
        """``ray.remote(Worker)`` and ``ray.remote(num_gpus=1)(Worker)``."""
        for module in self.project.interesting:
            for call in module.calls:
                func = call.func.func if isinstance(call.func, ast.Call) else call.func
                if call.args and isinstance(call.args[0], (ast.Name, ast.Attribute)):
                    named_remote = getattr(func, "attr", getattr(func, "id", "")) == "remote"
                    if named_remote and self._is_ray_remote(module, func):
                        found = self._behind(module, call.args[0])
                        if found is not None:
                            yield found

    def _inherits(self, owner: Definition, found: set[Definition]) -> bool:
        return not found.isdisjoint(self.line(owner)[0])


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in getattr(node, "body", ()):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
