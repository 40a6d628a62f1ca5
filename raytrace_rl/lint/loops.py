"""Rule RT206: a span for every token."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.groups import Groups
from raytrace_rl.lint.handles import Handles
from raytrace_rl.lint.model import Finding, finding
from raytrace_rl.lint.module import Definition, Module
from raytrace_rl.lint.words import words

_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
#: Functions that go through a container one by one.
_ONE_BY_ONE: Final = frozenset({"enumerate", "zip", "reversed", "iter", "list", "tuple", "tqdm", "sorted"})
_LENGTHS: Final = frozenset({"seq_len", "seqlen", "sequence_length", "response_length", "generation_length"})
_TOKEN: Final = frozenset({"token", "tok"})
#: How a token is called that a turn of a decode loop makes.
_OF_DECODING: Final = frozenset(
    {"next", "new", "cur", "current", "sampled", "generated", "decoded", "output", "predicted", "pred", "greedy"}
)
#: What makes one.
_MAKING: Final = frozenset({"decode", "sample", "sampler", "argmax", "multinomial", "logits", "predict", "topk"})


def check(groups: Groups, handles: Handles, module: Module) -> Iterator[Finding]:
    """Yields the findings of a file."""
    for call in module.calls:
        name = groups.project.api(module, call.func)
        what = None
        if name in api.OPENERS and not api.OPENERS[name].decorator:
            what = f"{name} is called"
        elif (function := _callee(handles, module, call)) is not None and _opens(groups, function):
            what = f"{function.name}(), which opens a span, is called"
        if what is not None and (loop := _loop(module, call)) is not None:
            yield finding(
                "RT206", module.shown, call, f"{what} for every token of the loop in line {getattr(loop, 'lineno', 0)}"
            )


def _callee(handles: Handles, module: Module, call: ast.Call) -> Definition | None:
    """Returns the function of the tree that a call runs here and now."""
    found = handles.project.definition(module, call.func) or handles.callers.own_method(module, call.func)
    return found if found is not None and not isinstance(found.node, ast.ClassDef) else None


def _opens(groups: Groups, function: Definition) -> bool:
    """True if every call of a function opens a span."""
    module, node = function.module, function.node
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and groups.project.api(module, decorator.func) in api.OPENERS:
            return True
    return any(
        groups.project.api(module, item.context_expr.func) in api.OPENERS
        for statement in node.body
        if isinstance(statement, (ast.With, ast.AsyncWith))
        for item in statement.items
        if isinstance(item.context_expr, ast.Call)
    )


def _loop(module: Module, call: ast.Call) -> ast.AST | None:
    """Returns the per-token loop that a call is in."""
    inner: ast.AST = call
    for above in module.enclosing(call):
        if isinstance(above, _FUNCTIONS):
            return None
        if _is_per_token(above, inner):
            return above
        inner = above
    return None


def _is_per_token(loop: ast.AST, inner: ast.AST) -> bool:
    """True if ``inner``, a part of ``loop``, runs once a token."""
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        if inner is loop.iter:
            return False
        counts = isinstance(loop.iter, ast.Call) and _called(loop.iter) in {"range", "trange", "count"}
        through = _is_token(loop.target) or _goes_through_tokens(loop.iter)
        return through or (counts and _decodes(loop, ends=False))
    if isinstance(loop, ast.While):
        return inner is not loop.test and (_counts_tokens(loop.test) or _decodes(loop, ends=_ends_with_tokens(loop)))
    if isinstance(loop, _COMPREHENSIONS):
        others = [each for each in loop.generators if each is not inner]
        return any(_is_token(each.target) or _goes_through_tokens(each.iter) for each in others)
    return False


def _is_token(target: ast.expr) -> bool:
    """``token``, ``next_token``, ``token_id``."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_is_token(element) for element in target.elts)
    said = words(target.id) if isinstance(target, ast.Name) else []
    return bool(said) and (said[-1] in _TOKEN or (len(said) > 1 and said[-2] in _TOKEN and said[-1] in {"id", "idx"}))


def _goes_through_tokens(iterable: ast.expr) -> bool:
    if isinstance(iterable, ast.Call):
        name = _called(iterable)
        if name in {"range", "trange"}:
            by_ones = len(iterable.args) < 3
            return by_ones and any(_is_token_count(argument) for argument in iterable.args)
        return name in _ONE_BY_ONE and any(_goes_through_tokens(argument) for argument in iterable.args)
    said = words(_identifier(iterable))
    return bool(said) and (said[-1] == "tokens" or said[-2:] == ["token", "ids"]) and "num" not in said


def _is_token_count(node: ast.expr) -> bool:
    """``max_new_tokens``, ``len(tokens)``, ``config.seq_len``, and those with something added."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"len", "int", "min", "max"}:
        return any(_is_token_count(argument) or _goes_through_tokens(argument) for argument in node.args)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return _is_token_count(node.left) or _is_token_count(node.right)
    identifier = _identifier(node)
    return identifier in _LENGTHS or words(identifier)[-1:] == ["tokens"]


def _counts_tokens(test: ast.expr) -> bool:
    """``len(tokens) < max_new_tokens``, ``token != eos``; a budget of tokens alone says nothing about one turn."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                measured = isinstance(side, ast.Call) and getattr(side.func, "id", "") == "len"
                if (measured and _is_token_count(side)) or _is_token(side) or _identifier(side) == "max_new_tokens":
                    return True
    return False


def _decodes(loop: ast.For | ast.AsyncFor | ast.While, *, ends: bool) -> bool:
    """True if each turn of a loop makes one token: ``next_token = sample(logits)``, ``tokens.append(decode(x))``.

    Args:
        loop: The loop; loops and functions inside it are left out.
        ends: What ends the loop is about tokens: then any ``token`` counts.
    """
    todo: list[ast.AST] = [*loop.body, *([loop.test] if isinstance(loop, ast.While) else [])]
    while todo:
        node = todo.pop()
        if isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.For, ast.AsyncFor, ast.While, ast.ClassDef)):
            continue
        if isinstance(node, (ast.Assign, ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each for target in targets for each in (getattr(target, "elts", None) or [target])]
            if any(_is_made_token(each, node.value, ends=ends) for each in names):
                return True
        elif isinstance(node, ast.Call) and _appends_token(node):
            return True
        todo += ast.iter_child_nodes(node)
    return False


def _appends_token(call: ast.Call) -> bool:
    into_tokens = _called(call) == "append" and _goes_through_tokens(getattr(call.func, "value", call.func))
    return into_tokens and any(_says(argument, _MAKING) for argument in call.args)


def _is_made_token(target: ast.expr, value: ast.expr, *, ends: bool) -> bool:
    """``next_token``; ``token`` where it is decoded; not ``page_token``, ``auth_token``."""
    said = words(_identifier(target))
    if said[-1:] in (["id"], ["ids"], ["idx"]):
        said.pop()
    if said[-1:] == ["tokens"]:  # one a sequence of a batch
        return said[:-1] == ["next"]
    if said[-1:] not in (["token"], ["tok"]):
        return False
    qualifiers = set(said[:-1])
    return qualifiers <= _OF_DECODING and (bool(qualifiers) or ends or _says(value, _MAKING))


def _ends_with_tokens(loop: ast.While) -> bool:
    return _says(loop.test, frozenset({"token", "tokens", "eos", "decoded", "decoding"}))


def _says(node: ast.AST, said: frozenset[str]) -> bool:
    """True if an identifier in an expression has one of these words."""
    identifiers = (getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node))
    return any(not said.isdisjoint(words(each)) for each in identifiers if isinstance(each, str))


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _identifier(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return getattr(node, "attr", getattr(node, "id", ""))
