"""Every fuzz target by its name: a function of bytes that raises where a property does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tests.fuzz import bulk_targets, otlp_targets, spool_targets, wire_targets

TARGETS: Final[dict[str, Callable[[bytes], Any]]] = {
    **spool_targets.TARGETS,
    **bulk_targets.TARGETS,
    **otlp_targets.TARGETS,
    **wire_targets.TARGETS,
}
