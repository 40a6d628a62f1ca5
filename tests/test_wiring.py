"""The project's own wiring: every decorated method is dispatched with a carrier, and no carrier can go unnoticed."""

from __future__ import annotations

import ast
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from raytrace_rl.lint import lint_paths
from raytrace_rl.testing import assert_wired

ROOT = Path(__file__).parent.parent
_DISPATCH = "dispatch_with_trace_context"
#: How the methods of worker groups begin, which are called as they are.
_OF_GROUPS = ("run_", "execute_")
TREES = ("raytrace_rl", "examples", "benchmarks")


@dataclass(frozen=True)
class Carrier:
    """One place in the examples that brings a carrier.

    Attributes:
        file: Below the examples.
        line: Where.
        source: The whole file without it.
    """

    file: Path
    line: int
    source: str


def test_every_context_accepting_method_is_dispatched_with_a_carrier():
    """Catches a decorated method whose spans become roots, and whatever else the linter knows, in our own code."""
    assert_wired([ROOT / tree for tree in TREES])


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class _Source:
    """A file whose parts are cut out by their places in its syntax tree, which count bytes of UTF-8."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_bytes()
        self.tree = ast.parse(self.text)
        self._starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        line, column = getattr(node, "lineno"), getattr(node, "col_offset")  # noqa: B009 - not every node has them
        last, end = getattr(node, "end_lineno"), getattr(node, "end_col_offset")  # noqa: B009
        return self._starts[line - 1] + column, self._starts[last - 1] + end

    def part(self, node: ast.AST) -> str:
        first, last = self.span(node)
        return self.text[first:last].decode()

    def replaced(self, node: ast.AST, new: str) -> str:
        first, last = self.span(node)
        return (self.text[:first] + new.encode() + self.text[last:]).decode()


def _without(source: _Source, call: ast.Call) -> str | None:
    """Returns the file without the carrier that ``call`` itself brings; None if it brings none."""
    if _name(call.func) == "traced":  # traced(x) -> x
        return source.replaced(call, source.part(call.args[0]))
    if _name(call.func) == _DISPATCH:  # dispatch_with_trace_context(t, a) -> t.remote(a), of a group t(a)
        rest = ", ".join(source.part(argument) for argument in (*call.args[1:], *call.keywords))
        of_group = _name(call.args[0]).startswith(_OF_GROUPS)
        return source.replaced(call, f"{source.part(call.args[0])}{'' if of_group else '.remote'}({rest})")
    if any(isinstance(arg, (ast.Name, ast.Attribute)) and _name(arg) == _DISPATCH for arg in call.args):
        raise AssertionError("a reference to the dispatch itself: teach this test how to take its carrier away")
    if _name(call.func) == "trace_context_kwargs":  # **trace_context_kwargs() -> **{}
        return source.replaced(call, "{}")
    return None


def _carriers() -> list[Carrier]:
    sources = [(path, _Source(path)) for path in sorted((ROOT / "examples").rglob("*.py"))]
    return [
        Carrier(path.relative_to(ROOT / "examples"), node.lineno, without)
        for path, source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and (without := _without(source, node)) is not None
    ]


CARRIERS = _carriers()


def test_the_examples_bring_carriers():
    """Catches a mutation test that has nothing to mutate."""
    words = ("traced(", "dispatch_with_trace_context(", "trace_context_kwargs(")
    spelled = sum(path.read_text().count(word) for path in (ROOT / "examples").rglob("*.py") for word in words)
    assert len(CARRIERS) == spelled >= 10


@pytest.mark.parametrize("carrier", CARRIERS, ids=lambda carrier: f"{carrier.file}:{carrier.line}")
def test_no_carrier_can_be_forgotten(carrier, tmp_path):
    """Catches a dispatch whose carrier could be dropped from the examples without a failing build."""
    copy = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = {(finding.path, finding.rule, finding.message) for finding in lint_paths([copy])}
    (copy / carrier.file).write_text(carrier.source)
    after = {(finding.path, finding.rule, finding.message) for finding in lint_paths([copy])}
    assert {rule for _, rule, _ in after - before} & {"RT101", "RT102"}
    with pytest.raises(AssertionError):
        assert_wired([copy])
