"""``raytrace-rl doctor``: what is enabled and why, where it goes, and what is misconfigured; of a run, what it lost."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from raytrace_rl import _doctor, _doctor_relay
from raytrace_rl._doctor import INFO, OK, PROBLEM, Check

_TIMEOUT_S: Final = 5.0
_MARKS: Final = {OK: "ok", INFO: "--", PROBLEM: "!!"}
_MAX_FINDINGS: Final = 5


def add_options(command: argparse.ArgumentParser, duration: Callable[[str], float]) -> None:
    """Adds the options of the subcommand; ``duration`` reads ``30s``, ``5m`` or ``1h``."""
    command.add_argument("RUN", nargs="?", help="also look at this run's directory")
    command.add_argument("--source", nargs="+", metavar="PATH", help="also look for wiring mistakes in these files")
    command.add_argument(
        "--timeout", type=duration, default=_TIMEOUT_S, metavar="TIME", help="for each endpoint; by default 5s"
    )
    command.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(options: argparse.Namespace, load: Callable[[str], Any]) -> bool:
    """Prints every check; returns whether one found a problem.

    Args:
        options: Of the command line.
        load: Loads the run that a directory holds.

    Raises:
        UnreadableRunError: There is no run.
        UnreadablePathError: A path given by ``--source`` cannot be read.
    """
    checks = list(_doctor.machine(os.environ, options.timeout))
    if options.source:
        checks += wiring(options.source)
    if options.RUN:
        checks += of_run(load(options.RUN), Path(options.RUN))
    problems = sum(check.state == PROBLEM for check in checks)
    if options.json:
        print(
            json.dumps({"schema": 1, "problems": problems, "checks": [check._asdict() for check in checks]}, indent=2)
        )
        return bool(problems)
    area = ""
    for check in checks:
        print(f"{check.area if check.area != area else '':<9} {_MARKS[check.state]} {check.text}")
        area = check.area
    print(f"{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return bool(problems)


def wiring(paths: list[str]) -> Iterator[Check]:
    """Yields what the lint finds in a source tree: how many findings, and the first few."""
    from raytrace_rl.lint import lint

    found = lint(paths)
    yield Check("wiring", PROBLEM if found.errors else OK, found.summary)
    for finding in found.errors[:_MAX_FINDINGS]:
        yield Check("wiring", PROBLEM, str(finding))
    if len(found.errors) > _MAX_FINDINGS:
        yield Check("wiring", INFO, f"... all of them: raytrace-rl lint {' '.join(paths)}")


def of_run(run: Any, path: Path) -> Iterator[Check]:
    """Yields what became of a run: its processes, what was lost, whether it hangs together, what its relays say."""
    from raytrace_rl.monitor import tables
    from raytrace_rl.monitor.relay_counters import relay_counters
    from raytrace_rl.monitor.skew import skew
    from raytrace_rl.monitor.text_skew import skew_checks

    loss, traces = tables.loss(run), tables.traces(run)
    states = Counter(process.state for process in run.processes)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield Check("run", INFO, f"{run.run_id}: {loss['spans']} spans of {len(run.processes)} processes ({told})")
    if not loss["spans"]:
        yield Check("run", PROBLEM, "no span was recorded: see the settings above, and the span groups")
    if not any(process.role == "driver" for process in run.processes):
        yield Check("run", PROBLEM, "no driver among the processes: was telemetry started before ray.init?")
    dropped = ", ".join(f"{count} {kind}" for kind, count in loss["drops"].items())
    yield Check("run", PROBLEM if dropped else OK, f"dropped by its processes: {dropped or 'nothing'}")
    damaged = loss["damaged_records"] + loss["lost_records"] + loss["unreachable_segments"]
    if damaged:
        yield Check("run", PROBLEM, f"{damaged} records or files cannot be read: raytrace-rl report {path}")
    if loss["truncated"]:
        yield Check("run", INFO, f"{loss['truncated']} spans were cut short by the death of their process")
    missing = traces["missing_parent"]
    shape = f"{traces['traces']} traces, {traces['roots']} roots"
    yield Check("run", PROBLEM if missing else OK, f"{shape}, {missing} spans whose parent is missing")
    for wrong, text in skew_checks(skew(run).as_json()):
        yield Check("clocks", PROBLEM if wrong else INFO, text)
    yield from _doctor_relay.checks(relay_counters(str(path)))
