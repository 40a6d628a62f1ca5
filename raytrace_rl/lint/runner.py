"""Runs every rule over a tree of files."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from raytrace_rl.lint import attributes, guards, lifecycle, loops, metrics, naming, suppress
from raytrace_rl.lint.classes import Classes
from raytrace_rl.lint.dispatches import Dispatches
from raytrace_rl.lint.files import UnreadablePathError
from raytrace_rl.lint.groups import Groups
from raytrace_rl.lint.handles import Handles
from raytrace_rl.lint.model import Finding, Severity
from raytrace_rl.lint.module import Module
from raytrace_rl.lint.pairs import Pairs
from raytrace_rl.lint.project import Project
from raytrace_rl.lint.wiring import Wiring

__all__ = ["Report", "UnreadablePathError", "lint", "lint_paths"]


@dataclass(frozen=True)
class Report:
    """What a run found.

    Attributes:
        findings: By path and line.
        files: How many files were checked.
    """

    findings: list[Finding]
    files: int

    @property
    def errors(self) -> list[Finding]:
        """Those that fail a build."""
        return [finding for finding in self.findings if finding.severity is Severity.ERROR]

    @property
    def summary(self) -> str:
        """One line."""
        errors = len(self.errors)
        return f"{_count(self.files, 'file')}: {_count(errors, 'error')}, {len(self.findings) - errors} for information"

    def as_json(self) -> dict[str, Any]:
        """``{"schema": 1, "files", "findings": [{"path", "line", "column", "rule", "severity", "message"}]}``."""
        findings = [
            {
                "path": finding.path,
                "line": finding.line,
                "column": finding.column,
                "rule": finding.rule,
                "severity": finding.severity.value,
                "message": finding.message,
            }
            for finding in self.findings
        ]
        return {"schema": 1, "files": self.files, "findings": findings}


def lint_paths(paths: Iterable[str | os.PathLike[str]]) -> list[Finding]:
    """Checks files and directories.

    Args:
        paths: What to check. The packages that they are part of are read as well, so that the other end of a call is
            found; findings are about ``paths`` alone.

    Returns:
        Findings by path and line, information included.

    Raises:
        UnreadablePathError: A path does not exist or may not be read.
    """
    return lint(paths).findings


def lint(paths: Iterable[str | os.PathLike[str]]) -> Report:
    """As `lint_paths`, with the number of files checked."""
    collecting = gc.isenabled()
    gc.disable()  # millions of tree nodes that all live to the end: collecting them in between doubles the time
    try:
        project = Project(paths)
        found = _check(project)
        files = sum(module.reported for module in project.modules)
        project.release()
    finally:
        if collecting:
            gc.enable()
    return Report(sorted(found), files)


def _check(project: Project) -> set[Finding]:
    by_path: dict[str, set[Finding]] = {}
    for finding in _findings(project):
        by_path.setdefault(finding.path, set()).add(finding)
    found: set[Finding] = set()
    for module in project.modules:
        if module.reported:
            found.update(suppress.apply(module, sorted(by_path.get(module.shown, ()))))
    return found


def _findings(project: Project) -> Iterator[Finding]:
    handles = Handles(Classes(project))
    dispatches = Dispatches(handles)
    groups = Groups(dispatches.strings)
    pairs = Pairs(groups)
    yield from Wiring(dispatches).check()
    for module in project.reported:
        yield from naming.check(groups, module)
        yield from guards.check(project, module)
        yield from loops.check(groups, handles, module)
        yield from attributes.check(pairs, module)
        yield from metrics.check(pairs, module)
        yield from lifecycle.check(handles, module)
    for module in project.modules:
        if module.reported:
            module.check_syntax()  # of those too in which no rule could find anything
            if module.error is not None:
                yield _unreadable(module)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _unreadable(module: Module) -> Finding:
    message = f"{module.error}: nothing in this file was checked"
    return Finding(module.shown, module.error_line, 1, "RT903", message, module.error_line)
