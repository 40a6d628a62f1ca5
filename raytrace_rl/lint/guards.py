"""Rule RT205: what a ``with`` over a span yields is None while its group is disabled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.model import Finding, finding
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.project import Project

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LEAVING: Final = (ast.Return, ast.Raise, ast.Continue, ast.Break)
#: What a variable that is asked about the span later is made of.
_CONDITIONS: Final = (ast.Compare, ast.BoolOp, ast.Call, ast.UnaryOp, ast.IfExp)
_ENTERING: Final = frozenset({"enter_context", "enter_async_context", "__enter__"})


def check(project: Project, module: Module) -> Iterator[Finding]:
    """Yields the findings of a file."""
    for kind in (ast.With, ast.AsyncWith):
        for node in module.by_type.get(kind, ()):
            if isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    if isinstance(item.optional_vars, ast.Name) and _is_optional(project, module, item.context_expr):
                        yield from _uses(project, module, item.optional_vars.id, node, node.body)
    for node in module.by_type.get(ast.Assign, ()):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            func = node.value.func
            entered = isinstance(func, ast.Attribute) and func.attr in _ENTERING
            opened = [*node.value.args, func.value] if entered and isinstance(func, ast.Attribute) else []
            by_hand = project.api(module, func) == "start_efficiency_span"
            if by_hand or any(_is_optional(project, module, each) for each in opened):
                scope = module.function_of(node) or module.tree
                body = [scope.body] if isinstance(scope, ast.Lambda) else scope.body
                yield from _uses(project, module, node.targets[0].id, scope, body, after=node.lineno)


def _is_optional(project: Project, module: Module, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = project.api(module, node.func)
    return name in api.OPENERS and api.OPENERS[name].optional and name != "start_efficiency_span"


def _uses(
    project: Project, module: Module, name: str, region: ast.AST, body: list[ast.stmt] | list[ast.expr], after: int = 0
) -> Iterator[Finding]:
    """Yields the first unguarded use: one finding a span is enough."""
    parts = [part for statement in body for part in ast.walk(statement)]
    if any(isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store) for part in parts) and (
        not after
    ):
        return  # it is given another value inside, perhaps one that is never None
    uses = [
        part
        for part in parts
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == name
        and part.lineno >= after
    ]
    for use in sorted(uses, key=lambda part: (part.lineno, part.col_offset)):
        if not _is_guarded(project, module, use, name, region):
            yield finding("RT205", module.shown, use, f"{name} may be None here, and then has no {use.attr}")
            return


def _is_guarded(project: Project, module: Module, use: ast.AST, name: str, region: ast.AST) -> bool:
    """True if something on the way from ``region`` to the use asks about the span."""
    inner = use
    for above in module.enclosing(use):
        if _asks_around(project, module, above, inner, name) or _asked_before(project, module, above, inner, name):
            return True
        if above is region:
            break
        inner = above
    return False


def _asks_around(project: Project, module: Module, above: ast.AST, inner: ast.AST, name: str) -> bool:
    if isinstance(above, (ast.If, ast.IfExp, ast.While)):
        return inner is not above.test and _asks(project, module, above.test, name)
    if isinstance(above, ast.BoolOp):
        before = above.values[: next((i for i, value in enumerate(above.values) if value is inner), 0)]
        return any(_asks(project, module, value, name) for value in before)
    if isinstance(above, ast.comprehension):
        return any(_asks(project, module, test, name) for test in above.ifs)
    if isinstance(above, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        return any(_asks(project, module, test, name) for each in above.generators for test in each.ifs)
    if isinstance(above, ast.Try) and inner in above.body:
        return any(_catches_attribute_error(handler) for handler in above.handlers)
    if isinstance(above, (ast.With, ast.AsyncWith)):
        return any("suppress" in ast.dump(item.context_expr) for item in above.items)
    return isinstance(above, ast.Match)


def _asked_before(project: Project, module: Module, above: ast.AST, inner: ast.AST, name: str) -> bool:
    """``if span is None: return`` and ``assert span is not None``, earlier in the same block."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(above, block, None)
        if isinstance(statements, list) and inner in statements:
            for statement in statements[: statements.index(inner)]:
                if isinstance(statement, ast.Assert) and _asks(project, module, statement.test, name):
                    return True
                leaves = isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVING)
                if leaves and isinstance(statement, ast.If) and _asks(project, module, statement.test, name):
                    return True
    return False


def _asks(project: Project, module: Module, test: ast.AST, name: str) -> bool:
    """True if a condition looks at the span itself, or at whether a group is enabled."""
    for node in ast.walk(test):
        if isinstance(node, ast.Name) and node.id == name:
            if not isinstance(module.parents.get(node), ast.Attribute):
                return True
        elif _asks_of_group(project, module, node):
            return True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            # enabled = span is not None
            for binding in module.lookup(node.id, node):
                if binding.kind == "value" and isinstance(binding.node, _CONDITIONS):
                    if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(binding.node)):
                        return True
                    if any(_asks_of_group(project, module, part) for part in ast.walk(binding.node)):
                        return True
    return False


def _asks_of_group(project: Project, module: Module, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and project.api(module, node.func) == "is_span_group_enabled"


def _catches_attribute_error(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(each is None or getattr(each, "id", "") in {"AttributeError", "Exception"} for each in names)
