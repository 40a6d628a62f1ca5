"""Which blocks of code the documentation has, and docs/blocks.md: what becomes of each, and why some are not run.

``make reference`` (``python -m docs.blocks``) writes the page; ``tests/test_docs_blocks.py`` runs what can be run, and
fails where the page is behind.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from docs.links import ROOT, pages

PAGE: Final = ROOT / "docs" / "blocks.md"

#: What a fence may say, and what becomes of such a block.
LANGUAGES: Final = {
    "python": "run as a program of its own; by pytest, where it holds a test",
    "bash": "checked by `bash -n`, and run line by line in a directory with a program, runs and sources to work on",
    "yaml": "parsed; settings under `telemetry:` are given to `TelemetryConfig`",
    "json": "parsed",
    "toml": "parsed",
    "text": "no code: a picture, or what a program prints",
}

_FENCE: Final = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*?) -->\n)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"\n]*)\")?[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: Path of the page, from the root.
        number: Which of the page's blocks it is, from 1.
        language: What its fence says; empty where it says nothing.
        title: A file's name, under which later blocks of the page find it; else empty.
        body: Its text.
        reason: Why it is not run; empty where it is.
    """

    page: str
    number: int
    language: str
    title: str
    body: str
    reason: str

    @property
    def is_test(self) -> bool:
        """Whether it is for pytest."""
        return self.language == "python" and re.search(r"^(?:async )?def test_", self.body, re.MULTILINE) is not None


def blocks(page: Path | None = None) -> list[Block]:
    """Returns the blocks of a page, or of all pages, in their order."""
    found = []
    for path in pages() if page is None else [page]:
        for number, fence in enumerate(_FENCE.finditer(path.read_text(encoding="utf-8")), 1):
            name = path.relative_to(ROOT).as_posix()
            text = {key: value or "" for key, value in fence.groupdict().items()}
            found.append(Block(name, number, **text))
    return found


def page(found: list[Block]) -> str:
    """Returns the text of docs/blocks.md.

    Args:
        found: All blocks.
    """
    shown = [block for block in found if block.page != "docs/blocks.md"]
    kept = [block for block in shown if block.reason]
    count = Counter(block.language for block in shown)
    held = Counter(block.language for block in kept)
    lines = [
        "# Blocks of code",
        "",
        "Written by `python -m docs.blocks`; do not edit it by hand. Each block of code on these pages is run, or",
        "parsed, by `make docs-check` and `make test`. One that cannot be run says so in a comment before it,",
        "`<!-- not run: the reason -->`: its syntax is checked all the same, and so are the options of the library's",
        "commands in it.",
        "",
        "| fence | blocks | of these not run | what becomes of one |",
        "| --- | --- | --- | --- |",
        *(f"| `{name}` | {count[name]} | {held[name]} | {what} |" for name, what in LANGUAGES.items() if count[name]),
        "",
        f"## Not run: {len(kept)}",
        "",
        "| page | begins with | reason |",
        "| --- | --- | --- |",
        *(f"| [{_short(block)}]({_link(block)}) | `{_first_line(block)}` | {block.reason} |" for block in kept),
        "",
    ]
    return "\n".join(lines)


def _short(block: Block) -> str:
    return block.page.removeprefix("docs/")


def _link(block: Block) -> str:
    return _short(block) if block.page.startswith("docs/") else f"../{block.page}"


def _first_line(block: Block) -> str:
    line = next(line for line in block.body.splitlines() if line.strip())
    line = line.partition("  #")[0].strip().replace("`", "'").replace("|", "\\|")
    return line if len(line) <= 60 else f"{line[:57]}..."


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
