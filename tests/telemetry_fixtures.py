"""Fixtures of the tests of the span path; test modules name this one in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl import _registry, _state, span_groups
from tests.running import Telemetry, running


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    """Telemetry that runs for the length of a test."""
    with running(tmp_path / "run") as started:
        yield started


@pytest.fixture
def registrations() -> Iterator[None]:
    """Puts the registry of span groups back as it was."""
    tables: list[Any] = [_registry.owners, _registry.umbrellas, _registry.buckets, _registry.presets]
    before = [table.copy() for table in tables]
    yield
    for table, contents in zip(tables, before, strict=True):
        table.clear()
        table.update(contents)
    _state.static_cache.clear()
    span_groups.apply_spec(span_groups._spec)
