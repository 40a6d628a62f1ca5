"""The files of a tree as one index: what a name in one of them means, across imports, aliases and re-exports."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

from raytrace_rl.lint import api, files
from raytrace_rl.lint.module import Definition, Module

#: Re-exports of re-exports, and aliases of aliases, are followed so far.
_MAX_HOPS: Final = 12

_Key = TypeVar("_Key")
_Calls = dict[_Key, list[tuple[Module, ast.Call]]]


class Project:
    """What was given to be checked, and the packages that it is part of.

    Args:
        paths: Files and directories.

    Raises:
        files.UnreadablePathError: One of them cannot be read.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        given = files.find(paths)
        self.modules: list[Module] = [
            Module(path, shown, files.module_names(path), reported=True) for path, shown in given.items()
        ]
        self.modules += [
            Module(path, str(path), files.module_names(path), reported=False)
            for path in files.surroundings(given)
            if path not in given
        ]
        self._by_name: dict[str, list[Module]] = {}
        for module in self.modules:
            for name in module.names:
                self._by_name.setdefault(name, []).append(module)
        self._apis: dict[ast.AST, str | None] = {}
        self._calls_of: dict[Definition, list[tuple[Module, ast.Call]]] = {}

    def release(self) -> None:
        """Lets go of the trees: definitions and files refer to each other, and a collector would take seconds."""
        for module in self.modules:
            vars(module).clear()

    @property
    def reported(self) -> Iterator[Module]:
        """The files that were given and in which a rule may find something."""
        return (module for module in self.interesting if module.reported)

    @cached_property
    def interesting(self) -> list[Module]:
        """The files in which a rule may find something.

        These are the files that say so, and those that import from users of the library: they may have its names by
        way of a re-export.
        """
        users = {
            module.path.parent.name if module.path.stem == "__init__" else module.path.stem
            for module in self.modules
            if any(package in module.text for package in api.PACKAGES)
        }
        names = "|".join(re.escape(name) for name in sorted(users))
        imports = re.compile(rf"^[ \t]*(?:from|import)\b.*\b(?:{names})\b", re.MULTILINE) if users else None
        return [
            module
            for module in self.modules
            if module.of_interest or (imports is not None and imports.search(module.text) is not None)
        ]

    # ------------------------------------------------------------------------------------------------------- names

    def api(self, module: Module, node: ast.AST) -> str | None:
        """Returns the library's name for an expression (``managed_span``, ``RLSpanGroup.U_JOB``), None for others."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return None
        if node not in self._apis:
            qualified = self.qualify(module, node)
            self._apis[node] = api.public_name(qualified) if qualified else None
        return self._apis[node]

    def qualify(self, module: Module, node: ast.AST, hops: int = 0) -> str | None:
        """Returns what ``a.b.c`` stands for, as a dotted path from a top-level module; None if that is not known."""
        if hops > _MAX_HOPS:
            return None
        if isinstance(node, ast.Attribute):
            base = self.qualify(module, node.value, hops + 1)
            return self.canonical(f"{base}.{node.attr}", module) if base else None
        if not isinstance(node, ast.Name):
            return None
        bindings = module.lookup(node.id, node)
        if not bindings:
            starred = self._from_star(module, node.id)
            return self.canonical(starred, module) if starred else None
        for binding in bindings:
            if binding.kind == "import":  # one of two is a fallback
                return self.canonical(binding.dotted, module)
        binding = bindings[-1]
        if binding.kind == "definition":
            return f"{module.name}.{module.qualified_name(binding.node)}"
        if binding.kind == "value" and len(bindings) == 1 and binding.index is None:
            return self.qualify(module, binding.node, hops + 1)
        return None

    def canonical(self, dotted: str, near: Module) -> str:
        """Follows re-exports through the files that are known: ``pkg.name`` to where ``name`` comes from."""
        for _ in range(_MAX_HOPS):
            module, rest = self._split(dotted, near)
            if module is None:
                return dotted
            if not rest:
                return module.name
            parts = rest.split(".")
            own = f"{module.name}.{rest}"
            bindings = module.bindings.get(module.tree, {}).get(parts[0], [])
            imported = next((binding for binding in bindings if binding.kind == "import"), None)
            if imported is not None:
                following = ".".join([imported.dotted, *parts[1:]])
            elif len(bindings) == 1 and isinstance(bindings[0].node, (ast.Name, ast.Attribute)):
                target = self.qualify(module, bindings[0].node, 1)
                following = ".".join([target, *parts[1:]]) if target else own
            elif not bindings and (star := self._from_star(module, parts[0])):
                following = ".".join([star, *parts[1:]])
            else:
                return own
            if following in {dotted, own}:
                return own
            dotted = following
        return dotted

    def module_named(self, dotted: str, near: Module) -> Module | None:
        """Returns the file of a module; of several with that name, the one that lies nearest to ``near``."""
        found = self._by_name.get(dotted)
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        return max(found, key=lambda module: len(Path(os.path.commonpath([module.path, near.path])).parts))

    def is_outside(self, dotted: str, near: Module) -> bool:
        """True if a dotted path leads to a module that is not among the files."""
        return self._split(dotted, near)[0] is None

    def _split(self, dotted: str, near: Module) -> tuple[Module | None, str]:
        """Returns the module that a dotted path begins with, and the rest."""
        name, rest = dotted, ""
        while name:
            module = self.module_named(name, near)
            if module is not None:
                return module, rest
            name, _, last = name.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
        return None, dotted

    def _from_star(self, module: Module, name: str) -> str | None:
        """Returns the dotted path of a name that a star import brings; it may itself be a re-export."""
        for star in module.stars:
            other = self.module_named(star, module)
            if other is None:
                if api.public_name(f"{star}.{name}") in api.NAMES:
                    return f"{star}.{name}"
            elif other is not module and name in other.bindings.get(other.tree, {}):
                return f"{star}.{name}"
        return None

    # ------------------------------------------------------------------------------------------- definitions and calls

    def definition(self, module: Module, node: ast.AST) -> Definition | None:
        """Returns the function or class of the tree that a name or dotted path stands for."""
        qualified = self.qualify(module, node)
        return self.definition_named(qualified, module) if qualified else None

    def definition_named(self, dotted: str, near: Module) -> Definition | None:
        """Returns the function or class of that dotted path; None if it is not in the tree."""
        module, rest = self._split(dotted, near)
        return module.definitions.get(rest) if module is not None and rest else None

    def calls_of(self, function: Definition) -> list[tuple[Module, ast.Call]]:
        """Returns the calls of a function or method, or those that construct a class, so far as names tell.

        ``x.method(...)`` counts for every class's ``method`` unless ``x`` is ``self`` in an unrelated class.
        """
        if function not in self._calls_of:
            self._calls_of[function] = self._find_calls(function)
        return self._calls_of[function]

    def _find_calls(self, function: Definition) -> list[tuple[Module, ast.Call]]:
        owner = function.module.parents.get(function.node)
        name = function.node.name
        if isinstance(owner, ast.ClassDef):
            return self._calls[0].get(name, []) + self._calls[1].get((owner, name), [])
        called = self._calls[0].get(name, [])
        return [(module, call) for module, call in called if self.definition(module, call.func) == function]

    @cached_property
    def _calls(self) -> tuple[_Calls[str], _Calls[tuple[ast.AST, str]]]:
        """All calls by the last part of what is called; apart from these, ``self.method()`` in a class that has it."""
        found: _Calls[str] = {}
        own: _Calls[tuple[ast.AST, str]] = {}
        for module in self.interesting:
            for call in module.calls:
                if not (name := _called(call)):
                    continue
                owner = module.class_of(call) if isinstance(call.func, ast.Attribute) and _is_self(call.func) else None
                if owner is not None and f"{module.qualified_name(owner)}.{name}" in module.definitions:
                    own.setdefault((owner, name), []).append((module, call))
                else:
                    found.setdefault(name, []).append((module, call))
        return found, own


def _is_self(func: ast.Attribute) -> bool:
    return isinstance(func.value, ast.Name) and func.value.id == "self"


def _called(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else None
