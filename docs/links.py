"""Links between pages, and the hook by which mkdocs has them lead somewhere on the site too.

Pages are written for the repository, where a link names a file. The site holds ``docs/``, the README as its home page,
and below ``repository/`` whatever else a page links to: pages as pages, other files as they are.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
#: Pages, as patterns below the root.
_PAGES: Final = ("*.md", "docs/*.md", "examples/*/README.md", "cluster_configs/README.md")

FENCE: Final = re.compile(r"^```[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(\[[^\]]*\]\()([^)\s]+)\)")
_CODE: Final = re.compile(r"`[^`\n]*`")
_ITEM: Final = re.compile(r"^ *(?:[-*]|\d+\.) ", re.MULTILINE)
_ROW: Final = re.compile(r"^\|(?![\s:|-]+\|$)", re.MULTILINE)
#: Of mkdocs: its warnings are errors in a strict build.
_logger: Final = logging.getLogger("mkdocs.hooks.links")


def pages() -> list[Path]:
    """Returns every page of the documentation, the README and its like included."""
    return sorted(path for pattern in _PAGES for path in ROOT.glob(pattern))


def prose(text: str) -> str:
    """Returns a page without its blocks of code."""
    return FENCE.sub("", text)


def links(text: str) -> Iterator[str]:
    """Yields what a page links to within the repository: a path, an anchor, or both."""
    for _, target in _LINK.findall(prose(text)):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def _on_site(path: str) -> str:
    """Where a file of the repository stands on the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _in_repository(path: str) -> str:
    """The file of the repository that stands there on the site."""
    if path == "index.md":
        return "README.md"
    return path.removeprefix("repository/") if path.startswith("repository/") else f"docs/{path}"


def _linked(page: str, target: str) -> str:
    """The file, below the root, that a link on a page of the repository leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))


def for_site(text: str, page: str) -> str:
    """Returns a page's text with links that hold on the site.

    Args:
        text: As it is in the repository.
        page: Its path there.
    """
    here = posixpath.dirname(_on_site(page))

    def moved(link: re.Match[str]) -> str:
        path, hash_sign, anchor = link[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        there = posixpath.relpath(_on_site(_linked(page, path)), here or ".")
        return f"{link[1]}{there}{hash_sign}{anchor})"

    # Between the blocks: what looks like a link in code is code.
    parts = re.split(f"({FENCE.pattern})", text, flags=FENCE.flags)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts)


def on_files(files: Any, config: Any) -> Any:
    """Adds the README and everything that is linked to, as mkdocs collects the site's files."""
    from mkdocs.structure.files import File

    # docs/ is mkdocs' own to find; what is missing is left to its check of links.
    wanted = {path.relative_to(ROOT).as_posix() for path in pages()}
    for page in list(wanted):
        wanted |= {_linked(page, target) for target in links((ROOT / page).read_text()) if not target.startswith("#")}
    for path in sorted(wanted):
        if not path.startswith("docs/") and (ROOT / path).is_file():
            files.append(File.generated(config, _on_site(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Has a page's links hold on the site, and code in its tables show no backslash before a bar."""
    text = for_site(markdown, _in_repository(page.file.src_uri))
    # The repository's host asks for the backslash, mkdocs' Markdown shows it.
    return "\n".join(
        _CODE.sub(lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line
        for line in text.split("\n")
    )


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Warns where the site shows text that the repository shows as a list or table, or the other way round."""
    text = prose(page.markdown)
    for what, written, shown in (
        ("list items", len(_ITEM.findall(text)), html.count("<li>")),
        ("table rows", len(_ROW.findall(text)), html.count("<tr>")),
    ):
        if written != shown:
            _logger.warning("%s: %d %s are written, %d are shown", page.file.src_uri, written, what, shown)
