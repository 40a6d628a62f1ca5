"""Methods that a worker group binds from its workers, as verl's does: called on the group as if it were a worker."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import Final

from raytrace_rl.lint.handles import GROUP, UNKNOWN, Handles, Held
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.words import words

_MAX_DEPTH: Final = 8
#: Keywords of verl's ``register``, and of those of its kind.
_SETTINGS: Final = frozenset({"dispatch_mode", "execute_mode", "blocking", "materialize_futures"})
#: Methods of a group that give a group.
_GROUPS_OF: Final = frozenset({"spawn", "spawn_fused", "fuse", "from_detached", "get", "pop", "values"})


class BoundMethods:
    """Answers whether a call on an object is one of a worker group's workers."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.project = handles.project
        self.classes = handles.classes

    @cached_property
    def decorated(self) -> set[str]:
        """Names of the methods that accept a trace context."""
        return {each.node.name for each in self.classes.decorated if self.classes.owner(each) is not None}

    @cached_property
    def registered(self) -> dict[str, list[Definition]]:
        """Name to the methods that are registered to be bound, of those names that accept a trace context somewhere."""
        found: dict[str, list[Definition]] = {}
        if not self.decorated:
            return found
        spelled = re.compile(rf"\bdef (?:{'|'.join(map(re.escape, sorted(self.decorated)))})\b")
        for module in self.project.modules:
            if "register" in module.text and spelled.search(module.text):
                for definition in module.definitions.values():
                    if definition.node.name in self.decorated and self._is_registered(definition):
                        found.setdefault(definition.node.name, []).append(definition)
        return found

    def accepting(self, name: str) -> Definition | None:
        """Returns a registered method that accepts a context, if all of that name do."""
        methods = self.registered.get(name, [])
        return methods[0] if methods and all(self.classes.is_decorated(method) for method in methods) else None

    def group(self, module: Module, node: ast.expr) -> Held | None:
        """Returns what a worker group is: that, if it was made as one, unknown if it is called one."""
        origin = self._origin(module, node)
        if origin is None:
            return UNKNOWN if _is_called_group(node) else None
        return GROUP if origin else None

    def _is_registered(self, definition: Definition) -> bool:
        for decorator in definition.node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            if getattr(target, "attr", getattr(target, "id", "")) != "register":
                continue
            if isinstance(decorator, ast.Call) and any(keyword.arg in _SETTINGS for keyword in decorator.keywords):
                return True
            if (self.project.qualify(definition.module, target) or "").startswith("verl."):
                return True
        return False

    def _origin(self, module: Module, node: ast.AST, depth: int = 0) -> bool | None:
        """True for what ``RayWorkerGroup(...)`` made, False for an object of another class, None if nobody knows."""
        if depth > _MAX_DEPTH:
            return None
        if isinstance(node, ast.Subscript):
            return self._origin(module, node.value, depth + 1)
        if isinstance(node, ast.Call):
            return self._made(module, node, depth)
        if isinstance(node, ast.Name):
            bindings = module.lookup(node.id, node)
            if node.id in {"self", "cls"} or any(each.kind in {"import", "definition"} for each in bindings):
                return False
        elif isinstance(node, ast.Attribute):
            owner = module.class_of(node) if getattr(node.value, "id", "") in {"self", "cls"} else None
            names = module.attributes.get(module.qualified_name(owner), {}) if owner is not None else {}
            bindings = names.get(node.attr, [])
        else:
            return None
        known = [self._origin(module, each.node, depth + 1) for each in bindings if each.kind in {"value", "update"}]
        return None if all(each is None for each in known) else any(known)

    def _made(self, module: Module, call: ast.Call, depth: int) -> bool | None:
        func = call.func
        last = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        definition = self.project.definition(module, func)
        if definition is not None and isinstance(definition.node, ast.ClassDef):
            lines = self.classes.line(definition)[0]
            bases = {getattr(base, "attr", getattr(base, "id", "")) for each in lines for base in _bases(each)}
            return any(base.endswith("WorkerGroup") for base in bases)
        if last.endswith("WorkerGroup") and definition is None:
            return True
        if last == "super":
            return False
        return (
            self._origin(module, func.value, depth + 1)
            if last in _GROUPS_OF and isinstance(func, ast.Attribute)
            else None
        )


def _bases(definition: Definition) -> list[ast.expr]:
    return definition.node.bases if isinstance(definition.node, ast.ClassDef) else []


def _is_called_group(node: ast.expr) -> bool:
    """``wg``, ``self.actor_rollout_wg``, ``all_wg["actor"]``, ``worker_group``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    said = words(getattr(node, "attr", getattr(node, "id", "")))
    return bool(said) and (said[-1] in {"wg", "wgs"} or said[-2:] in (["worker", "group"], ["worker", "groups"]))
