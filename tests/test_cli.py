"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from raytrace_rl._version import VERSION
from raytrace_rl.cli import main
from raytrace_rl.monitor import load_run
from tests.spooling import Spool, ended, resource, span


@pytest.fixture
def run_dir(tmp_path):
    """A small run."""
    spool = Spool(tmp_path / "run")
    rows = [span(1, 0, 9, name="rl.grpo.job", rl__span_group="job")]
    rows += [span(n, 0, 1, parent=1, name=f"rl.work {n}") for n in range(2, 400)]
    spool.segment(10, ended(*rows), resource=resource(rl__role="driver", rl__run__id="my-run"))
    return str(spool.run_dir)


def test_report(run_dir, capsys):
    """Catches a report that goes to stderr, or noise beside it."""
    assert main(["report", run_dir]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Run my-run: 399 spans, 1 process, 1 trace\n")
    assert "\x1b" not in out
    assert err == ""


def test_report_json(run_dir, capsys):
    """Catches output that is not one JSON document."""
    assert main(["report", run_dir, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == 1
    assert err == ""


@pytest.mark.parametrize("form", ["otlp-json", "otlp-proto"])
def test_export_to_a_file(run_dir, tmp_path, form, capsys):
    """Catches an export that is incomplete, or that leaves its temporary file behind."""
    target = tmp_path / "out" / "spans"
    target.parent.mkdir()
    assert main(["export", run_dir, "--format", form, "--out", str(target)]) == 0
    assert len(load_run(target).spans) == 399
    assert list(target.parent.iterdir()) == [target]
    out, err = capsys.readouterr()
    assert out == ""
    assert "399 spans" in err


def test_export_over_its_own_input(run_dir, tmp_path):
    """Catches a file that is emptied before it has been read."""
    target = str(tmp_path / "spans.jsonl")
    for _ in range(2):
        assert main(["export", run_dir, "--format", "otlp-json", "--out", target]) == 0
        run_dir = target
    assert len(load_run(target).spans) == 399


def program(*arguments, **options):
    """Runs the command line in a process of its own."""
    command = [sys.executable, "-m", "raytrace_rl.cli", *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **options)


def test_export_to_standard_output(run_dir):
    """Catches anything beside the data on standard output."""
    done = program("export", run_dir, "--format", "otlp-json", "--out", "-")
    assert done.returncode == 0
    assert (
        sum(len(json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]) for line in done.stdout.splitlines())
        == 399
    )
    assert done.stderr == b""


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "/nowhere/at/all"],
        ["report", os.devnull],
        ["export", "/nowhere/at/all", "--format", "otlp-json", "--out", "-"],
    ],
)
def test_unreadable_input(arguments, capsys):
    """Catches a traceback, an empty report or exit code 0 where there is no run."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert arguments[1] in err


def test_unwritable_output(run_dir, tmp_path, capsys):
    """Catches a traceback where the output cannot be written."""
    for target in (tmp_path, tmp_path / "missing" / "x"):
        assert main(["export", run_dir, "--format", "otlp-json", "--out", str(target)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["report"], ["export", "x", "--format", "csv", "--out", "y"]])
def test_usage_errors(arguments, capsys):
    """Catches a usage error that is not exit code 2, or that raises out of `main`."""
    assert main(arguments) == 2
    assert "usage: raytrace-rl" in capsys.readouterr().err


def test_help(capsys):
    """Catches a subcommand that the help does not list."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "report" in out
    assert "export" in out


@pytest.mark.parametrize("what", ["export {run} --format otlp-json --out -", "report {run} --json"])
def test_broken_pipe(run_dir, what):
    """Catches a traceback under ``raytrace-rl export RUN ... | head -1``."""
    command = f"{sys.executable} -m raytrace_rl.cli {what.format(run=run_dir)} | head -c 10; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
    assert done.stdout.endswith(b"0\n")


@pytest.mark.parametrize(
    "command", ["report {run}", "report {run} --json", "export {run} --format otlp-json --out -", "lint {run}"]
)
def test_closed_output_is_exit_2_with_a_reason(run_dir, command):
    """Catches a traceback under ``raytrace-rl report RUN >&-``, or exit code 0 for output that nobody got."""
    line = f"{sys.executable} -m raytrace_rl.cli {command.format(run=run_dir)} >&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "raytrace-rl: standard output is closed\n")


def test_what_has_another_effect_than_output_needs_none(run_dir, tmp_path):
    """Catches a retuning, or an export to a file, that fails because a daemon has closed its standard output."""
    for command in (f"groups {run_dir} all", f"export {run_dir} --format otlp-json --out {tmp_path / 'spans'}"):
        line = f"{sys.executable} -m raytrace_rl.cli {command} >&-"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert len(load_run(tmp_path / "spans").spans) == 399
    assert "all" in (tmp_path / "run" / "control.json").read_text()


def test_closed_standard_error_does_not_put_words_into_the_output(run_dir, tmp_path):
    """Catches ``print(..., file=None)``, which writes to standard output instead."""
    for command, code in (
        ("report /nowhere", 2),
        (f"export {run_dir} --format otlp-json --out {tmp_path / 'x'}", 0),
        (f"lint {tmp_path}", 0),
    ):
        line = f"{sys.executable} -m raytrace_rl.cli {command} 2>&-"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (code, "")


@pytest.mark.parametrize("command", ["report {run} --json", "export {run} --format otlp-json --out -"])
def test_a_full_disk_under_the_output(run_dir, command):
    """Catches a traceback, or Python's own complaint at exit, where the output's disk is full."""
    line = f"{sys.executable} -m raytrace_rl.cli {command.format(run=run_dir)} >/dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "raytrace-rl: output: No space left on device\n")


def test_version(capsys):
    """Catches a report of a bug that cannot say which version it is about."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"raytrace-rl {VERSION}\n"


def test_export_writes_to_devices_and_pipes_and_through_links(run_dir, tmp_path, capsys):
    """Catches an export that replaces /dev/stdout, a FIFO or a link by a regular file."""
    import threading

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    assert main(["export", str(run_dir), "--format", "otlp-json", "--out", str(fifo)]) == 0
    reader.join(20)
    assert got
    assert got[0].startswith(b"{")
    assert stat.S_ISFIFO(fifo.stat().st_mode)

    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert main(["export", str(run_dir), "--format", "otlp-json", "--out", str(link)]) == 0
    assert link.is_symlink()
    assert (tmp_path / "target").read_bytes() == got[0]

    nowhere = tmp_path / "no" / "where"
    assert main(["export", str(run_dir), "--format", "otlp-json", "--out", str(nowhere)]) == 2
    assert str(nowhere) in capsys.readouterr().err


def test_a_huge_file_of_something_else_is_refused_unread(tmp_path, capsys):
    """Catches a mistyped path whose file is read whole into memory before it is found to be none of ours."""
    huge = tmp_path / "checkpoint.bin"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    assert main(["report", str(huge)]) == 2
    assert "neither" in capsys.readouterr().err
