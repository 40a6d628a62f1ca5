"""Rules RT401 to RT403: a metric's name and labels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.model import Finding, finding
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.pairs import Pairs
from raytrace_rl.lint.strings import HOLE
from raytrace_rl.lint.words import flowing, grows, is_growing, words

_NAME: Final = re.compile(r"rl\.[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
_SHORT: Final = frozenset({"rl.grad_norm", "rl.learning_rate", "rl.entropy"})
#: Methods of an OpenTelemetry meter.
_CREATE: Final = re.compile(r"create_(observable_)?(counter|gauge|histogram|up_down_counter)")
#: Names that are given by names, and helpers by helpers, are followed so far.
_MAX_DEPTH: Final = 4
#: What a variable with few values is called.
_FEW: Final = frozenset({"bucket", "phase", "split", "mode", "kind", "stage", "status", "state", "parity", "worker"})
_RECORDING: Final = frozenset({"add", "record", "set"})
_INSTRUMENT: Final = re.compile(r"(^|_)(counter|gauge|histogram|instrument)$")
#: Classes that describe a metric, and the position of its name.
_ROWS: Final = {"TeedMetric": 1, "MetricSpec": 1}


def check(pairs: Pairs, module: Module) -> Iterator[Finding]:
    """Yields the findings of a file."""
    for call in module.calls:
        name = _name(pairs, module, call)
        if name is not None:
            yield from _check_name(pairs, module, name)
        for labels in _labels(pairs, module, call):
            yield from _check_labels(pairs, module, labels)


# --------------------------------------------------------------------------------------------------------------- names


def _name(pairs: Pairs, module: Module, call: ast.Call) -> ast.expr | None:
    """Returns the name that a call gives a metric."""
    called = pairs.project.api(module, call.func) or ""
    if called in _ROWS:
        position = _ROWS[called]
    elif isinstance(call.func, ast.Attribute) and _CREATE.fullmatch(call.func.attr) and _is_ours(module):
        position = 0
    else:
        return None
    if position < len(call.args):
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == "name"), None)


def _is_ours(module: Module) -> bool:
    """Other programs' meters, in files that have nothing to do with the library, name their metrics as they like."""
    return any(package in module.text for package in api.PACKAGES)


def _check_name(pairs: Pairs, module: Module, node: ast.expr) -> Iterator[Finding]:
    for where, at, made in _origins(pairs, module, node):
        what = _growing(pairs, where, made) if _is_put_together(made) else None
        if what is not None and where.reported:
            yield finding("RT403", where.shown, at, f"{what} is spelled into the name of a metric")
    for text in pairs.strings.texts(module, node):
        if not is_metric_name(text, pairs.groups.metric_owners):
            yield finding("RT401", module.shown, node, f"{text.replace(HOLE, '{...}')!r} is no name for a metric")


def _origins(
    pairs: Pairs, module: Module, node: ast.expr, at: ast.expr | None = None, depth: int = 0
) -> Iterator[tuple[Module, ast.expr, ast.expr]]:
    """Yields the expressions behind a name: its values, or what the callers of a helper give; and where to point."""
    yield module, at or node, node
    if depth >= _MAX_DEPTH or not isinstance(node, (ast.Name, ast.Attribute)):
        return
    where, bindings = pairs.strings.bindings(module, node)
    for binding in bindings:
        if binding.kind in {"value", "update"} and binding.index is None and isinstance(binding.node, ast.expr):
            yield from _origins(pairs, where, binding.node, at or (node if where is module else None), depth + 1)
        elif binding.kind == "param" and isinstance(node, ast.Name):
            function = where.definitions.get(where.qualified_name(binding.node))
            if function is not None and function.node is binding.node:
                for caller, _, argument in pairs.strings.handles.callers.arguments(function, node.id, binding.index):
                    yield from _origins(pairs, caller, argument, None, depth + 1)


def _growing(pairs: Pairs, module: Module, node: ast.AST, depth: int = 0) -> str | None:
    """Returns what makes a value new with every step: in the expression, or in the variables that it is made of."""
    for identifier, part in flowing(node):
        if _is_bounded(pairs, module, identifier, part):
            continue
        if is_growing(identifier):
            return identifier
        bindings = module.lookup(part.id, part) if isinstance(part, ast.Name) and depth < _MAX_DEPTH else []
        for binding in bindings:
            if binding.kind in {"value", "update"} and binding.index is None and binding.node is not node:
                what = _growing(pairs, module, binding.node, depth + 1)
                if what is not None:
                    return what
    return None


def _is_bounded(pairs: Pairs, module: Module, identifier: str, node: ast.AST) -> bool:
    """True for one of known strings (``for step in ("read", "filter")``), and for what is named after few values."""
    texts = pairs.strings.texts(module, node) if isinstance(node, ast.Name) else []
    return (bool(texts) and not any(HOLE in text for text in texts)) or not _FEW.isdisjoint(words(identifier)[-1:])


def _is_put_together(node: ast.AST) -> bool:
    return not isinstance(node, (ast.Name, ast.Attribute, ast.Constant))


def is_metric_name(text: str, owners: set[str]) -> bool:
    """True if a name may be one: its unknown parts are taken to be whatever makes it right."""
    if text.startswith(HOLE):
        return True
    owner = text.partition(".")[0]
    if owner in owners and owner != "dl":
        text = f"rl{text[len(owner) :]}"
    names = [text.replace(HOLE, part) for part in ("x", "x.x", "")]
    return any(name in _SHORT or _NAME.fullmatch(name) for name in names)


# -------------------------------------------------------------------------------------------------------------- labels


def _labels(pairs: Pairs, module: Module, call: ast.Call) -> Iterator[ast.expr]:
    """Yields the mappings of labels that a call records a value with."""
    called = pairs.project.api(module, call.func)
    by_keyword = next((keyword.value for keyword in call.keywords if keyword.arg == "attributes"), None)
    if called == "record_metrics":
        if len(call.args) > 3:
            yield call.args[3]
    elif isinstance(call.func, ast.Attribute) and call.func.attr in _RECORDING:
        if not _is_instrument(pairs, module, call.func.value):
            return
        if len(call.args) > 1:
            yield call.args[1]
    elif pairs.project.qualify(module, call.func) in {
        "opentelemetry.metrics.Observation",
        "opentelemetry.metrics._internal.observation.Observation",
    }:
        if len(call.args) > 1:
            yield call.args[1]
    else:
        return
    if by_keyword is not None:
        yield by_keyword


def _is_instrument(pairs: Pairs, module: Module, node: ast.expr) -> bool:
    """True for what a meter created, in this file or another, and for what is called a counter, gauge or histogram."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and _CREATE.fullmatch(node.func.attr) is not None
    if isinstance(node, ast.Subscript):
        return _is_instrument(pairs, module, node.value)
    identifier = getattr(node, "attr", getattr(node, "id", ""))
    if _INSTRUMENT.search(identifier.lower()):
        return True
    bindings = module.lookup(node.id, node) if isinstance(node, ast.Name) else []
    if isinstance(node, ast.Attribute):
        owner = module.class_of(node)
        bindings = module.attributes.get(module.qualified_name(owner), {}).get(node.attr, []) if owner else []
    where = module
    if not bindings or any(binding.kind == "import" for binding in bindings):
        dotted, _, name = (pairs.project.qualify(module, node) or "").rpartition(".")
        other = pairs.project.module_named(dotted, module) if dotted else None
        if other is None:
            return False
        where, bindings = other, other.bindings.get(other.tree, {}).get(name, [])
    return any(
        binding.kind == "value" and isinstance(binding.node, ast.Call) and _is_instrument(pairs, where, binding.node)
        for binding in bindings
    )


def _check_labels(pairs: Pairs, module: Module, labels: ast.expr) -> Iterator[Finding]:
    for pair in pairs.of_mapping(module, labels):
        if pair.key is not None and grows(pair.key) and not isinstance(pair.value, ast.Constant):
            yield finding("RT402", module.shown, pair.node, f"label {pair.key!r} grows with the run")
        elif (what := _growing(pairs, module, pair.value)) is not None:
            message = f"label {pair.key!r} holds {what}, which grows with the run"
            yield finding("RT402", module.shown, pair.node, message)
