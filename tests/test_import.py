"""What importing costs, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parent.parent / "raytrace_rl"

#: Modules that arrive only when first needed; each worker class may live in an environment that lacks some of them.
HEAVY = (
    "ray",
    "torch",
    "numpy",
    "vllm",
    "megatron",
    "grpc",
    "duckdb",
    "opentelemetry.sdk",
    "opentelemetry.proto",
    "opentelemetry.baggage",
)

#: A public module reaches modules of its own level and below (docs/architecture.md has the same picture). A private
#: one belongs to whoever imports it: what it imports counts as imported by those.
LEVELS = {
    "semconv": 0,
    "config": 1,
    "resources": 1,
    "spool": 1,
    "relay": 2,
    "buckets": 2,
    "efficiency": 2,
    "span_groups": 2,
    "vocabulary": 2,
    "logs": 3,
    "setup": 3,
    "actors": 4,
    "context": 4,
    "dispatch": 4,
    "instrumentation": 4,
    "metrics": 4,
    "timer": 4,
    "threads": 4,
    "integrations": 5,
    "lint": 5,
    "monitor": 5,
    "session": 5,
    "testing": 5,
    "worker_groups": 5,
    "cli": 6,
    "raytrace_rl": 7,  # the root re-exports from everywhere; nothing inside imports from it
}


def _loaded_after(code: str) -> set[str]:
    """Runs ``code`` in a fresh interpreter; returns which of the heavy modules it pulled in."""
    script = f"{code}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return set(ast.literal_eval(result.stdout.splitlines()[-1]))


def test_importing_the_package_pulls_in_nothing_heavy():
    """Catches an import at module level that makes every worker pay for, or fail without, Ray, torch or the SDK."""
    assert _loaded_after("import raytrace_rl") == set()


@pytest.mark.parametrize(
    "name",
    [
        "config",
        "resources",
        "semconv",
        "dispatch",
        "threads",
        "instrumentation",
        "integrations.collector",
        "integrations.data_plane",
    ],
)
def test_importing_a_light_module_pulls_in_nothing_heavy(name):
    """Catches the same in the modules that a user imports by name."""
    assert _loaded_after(f"import raytrace_rl.{name}") == set()


def test_the_probe_sees_a_heavy_import():
    """Catches a probe that would report nothing whatever was imported."""
    assert "opentelemetry.sdk" in _loaded_after("import opentelemetry.sdk.trace")


def test_imports_point_one_way():
    """Catches a lower layer that begins to depend on a higher one, lazily imported or not."""
    graph = _graph()
    unknown = {name for module in graph if not (name := _concern(module)).startswith("_")} - LEVELS.keys()
    assert unknown == set(), "give each a level in LEVELS and in docs/architecture.md"
    wrong = [
        f"{module} reaches {reached}"
        for module in graph
        if not _concern(module).startswith("_")
        for reached in _reach(module, graph)
        if LEVELS[_concern(reached)] > LEVELS[_concern(module)]
    ]
    assert wrong == []


def test_no_import_cycle_at_module_level():
    """Catches two modules that need each other to be imported: which one works then depends on who comes first."""
    graph = _graph(lazy=False)

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        for following in graph.pop(module, ()):
            visit(following, (*path, module))

    while graph:
        visit(next(iter(graph)), ())


def _concern(module: str) -> str:
    """Returns the public module or subpackage, or the private module, that ``module`` is or lies in."""
    return module.removeprefix("raytrace_rl.").split(".")[0]


def _graph(*, lazy: bool = True) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for importer, imported in _imports(lazy=lazy):
        graph.setdefault(importer, set()).add(imported)
        graph.setdefault(imported, set())
    return graph


def _reach(module: str, graph: dict[str, set[str]]) -> set[str]:
    """Returns the public modules that ``module`` imports, itself or through private ones."""
    found, seen, ahead = set(), {module}, [module]
    while ahead:
        for imported in graph[ahead.pop()] - seen:
            seen.add(imported)
            if _concern(imported).startswith("_"):
                ahead.append(imported)
            else:
                found.add(imported)
    return found


def _imports(*, lazy: bool = True) -> Iterator[tuple[str, str]]:
    """Yields (importer, imported) between modules of the package; imports for type checkers alone are left out."""
    modules = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    for importer, path in modules.items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node in _import_nodes(ast.parse(path.read_text()), lazy=lazy):
            for imported in _targets(node, package, modules):
                if imported != importer:
                    yield importer, imported


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _import_nodes(node: ast.AST, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:
                yield from _import_nodes(statement, lazy=lazy)
        elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _import_nodes(child, lazy=lazy)


def _targets(node: ast.Import | ast.ImportFrom, package: str, modules: dict[str, Path]) -> Iterator[str]:
    """Yields the package's own modules that one statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
        return
    base = node.module or ""
    if node.level:
        parents = package.split(".")
        base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
    for alias in node.names:
        if (full := f"{base}.{alias.name}") in modules:
            yield full
        elif base in modules:
            yield base
