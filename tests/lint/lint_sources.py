"""Sources as tests write them: exactly where a line ends in ``#! RT101 RT203`` these rules must find something."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

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
