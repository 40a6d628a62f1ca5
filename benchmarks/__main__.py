"""Runs the benchmarks, prints one table of ratios, and writes the figures to ``benchmarks/results/``.

Exit status 1 if a ratio is above its bar.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks import spans
from benchmarks.rounds import Figure, Ratio, figure, ratio

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One line of the table: a cost over its baseline, and the bar that it must keep."""

    what: str
    cost: Figure
    baseline: Figure
    ratio: Ratio
    bar: float


def _row(what: str, found: dict[str, list[float]], mine: str, theirs: str, bar: float) -> Row:
    return Row(what, figure(found[mine]), figure(found[theirs]), ratio(found[mine], found[theirs]), bar)


def run() -> list[Row]:
    """Runs everything; the disabled costs first, in a process that has not seen telemetry yet."""
    off = spans.disabled()
    on = spans.enabled()
    sixth = 1 / 6
    return [
        _row("disabled span / nullcontext()", off, "no attributes", "nullcontext", 0.9),
        _row("disabled span, 2 attributes / nullcontext()", off, "two attributes", "nullcontext", 1.2),
        _row("enabled span in the spool / SDK span encoded", on, "no attributes", "SDK, no attributes", sixth),
        _row("the same, 2 attributes", on, "two attributes", "SDK, two attributes", sixth),
        _row("the same, 5 attributes", on, "five attributes", "SDK, five attributes", sixth),
    ]


def main() -> int:
    """Runs, prints, writes. Returns the exit status."""
    rows = run()
    print(f"{'':46} {'ratio':>7} {'±':>6} {'bar':>6} {'ours':>10} {'theirs':>10}")
    for row in rows:
        verdict = "" if row.ratio.median <= row.bar else "  ABOVE THE BAR"
        print(
            f"{row.what:46} {row.ratio.median:7.3f} {row.ratio.spread:6.3f} {row.bar:6.3f} "
            f"{row.cost.median_us:7.3f} µs {row.baseline.median_us:7.3f} µs{verdict}"
        )
    print("CPU time a turn, medians of interleaved rounds; ± is the interquartile range of the ratio.")
    RESULTS.mkdir(exist_ok=True)
    about = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **{name: version(name) for name in ("raytrace-rl", "opentelemetry-sdk", "protobuf")},
    }
    result = {"schema": 1, "about": about, "rows": [asdict(row) for row in rows]}
    (RESULTS / "spans.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row.ratio.median > row.bar for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
