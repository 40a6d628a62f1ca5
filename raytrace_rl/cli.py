"""The command line: ``report``, ``stuck``, ``diff``, ``export``, ``push``, ``lint``, ``groups``, each a function.

Exit codes: 0 fine, 1 findings (subcommands that look for them), 2 usage or unreadable input, with one line that says
why on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from raytrace_rl import _cli_doctor, _cli_push, _cli_run, _cli_sql, _cli_stuck
from raytrace_rl._cli_files import UnusablePathError, write_file
from raytrace_rl._cli_progress import watched
from raytrace_rl._version import VERSION
from raytrace_rl.monitor import large, spool_files, windows
from raytrace_rl.monitor.export import FORMATS, OTLP_FORMATS, export, export_spool
from raytrace_rl.monitor.load import load_run
from raytrace_rl.monitor.model import Run, UnreadableRunError
from raytrace_rl.spool import listing, liveness, seal

OK: Final = 0
FINDINGS: Final = 1
UNUSABLE: Final = 2

_RUN_HELP: Final = "run directory, or OTLP traces file (JSON lines or protobuf)"


class _UsageError(Exception):
    """Ends a subcommand with exit code 2; the message is the line on stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit code. Never raises for bad input.
    """
    try:
        options = _parser().parse_args(argv)
        if sys.stdout is None:  # as Python has it where the descriptor is closed (``>&-``)
            if getattr(options, "prints", True) or vars(options).get("out") == "-":
                raise _UsageError("standard output is closed")
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                return int(options.run_subcommand(options))
        code: int = options.run_subcommand(options)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: --help, or a usage error that it has explained
        return stop.code if isinstance(stop.code, int) else UNUSABLE
    except (UnreadableRunError, UnusablePathError, _UsageError) as error:
        return _complain(str(error))
    except BrokenPipeError:
        # The reader (head, less) has what it wanted. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _complain(f"{error.filename or 'output'}: {error.strerror or error}")
    return code


def _complain(reason: str) -> int:
    _say(f"raytrace-rl: {' '.join(reason.splitlines())}")
    return UNUSABLE


def _say(line: str) -> None:
    """Prints a line beside the output. Where stderr is closed nobody hears it; ``print`` would take stdout instead."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raytrace-rl", description="Where the time of an RL post-training run went, from its traces."
    )
    parser.add_argument("--version", action="version", version=f"raytrace-rl {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser("run", help="run a command with telemetry on and its Ray calls traced; then sum up")
    _cli_run.add_options(command)
    command.set_defaults(run_subcommand=_run, prints=False)

    command = commands.add_parser("report", help="goodput, steps, spans, processes and what was lost")
    command.add_argument("RUN", help=_RUN_HELP)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON (schema in docs/report.md)")
    form.add_argument("--html", metavar="FILE", help="write one HTML file with timeline and charts, - for stdout")
    command.add_argument(
        "--align", action="store_true", help="shift other nodes' times by the clock skew; the report says what it did"
    )
    command.add_argument(
        "--exclude",
        metavar="FROM..TO",
        type=_stretch,
        action="append",
        default=[],
        help="leave this out of goodput: times since the job began (90s..5m) or ISO 8601 ones; may be given again",
    )
    command.add_argument("--every", metavar="TIME", type=_duration, help="tell goodput for each 30s, 5m or 1h as well")
    command.set_defaults(run_subcommand=_report, prints=True)

    command = commands.add_parser("stuck", help="the spans that are open: where, for how long, who waits for whom")
    command.add_argument("RUN", help=_RUN_HELP)
    _cli_stuck.add_options(command, _duration)
    command.set_defaults(run_subcommand=_stuck, prints=True)

    command = commands.add_parser("diff", help="what got slower from one run to another: spans, ranks, buckets")
    command.add_argument("RUN_A", help=_RUN_HELP)
    command.add_argument("RUN_B", help="the run that is compared with it")
    command.add_argument("--json", action="store_true", help="print the difference as JSON (schema in docs/diff.md)")
    command.set_defaults(run_subcommand=_diff, prints=True)

    command = commands.add_parser("sql", help="ask the run's spans, metrics and logs anything, in SQL")
    command.add_argument("RUN", help=_RUN_HELP)
    _cli_sql.add_options(command)
    command.set_defaults(run_subcommand=_sql, prints=True)

    command = commands.add_parser("export", help="write the run's spans in a standard file form")
    command.add_argument("RUN", help=_RUN_HELP)
    command.add_argument("--format", required=True, choices=(*FORMATS, "parquet"), help="form of the file")
    command.add_argument(
        "--out", required=True, metavar="PATH", help="file to write, - for stdout; for parquet a directory"
    )
    command.set_defaults(run_subcommand=_export, prints=False)

    command = commands.add_parser("push", help="send over OTLP what a run left behind (OTEL_EXPORTER_OTLP_* say where)")
    command.add_argument("RUN", help="run directory")
    _cli_push.add_options(command, _duration)
    command.set_defaults(run_subcommand=_push, prints=True)

    command = commands.add_parser("lint", help="wiring and naming mistakes in a source tree")
    command.add_argument("PATH", nargs="+", help="Python file, or directory of them")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    command.set_defaults(run_subcommand=_lint, prints=True)

    command = commands.add_parser("doctor", help="what is enabled and why, where it goes, what is misconfigured")
    _cli_doctor.add_options(command, _duration)
    command.set_defaults(run_subcommand=_doctor, prints=True)

    command = commands.add_parser("groups", help="change which span groups a live run records")
    command.add_argument("RUN", help="run directory")
    command.add_argument(
        "SPEC", nargs="?", help="presets and groups, joined by commas; none for telemetry off; absent: as configured"
    )
    command.add_argument("--for", dest="seconds", type=_duration, metavar="TIME", help="go back after 30s, 5m or 1h")
    command.set_defaults(run_subcommand=_groups, prints=False)
    return parser


def _may_live(run_dir: Path) -> bool:
    """False if every process of a run is proven to have ended."""
    for files in listing.processes(run_dir / "spool"):
        if liveness.state(files.live, spool_files.boot_id(files)) in {"alive", "unknown"}:
            return True
    return False


def _stretch(text: str) -> tuple[windows.Moment, windows.Moment]:
    try:
        return windows.stretch(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    """Reads ``30s``, ``5m``, ``1h`` or plain seconds."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: write 30s, 5m or 1h")
    return seconds


def _load(path: str) -> Run:
    """Loads the run, and says that it does while someone watches."""
    _bring_home(path)
    with watched(f"reading {path}"):
        return load_run(path)


def _bring_home(path: str) -> None:
    """Moves what killed processes of this host left in a tmpfs into the run directory, where that can be written."""
    for directory in Path(path).glob("spool/*/"):
        if os.access(directory, os.W_OK):
            with contextlib.suppress(OSError):
                seal.adopt_orphans(str(directory))


def _run(options: argparse.Namespace) -> int:
    try:
        return _cli_run.run(options, _load)
    except _cli_run.RunUsageError as error:
        raise _UsageError(str(error)) from None


def _report(options: argparse.Namespace) -> int:
    _bring_home(options.RUN)
    with watched(f"reading {options.RUN}") as progress:
        every_ns = None if options.every is None else round(options.every * 1e9)
        asked = windows.Windows(options.exclude, every_ns)
        run = large.read(options.RUN, align=options.align, windows=asked, progress=progress, say=_say)
    with watched("working out the report"):
        form = large.html if options.html is not None else _json_report if options.json else large.text
        try:
            drawn = form(run)
        except windows.TooManyWindowsError as error:
            raise _UsageError(f"--every: {error}") from None
    if options.html is None:
        print(drawn, end="")
        return OK
    write_file(options.html, lambda file: file.write(drawn.encode()))
    if options.html != "-":
        _say(f"report written to {options.html}")
    return OK


def _json_report(run: large.ReadRun) -> str:
    return large.json_text(run) + "\n"


def _stuck(options: argparse.Namespace) -> int:
    return FINDINGS if _cli_stuck.run(options) else OK


def _diff(options: argparse.Namespace) -> int:
    from raytrace_rl.monitor import diff, text_diff

    sides = []
    for path in (options.RUN_A, options.RUN_B):  # one after the other: a run takes memory, what is compared of it none
        _bring_home(path)
        with watched(f"reading {path}") as progress:
            sides.append(large.side(large.read(path, progress=progress, say=_say)))
    found = diff.of_sides(*sides)
    print(json.dumps(found, indent=2) + "\n" if options.json else text_diff.render(found), end="")
    return OK


def _sql(options: argparse.Namespace) -> int:
    with _store_errors():
        _bring_home(options.RUN)
        _cli_sql.run(options)
    return OK


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Ends the subcommand, with the reason, where the store cannot be had, or asked."""
    from raytrace_rl.monitor.store import MissingExtraError

    try:
        yield
    except (MissingExtraError, _cli_sql.QueryError) as error:
        raise _UsageError(str(error)) from None


def _export(options: argparse.Namespace) -> int:
    if options.format == "parquet":
        if options.out == "-" or Path(options.out).is_file():
            raise _UsageError(f"{options.out}: parquet is a directory of tables")
        with _store_errors():
            _bring_home(options.RUN)
            written = _cli_sql.export(options.RUN, options.out)
        _say(f"{written} spans written to {options.out}")
        return OK
    _bring_home(options.RUN)
    if options.format in OTLP_FORMATS and Path(options.RUN).is_dir():
        with watched(f"exporting {options.RUN}") as progress:
            path = Path(options.RUN)
            written = write_file(options.out, lambda file: export_spool(path, options.format, file, progress))
    else:
        run = _load(options.RUN)
        with watched(f"writing {options.out}") as progress:
            written = write_file(options.out, lambda file: export(run, options.format, file, progress))
    if options.out != "-":
        _say(f"{written} spans written to {options.out}")
    return OK


def _push(options: argparse.Namespace) -> int:
    try:
        return OK if _cli_push.run(options) else FINDINGS
    except _cli_push.NothingToPushError as error:
        raise _UsageError(str(error)) from None


def _lint(options: argparse.Namespace) -> int:
    from raytrace_rl.lint import UnreadablePathError, lint

    try:
        found = lint(options.PATH)
    except UnreadablePathError as error:
        raise _UsageError(str(error)) from None
    if options.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        for finding in found.findings:
            print(finding)
        _say(found.summary)
    return FINDINGS if found.errors else OK


def _doctor(options: argparse.Namespace) -> int:
    from raytrace_rl.lint import UnreadablePathError

    try:
        return FINDINGS if _cli_doctor.run(options, _load) else OK
    except UnreadablePathError as error:
        raise _UsageError(str(error)) from None


def _groups(options: argparse.Namespace) -> int:
    from raytrace_rl import _control, span_groups

    run_dir = Path(options.RUN)
    if not (run_dir / "spool").is_dir():
        raise _UsageError(f"{run_dir}: is no run directory (it has no spool)")
    if options.SPEC is not None and not span_groups.split_spec(options.SPEC):
        raise _UsageError(f"SPEC {options.SPEC!r} names no group; write none for telemetry off")
    until_ns = None if options.seconds is None else time.time_ns() + int(options.seconds * 1e9)
    if options.SPEC is not None:
        for word in span_groups.pending_words(options.SPEC):
            _say(f"raytrace-rl: {word!r} is not known here: it works where its library is loaded")
    if not _may_live(run_dir):
        _say("raytrace-rl: no process of this run is alive: only one that starts in this directory later will follow")
    _control.write(run_dir, options.SPEC, until_ns)
    chosen = "as configured" if options.SPEC is None else options.SPEC
    print(f"span groups of {run_dir}: {chosen}, within a heartbeat of each process")
    return OK


if __name__ == "__main__":
    sys.exit(main())
