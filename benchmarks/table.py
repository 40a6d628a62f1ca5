"""The table of the benchmarks: one row a figure, held against its bar and against the last committed result."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
SCHEMA: Final = 2
#: A figure this much worse than the last committed one is pointed out; by so much do two runs of one tree differ here.
WORSE: Final = 1.15


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: What is compared with what.
        value: The figure: a ratio, or what ``unit`` says.
        spread: Interquartile range of the rounds' values.
        bar: What it must keep; the least if ``at_least``, else the most.
        aim: What we should like.
        ours, theirs: The medians that it is made of, as printed.
        unit: Of ``value``; nothing for a ratio.
        at_least: More is better.
        error: Standard error of the figure; 0 where rounds are too few to tell.
    """

    what: str
    value: float
    spread: float
    bar: float
    aim: float
    ours: str
    theirs: str
    unit: str = ""
    at_least: bool = False
    error: float = 0.0

    @property
    def holds(self) -> bool:
        """True if the bar is kept."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    @property
    def aimed(self) -> bool:
        """True if the aim is met as well."""
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def installed(module: str) -> bool:
    """True if a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it would be in
        return False


def about() -> dict[str, Any]:
    """What a result depends on: interpreter, machine, versions."""
    names = ["raytrace-rl", "ray", "opentelemetry-sdk", "protobuf", "grpcio"]
    names += [name for name, module in (("ddtrace", "ddtrace"), ("nemo-lens", "nemo.lens")) if installed(module)]
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **{name: version(name) for name in names},
    }


def show(suite: str, rows: list[Row]) -> None:
    """Prints the rows of one suite."""
    last = _last(suite)
    for row in rows:
        verdict = "aim met" if row.aimed else "" if row.holds else "MISSES THE BAR"
        before = last.get(row.what)
        if before:
            change = before / row.value if row.at_least else row.value / before
            if change > WORSE:
                verdict += f"  (was {before:.3g})"
        sign = "≥" if row.at_least else "≤"
        error = f"{row.error:7.4f}" if row.error else ""
        print(
            f"{row.what:58} {row.value:9.3f} {row.unit:2} {row.spread:8.3f} {error:>7}  {sign} {row.bar:<7.4g} "
            f"{row.ours:>12} {row.theirs:>12}  {verdict}".rstrip(),
            flush=True,
        )


def write(suite: str, rows: list[Row]) -> None:
    """Writes the rows to ``benchmarks/results/<suite>.json``."""
    RESULTS.mkdir(exist_ok=True)
    result = {"schema": SCHEMA, "about": about(), "rows": [asdict(row) for row in rows]}
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    (RESULTS / f"{suite}.json").write_text(text, encoding="utf-8")


def _last(suite: str) -> dict[str, float]:
    """Returns the figures of the last result that was written, by row; none if there is none of this schema."""
    try:
        result = json.loads((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))
        return {row["what"]: row["value"] for row in result["rows"]} if result["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError):
        return {}
