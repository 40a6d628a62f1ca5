"""``raytrace-rl run``: runs a command with telemetry on and its Ray calls traced, then sums up what was recorded.

The command is a child, and the environment is all that it is given: its source stays as it is. The runner itself
records nothing, so that the summary comes after any end of the command, ``kill -9`` included.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _run_place
from raytrace_rl.config import ConfigError, TelemetryConfig, resolve, sdk_disabled

if TYPE_CHECKING:
    from collections.abc import Callable

#: As shells have it: the command is not there, or is no program.
_NOT_FOUND: Final = 127
_NO_PROGRAM: Final = 126
#: Sent on to the command; SIGCHLD tells that it has ended.
_SIGNALS: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
#: si_code of a signal out of the kernel: from the terminal, which sends it to the command too.
_SI_KERNEL: Final = 0x80
#: A larger spool is not summed up at the end: reading it takes about 2 s and 60 MiB for each 10 MiB.
_SUMMARY_MAX_BYTES: Final = 64 << 20
#: Calls that are shown where there is no goodput to show.
_CALLS: Final = 8
_SITE: Final = str(Path(__file__).with_name("_run_site"))


class RunUsageError(Exception):
    """The message says what is wrong with the command line or the settings."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    command.add_argument("--dir", metavar="D", help="run directory; by default ./raytrace_runs/<run id>")
    command.add_argument("--span-groups", metavar="S", help="which spans are recorded; by default per_step")
    command.add_argument("--no-summary", action="store_true", help="print nothing at the end")
    command.add_argument("COMMAND", nargs=argparse.REMAINDER, help="-- and the command, such as -- python train.py")


def run(options: argparse.Namespace, load: Callable[[str], Any]) -> int:
    """Runs the command; returns its exit code, 128 and the number of a signal if one ended it.

    Args:
        options: Of the command line.
        load: Loads the run that a directory holds.

    Raises:
        RunUsageError: There is no command, or a setting cannot be used.
    """
    command = options.COMMAND[1:] if options.COMMAND[:1] == ["--"] else options.COMMAND
    if not command:
        raise RunUsageError("run: name the command after --, as in: raytrace-rl run -- python train.py")
    environ, run_dir = environment(os.environ, options.dir, options.span_groups)
    if run_dir is not None:
        _make(run_dir)
    code = _execute(command, environ)
    if not options.no_summary and code not in (_NOT_FOUND, _NO_PROGRAM):
        _summarise(run_dir, load)
    return code


def _make(run_dir: str) -> None:
    """Makes the run directory, before a program runs for hours whose spans go nowhere."""
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        if not os.access(run_dir, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
    except OSError as error:
        raise RunUsageError(
            f"run: the run directory {run_dir} cannot be used: {error}; name another with --dir"
        ) from None


def environment(
    base: Any, run_dir: str | None = None, span_groups: str | None = None
) -> tuple[dict[str, str], str | None]:
    """Returns the command's environment, and the run directory; None if nothing will be written there.

    Args:
        base: The environment to begin with; what it says beats the defaults of ``run``, and the arguments beat both.
        run_dir: Where the run's files go.
        span_groups: Which spans are recorded.

    Raises:
        RunUsageError: A setting cannot be used.
    """
    environ = dict(base)
    if run_dir == "":
        raise RunUsageError("run: --dir is empty; name a directory, or leave it out")
    if run_dir is not None:
        environ["RAYTRACE_RL_RUN_DIR"] = str(Path(run_dir).absolute())
    if span_groups is not None:
        environ["RAYTRACE_RL_SPAN_GROUPS"] = span_groups
    try:
        config = resolve(TelemetryConfig(enabled=True, span_groups="per_step"), strict=True, environ=environ)
    except ConfigError as error:
        raise RunUsageError(str(error)) from None
    if not config.enabled or sdk_disabled(environ):
        return environ, None
    if config.run_id is None and config.run_dir is not None:
        # The same directory again is the same run again: another attempt.
        environ["RAYTRACE_RL_RUN_ID"] = re.sub(r"[^\w.-]+", "-", Path(config.run_dir).name) or "run"
        config = resolve(config, strict=True, environ=environ)
    settled = _run_place.settle(config)
    environ.update(
        RAYTRACE_RL_ENABLED="1",
        RAYTRACE_RL_SPAN_GROUPS=settled.span_groups,
        RAYTRACE_RL_RUN_ID=str(settled.run_id),
        RAYTRACE_RL_RUN_DIR=str(settled.run_dir),
        PYTHONPATH=os.pathsep.join(filter(None, [_SITE, environ.get("PYTHONPATH")])),
    )
    environ.setdefault("RAYTRACE_RL_AUTO_RAY", "1")
    return environ, None if settled.exporter in ("console", "none") else settled.run_dir


def _execute(command: list[str], environ: dict[str, str]) -> int:
    """Runs the command to its end, and hands on to it the signals that come in meanwhile."""
    waited_for = {*_SIGNALS, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        try:
            child = subprocess.Popen(
                command,
                env=environ,
                # The mask would be inherited. There is but this one thread, which makes preexec_fn safe.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),  # noqa: PLW1509
            )
        except OSError as error:
            print(f"raytrace-rl: {command[0]}: {error.strerror or error}", file=sys.stderr)
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NO_PROGRAM
        while (code := child.poll()) is None:
            signalled = signal.sigwaitinfo(waited_for)
            if signalled.si_signo in _SIGNALS and signalled.si_code != _SI_KERNEL:
                child.send_signal(signalled.si_signo)
        return code if code >= 0 else 128 - code
    finally:
        # What came in at the last moment was for the command.
        while signal.sigtimedwait(waited_for, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _summarise(run_dir: str | None, load: Callable[[str], Any]) -> None:
    """Prints the summary to stderr: what the command writes to stdout may be somebody's input."""
    if run_dir is None:
        _say("no files: RAYTRACE_RL_ENABLED, RAYTRACE_RL_EXPORTER or OTEL_SDK_DISABLED of the environment says so")
        return
    size = sum(path.stat().st_size for path in Path(run_dir).glob("spool/*/*.rts") if path.exists())
    if not size:
        _say(
            f"nothing was recorded in {run_dir}: the command drove no Ray (as a Ray Client it would not), "
            "and started no telemetry of its own"
        )
    elif size > _SUMMARY_MAX_BYTES:
        _say(f"{size >> 20} MiB of spans: raytrace-rl report {run_dir}")
    else:
        from raytrace_rl.monitor.report import summary

        run = load(run_dir)
        print(summary(run), end="", file=sys.stderr)
        if not any(row.bucket for row in run.spans):
            print("\n".join(_calls(run)), file=sys.stderr)
        sys.stderr.flush()


def _calls(run: Any) -> list[str]:
    """Returns what is known of a program without spans of its own: its calls, by time."""
    from raytrace_rl.monitor.drawing import seconds, table
    from raytrace_rl.monitor.tables import span_names

    calls = [entry for entry in span_names(run) if entry["span_group"] == "actor_call"]
    rows = [
        (entry["name"], entry["count"], seconds(entry["total_s"]), seconds(entry["p50_s"]), seconds(entry["p95_s"]))
        for entry in calls[:_CALLS]
    ]
    head = "No span says what its time was for, so there is no goodput yet: put managed_span around the work."
    return [head, *table(("call", "count", "total", "p50", "p95"), rows, (40, -7, -8, -8, -8))] if rows else [head]


def _say(line: str) -> None:
    print(f"raytrace-rl: {line}", file=sys.stderr, flush=True)
