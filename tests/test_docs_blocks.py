"""Every block of code in the documentation is run, or parsed; what cannot be run is counted, with its reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from docs.blocks import LANGUAGES, PAGE, Block, blocks, page
from docs.links import ROOT, pages
from raytrace_rl import cli
from raytrace_rl.config import TelemetryConfig, resolve

BLOCKS = blocks()


def _cases(*languages: str, run: bool | None = None):
    chosen = [block for block in BLOCKS if block.language in languages]
    if run is not None:  # what has a title is run by the command that names it
        chosen = [block for block in chosen if bool(block.reason) is not run and not block.title]
    return [pytest.param(block, id=f"{block.page}-{block.number}") for block in chosen]


def _environment() -> dict[str, str]:
    """With the commands of this environment first, the checkout's modules, and no settings of the machine's own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAYTRACE_RL_", "OTEL_"))}
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT)}


def _succeeds(command: list[str], directory: Path, timeout_s: float = 240) -> None:
    done = subprocess.run(
        command,
        cwd=directory,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _give_files(of: Block, directory: Path) -> None:
    """Saves the titled blocks before a block of the same page under their titles, as a reader does."""
    for block in BLOCKS:
        if block.page == of.page and block.number < of.number and block.title:
            (directory / block.title).write_text(block.body)


def test_every_block_says_what_it_is():
    """Catches a fence without a language, or with one that nothing here checks: its block would be run by nobody."""
    assert [(block.page, block.number, block.language) for block in BLOCKS if block.language not in LANGUAGES] == []
    for path in pages():  # one that is indented, or of tildes, is none to `blocks`
        fences = re.findall(r"^\s*(?:```|~~~)", path.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(path)), path


def test_the_list_of_blocks_is_current():
    """Catches a block that is no longer run, or run again, and a count that has gone stale: `make reference`."""
    assert PAGE.read_text() == page(BLOCKS)


@pytest.mark.ray
@pytest.mark.parametrize("block", _cases("python", run=True))
def test_python_runs(block, tmp_path):
    """Catches an example that a reader copies and that does not run, or whose assertions are no longer true."""
    _give_files(block, tmp_path)
    script = tmp_path / "test_block.py"
    script.write_text(block.body)
    how = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if block.is_test else []
    _succeeds([sys.executable, *how, str(script)], tmp_path)


def test_titled_blocks_are_used():
    """Catches a program that is shown, saved under a name, and never run by a command of its page."""
    for block in BLOCKS:
        if block.title:
            later = [other for other in BLOCKS if other.page == block.page and other.number > block.number]
            assert any(block.title in other.body and other.language == "bash" for other in later), block.title


@pytest.mark.parametrize("block", _cases("python", run=False))
def test_python_that_is_not_run_is_python(block):
    """Catches a typing error in an example that nobody can run here."""
    compile(block.body, block.page, "exec")


@pytest.fixture(name="workshop", scope="module")
def _workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what commands of the documentation name: a program, runs, and sources under version control."""
    place = tmp_path_factory.mktemp("workshop")
    program = next(block for block in BLOCKS if block.title == "train.py")
    (place / "train.py").write_text(program.body)
    _succeeds(["raytrace-rl", "run", "--no-summary", "--dir", "RUN", "--", "python", "train.py"], place)
    for name in ("RUN_A", "RUN_B"):
        shutil.copytree(place / "RUN", place / name, symlinks=True)
    (place / "PATH").mkdir()
    (place / "PATH" / "train.py").write_text(program.body)
    _succeeds(["git", "init", "--quiet"], place)
    _succeeds(["git", "add", "train.py"], place)
    return place


@pytest.mark.ray
@pytest.mark.parametrize("block", _cases("bash", run=True))
def test_commands_run(block, workshop, tmp_path):
    """Catches a command, an option or an order of commands that a reader types and that fails."""
    directory = tmp_path / "here"
    shutil.copytree(workshop, directory, symlinks=True)
    _give_files(block, directory)
    _succeeds(["bash", "-euo", "pipefail", "-c", block.body], directory)


@pytest.mark.parametrize("block", _cases("bash"))
def test_commands_are_commands(block):
    """Catches broken quoting, and an option of ours that does not exist, in a command that cannot be run here too."""
    done = subprocess.run(["bash", "-n", "-c", block.body], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in _our_commands(block.body.splitlines()):
        cli._parser().parse_args(words)  # SystemExit, with the reason on stderr, if it takes no such thing


def _our_commands(lines: Iterable[str]):
    for line in lines:
        words = shlex.split(line, comments=True)
        if "raytrace-rl" in words:
            yield words[words.index("raytrace-rl") + 1 :]


def test_commands_in_the_text_exist():
    """Catches a subcommand that prose names and the command line does not know."""
    known = {
        name
        for action in cli._parser()._actions
        for name in (action.choices if isinstance(action.choices, dict) else ())
    }
    named = {
        name
        for path in {block.page for block in BLOCKS} | {"README.md", "AGENTS.md"}
        for name in re.findall(r"`raytrace-rl ([a-z]+)", (ROOT / path).read_text())
    }
    assert named <= known


@pytest.mark.parametrize("block", _cases("yaml", "json", "toml"))
def test_data_is_well_formed(block):
    """Catches a configuration that a reader copies and that no parser takes, or with a setting that does not exist."""
    if block.language == "json":
        data = json.loads(block.body)
    elif block.language == "yaml":
        yaml = pytest.importorskip("yaml")
        data = yaml.safe_load(block.body)
    else:
        data = pytest.importorskip("tomllib").loads(block.body)  # of Python 3.11
    if "telemetry" in data:
        resolve(TelemetryConfig.from_any(data), strict=True)
