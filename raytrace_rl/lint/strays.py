"""Views of `traced` that go where nobody can follow them: what is called there, and on what, is not known."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cached_property
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.handles import Handles, Held
from raytrace_rl.lint.module import Definition, Module

_BUILTINS: Final = frozenset(vars(builtins)) - {"setattr"}
#: Methods of containers, of pools of workers and of their like, whose result and elements are followed.
_KEEPING: Final = frozenset(
    {
        "add", "append", "appendleft", "extend", "extendleft", "insert", "push", "put", "put_nowait", "setdefault",
        "update", "remove", "discard", "index", "count", "get", "pop", "remote", "map", "map_unordered", "submit",
    }
)  # fmt: skip
_FOLLOWED: Final = frozenset({"ActorPool", "deque", "cycle", "chain", "nullcontext", "partial", "Thread", "to_thread"})


class Strays:
    """Asks of a class whether views of its handles, or of what may be such, have gone out of sight."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.project = handles.project

    def handed_away(self, owners: list[Definition]) -> bool:
        """True if code outside the tree was given a view of one of these, and may give it back anywhere."""
        return any(self._may_be(held, owners) for held in self._handed)

    def called_elsewhere(self, owner: Definition) -> bool:
        """True if code outside the tree has a view of such a worker, or of its group, and may call through it."""
        return any(self._may_be(held, [owner]) for held in (*self._handed, *self._kept))

    def _may_be(self, held: Held, owners: list[Definition]) -> bool:
        known = [cls for cls in held.classes if isinstance(cls.node, ast.ClassDef)]
        return not known or any(self.handles.classes.related(owner, cls) for owner in owners for cls in known)

    @cached_property
    def _views(self) -> list[Module]:
        """The files with something that may be a view: none, if nothing in the tree makes one."""
        makes = any(
            self.project.api(module, call.func) in api.VIEWS
            for module in self.project.interesting
            if not api.in_library(module.name)
            for call in module.calls
        )
        return [module for module in self.project.interesting if not api.in_library(module.name)] if makes else []

    @cached_property
    def _handed(self) -> list[Held]:
        """What is given to functions outside the tree."""
        return [
            held
            for module in self._views
            for call in module.calls
            if self._leads_out(module, call)
            for argument in (*call.args, *(keyword.value for keyword in call.keywords))
            if not isinstance(argument, (ast.Constant, ast.Lambda, ast.JoinedStr, ast.Compare))
            and (held := self.handles.held(module, argument)).traced
        ]

    def _leads_out(self, module: Module, call: ast.Call) -> bool:
        func = call.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if name in _FOLLOWED or (isinstance(func, ast.Name) and name in _BUILTINS):
            return False
        if isinstance(func, ast.Attribute) and (name in _KEEPING or name in self.handles.classes.methods):
            return False
        if self.project.api(module, func) is not None or self.handles.callers.callee(module, func) is not None:
            return False
        if name == "__init__" and isinstance(func, ast.Attribute):
            return not self._constructs_in_tree(module, call)
        return not (self.project.qualify(module, func) or "").startswith("ray.")

    def _constructs_in_tree(self, module: Module, call: ast.Call) -> bool:
        own = module.class_of(call)
        definition = module.definitions.get(module.qualified_name(own)) if own is not None else None
        return definition is not None and self.handles.classes.line(definition)[1]

    @cached_property
    def _kept(self) -> list[Held]:
        """What is put into objects of classes outside the tree, or whose bases are: ``trainer.wg = traced(...)``."""
        return [
            held
            for module in self._views
            for target, value in _assigned(module)
            if self._is_foreign(module, target)
            and (held := self.handles.held(module, value)).traced
            and not (_is_self(target) and held.kind == "handle")
        ]

    def _is_foreign(self, module: Module, target: ast.Attribute) -> bool:
        owner = module.class_of(target) if _is_self(target) else None
        definition = module.definitions.get(module.qualified_name(owner)) if owner is not None else None
        return definition is None or not self.handles.classes.line(definition)[1]


def _assigned(module: Module) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    for node in module.by_type.get(ast.Assign, ()):
        if isinstance(node, ast.Assign):
            for each in node.targets:
                target = each
                while isinstance(target, ast.Subscript):
                    target = target.value
                if isinstance(target, ast.Attribute):
                    yield target, node.value


def _is_self(target: ast.Attribute) -> bool:
    return getattr(target.value, "id", "") in {"self", "cls"}
