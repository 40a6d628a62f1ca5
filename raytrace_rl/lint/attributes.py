"""Rules RT207 and RT301 to RT304: what may be an attribute of a span, and under which name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.model import Finding, finding
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.pairs import Pair, Pairs
from raytrace_rl.lint.words import is_raw_text, words
from raytrace_rl.semconv import RL_BUCKET, RL_ITERATION

#: What has a size() that is a number.
_COUNTED: Final = frozenset(
    {
        "queue", "q", "buffer", "buf", "pool", "cache", "deque", "heap", "store", "storage", "dataset", "loader",
        "group", "pg", "mesh", "world", "dist", "comm", "file", "path", "set", "dict", "map", "list", "table",
    }
)  # fmt: skip

_NV_DL: Final = re.compile(r"nv\.dl\.[a-z]")


def check(pairs: Pairs, module: Module) -> Iterator[Finding]:
    """Yields the findings of a file."""
    yield from _literals(module)
    if api.in_library(module.name):
        return  # sets these very attributes, on behalf of its users
    for pair in pairs.of_module(module):
        yield from _pair(pairs, module, pair)


def _pair(pairs: Pairs, module: Module, pair: Pair) -> Iterator[Finding]:
    if pair.key == RL_ITERATION:
        yield finding("RT301", module.shown, pair.node, f"{RL_ITERATION} is set by hand")
    if pair.key == RL_BUCKET and pair.span is not None and pairs.groups.is_umbrella(pair.span):
        yield finding("RT207", module.shown, pair.node, f"the umbrella of {pair.span.opener_name} is given a bucket")
    value = _resolved(module, pair.value)
    label = f"attribute {pair.key!r}" if pair.key else "an attribute"
    if is_raw_text(pair.key, pair.value):
        yield finding("RT302", module.shown, pair.node, f"{label} holds text of the data")
    if _is_shape(value):
        yield finding("RT303", module.shown, pair.node, f"{label} is a tensor's whole shape")


def _resolved(module: Module, value: ast.expr) -> ast.expr:
    """Follows a local variable that is given a value once."""
    if isinstance(value, ast.Name):
        bindings = module.lookup(value.id, value)
        if len(bindings) == 1 and bindings[0].kind == "value" and bindings[0].index is None:
            return bindings[0].node if isinstance(bindings[0].node, ast.expr) else value
    return value


def _is_shape(node: ast.AST) -> bool:
    """``x.shape``, ``x.size()``, ``str(x.shape)``, ``f"{x.shape}"``; ``x.shape[0]``, ``x.size(0)`` are numbers."""
    if isinstance(node, ast.Attribute):
        return node.attr == "shape"
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return _is_size_of_tensor(node.func, node)
        return getattr(node.func, "id", "") in {"str", "repr", "list", "tuple"} and any(map(_is_shape, node.args))
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(part, ast.FormattedValue) and _is_shape(part.value) for part in node.values)
    return False


def _is_size_of_tensor(func: ast.Attribute, call: ast.Call) -> bool:
    """``x.size()``, torch's word for the shape: but not of what is a number of things, such as ``queue.size()``."""
    if func.attr != "size" or call.args or call.keywords:
        return False
    holder = func.value
    identifier = getattr(holder, "attr", getattr(holder, "id", ""))
    return bool(identifier) and _COUNTED.isdisjoint(words(identifier))


def _literals(module: Module) -> Iterator[Finding]:
    if module.path.stem == "semconv" or "nv.dl." not in module.text:
        return
    for node in module.by_type.get(ast.Constant, ()):
        value = getattr(node, "value", None)
        above = module.parents.get(node)
        if isinstance(value, str) and not isinstance(above, ast.Expr):
            begun = value == "nv.dl." and isinstance(above, ast.JoinedStr)
            if _NV_DL.match(value) or begun:
                yield finding("RT304", module.shown, node, f"{value!r} is written out")
