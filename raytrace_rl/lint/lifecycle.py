"""Rules RT104, RT105, RT208 and RT501: how a process starts and ends its telemetry, and what it may reach for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from raytrace_rl.lint import api
from raytrace_rl.lint.handles import Handles
from raytrace_rl.lint.model import Finding, finding
from raytrace_rl.lint.module import Definition, Module

_CONSTRUCTORS: Final = frozenset({"__init__", "__new__", "__post_init__", "__attrs_post_init__", "model_post_init"})
_HOOK: Final = "worker_process_setup_hook"
_TRACERS: Final = frozenset({"opentelemetry.trace.get_tracer", "opentelemetry.trace.get_tracer_provider"})


def check(handles: Handles, module: Module) -> Iterator[Finding]:
    """Yields the findings of a file."""
    if api.in_library(module.name):
        return
    for call in module.calls:
        starts = handles.project.api(module, call.func) == api.INIT_WORKER
        if starts and not _is_start_of_process(handles, module, call):
            yield finding("RT105", module.shown, call, "init_telemetry_worker is called outside __init__")
        if handles.project.qualify(module, call.func) == "ray.kill":
            yield from _kill(handles, module, call)
    if not _is_test(module):
        yield from _tracers(handles, module)
        yield from _private_imports(module)
        yield from _private_attributes(handles, module)


# --------------------------------------------------------------------------------------------------------- RT105, RT104


def _is_start_of_process(handles: Handles, module: Module, call: ast.Call) -> bool:
    function = module.function_of(call)
    if function is None:
        return _is_main_block(module, call)
    if isinstance(function, ast.Lambda):
        return False
    if function.name in _CONSTRUCTORS or function.name == "main":
        return True
    definition = module.definitions.get(module.qualified_name(function))
    return definition is not None and (_is_hook(handles, definition) or _is_called_at_start(handles, definition))


def _is_main_block(module: Module, node: ast.AST) -> bool:
    return any(
        isinstance(above, ast.If)
        and any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(above.test))
        for above in module.enclosing(node)
    )


def _is_called_at_start(handles: Handles, function: Definition) -> bool:
    """A helper: everyone who calls it is a constructor, a script's main, or its main block."""
    calls = handles.project.calls_of(function)
    return bool(calls) and all(
        getattr(caller, "name", "") in {*_CONSTRUCTORS, "main"}
        if (caller := module.function_of(call)) is not None
        else _is_main_block(module, call)
        for module, call in calls
    )


def _is_hook(handles: Handles, function: Definition) -> bool:
    """``{"worker_process_setup_hook": hook}``, the function itself or its dotted path."""
    for module in handles.project.modules:
        if _HOOK not in module.text:
            continue
        for value in _hooks(module):
            if isinstance(value, ast.Constant) and str(value.value).rpartition(".")[2] == function.node.name:
                return True
            if handles.project.definition(module, value) == function:
                return True
    return False


def _hooks(module: Module) -> Iterator[ast.expr]:
    for node in module.parents:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == _HOOK:
                    yield value
        elif isinstance(node, ast.keyword) and node.arg == _HOOK:
            yield node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = node.targets[0].slice
            if isinstance(key, ast.Constant) and key.value == _HOOK:
                yield node.value


def _kill(handles: Handles, module: Module, call: ast.Call) -> Iterator[Finding]:
    if not call.args:
        return
    classes = [cls for cls in handles.held(module, call.args[0]).classes if isinstance(cls.node, ast.ClassDef)]
    if not classes or not all(_is_traced(handles, cls) for cls in classes):
        return
    function = module.function_of(call) or module.tree
    for node in ast.walk(function):
        name = handles.project.api(module, node) or getattr(node, "attr", "")
        if name in api.FLUSHES and getattr(node, "lineno", 0) <= call.lineno:
            return
    names = ", ".join(sorted(cls.node.name for cls in classes))
    yield finding("RT104", module.shown, call, f"ray.kill of {names}, which is traced, without a flush before it")


def _is_traced(handles: Handles, owner: Definition) -> bool:
    if handles.classes.is_traced_actor(owner):
        return True
    return any(handles.classes.owner(method) == owner for method in handles.classes.decorated)


# --------------------------------------------------------------------------------------------------------- RT208, RT501


def _is_test(module: Module) -> bool:
    """Tests reach into what they test, and play foreign libraries."""
    stem = module.path.stem
    named = stem.startswith("test_") or stem.endswith("_test") or stem == "conftest"
    return named or "tests" in module.path.parts[-4:-1]


def _tracers(handles: Handles, module: Module) -> Iterator[Finding]:
    for call in module.calls:
        func: ast.AST = call.func
        if isinstance(func, ast.Attribute) and func.attr == "get_tracer" and isinstance(func.value, ast.Call):
            func = func.value.func  # trace.get_tracer_provider().get_tracer(...)
        elif handles.project.qualify(module, func) != "opentelemetry.trace.get_tracer":
            continue
        if handles.project.qualify(module, func) in _TRACERS:
            yield finding("RT208", module.shown, call, "a tracer is taken from OpenTelemetry itself")


def _private_imports(module: Module) -> Iterator[Finding]:
    for node in module.by_type.get(ast.ImportFrom, ()):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_of_package(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from _private(module, node, names)
    for node in module.by_type.get(ast.Import, ()):
        if isinstance(node, ast.Import):
            yield from _private(module, node, [alias.name for alias in node.names if _is_of_package(alias.name)])


def _private(module: Module, node: ast.AST, names: list[str]) -> Iterator[Finding]:
    for name in names:
        if any(map(_is_private, name.split("."))):
            yield finding("RT501", module.shown, node, f"{name} is private")


def _private_attributes(handles: Handles, module: Module) -> Iterator[Finding]:
    """``raytrace_rl._state.enabled``, ``getattr(raytrace_rl, "_state")``, ``import_module("raytrace_rl._state")``."""
    for node in module.by_type.get(ast.Attribute, ()):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield from _reached(handles, module, node, node.value, node.attr)
    for call in module.calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if name in {"import_module", "__import__"} and texts and _is_of_package(texts[0]):
            yield from _private(module, call, [texts[0]])
        elif name in {"getattr", "setattr", "hasattr"} and len(call.args) > 1 and texts and _is_private(texts[0]):
            yield from _reached(handles, module, call, call.args[0], texts[0])


def _reached(handles: Handles, module: Module, node: ast.AST, holder: ast.expr, name: str) -> Iterator[Finding]:
    dotted = handles.project.qualify(module, holder)
    # Below what is private already, one finding is enough: where that was imported or reached.
    ours = dotted is not None and _is_of_package(dotted) and not any(map(_is_private, dotted.split(".")))
    if ours and f"{dotted}.{name}" not in _imported(module):
        yield finding("RT501", module.shown, node, f"{dotted}.{name} is private")


def _imported(module: Module) -> set[str]:
    """What ``import a.b.c`` makes reachable."""
    names = [alias.name for node in module.by_type.get(ast.Import, ()) for alias in getattr(node, "names", ())]
    return {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_of_package(dotted: str) -> bool:
    return any(dotted == package or dotted.startswith(f"{package}.") for package in api.PACKAGES)
