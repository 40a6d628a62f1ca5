"""Short variants of the soak (`make soak`): real writers, a relay and a server, watched while they run."""

from __future__ import annotations

import pytest

from tests.soak import Soak
from tests.soak_results import Plan

pytest_plugins = ["tests.telemetry_fixtures"]
pytestmark = [pytest.mark.slow]


def test_a_node_stays_within_its_bounds_and_every_span_arrives(tmp_path):
    """Catches a spool, a relay or a tmpfs that grows with time, and ended spans that those still open push out."""
    seen = Soak(Plan(writers=16, rate=100, seconds=20, spool_max_mib=32), tmp_path).run()
    assert not seen.failures, seen
    assert seen.ended > 1000
    assert seen.killed == 7


def test_what_the_bound_drops_is_counted_exactly(tmp_path):
    """Catches a bound that many writers exceed together, and a dropped span that nobody counts, or two do."""
    seen = Soak(Plan(writers=16, rate=300, seconds=20, spool_max_mib=8, relays=False), tmp_path).run()
    assert not seen.failures, seen
    assert seen.dropped > 0
