"""One parsed file: its tree, what encloses what, and where each name gets its value. Knows no other file."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from raytrace_rl.lint import files
from raytrace_rl.lint.scopes import Binding, bind

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
#: Statements whose target is a name of its own inside them: the same name may mean something else in the next loop.
_BLOCKS: Final = (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)

#: A file without any of these has nothing to check, and is parsed only if another one asks what it defines.
_OF_INTEREST: Final = re.compile(
    r"raytrace|nemo_rl|\bray\b|telemetry|opentelemetry|\.remote\b|run_all_workers|run_single_worker|trace_context"
    r"|(?:managed|umbrella)_span|span_cm|trace_fn|TracedActor|TeedMetric|nv\.dl\."
)


@dataclass(frozen=True)
class Definition:
    """A function or class of a file."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    @property
    def name(self) -> str:
        """As ``Class.method``."""
        return self.module.qualified_name(self.node)

    def __hash__(self) -> int:
        return id(self.node)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Definition) and other.node is self.node


class Module:
    """A file.

    Args:
        path: Where it is.
        shown: What findings call it.
        names: The dotted names that it can be imported by, its own first.
        reported: It was given to be checked, not only found beside what was.
    """

    def __init__(self, path: Path, shown: str, names: list[str], *, reported: bool) -> None:
        self.path = path
        self.shown = shown
        self.names = names
        self.reported = reported
        self.error: str | None = None
        self.error_line = 1
        try:
            self.source = files.read(path)
        except OSError as error:
            self.source = b""
            self.error = error.strerror or str(error)

    @property
    def name(self) -> str:
        """The dotted name, from its package."""
        return self.names[0]

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    @cached_property
    def text(self) -> str:
        """The source; for looking at, not for parsing: what is no UTF-8 is replaced."""
        return self.source.decode("utf-8-sig", "replace")

    @cached_property
    def of_interest(self) -> bool:
        """False if no rule can have anything to say."""
        return _OF_INTEREST.search(self.text) is not None

    @cached_property
    def tree(self) -> ast.Module:
        """The tree; empty, with `error` set, if the file cannot be parsed."""
        return self._parse()

    def check_syntax(self) -> None:
        """Sets `error` if the file cannot be parsed; a tree that nobody has asked for is not kept."""
        if "tree" not in vars(self):
            self._parse()

    def _parse(self) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.error = getattr(error, "msg", None) or str(error) or type(error).__name__
            self.error_line = getattr(error, "lineno", None) or 1
            return ast.Module(body=[], type_ignores=[])

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Node to the node that it is part of."""
        parents: dict[ast.AST, ast.AST] = {}
        todo: list[ast.AST] = [self.tree]
        while todo:
            node = todo.pop()
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.expr_context):  # these are shared between all places
                    parents[child] = node
                    todo.append(child)
        return parents

    @cached_property
    def by_type(self) -> dict[type[ast.AST], list[ast.AST]]:
        """All nodes by type."""
        found: dict[type[ast.AST], list[ast.AST]] = {}
        for node in self.parents:
            found.setdefault(type(node), []).append(node)
        return found

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls."""
        return [node for node in self.by_type.get(ast.Call, ()) if isinstance(node, ast.Call)]

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """All functions and classes by qualified name, methods and nested ones included; the last of a name holds."""
        found: dict[str, Definition] = {}
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            for node in self.by_type.get(kind, ()):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    found[self.qualified_name(node)] = Definition(self, node)
        return found

    @cached_property
    def _bound(self) -> tuple[dict[ast.AST, dict[str, list[Binding]]], dict[str, dict[str, list[Binding]]], list[str]]:
        return bind(self)

    @property
    def bindings(self) -> dict[ast.AST, dict[str, list[Binding]]]:
        """Scope (module, class, function, comprehension, loop, ``with``) to name to where it gets its value."""
        return self._bound[0]

    @property
    def attributes(self) -> dict[str, dict[str, list[Binding]]]:
        """Class (by qualified name; `scopes.OUTSIDE` for objects other than ``self``) to attribute to its values."""
        return self._bound[1]

    @property
    def stars(self) -> list[str]:
        """The modules that ``from ... import *`` names."""
        return self._bound[2]

    def enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields what ``node`` is part of, the innermost first."""
        parents = self.parents
        above = parents.get(node)
        while above is not None:
            yield above
            above = parents.get(above)

    def function_of(self, node: ast.AST) -> FunctionNode | None:
        """Returns the function whose body ``node`` is in."""
        return next((above for above in self.enclosing(node) if isinstance(above, _FUNCTIONS)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Returns the class whose method (or body) ``node`` is in."""
        return next((above for above in self.enclosing(node) if isinstance(above, ast.ClassDef)), None)

    def qualified_name(self, node: ast.AST) -> str:
        """Returns ``Class.method``, without ``<locals>``."""
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else []
        names += [
            above.name
            for above in self.enclosing(node)
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
        return ".".join(reversed(names))

    def lookup(self, name: str, node: ast.AST) -> list[Binding]:
        """Returns where ``name``, used at ``node``, gets its value; empty if nothing in this file says so."""
        found: list[Binding] = []
        in_function = False
        for above in (node, *self.enclosing(node)):
            names = self.bindings.get(above)
            # A method does not see the names of its class.
            if names is not None and not (in_function and isinstance(above, ast.ClassDef)):
                here = names.get(name, [])
                found += here
                if isinstance(above, _BLOCKS) and here:
                    return found + self._rebound(name, above)
                if any(binding.kind != "update" for binding in here):
                    return found
            in_function = in_function or isinstance(above, _FUNCTIONS)
        return found

    def _rebound(self, name: str, block: ast.AST) -> list[Binding]:
        """``for actor in actors: actor = traced(actor)``: the values that a loop's own name is given inside it."""
        scope = self.function_of(block) or self.tree
        first, last = getattr(block, "lineno", 0), getattr(block, "end_lineno", 0)
        return [
            binding
            for binding in self.bindings.get(scope, {}).get(name, ())
            if binding.kind in {"value", "update"} and first <= getattr(binding.node, "lineno", 0) <= last
        ]
