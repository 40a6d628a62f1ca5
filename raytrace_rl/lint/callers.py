"""Who calls a function, and with what: by name, by constructing its class, or by handing it to what calls it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.classes import Classes
from raytrace_rl.lint.module import Definition, Module

#: A call with what it gives a parameter.
Argument = tuple[Module, ast.Call, ast.expr]
#: A call, and the arguments by position that reach a function through it.
_Given = tuple[Module, ast.Call, list[ast.expr]]

#: Methods that may call a function with something of their own object's first, as ``ActorPool.map`` does.
_OF_POOLS: Final = frozenset({"map", "map_unordered", "submit"})


class Callers:
    """Answers about the calls of a project."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.project = classes.project

    # -------------------------------------------------------------------------------------------------- what is called

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

    def own_method(self, module: Module, func: ast.AST) -> Definition | None:
        """Returns the method that ``self.method`` is."""
        if not (isinstance(func, ast.Attribute) and getattr(func.value, "id", "") in {"self", "cls"}):
            return None
        owner = module.class_of(func)
        definition = module.definitions.get(module.qualified_name(owner)) if owner is not None else None
        return self.classes.method(definition, func.attr)[0] if definition is not None else None

    def callee(self, module: Module, func: ast.AST) -> Definition | None:
        """Returns the function or class of the tree that a call runs here and now."""
        return self.project.definition(module, func) or self.own_method(module, func)

    def _is_remote_call(self, module: Module, call: ast.Call) -> bool:
        func = call.func.func if isinstance(call.func, ast.Call) else call.func
        return self.project.qualify(module, func) == "ray.remote"

    # --------------------------------------------------------------------------------------------------- what is given

    def arguments(self, function: Definition, name: str, index: int | None) -> list[Argument]:
        """Returns what each known caller of a function gives for the parameter ``name`` at position ``index``."""
        owner = self.classes.owner(function)
        static = any(getattr(each, "id", "") == "staticmethod" for each in function.node.decorator_list)
        position = index - 1 if index is not None and owner is not None and not static else index
        if owner is not None and function.node.name == "__init__":
            calls = self._constructions(owner)
        else:
            calls = [(module, call, 0) for module, call in self.project.calls_of(function)]
        found: list[Argument] = []
        for module, call, skipped in calls:
            argument = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
            if argument is None:
                argument = _at(call.args[skipped:], position)
            if argument is not None:
                found.append((module, call, argument))
        bound = owner is not None and not static
        for module, call, given in self._handed(function, bound=bound):
            argument = next((keyword.value for keyword in call.keywords if keyword.arg == name), _at(given, position))
            if argument is not None:
                found.append((module, call, argument))
        return found

    def of_lambda(self, module: Module, node: ast.Lambda, index: int | None) -> ast.expr | None:
        """Returns what ``map(lambda actor: ..., actors)``, ``pool.map(lambda actor, x: ..., xs)`` give a parameter."""
        call = module.parents.get(node)
        if not isinstance(call, ast.Call) or node not in call.args:
            return None
        return _at(_reaching(call, node, len(node.args.posonlyargs) + len(node.args.args)), index)

    def _handed(self, function: Definition, *, bound: bool) -> Iterator[_Given]:
        """The calls that are handed the function, to call it themselves: ``pool.submit(function, actor)``."""
        if isinstance(function.node, ast.ClassDef):
            return
        parameters = function.node.args
        count = len(parameters.posonlyargs) + len(parameters.args) - bound - len(parameters.defaults)
        for module, call, node in self._mentions.get(function.node.name, ()):
            if self.project.api(module, call.func) == api.DISPATCH:
                continue  # leaves the process
            if self.project.definition(module, node) == function or self.own_method(module, node) == function:
                yield module, call, _reaching(call, node, count)

    @cached_property
    def _mentions(self) -> dict[str, list[tuple[Module, ast.Call, ast.expr]]]:
        """Name of a function to the calls that are handed something of that name."""
        names = {name.rpartition(".")[2] for module in self.project.interesting for name in module.definitions}
        found: dict[str, list[tuple[Module, ast.Call, ast.expr]]] = {}
        for module in self.project.interesting:
            for call in module.calls:
                for node in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "target")):
                    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                    if name in names:
                        found.setdefault(name, []).append((module, call, node))
        return found

    # --------------------------------------------------------------------------------------------------- constructions

    def _constructions(self, owner: Definition) -> list[tuple[Module, ast.Call, int]]:
        """``Cls(...)``, ``Cls.remote(...)``, ``traced(Cls).remote(...)``, ``dispatch_with_trace_context(Cls, ...)``."""
        local = [(module, call, 0) for module, call in self.project.calls_of(owner)]
        return local + self._remote_constructions.get(owner, []) + self._super_calls.get(owner, [])

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

    @cached_property
    def _super_calls(self) -> dict[Definition, list[tuple[Module, ast.Call, int]]]:
        """Class to the calls of its constructor by those of its subclasses: ``super().__init__(...)``."""
        found: dict[Definition, list[tuple[Module, ast.Call, int]]] = {}
        for module in self.project.interesting:
            for call in module.calls:
                if not isinstance(call.func, ast.Attribute) or call.func.attr != "__init__":
                    continue
                if getattr(getattr(call.func.value, "func", None), "id", "") != "super":
                    base, skipped = self.project.definition(module, call.func.value), 1  # Base.__init__(self, ...)
                else:
                    own = module.class_of(call)
                    cls = module.definitions.get(module.qualified_name(own)) if own is not None else None
                    above = self.classes.line(cls)[0][1:] if cls is not None else []
                    having = (each for each in above if f"{each.name}.__init__" in each.module.definitions)
                    base, skipped = next(having, None), 0
                if base is not None:
                    found.setdefault(base, []).append((module, call, skipped))
        return found


def _at(arguments: list[ast.expr], position: int | None) -> ast.expr | None:
    """Returns the argument at a position; None where ``*args`` hide it."""
    if position is None or not 0 <= position < len(arguments):
        return None
    return None if any(isinstance(each, ast.Starred) for each in arguments[: position + 1]) else arguments[position]


def _reaching(call: ast.Call, node: ast.expr, count: int) -> list[ast.expr]:
    """Returns what ``call`` gives the function ``node``, one of its arguments, that takes ``count`` without defaults.

    Containers count as what they hold, so that ``map`` and ``submit`` are alike.
    """
    if node not in call.args:  # Thread(target=node, args=(actor, x))
        given = next((keyword.value for keyword in call.keywords if keyword.arg == "args"), None)
        return list(given.elts) if isinstance(given, (ast.Tuple, ast.List)) else []
    following = call.args[call.args.index(node) + 1 :]
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr in _OF_POOLS and count == len(following) + 1:
        return [func.value, *following]
    return following
