"""What an expression holds: a handle of which actor class, a traced view or not, followed through the tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeGuard

from raytrace_rl.lint import api
from raytrace_rl.lint.callers import Callers
from raytrace_rl.lint.classes import Classes
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.scopes import OUTSIDE, Binding

_MAX_DEPTH: Final = 14
#: Of one question; circles of parameters and attributes could be followed for ever.
_MAX_STEPS: Final = 2000
#: Functions of one container that give back what it holds.
_PASSING: Final = frozenset(
    {
        "list", "tuple", "set", "sorted", "reversed", "iter", "next", "cycle", "choice", "deque", "dict", "ActorPool",
        "nullcontext", "closing", "enter_context",
    }
)  # fmt: skip
#: Methods of containers that give back what it holds.
_TAKING: Final = frozenset(
    {"pop", "popleft", "get", "values", "copy", "__next__", "get_nowait", "pop_idle", "setdefault"}
)
#: Decorators that make a method an attribute.
_PROPERTIES: Final = frozenset({"property", "cached_property", "abstractproperty", "getter"})

Place = tuple[Module, ast.AST]


@dataclass(frozen=True)
class Held:
    """What is known of a value; containers count as what they hold.

    Attributes:
        classes: The classes of the tree that it may be a handle of (with ``kind`` class or function: that is it).
        kind: ``handle``, ``target`` (a class or function itself), ``group`` (of workers), ``empty`` (None, an empty
            list) or ``unknown``.
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
GROUP: Final = Held(kind="group")
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
        self.callers = Callers(classes)
        self._known: dict[ast.AST, Held] = {}
        self._known_attributes: dict[str, Held] = {}
        self._known_methods: dict[str, Held] = {}
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
        target = self.callers.target(module, node)
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
        base = self.held(module, node.value, depth)
        if base.traced and not base.classes and node.attr != "workers":
            return Held(traced=True, plain_at=base.plain_at)  # a group of a group is a view as well
        return self._any_attribute(node.attr, depth)

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
                # Whoever has the object may put views in: ``group.actors = [traced(each) for each in group.actors]``.
                put = [self._bound(*each, node.attr, depth) for each in self._put_from_outside.get(node.attr, ())]
                return merged([*found, *(each for each in put if each.traced)])
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
            for definition in module.definitions.values():
                if isinstance(definition.node, ast.ClassDef):
                    for place, name, value in self._fields(definition):
                        found.setdefault(name, []).append((place, [Binding("value", value)]))
                elif _is_property(definition):
                    binding = Binding("definition", definition.node)
                    found.setdefault(definition.node.name, []).append((module, [binding]))
        return found

    @cached_property
    def _put_from_outside(self) -> dict[str, list[tuple[Module, list[Binding]]]]:
        """Attribute to where it is given to an object other than ``self``."""
        found: dict[str, list[tuple[Module, list[Binding]]]] = {}
        for module in self.project.interesting:
            for name, bindings in module.attributes.get(OUTSIDE, {}).items():
                found.setdefault(name, []).append((module, bindings))
        return found

    def _fields(self, owner: Definition) -> Iterator[tuple[Module, str, ast.expr]]:
        """What a dataclass's fields are given where one is made."""
        fields = [getattr(each.target, "id", "") for each in owner.node.body if _is_field(each)]
        if fields and f"{owner.name}.__init__" not in owner.module.definitions:
            for module, call in self.project.calls_of(owner):
                for name, value in zip(fields, call.args, strict=False):
                    yield module, name, value
                for keyword in call.keywords:
                    if keyword.arg is not None and keyword.arg in fields:
                        yield module, keyword.arg, keyword.value

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
        if binding.kind == "with":
            return self.held(module, node, depth)
        if binding.kind == "definition":
            function = module.definitions.get(module.qualified_name(node))
            return self._returned(function, depth) if function is not None and _is_property(function) else UNKNOWN
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
        target = self.callers.target(module, call)
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
        function = self.project.definition(module, call.func) or self.callers.own_method(module, call.func)
        if function is not None:
            return UNKNOWN if isinstance(function.node, ast.ClassDef) else self._returned(function, depth)
        return self._any_method(last, depth) if isinstance(call.func, ast.Attribute) else UNKNOWN

    def _any_method(self, name: str, depth: int) -> Held:
        """``pool.lease()``, of a pool of unknown class: whatever any class's method of that name returns, if a view."""
        if name not in self._known_methods:
            self._known_methods[name] = UNKNOWN
            returned = merged(self._returned(method, depth) for method in self.classes.methods.get(name, ()))
            self._known_methods[name] = replace(returned, plain_at=()) if returned.traced else UNKNOWN
        return self._known_methods[name]

    def _created(self, module: Module, node: ast.AST, depth: int) -> Held:
        """What ``X.remote(...)`` returns: a plain handle if ``X`` is an actor class, an object reference otherwise."""
        target = self.callers.target(module, node)
        if target is None and isinstance(node, (ast.Name, ast.Call, ast.Attribute)):
            held = self.held(module, node, depth)
            if held.kind == "target" and len(held.classes) == 1:
                (target,) = held.classes
        if target is None:
            dotted = self.project.qualify(module, node)
            outside = dotted is not None and self.project.is_outside(dotted, module)
            return Held(kind="handle", external=True) if outside else UNKNOWN
        return Held(frozenset({target}), "handle") if isinstance(target.node, ast.ClassDef) else UNKNOWN

    def _returned(self, function: Definition, depth: int) -> Held:
        returned = [
            node.value
            for node in ast.walk(function.node)
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom))
            and node.value is not None
            and function.module.function_of(node) is function.node
        ]
        return merged(self.held(function.module, value, depth) for value in returned) if returned else UNKNOWN

    def _parameter(self, module: Module, binding: Binding, name: str, depth: int) -> Held:
        """What the callers of a function give for a parameter; a view pickles to the plain handle on its way to Ray."""
        if isinstance(binding.node, ast.Lambda):
            handed = self.callers.of_lambda(module, binding.node, binding.index)
            return self.held(module, handed, depth) if handed is not None else UNKNOWN
        function = module.definitions.get(module.qualified_name(binding.node))
        if function is None or function.node is not binding.node:
            return UNKNOWN
        given: list[tuple[Place, Held]] = []
        for where, call, argument in self.callers.arguments(function, name, binding.index):
            remote = isinstance(call.func, ast.Attribute) and call.func.attr == "remote"
            held = self.held(where, argument, depth)
            given.append(((where, call), replace(held, traced=False, plain_at=()) if remote else held))
        if not given:
            return UNKNOWN
        plain = tuple(place for place, held in given if not held.traced and held.kind != "empty")
        return replace(merged(held for _, held in given), plain_at=plain if len(plain) < len(given) else ())


def _is_property(function: Definition) -> bool:
    names = (getattr(each, "attr", getattr(each, "id", "")) for each in function.node.decorator_list)
    return not _PROPERTIES.isdisjoint(names)


def _is_field(statement: ast.stmt) -> TypeGuard[ast.AnnAssign]:
    return isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
