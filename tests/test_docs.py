"""The documentation keeps its word: its links lead somewhere, its files and targets exist, its Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:\.ci|raytrace_rl|tests|examples|benchmarks|docs|cluster_configs)/[\w./-]*)`")


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _examples():
    for page in PAGES:
        blocks = [body for language, body in _FENCE.findall(page.read_text()) if language == "python"]
        for number, body in enumerate(blocks, 1):
            yield pytest.param(body, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Catches a page or heading that was renamed and is still linked to."""
    broken = []
    for target in _LINK.findall(_prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in _anchors(linked)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    """Catches a file that was moved and is still named in a table of where to find what."""
    assert [path for path in _PATH.findall(_prose(page)) if not (ROOT / path).exists()] == []


def test_named_make_targets_exist():
    """Catches a README that tells a newcomer to type what make does not know."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"\bmake ([a-z][a-z-]*)\b(?=[`\s]*(?:#|`))", page.read_text())
    }
    assert {"demo", "test"} <= named
    assert named <= targets


@pytest.mark.ray
@pytest.mark.parametrize("code", list(_examples()))
def test_python_examples_run(code, tmp_path):
    """Catches an example that a reader copies and that does not run."""
    script = tmp_path / "example.py"
    script.write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
