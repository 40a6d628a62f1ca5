"""The report as one HTML file: no network, no other file, every text of the run as data and never as markup."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl.monitor.html_data import document

if TYPE_CHECKING:
    from raytrace_rl.monitor.model import Run

#: In the order in which they need each other.
_SCRIPTS: Final = ("base.js", "charts.js", "timeline.js", "main.js")


def html(run: Run) -> str:
    """Returns the page of a run."""
    return page(document(run))


def page(content: dict[str, Any]) -> str:
    """Returns the page of what `html_data.document` returns."""
    # Inside a script element only "</script" and "<!--" mean anything, and both begin with "<".
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    frame = _file("report.html")
    parts = {"STYLE": _file("report.css"), "SCRIPT": "\n".join(map(_file, _SCRIPTS)), "DATA": data}
    before, *rest = frame.split("{{")
    pieces = [before]
    for piece in rest:  # in one pass: what is put in is not looked through again
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def _file(name: str) -> str:
    return (resources.files(__package__) / "html" / name).read_text(encoding="utf-8")
