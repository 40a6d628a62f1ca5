"""Runs the benchmarks: ``python -m benchmarks`` all of them, ``python -m benchmarks spans carriers`` some.

Each suite runs in a process of its own, so that none inherits what another has started. The rows go to one table and
to ``benchmarks/results/<suite>.json``. Exit status 1 if a bar is missed or a suite fails.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Final

from benchmarks import table

#: Suite (a module of this package with ``rows()``) and the seconds that it may take.
SUITES: Final = {
    "spans": 300,
    "lens": 120,
    "carriers": 120,
    "startup": 300,
    "stalls": 300,
    "calls": 600,
    "demo": 1200,
    "relay": 600,
    "monitor": 1200,
}
#: Suites about one peer, which not every Python can have, and its module.
OPTIONAL: Final = {"lens": "nemo.lens"}
_ONE: Final = "--one"


def run_suite(name: str) -> int:
    """Runs one suite in this process. Returns the exit status."""
    rows = importlib.import_module(f"benchmarks.{name}").rows()
    table.show(name, rows)
    table.write(name, rows)
    return 0 if all(row.holds for row in rows) else 1


def main(arguments: list[str]) -> int:
    """Runs the suites named, all by default. Returns the exit status."""
    if arguments[:1] == [_ONE]:
        return run_suite(arguments[1])
    unknown = [name for name in arguments if name not in SUITES]
    if unknown:
        print(f"no such suite: {', '.join(unknown)}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    status = 0
    print(f"{'':58} {'figure':>9}    {'spread':>8}   error    {'bar':7} {'ours':>12} {'theirs':>12}")
    for name in arguments or SUITES:
        if name in OPTIONAL and not table.installed(OPTIONAL[name]):
            print(f"{name}: left out, {OPTIONAL[name]} is not installed")
            continue
        command = [sys.executable, "-m", "benchmarks", _ONE, name]
        try:
            status |= subprocess.run(command, timeout=SUITES[name], check=False).returncode != 0
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {SUITES[name]} s")
            status = 1
    print("Medians of interleaved rounds, the interquartile range of the rounds' figures, the figure's standard error.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
