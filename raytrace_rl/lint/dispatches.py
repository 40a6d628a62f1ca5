"""Every place where a call leaves for another process: what it calls, and whether a carrier goes along."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.bound import BoundMethods
from raytrace_rl.lint.evidence import NO, YES, Carry, Evidence, any_of
from raytrace_rl.lint.handles import GROUP, UNKNOWN, Handles, Held
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.strings import HOLE, Strings

#: Methods of worker groups that take the workers' method by name: NeMo-RL's, and verl's.
_GROUP_CALLS: Final = ("run_all_workers", "run_single_worker", "execute_all", "execute_rank_zero")
#: Methods of worker groups that call a worker.
_IN_GROUPS: Final = (*_GROUP_CALLS, "_execute_remote_single_worker")
_MAX_HOPS: Final = 5


@dataclass(frozen=True)
class Site:
    """One dispatch.

    Attributes:
        module: Where.
        node: What a finding points at.
        carry: Whether a carrier goes along.
        method: The method's name; None if ``target`` is called itself.
        receiver: What holds the method.
        target: The class (for its constructor) or function that is called.
        bound: The method is one that a worker group has bound from its workers, called as it is.
    """

    module: Module
    node: ast.AST
    carry: Carry
    method: str | None = None
    receiver: Held = UNKNOWN
    target: Definition | None = None
    bound: bool = False


class Dispatches:
    """Finds the sites of a project."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.project = handles.project
        self.strings = Strings(handles)
        self.evidence = Evidence(handles)
        self.bound = BoundMethods(handles)
        #: Names of methods that are handed on, or called in a way that cannot be followed.
        self.mentioned: set[str] = set()
        #: A method whose name is known only at run time is dispatched somewhere.
        self.dynamic = False
        self._own_carriers: dict[str, bool] = {}
        self._with_groups: dict[Module, bool] = {}
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
        sent = False
        for index, argument in enumerate(call.args):
            if sent:
                break  # these are the dispatch's own
            if self.project.api(module, argument) == api.DISPATCH and index + 1 < len(call.args):  # partial, submit
                sent = True
                yield from self._to(module, call, call.args[index + 1], YES, call.args[index + 2 :], 0)
            elif isinstance(argument, ast.Attribute):
                carry = self.evidence.of_call(module, call)
                if argument.attr == "remote":
                    yield from self._to(module, argument, argument.value, carry, [], 0)
                elif argument.attr.startswith(_GROUP_CALLS):
                    method = argument.value, argument.attr
                    yield from self._by_name(module, call, method, call.args[index + 1 :])
                else:
                    yield from self._on_group(module, argument, argument.value, argument.attr, carry)
                self.mentioned.add(argument.attr)
        self.mentioned.update(k.value.attr for k in call.keywords if isinstance(k.value, ast.Attribute))
        if not isinstance(func, ast.Attribute):
            kept = self._kept_method(module, func) if self._may_keep(module) else None
            if kept is not None and kept[1].startswith(_GROUP_CALLS):
                yield from self._by_name(module, call, kept, call.args)
            elif kept is not None:
                yield from self._on_group(module, call, *kept, self.evidence.of_call(module, call))
            return
        if func.attr == "remote":
            yield from self._to(module, call, func.value, self.evidence.of_call(module, call), call.args, 0)
        elif func.attr == "bind" and isinstance(func.value, ast.Attribute):
            self.mentioned.add(func.value.attr)  # a compiled graph's: no carrier can go along
        elif func.attr.startswith(_GROUP_CALLS):
            yield from self._by_name(module, call, (func.value, func.attr), call.args)
        else:
            yield from self._on_group(module, call, func.value, func.attr, self.evidence.of_call(module, call))

    def _may_keep(self, module: Module) -> bool:
        """True if a file names a method that groups call, or have."""
        if module not in self._with_groups:
            read = {getattr(node, "attr", "") for node in module.by_type.get(ast.Attribute, ())}
            named = "getattr" in module.text or any(name in module.text for name in _GROUP_CALLS)
            self._with_groups[module] = named or not self.bound.decorated.isdisjoint(read)
        return self._with_groups[module]

    def _on_group(self, module: Module, at: ast.AST, group: ast.expr, name: str, carry: Carry) -> Iterator[Site]:
        """``traced(wg).update_actor(batch)``, ``wg.update_actor(batch)``: a method that the group has bound."""
        if name not in self.bound.decorated:
            return
        receiver = self.handles.held(module, group)
        made = self.bound.group(module, group) if name in self.bound.registered else None
        if receiver.traced and receiver.kind != "target":
            # Of callers that give no view it is known only where it is called a group that they give one.
            yield Site(module, at, _with(carry, receiver) if made is not None else YES, name, bound=True)
        elif made is not None:
            yield Site(module, at, carry, name, made, bound=True)

    def _kept_method(self, module: Module, func: ast.expr, hops: int = 0) -> tuple[ast.expr, str] | None:
        """Returns group and method of ``getattr(group, "train")``, or of a variable with that or with the method."""
        if isinstance(func, ast.Name) and hops < _MAX_HOPS:
            bindings = module.lookup(func.id, func)
            if len(bindings) == 1 and bindings[0].kind == "value" and isinstance(bindings[0].node, ast.expr):
                return self._kept_method(module, bindings[0].node, hops + 1)
        elif isinstance(func, ast.Attribute) and (
            func.attr.startswith(_GROUP_CALLS) or func.attr in self.bound.decorated
        ):
            return func.value, func.attr
        elif isinstance(func, ast.Call) and getattr(func.func, "id", "") == "getattr" and len(func.args) > 1:
            names = self.strings.texts(module, func.args[1])
            if names and all(name.startswith(_GROUP_CALLS) or name in self.bound.decorated for name in names):
                return func.args[0], names[0]
        return None

    def _by_name(
        self, module: Module, call: ast.Call, method: tuple[ast.expr, str], positional: list[ast.expr]
    ) -> Iterator[Site]:
        """A call of a worker group's method, or one that is handed such a method and what to call it with."""
        group, name = method
        found = [self.evidence.of_call(module, call)]
        if self.handles.held(module, group).traced or self._group_brings_its_own(name):
            found.append(YES)
        yield from self._group(module, call, group, any_of(found), positional)

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
        target = self.handles.callers.target(module, node)
        if target is not None:
            yield Site(module, at, carry, target=target)
        elif isinstance(node, ast.Attribute):
            held = self.handles.held(module, node)
            if held.kind == "target":
                yield from self._targets(module, at, held, carry)
            elif node.attr.startswith(_GROUP_CALLS):
                call = at if isinstance(at, ast.Call) else None
                held = self.handles.held(module, node.value)
                yield from self._group(module, call, node, _with(carry, held), rest)
            else:
                receiver = self.handles.held(module, node.value)
                yield Site(module, at, _with(carry, receiver), node.attr, receiver)
        elif isinstance(node, ast.Name):
            yield from self._variable(module, at, node, carry, rest, hops)
        else:
            held = self.handles.held(module, node)
            if held.kind == "target":
                yield from self._targets(module, at, held, carry)
            else:
                self.dynamic = True

    def _targets(self, module: Module, at: ast.AST, held: Held, carry: Carry) -> Iterator[Site]:
        for target in held.classes:
            yield Site(module, at, _with(carry, held), target=target)

    def _variable(
        self, module: Module, at: ast.AST, node: ast.Name, carry: Carry, rest: list[ast.expr], hops: int
    ) -> Iterator[Site]:
        """``method.remote()``: of what the variable, or the helper's parameter, was given."""
        held = self.handles.held(module, node)
        if held.kind == "target":
            yield from self._targets(module, at, held, carry)
            return
        for binding in module.lookup(node.id, node) if hops < _MAX_HOPS else ():
            if binding.kind == "param" and not isinstance(binding.node, ast.Lambda):
                function = module.definitions.get(module.qualified_name(binding.node))
                for where, call, argument in (
                    self.handles.callers.arguments(function, node.id, binding.index) if function is not None else ()
                ):
                    yield from self._to(where, call, argument, _of_caller(carry, call), [], hops + 1)
            elif binding.kind == "value" and binding.index is None:
                yield from self._to(module, at, binding.node, carry, rest, hops + 1)
            elif binding.kind == "element" and isinstance(binding.node, (ast.Tuple, ast.List)):
                for element in binding.node.elts:
                    yield from self._to(module, at, element, carry, rest, hops + 1)
            else:
                self.dynamic = True

    def _group(
        self, module: Module, call: ast.Call | None, near: ast.expr, carry: Carry, positional: list[ast.expr]
    ) -> Iterator[Site]:
        if _in_group_call(module, near):
            return  # a group's own calls among themselves; those of its users are seen where they stand
        keywords = {keyword.arg: keyword.value for keyword in call.keywords} if call is not None else {}
        node = positional[0] if positional else keywords.get("method_name", keywords.get("method"))
        if node is not None:
            yield from self._methods(module, call or near, node, GROUP, carry, 0)

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
            # A subclass, or whoever has the object, may give an attribute another value.
            self.dynamic = self.dynamic or isinstance(name, ast.Attribute)
            return
        bindings = module.lookup(name.id, name) if isinstance(name, ast.Name) and hops < _MAX_HOPS else []
        found = False
        for binding in bindings:
            function = module.definitions.get(module.qualified_name(binding.node))
            if function is None or binding.kind != "param" or isinstance(binding.node, ast.Lambda):
                continue
            for where, call, argument in self.handles.callers.arguments(
                function, getattr(name, "id", ""), binding.index
            ):
                found = True
                yield from self._methods(where, call, argument, receiver, _of_caller(carry, call), hops + 1)
        self.dynamic = self.dynamic or not found


def _in_group_call(module: Module, node: ast.AST) -> bool:
    """True inside a method of a worker group that calls its workers."""
    return bool(getattr(module.function_of(node), "name", "").startswith(_IN_GROUPS))


def _with(carry: Carry, receiver: Held) -> Carry:
    return any_of([carry, Carry(True, receiver.plain_at)]) if receiver.traced else carry


def _of_caller(carry: Carry, call: ast.Call) -> Carry:
    """What is true of one caller of a helper."""
    if carry.yes and carry.plain_at:
        return NO if any(node is call for _, node in carry.plain_at) else YES
    return carry
