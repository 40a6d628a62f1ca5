"""The documentation keeps its word: its links lead somewhere, its files and targets exist, on the site as well."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

from docs.links import ROOT, for_site, links, pages, prose

PAGES = pages()
_PATH = re.compile(r"`((?:\.ci|raytrace_rl|tests|examples|benchmarks|docs|cluster_configs)/[\w./-]*)`")


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_lead_somewhere(page):
    """Catches a page or heading that was renamed and is still linked to."""
    broken = []
    for target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in _anchors(linked)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_named_files_exist(page):
    """Catches a file that was moved and is still named in a table of where to find what."""
    assert [path for path in _PATH.findall(prose(page.read_text())) if not (ROOT / path).exists()] == []


def test_named_make_targets_exist():
    """Catches a README that tells a newcomer to type what make does not know."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"\bmake ([a-z][a-z-]*)\b(?=[`\s]*(?:#|`))", page.read_text())
    }
    assert {"demo", "test"} <= named
    assert named <= targets


def test_every_page_is_in_the_sites_navigation():
    """Catches a new page that nobody finds, before a strict build does, for which the site's environment is needed."""
    site = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"^ *- ([\w-]+\.md)$", site, re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("docs/report.md", "sql.md#spans", "sql.md#spans"),
        ("docs/architecture.md", "../AGENTS.md", "repository/AGENTS.md"),
        ("README.md", "docs/quickstart.md", "quickstart.md"),
        ("AGENTS.md", "docs/architecture.md", "../architecture.md"),
        ("AGENTS.md", "CONTRIBUTING.md#a-release", "CONTRIBUTING.md#a-release"),
        ("examples/async_grpo/README.md", "../../docs/vllm.md", "../../../vllm.md"),
        ("docs/diff.md", "../README.md", "index.md"),
    ],
)
def test_links_hold_on_the_site_too(page, link, there):
    """Catches a link that works where the repository is read and leads nowhere on the site."""
    text = f"[it]({link}), [it]({link}) and [out](https://example.org/a.md)\n```python\nx[1](a.md)\n```\n"
    moved = for_site(text, page)
    assert moved.startswith(f"[it]({there}), [it]({there}) and [out](https://example.org/a.md)")
    assert "x[1](a.md)" in moved


def test_the_sites_home_links_to_what_the_readme_does():
    """Catches a page of the repository that the README links to and the site lacks."""
    for target in links(for_site((ROOT / "README.md").read_text(), "README.md")):
        path = posixpath.normpath(target.partition("#")[0])
        here = path.removeprefix("repository/") if path.startswith("repository/") else f"docs/{path}"
        assert (ROOT / here).exists(), target
