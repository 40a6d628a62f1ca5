"""Fixtures of the tests of the span path; test modules name this one in ``pytest_plugins``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrace_rl import _registry, _state, span_groups
from raytrace_rl.spool import place
from tests.running import Telemetry, running


@pytest.fixture(autouse=True)
def _nothing_left_in_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Removes what processes that a test has killed left in the tmpfs: nobody will come to bring it home."""
    run_dirs: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    for node in run_dirs.rglob("spool/*") if run_dirs is not None else ():
        shutil.rmtree(f"/dev/shm/raytrace_rl-{os.getuid()}/{place.label(str(node))}", ignore_errors=True)


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    """Telemetry that runs for the length of a test."""
    with running(tmp_path / "run") as started:
        yield started


@pytest.fixture
def registrations() -> Iterator[None]:
    """Puts the registry of span groups back as it was."""
    tables: list[Any] = [_registry.owners, _registry.umbrellas, _registry.buckets, _registry.presets]
    tables.append(_registry.preset_owners)
    before = [table.copy() for table in tables]
    yield
    for table, contents in zip(tables, before, strict=True):
        table.clear()
        table.update(contents)
    _state.static_cache.clear()
    span_groups.apply_spec(span_groups._spec)
