"""Fixtures of a node whose spool is brought home; test modules name this one in ``pytest_plugins``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from raytrace_rl.relay.home import HomeFiles
from tests.spooling import Spool

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def far(tmp_path: Path) -> Spool:
    """The node: a run directory that the driver does not see."""
    return Spool(tmp_path / "far")


@pytest.fixture
def home(tmp_path: Path) -> HomeFiles:
    """The driver's run directory."""
    return HomeFiles(tmp_path / "home")
