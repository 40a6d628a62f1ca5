"""Fixtures of the relay's tests; test modules name this one in ``pytest_plugins``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from raytrace_rl.relay import lane, retry
from tests.relay.otlp_server import receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.relay.otlp_server import Server


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane's waits, a hundredth of what they are."""
    monkeypatch.setattr(retry, "FIRST_S", 0.005)
    monkeypatch.setattr(retry, "LONGEST_S", 0.05)
    monkeypatch.setattr(lane, "INTERVAL_S", 0.01)


@pytest.fixture
def server() -> Iterator[Server]:
    """A receiver in this process."""
    with receiver() as running:
        yield running
