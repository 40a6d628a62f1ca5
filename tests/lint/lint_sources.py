"""Sources as tests write them: exactly where a line ends in ``#! RT101 RT203`` these rules must find something.

`family_of` makes the three tests of a family of rules from its failing, passing and cross-file sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from raytrace_rl.lint import lint_paths

#: The first line of every file, unless the file says that it is bare.
PRELUDE = (
    "import ray; from raytrace_rl import (RLSpanGroup as G, TraceContext, TracedActor, accepts_trace_context, "
    "dispatch_with_trace_context, init_telemetry_worker, managed_span, register_span_groups, "
    "safe_set_span_attributes, span_cm, trace_context_kwargs, trace_fn, traced, umbrella_span, umbrella_trace_fn)"
)
_MARK = re.compile(r"#! ((?:RT\d+ ?)+)$")

Files = dict[str, str]


def write(directory: Path, files: Files) -> set[tuple[str, int, str]]:
    """Writes the files; returns what their marks expect: file, line, rule."""
    expected = set()
    for name, source in files.items():
        text = dedent(source).lstrip("\n")
        if not text.startswith("# bare"):
            text = f"{PRELUDE}\n{text}"
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for number, line in enumerate(text.splitlines(), 1):
            if match := _MARK.search(line):
                expected |= {(name, number, rule) for rule in match[1].split()}
    return expected


def found(directory: Path, *below: str) -> set[tuple[str, int, str]]:
    """Returns what the linter finds: file, line, rule."""
    findings = lint_paths([directory / part for part in below] or [directory])
    return {(Path(each.path).relative_to(directory).as_posix(), each.line, each.rule) for each in findings}


def agree(directory: Path, files: Files) -> None:
    """Asserts that the linter finds what is marked, and nothing else."""
    expected = write(directory, files)
    actual = found(directory)
    assert actual == expected, f"not found: {sorted(expected - actual)}, unexpected: {sorted(actual - expected)}"


def one(source: str) -> Files:
    """A tree of one file."""
    return {"main.py": source}


def family_of(
    failing: Mapping[str, str], passing: Mapping[str, str], cross_file: Mapping[str, Files]
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns ``test_finds``, ``test_leaves_alone`` and ``test_across_files`` of a family of rules.

    Args:
        failing: Name to a source with marks.
        passing: Name to a source without any.
        cross_file: Name to the files of a tree, with marks.
    """

    @pytest.mark.parametrize("name", failing)
    def test_finds(name: str, tmp_path: Path) -> None:
        """Catches a mistake that the linter does not see."""
        if "#!" not in failing[name]:
            raise AssertionError("this source expects nothing")
        agree(tmp_path, one(failing[name]))

    @pytest.mark.parametrize("name", passing)
    def test_leaves_alone(name: str, tmp_path: Path) -> None:
        """Catches a finding where everything is right, or where nobody can know."""
        if "#!" in passing[name]:
            raise AssertionError("this source expects a finding")
        agree(tmp_path, one(passing[name]))

    @pytest.mark.parametrize("name", cross_file)
    def test_across_files(name: str, tmp_path: Path) -> None:
        """Catches a linter that looks at one file at a time."""
        agree(tmp_path, cross_file[name])

    return test_finds, test_leaves_alone, test_across_files
