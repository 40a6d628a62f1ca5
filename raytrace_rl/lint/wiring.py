"""Rules RT101 to RT103: both ends of a dispatch fit, the carrier that is sent and the decorator that takes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.dispatches import Dispatches, Site
from raytrace_rl.lint.model import Finding, finding
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.strays import Strays

#: Calls that are followed from a constructor.
_MAX_DEPTH: Final = 4


class Wiring:
    """Checks the sites of a project against its definitions."""

    def __init__(self, dispatches: Dispatches) -> None:
        self.dispatches = dispatches
        self.project = dispatches.project
        self.classes = dispatches.handles.classes
        self.strays = Strays(dispatches.handles)

    def check(self) -> Iterator[Finding]:
        """Yields the findings."""
        for site in self.dispatches.sites:
            if site.carry.yes:
                yield from self._carried(site)
            if not site.carry.yes or site.carry.plain_at:
                yield from self._plain(site)
        yield from self._never_dispatched()

    # --------------------------------------------------------------------------------------------------- at the caller

    def _plain(self, site: Site) -> Iterator[Finding]:
        what = self._accepting(site)
        if what is None:
            return
        for module, node in site.carry.plain_at or ((site.module, site.node),):
            if module.reported:
                yield finding("RT101", module.shown, node, f"{what}, and this call brings no carrier")

    def _accepting(self, site: Site) -> str | None:
        """Returns what accepts a context at a site's other end, for people; None if nothing does for certain."""
        if site.target is not None:
            if isinstance(site.target.node, ast.ClassDef):
                wants = self._constructor_wants(site.target)
                return f"{site.target.node.name}'s constructor opens spans under the caller's" if wants else None
            return _accepts(site.target) if self.classes.is_decorated(site.target) else None
        if site.bound and site.method is not None:
            method = self.dispatches.bound.accepting(site.method)
            methods = [method] if method is not None else []
        else:
            methods = self._callees(site)
        if not methods or not all(self.classes.is_decorated(method) for method in methods):
            return None
        if site.receiver.kind == "unknown" and self._may_be_view(site, methods):
            return None
        return _accepts(methods[0])

    def _may_be_view(self, site: Site, methods: list[Definition]) -> bool:
        """True if a handle of unknown origin may come from where views of such actors were handed to."""
        owners = [owner for method in methods if (owner := self.classes.owner(method)) is not None]
        return not site.carry.plain_at and self.strays.handed_away(owners)

    def _carried(self, site: Site) -> Iterator[Finding]:
        if not site.module.reported or site.bound:
            return  # of a group that is kept as a view, methods without a carrier are called as well
        if site.target is not None:
            if isinstance(site.target.node, ast.ClassDef):
                wrong = self._constructor_refuses(site.target)
                name = f"the constructor of {site.target.node.name}"
            else:
                wrong, name = self.classes.accepts(site.target) is False, f"{site.target.node.name}()"
        else:
            methods = self._callees(site)
            wrong = bool(methods) and all(self.classes.accepts(method) is False for method in methods)
            name = f"{methods[0].name}()" if methods else ""
        if wrong:
            message = f"{name} does not accept the carrier that is sent here"
            yield finding("RT103", site.module.shown, site.node, message)

    def _callees(self, site: Site) -> list[Definition]:
        """Returns the methods that a site may call; empty if one of them is not known."""
        name = site.method
        if name is None or name in api.FLUSHES or site.receiver.external:
            return []
        owners = [cls for cls in site.receiver.classes if isinstance(cls.node, ast.ClassDef)]
        if owners:
            found = [self.classes.method(owner, name)[0] for owner in owners]
            return [method for method in found if method is not None] if all(found) else []
        return self.classes.actor_methods.get(name, [])

    # --------------------------------------------------------------------------------------------------- constructors

    def _constructor_wants(self, owner: Definition) -> bool:
        """True if a constructor takes a carrier and opens spans, or keeps the context for later."""
        init = self.classes.method(owner, "__init__")[0]
        if init is not None and self.classes.is_decorated(init):
            return True
        if not self.classes.is_traced_actor(owner):
            return False
        keeps = self.classes.is_collector(owner)
        return keeps or self._asks_for_model_init(owner) or self._opens_in_constructor(owner)

    def _constructor_refuses(self, owner: Definition) -> bool:
        """True if the context is lost for what a constructor does."""
        init, certain = self.classes.method(owner, "__init__")
        complete = self.classes.line(owner)[1]
        if init is None or not certain or not complete or self.classes.is_traced_actor(owner):
            return False
        return self.classes.accepts(init) is False and self._opens_in_constructor(owner)

    def _asks_for_model_init(self, owner: Definition) -> bool:
        return any(
            keyword.arg == "model_init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for cls in self.classes.line(owner)[0]
            for keyword in getattr(cls.node, "keywords", ())
        )

    def _opens_in_constructor(self, owner: Definition) -> bool:
        constructors = [
            init
            for cls in self.classes.line(owner)[0]
            if (init := cls.module.definitions.get(f"{cls.name}.__init__")) is not None
        ]
        return any(self._opens(init, owner) for init in constructors)

    def _opens(self, constructor: Definition, owner: Definition) -> bool:
        """True if a constructor opens spans or captures the context: itself, or in what it calls of the tree."""
        seen, todo = {constructor}, [(constructor, 0)]
        while todo:
            function, depth = todo.pop()
            for node in ast.walk(function.node):
                if isinstance(node, (ast.Name, ast.Attribute)):
                    name = self.project.api(function.module, node)
                    if name in api.OPENERS or name in api.CAPTURES:
                        return True
                    found = self._continues(function.module, node, owner) if depth < _MAX_DEPTH else None
                    if found is not None and found not in seen:
                        seen.add(found)
                        todo.append((found, depth + 1))
        return False

    def _continues(self, module: Module, node: ast.Name | ast.Attribute, owner: Definition) -> Definition | None:
        """Returns the method of ``self``, or the function or local class of the tree, that a constructor goes on in."""
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            return self.classes.method(owner, node.attr)[0]
        call = module.parents.get(node)
        if not isinstance(call, ast.Call) or call.func is not node:
            return None
        found = self.project.definition(module, node)
        if found is None or api.in_library(found.module.name) or self.classes.is_remote(found):
            return None
        if isinstance(found.node, ast.ClassDef):
            return self.classes.method(found, "__init__")[0]
        return found

    # ------------------------------------------------------------------------------------------------ at the definition

    def _never_dispatched(self) -> Iterator[Finding]:
        for function in self.classes.decorated:
            if function.module.reported and not self._is_dispatched(function):
                yield finding(
                    "RT102",
                    function.module.shown,
                    function.node,
                    f"{_accepts(function)}, and nothing among the files that were read dispatches it",
                )

    def _is_dispatched(self, function: Definition) -> bool:
        owner, name = self.classes.owner(function), function.node.name
        if owner is None and not self.classes.is_remote(function):
            return True  # whoever makes it remote may be anywhere
        if name in self.dispatches.mentioned or (self.dispatches.dynamic and self._is_spelled(name)):
            return True
        for site in self.dispatches.sites:
            if site.target is not None:
                if site.target == function:
                    return True
                constructs = name == "__init__" and owner is not None and isinstance(site.target.node, ast.ClassDef)
                if constructs and owner is not None and self.classes.related(owner, site.target):
                    return True
            elif site.method == name and owner is not None:
                known = site.receiver.classes
                if not known or any(self.classes.related(owner, cls) for cls in known):
                    return True
        return owner is not None and self.strays.called_elsewhere(owner)

    def _is_spelled(self, name: str) -> bool:
        """True if a method's name stands somewhere as a string, for whoever dispatches by name."""
        return any(
            isinstance(node, ast.Constant) and node.value == name
            for module in self.project.interesting
            if f'"{name}"' in module.text or f"'{name}'" in module.text
            for node in module.by_type.get(ast.Constant, ())
        )


def _accepts(function: Definition) -> str:
    return f"{function.name}() accepts a trace context"
