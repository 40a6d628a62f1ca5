"""The fuzz targets on what the fuzzer begins with, and on what it once found; `make fuzz` goes on from there."""

from __future__ import annotations

import logging
import time

import pytest

from tests.fuzz.seeds import regressions, seeds
from tests.fuzz.targets import TARGETS


@pytest.fixture(scope="module")
def first():
    """The seeds, made once: real processes write them."""
    return seeds()


@pytest.fixture(autouse=True)
def _quiet():
    """No warning for each damage on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", TARGETS)
def test_every_property_holds_for_the_seeds(first, target):
    """Catches a target that nothing leads into, and a property that sound input breaks already."""
    assert first[target]
    for name, data in first[target].items():
        try:
            TARGETS[target](data)
        except Exception as error:
            raise AssertionError(f"{target}, seed {name}: {error!r}") from error


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, known in regressions().items() for name in known]
)
def test_what_the_fuzzer_found_stays_repaired(target, name):
    """Catches a repair that is undone; one of them took half a minute of a CPU."""
    begun = time.process_time()
    TARGETS[target](regressions()[target][name])
    assert time.process_time() - begun < 10
