"""What an expression holds: a handle of which actor class, a traced view or not, followed through the tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.classes import Classes
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.scopes import Binding

_MAX_DEPTH: Final = 14
#: Of one question; circles of parameters and attributes could be followed for ever.
_MAX_STEPS: Final = 2000
#: Functions of one container that give back what it holds.
_PASSING: Final = frozenset({"list", "tuple", "set", "sorted", "reversed", "iter", "next", "cycle", "choice", "deque"})
#: Methods of containers that give back what it holds.
_TAKING: Final = frozenset({"pop", "popleft", "get", "values", "copy", "__next__", "get_nowait"})

Place = tuple[Module, ast.AST]


@dataclass(frozen=True)
class Held:
    """What is known of a value; containers count as what they hold.

    Attributes:
        classes: The classes of the tree that it may be a handle of (with ``kind`` class or function: that is it).
        kind: ``handle``, ``target`` (a class or function itself), ``empty`` (None, an empty list) or ``unknown``.
        traced: It is a view of `traced`: calls through it bring a carrier.
        plain_at: For a parameter that some callers give a view and others do not: those others.
        external: It comes from a class outside the tree.
    """

    classes: frozenset[Definition] = frozenset()
    kind: str = "unknown"
    traced: bool = False
    plain_at: tuple[Place, ...] = ()
    external: bool = False


UNKNOWN: Final = Held()
EMPTY: Final = Held(kind="empty")


def merged(held: Iterable[Held]) -> Held:
    """Returns what is known of a value that is one of these; a view among them makes it a view."""
    known = [each for each in held if each.kind != "empty"]
    if not known:
        return EMPTY
    kinds = {each.kind for each in known}
    complete = "unknown" not in kinds
    return Held(
        classes=frozenset().union(*(each.classes for each in known)) if complete else frozenset(),
        kind=known[0].kind if len(kinds) == 1 else "unknown",
        traced=any(each.traced for each in known),
        plain_at=tuple(place for each in known for place in each.plain_at),
        external=all(each.external for each in known),
    )


class Handles:
    """Follows values. Whatever it cannot follow is unknown, never guessed."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.project = classes.project
        self._known: dict[ast.AST, Held] = {}
        self._known_attributes: dict[str, Held] = {}
        #: What is being worked out, with its place in the order; and the first of them that was met again.
        self._underway: dict[ast.AST, int] = {}
        self._met = sys.maxsize
        self._steps = 0

    def held(self, module: Module, node: ast.AST, depth: int = 0) -> Held:
        """Returns what an expression holds."""
        if node in self._known:
            return self._known[node]
        if node in self._underway:
            self._met = min(self._met, self._underway[node])
            return EMPTY  # a name defined by itself adds nothing
        own = len(self._underway)
        self._steps = self._steps + 1 if own else 0
        if depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return UNKNOWN
        self._underway[node] = own
        outer, self._met = self._met, sys.maxsize
        try:
            result = self._held(module, node, depth + 1)
        finally:
            del self._underway[node]
        if self._met >= own:  # else it is part of a circle that began above, and known in part only
            self._known[node] = result
            self._met = outer
        else:
            self._met = min(self._met, outer)
        return result

    def _held(self, module: Module, node: ast.AST, depth: int) -> Held:
        if isinstance(node, ast.Constant):
            return EMPTY if node.value is None else UNKNOWN
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._named(module, node, depth)
        if isinstance(node, ast.Call):
            return self._call(module, node, depth)
        if isinstance(node, (ast.Subscript, ast.Starred, ast.Await, ast.NamedExpr)):
            return self.held(module, node.value, depth)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self.held(module, node.elt, depth)
        parts: list[ast.expr] | None = None
        if isinstance(node, ast.DictComp):
            parts = [node.value]
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = node.elts
        elif isinstance(node, ast.Dict):
            parts = node.values
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult, ast.BitOr)):
            parts = [node.left, node.right] if not isinstance(node.op, ast.Mult) else [node.left]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        return UNKNOWN if parts is None else merged(self.held(module, part, depth) for part in parts)

    # ----------------------------------------------------------------------------------------------------------- names

    def _named(self, module: Module, node: ast.Name | ast.Attribute, depth: int) -> Held:
        target = self.target(module, node)
        if target is not None:
            return Held(frozenset({target}), "target")
        if isinstance(node, ast.Name):
            bindings = module.lookup(node.id, node)
            if any(binding.kind == "import" for binding in bindings):
                return self._imported(module, node, depth)
            return self._bound(module, bindings, node.id, depth)
        if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
            return self._own_attribute(module, node, depth)
        if (qualified := self.project.qualify(module, node)) is not None:
            return self._module_variable(module, qualified, depth)
        return self._any_attribute(node.attr, depth)

    def target(self, module: Module, node: ast.AST) -> Definition | None:
        """Returns the class or function that an expression is: a name, ``ray.remote(X)``, ``X.options(...)``."""
        while isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "options":
                node = node.func.value
            elif self._is_remote_call(module, node) and node.args:
                node = node.args[0]
            else:
                return None
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return None
        if (found := self.project.definition(module, node)) is not None:
            return found
        if isinstance(node, ast.Name):
            values = [binding for binding in module.lookup(node.id, node) if binding.kind == "value"]
            if len(values) == 1 and isinstance(values[0].node, ast.Call):
                return self.target(module, values[0].node)
        return None

    def _is_remote_call(self, module: Module, call: ast.Call) -> bool:
        func = call.func.func if isinstance(call.func, ast.Call) else call.func
        return self.project.qualify(module, func) == "ray.remote"

    def _imported(self, module: Module, node: ast.AST, depth: int) -> Held:
        qualified = self.project.qualify(module, node)
        return self._module_variable(module, qualified, depth) if qualified else UNKNOWN

    def _module_variable(self, near: Module, dotted: str, depth: int) -> Held:
        owner, _, name = dotted.rpartition(".")
        other = self.project.module_named(owner, near)
        if other is None:
            return Held(external=True)
        return self._bound(other, other.bindings.get(other.tree, {}).get(name, []), name, depth)

    def _own_attribute(self, module: Module, node: ast.Attribute, depth: int) -> Held:
        owner = module.class_of(node)
        definition = module.definitions.get(module.qualified_name(owner)) if owner is not None else None
        if definition is not None:
            found = [
                self._bound(cls.module, bindings, node.attr, depth)
                for cls in self.classes.line(definition)[0]
                if (bindings := self._attribute_bindings(cls, node.attr))
            ]
            if found:
                return merged(found)
        return self._any_attribute(node.attr, depth)

    def _any_attribute(self, name: str, depth: int) -> Held:
        """``pool.actor``, of a pool of unknown class: whatever any class keeps under that name."""
        if name not in self._known_attributes:
            self._known_attributes[name] = EMPTY
            found = [self._bound(module, bindings, name, depth) for module, bindings in self._attributes.get(name, ())]
            self._known_attributes[name] = replace(merged(found), plain_at=()) if found else UNKNOWN
        return self._known_attributes[name]

    @cached_property
    def _attributes(self) -> dict[str, list[tuple[Module, list[Binding]]]]:
        """Attribute of ``self`` to where each class gets it from."""
        found: dict[str, list[tuple[Module, list[Binding]]]] = {}
        for module in self.project.interesting:
            for names in module.attributes.values():
                for name, bindings in names.items():
                    found.setdefault(name, []).append((module, bindings))
        return found

    def _attribute_bindings(self, owner: Definition, name: str) -> list[Binding]:
        own = owner.module.attributes.get(owner.name, {}).get(name, [])
        return own + owner.module.bindings.get(owner.node, {}).get(name, [])

    def _bound(self, module: Module, bindings: list[Binding], name: str, depth: int) -> Held:
        return merged(self._binding(module, binding, name, depth) for binding in bindings) if bindings else UNKNOWN

    def _binding(self, module: Module, binding: Binding, name: str, depth: int) -> Held:
        node = binding.node
        if binding.kind == "param":
            return self._parameter(module, binding, name, depth)
        if binding.kind in {"value", "update"}:
            if binding.index is not None and isinstance(node, (ast.Tuple, ast.List)) and binding.index < len(node.elts):
                node = node.elts[binding.index]
            return self.held(module, node, depth)
        if binding.kind == "element":
            return self._element(module, node, binding.index, depth)
        return UNKNOWN

    def _element(self, module: Module, iterable: ast.AST, index: int | None, depth: int) -> Held:
        """What a loop over ``zip(actors, parts)``, ``enumerate(actors)``, ``actors.items()`` gives at a position."""
        if isinstance(iterable, ast.Call) and index is not None:
            name = iterable.func.attr if isinstance(iterable.func, ast.Attribute) else getattr(iterable.func, "id", "")
            if name in {"zip", "zip_longest", "product"} and index < len(iterable.args):
                return self.held(module, iterable.args[index], depth)
            if name == "enumerate" and index == 1 and iterable.args:
                return self.held(module, iterable.args[0], depth)
            if name == "items" and index == 1 and isinstance(iterable.func, ast.Attribute):
                return self.held(module, iterable.func.value, depth)
            return UNKNOWN
        return self.held(module, iterable, depth)

    # ----------------------------------------------------------------------------------------------------------- calls

    def _call(self, module: Module, call: ast.Call, depth: int) -> Held:
        name = self.project.api(module, call.func)
        if name in api.VIEWS and call.args:
            given = self.held(module, call.args[0], depth)
            return replace(given, traced=True, plain_at=(), kind="unknown" if given.kind == "empty" else given.kind)
        if name == api.DISPATCH and call.args:
            return self._created(module, call.args[0], depth)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "remote":
            return self._created(module, call.func.value, depth)
        target = self.target(module, call)
        if target is not None:
            return Held(frozenset({target}), "target")
        if isinstance(call.func, ast.Attribute) and call.func.attr == "options":
            return self.held(module, call.func.value, depth)
        last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if isinstance(call.func, ast.Attribute) and last in _TAKING:
            return self.held(module, call.func.value, depth)
        if last in _PASSING and len(call.args) >= 1:
            return self.held(module, call.args[0], depth)
        if last in {"list", "dict", "set", "deque", "tuple"} and not call.args:
            return EMPTY
        function = self.project.definition(module, call.func) or self.own_method(module, call.func)
        if function is not None and not isinstance(function.node, ast.ClassDef):
            return self._returned(function, depth)
        return UNKNOWN

    def _created(self, module: Module, node: ast.AST, depth: int) -> Held:
        """What ``X.remote(...)`` returns: a plain handle if ``X`` is an actor class, an object reference otherwise."""
        target = self.target(module, node)
        if target is None and isinstance(node, (ast.Name, ast.Call, ast.Attribute)):
            held = self.held(module, node, depth)
            if held.kind == "target" and len(held.classes) == 1:
                (target,) = held.classes
        if target is None:
            dotted = self.project.qualify(module, node)
            outside = dotted is not None and self.project.is_outside(dotted, module)
            return Held(kind="handle", external=True) if outside else UNKNOWN
        return Held(frozenset({target}), "handle") if isinstance(target.node, ast.ClassDef) else UNKNOWN

    def own_method(self, module: Module, func: ast.AST) -> Definition | None:
        """Returns the method that ``self.method`` is."""
        if not (isinstance(func, ast.Attribute) and getattr(func.value, "id", "") in {"self", "cls"}):
            return None
        owner = module.class_of(func)
        definition = module.definitions.get(module.qualified_name(owner)) if owner is not None else None
        return self.classes.method(definition, func.attr)[0] if definition is not None else None

    def _returned(self, function: Definition, depth: int) -> Held:
        returned = [
            node.value
            for node in ast.walk(function.node)
            if isinstance(node, ast.Return)
            and node.value is not None
            and function.module.function_of(node) is function.node
        ]
        return merged(self.held(function.module, value, depth) for value in returned) if returned else UNKNOWN

    def _parameter(self, module: Module, binding: Binding, name: str, depth: int) -> Held:
        """What the callers of a function give for a parameter; a view pickles to the plain handle on its way to Ray."""
        function = module.definitions.get(module.qualified_name(binding.node))
        if function is None or isinstance(binding.node, ast.Lambda) or function.node is not binding.node:
            return UNKNOWN
        given: list[tuple[Place, Held]] = []
        for where, call, argument in self.arguments(function, name, binding.index):
            remote = isinstance(call.func, ast.Attribute) and call.func.attr == "remote"
            held = self.held(where, argument, depth)
            given.append(((where, call), replace(held, traced=False, plain_at=()) if remote else held))
        if not given:
            return UNKNOWN
        plain = tuple(place for place, held in given if not held.traced and held.kind != "empty")
        return replace(merged(held for _, held in given), plain_at=plain if len(plain) < len(given) else ())

    def arguments(self, function: Definition, name: str, index: int | None) -> list[tuple[Module, ast.Call, ast.expr]]:
        """Returns what each known caller of a function gives for the parameter ``name`` at position ``index``."""
        owner = self.classes.owner(function)
        static = any(getattr(each, "id", "") == "staticmethod" for each in function.node.decorator_list)
        position = index - 1 if index is not None and owner is not None and not static else index
        if owner is not None and function.node.name == "__init__":
            calls = self._constructions(owner)
        else:
            calls = [(module, call, 0) for module, call in self.project.calls_of(function)]
        found = []
        for module, call, skipped in calls:
            argument = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
            if argument is None and position is not None and position >= 0:
                positional = call.args[skipped : skipped + position + 1]
                if len(positional) > position and not any(isinstance(each, ast.Starred) for each in positional):
                    argument = positional[position]
            if argument is not None:
                found.append((module, call, argument))
        return found

    def _constructions(self, owner: Definition) -> list[tuple[Module, ast.Call, int]]:
        """``Cls(...)``, ``Cls.remote(...)``, ``traced(Cls).remote(...)``, ``dispatch_with_trace_context(Cls, ...)``."""
        local = [(module, call, 0) for module, call in self.project.calls_of(owner)]
        return local + self._remote_constructions.get(owner, [])

    @cached_property
    def _remote_constructions(self) -> dict[Definition, list[tuple[Module, ast.Call, int]]]:
        """Class to where actors of it are made, and how many arguments there are not the constructor's."""
        found: dict[Definition, list[tuple[Module, ast.Call, int]]] = {}
        for module in self.project.interesting:
            for call in module.calls:
                skipped = 0
                if isinstance(call.func, ast.Attribute) and call.func.attr == "remote":
                    node: ast.AST = call.func.value
                    if isinstance(node, ast.Call) and node.args and self.project.api(module, node.func) in api.VIEWS:
                        node = node.args[0]
                elif call.args and self.project.api(module, call.func) == api.DISPATCH:
                    node, skipped = call.args[0], 1
                else:
                    continue
                target = self.target(module, node)
                if target is not None and isinstance(target.node, ast.ClassDef):
                    found.setdefault(target, []).append((module, call, skipped))
        return found
