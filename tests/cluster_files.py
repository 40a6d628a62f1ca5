"""The files of cluster_configs/, for the tests that hold them against what they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parent.parent / "cluster_configs"


def documents(name: str) -> list[Any]:
    """The YAML documents of a file, anchors resolved."""
    return [document for document in yaml.safe_load_all((CONFIGS / name).read_text()) if document]


def ids(path: Path) -> str:
    """A file, for the name of a test."""
    return str(path.relative_to(CONFIGS))
