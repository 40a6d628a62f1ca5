"""Fixtures of the relay's tests; test modules name this one in ``pytest_plugins``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.relay.otlp_server import receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.relay.otlp_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    """A receiver in this process."""
    with receiver() as running:
        yield running
