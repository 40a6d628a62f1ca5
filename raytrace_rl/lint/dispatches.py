"""Every place where a call leaves for another process: what it calls, and whether a carrier goes along."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.evidence import NO, YES, Carry, Evidence, any_of
from raytrace_rl.lint.handles import UNKNOWN, Handles, Held
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.strings import HOLE, Strings

#: NeMo-RL's worker groups take the method by name.
_GROUP_CALLS: Final = ("run_all_workers", "run_single_worker")
_MAX_HOPS: Final = 5


@dataclass(frozen=True)
class Site:
    """One dispatch.

    Attributes:
        module: Where.
        node: What a finding points at.
        carry: Whether a carrier goes along.
        method: The method's name; None if ``target`` is called itself.
        receiver: What holds the method; unknown for a worker group.
        target: The class (for its constructor) or function that is called.
    """

    module: Module
    node: ast.AST
    carry: Carry
    method: str | None = None
    receiver: Held = UNKNOWN
    target: Definition | None = None


class Dispatches:
    """Finds the sites of a project."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.project = handles.project
        self.strings = Strings(handles)
        self.evidence = Evidence(handles)
        #: Names of methods that are handed on, or called in a way that cannot be followed.
        self.mentioned: set[str] = set()
        #: A method whose name is known only at run time is dispatched somewhere.
        self.dynamic = False
        self._own_carriers: dict[str, bool] = {}
        self.sites: list[Site] = [
            site
            for module in self.project.interesting
            if not api.is_mechanism(module.name)
            for call in module.calls
            for site in self._sites(module, call)
        ]

    def _sites(self, module: Module, call: ast.Call) -> Iterator[Site]:
        func = call.func
        if self.project.api(module, func) == api.DISPATCH:
            if call.args:
                yield from self._to(module, call, call.args[0], YES, call.args[1:], 0)
            return
        for index, argument in enumerate(call.args):
            if self.project.api(module, argument) == api.DISPATCH and index + 1 < len(call.args):  # partial, submit
                yield from self._to(module, call, call.args[index + 1], YES, call.args[index + 2 :], 0)
            elif isinstance(argument, ast.Attribute):
                if argument.attr == "remote":
                    yield from self._to(module, argument, argument.value, self.evidence.of_call(module, call), [], 0)
                self.mentioned.add(argument.attr)
        self.mentioned.update(k.value.attr for k in call.keywords if isinstance(k.value, ast.Attribute))
        if not isinstance(func, ast.Attribute):
            return
        if func.attr == "remote":
            yield from self._to(module, call, func.value, self.evidence.of_call(module, call), [], 0)
        elif func.attr == "bind" and isinstance(func.value, ast.Attribute):
            self.mentioned.add(func.value.attr)  # a compiled graph's: no carrier can go along
        elif func.attr.startswith(_GROUP_CALLS):
            yield from self._group(module, call, func, self._group_carry(module, call, func), call.args)

    def _to(
        self, module: Module, at: ast.AST, node: ast.AST, carry: Carry, rest: list[ast.expr], hops: int
    ) -> Iterator[Site]:
        """Yields the sites of a call to what ``node`` is."""
        while isinstance(node, ast.Call):
            name = self.project.api(module, node.func)
            if name in api.VIEWS and node.args:
                carry, node = YES, node.args[0]
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "options":
                node = node.func.value
            elif getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
                if _in_group_call(module, node) and isinstance(node.args[1], ast.Name):
                    return  # a group's own call of its workers; its users' calls are seen where they stand
                yield from self._methods(module, at, node.args[1], self.handles.held(module, node.args[0]), carry, hops)
                return
            else:
                break
        target = self.handles.target(module, node)
        if target is not None:
            yield Site(module, at, carry, target=target)
        elif isinstance(node, ast.Attribute):
            held = self.handles.held(module, node)
            if held.kind == "target":
                yield from self._targets(module, at, held, carry)
            elif node.attr.startswith(_GROUP_CALLS):
                call = at if isinstance(at, ast.Call) else None
                yield from self._group(module, call, node, carry, rest)
            else:
                receiver = self.handles.held(module, node.value)
                yield Site(module, at, _with(carry, receiver), node.attr, receiver)
        elif isinstance(node, ast.Name):
            yield from self._variable(module, at, node, carry, hops)
        else:
            held = self.handles.held(module, node)
            if held.kind == "target":
                yield from self._targets(module, at, held, carry)
            else:
                self.dynamic = True

    def _targets(self, module: Module, at: ast.AST, held: Held, carry: Carry) -> Iterator[Site]:
        for target in held.classes:
            yield Site(module, at, _with(carry, held), target=target)

    def _variable(self, module: Module, at: ast.AST, node: ast.Name, carry: Carry, hops: int) -> Iterator[Site]:
        """``method.remote()``: of what the variable, or the helper's parameter, was given."""
        held = self.handles.held(module, node)
        if held.kind == "target":
            yield from self._targets(module, at, held, carry)
            return
        for binding in module.lookup(node.id, node) if hops < _MAX_HOPS else ():
            if binding.kind == "param" and not isinstance(binding.node, ast.Lambda):
                function = module.definitions.get(module.qualified_name(binding.node))
                for where, call, argument in (
                    self.handles.arguments(function, node.id, binding.index) if function is not None else ()
                ):
                    yield from self._to(where, call, argument, _of_caller(carry, call), [], hops + 1)
            elif binding.kind == "value" and binding.index is None:
                yield from self._to(module, at, binding.node, carry, [], hops + 1)
            elif binding.kind == "element" and isinstance(binding.node, (ast.Tuple, ast.List)):
                for element in binding.node.elts:
                    yield from self._to(module, at, element, carry, [], hops + 1)
            else:
                self.dynamic = True

    def _group(
        self, module: Module, call: ast.Call | None, func: ast.Attribute, carry: Carry, positional: list[ast.expr]
    ) -> Iterator[Site]:
        if _in_group_call(module, func):
            return  # a group's own calls among themselves; those of its users are seen where they stand
        keywords = {keyword.arg: keyword.value for keyword in call.keywords} if call is not None else {}
        node = positional[0] if positional else keywords.get("method_name", keywords.get("method"))
        if node is not None:
            yield from self._methods(module, call or func, node, UNKNOWN, carry, 0)

    def _group_carry(self, module: Module, call: ast.Call, func: ast.Attribute) -> Carry:
        found = [self.evidence.of_call(module, call)]
        if self.handles.held(module, func.value).traced or self._group_brings_its_own(func.attr):
            found.append(YES)
        return any_of(found)

    def _group_brings_its_own(self, name: str) -> bool:
        """True if a group of the tree adds the carrier inside its method of that name."""
        if name not in self._own_carriers:
            self._own_carriers[name] = any(
                self.project.api(module, node) in {api.KWARGS, api.DISPATCH, *api.VIEWS}
                for module in self.project.interesting
                if f"def {name}" in module.text
                for definition in module.definitions.values()
                if definition.node.name == name
                for node in ast.walk(definition.node)
            )
        return self._own_carriers[name]

    def _methods(
        self, module: Module, at: ast.AST, name: ast.AST, receiver: Held, carry: Carry, hops: int
    ) -> Iterator[Site]:
        """Yields the sites of methods given by name, through a helper's parameter too."""
        texts = self.strings.texts(module, name)
        if texts and not any(HOLE in text for text in texts):
            for text in texts:
                yield Site(module, at, _with(carry, receiver), text, receiver)
            return
        bindings = module.lookup(name.id, name) if isinstance(name, ast.Name) and hops < _MAX_HOPS else []
        found = False
        for binding in bindings:
            function = module.definitions.get(module.qualified_name(binding.node))
            if function is None or binding.kind != "param" or isinstance(binding.node, ast.Lambda):
                continue
            for where, call, argument in self.handles.arguments(function, getattr(name, "id", ""), binding.index):
                found = True
                yield from self._methods(where, call, argument, receiver, _of_caller(carry, call), hops + 1)
        self.dynamic = self.dynamic or not found


def _in_group_call(module: Module, node: ast.AST) -> bool:
    """True inside a method of a worker group that calls its workers."""
    return bool(getattr(module.function_of(node), "name", "").startswith(_GROUP_CALLS))


def _with(carry: Carry, receiver: Held) -> Carry:
    return any_of([carry, Carry(True, receiver.plain_at)]) if receiver.traced else carry


def _of_caller(carry: Carry, call: ast.Call) -> Carry:
    """What is true of one caller of a helper."""
    if carry.yes and carry.plain_at:
        return NO if any(node is call for _, node in carry.plain_at) else YES
    return carry
