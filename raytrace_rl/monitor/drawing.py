"""How a report's numbers, texts and tables are drawn as plain text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

#: Rows of a table in the text report; the JSON report has them all.
ROWS: Final = 20
#: Ten thousand days.
_UNREADABLE_S: Final = 1e4 * 86400


def seconds(value: float) -> str:
    """Returns a duration in a unit that suits it, at most eight characters; ``n/a`` for what is no number."""
    if not math.isfinite(value):
        return "n/a"
    if value < 0:
        return "-" + seconds(-value)
    if value >= _UNREADABLE_S:
        return f"{value:.0e}s"
    if value >= 86400:
        return f"{int(value // 86400)}d{int(value % 86400 // 3600):02d}h"
    if value >= 3600:
        return f"{int(value // 3600)}h{int(value % 3600 // 60):02d}m"
    if value >= 60:
        return f"{int(value // 60)}m{int(value % 60):02d}s"
    if value >= 1 or not value:
        return f"{value:.2f}s" if value else "0s"
    if value >= 1e-3:
        return f"{value * 1e3:.1f}ms"
    return f"{value * 1e6:.0f}us"


def percent(part: float | None) -> str:
    """Returns 0.123 as ``12.3%``; an unknown part, or what is no number, as ``n/a``."""
    return "n/a" if part is None or not math.isfinite(part) else f"{part * 100:.1f}%"


def cut(text: object, width: int) -> str:
    """Returns ``text`` on one line of at most ``width`` characters, free of control characters."""
    line = "".join(char if char.isprintable() else "?" for char in str(text))
    return line if len(line) <= width else line[: width - 1] + "~"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], widths: Sequence[int]) -> list[str]:
    """Draws a table under its heads; a positive width aligns left, a negative one right."""

    def line(cells: Sequence[object]) -> str:
        drawn = (
            cut(cell, abs(width)).ljust(width) if width > 0 else cut(cell, -width).rjust(-width)
            for cell, width in zip(cells, widths, strict=True)
        )
        return ("  " + " ".join(drawn)).rstrip()

    return [line(heads), *map(line, rows)]


def more(shown: int, whole: int) -> list[str]:
    """Returns a line that says how many rows a table leaves out; none if it has them all."""
    return [f"  ... and {whole - shown} more (--json has them)"] if whole > shown else []
