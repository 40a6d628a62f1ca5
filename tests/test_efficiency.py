from __future__ import annotations

import pytest

from raytrace_rl import efficiency, vocabulary
from raytrace_rl.buckets import Bucket
from raytrace_rl.efficiency import (
    COLLECTOR_WALL_CLOCK,
    RUN_WINDOW,
    STEP_WINDOW,
    THREAD_SECONDS,
    WALL_CLOCK,
    EfficiencyCategory,
    efficiency_categories,
    efficiency_category,
    efficiency_measurements,
    register_efficiency_category,
)

BUILT_IN = {
    "init/total": (Bucket.OVERHEAD, WALL_CLOCK, RUN_WINDOW, False),
    "idle/buffer_starvation": (Bucket.IDLE, WALL_CLOCK, STEP_WINDOW, True),
    "idle/refit_bubble": (Bucket.IDLE, WALL_CLOCK, STEP_WINDOW, True),
    "idle/validation": (Bucket.IDLE, WALL_CLOCK, STEP_WINDOW, True),
    "idle/generation_limit_pause": (Bucket.IDLE, COLLECTOR_WALL_CLOCK, RUN_WINDOW, False),
    "idle/refit_event_wait": (Bucket.IDLE, COLLECTOR_WALL_CLOCK, RUN_WINDOW, False),
    "idle/buffer_full_backoff": (Bucket.IDLE, THREAD_SECONDS, RUN_WINDOW, True),
    "wasted/failed_trajectory": (Bucket.WASTED, THREAD_SECONDS, RUN_WINDOW, True),
}


@pytest.fixture(autouse=True)
def _categories(monkeypatch):
    monkeypatch.setattr(efficiency, "_categories", dict(efficiency._categories))


def test_the_categories_are_those_of_the_design():
    """Catches a category that is lost, in the wrong bucket, or measured on a clock that it may not be added to."""
    found = {
        name: (category.bucket, category.measurement, category.window, category.bucketed_span)
        for name, category in efficiency_categories().items()
    }
    assert found == BUILT_IN
    assert efficiency_measurements() == {name: row[1] for name, row in BUILT_IN.items()}


def test_run_window_on_the_wall_clock_agrees_with_the_vocabulary():
    """Catches startup's seconds being added to every step's because the two places disagree on its window."""
    run = {c.name for c in efficiency_categories().values() if (c.measurement, c.window) == (WALL_CLOCK, RUN_WINDOW)}
    assert run == vocabulary.RUN_WINDOW_WALL_CLOCK_CATEGORIES
    assert vocabulary.INIT_TOTAL_CATEGORY in run


def test_names_of_span_and_logger_key():
    """Catches a span, a metric label and a logged key of one category that no longer share its name."""
    category = efficiency_category("idle/refit_bubble")
    assert category is not None
    assert category.span_name == "rl.idle.refit_bubble"
    assert category.logger_key == "efficiency/idle/refit_bubble_s"


def test_a_library_adds_its_own_category_and_may_do_so_again():
    """Catches a closed list of categories, and an import that runs twice being taken for a clash."""
    for bucket in (Bucket.IDLE, "idle"):  # its string will do
        register_efficiency_category(EfficiencyCategory("idle/judge_wait", bucket, WALL_CLOCK, STEP_WINDOW))
    assert efficiency_category("idle/judge_wait") in efficiency_categories().values()
    assert efficiency_category("idle/judge_wait").bucket is Bucket.IDLE
    assert efficiency_measurements()["idle/judge_wait"] == WALL_CLOCK


def test_two_libraries_cannot_mean_different_things_by_one_name():
    """Catches the second one silently recording under the first one's bucket and clock."""
    with pytest.raises(ValueError, match="idle/refit_bubble"):
        register_efficiency_category(EfficiencyCategory("idle/refit_bubble", Bucket.WASTED, THREAD_SECONDS, RUN_WINDOW))
    assert efficiency_category("idle/refit_bubble").bucket is Bucket.IDLE


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (("refit_bubble", Bucket.IDLE, WALL_CLOCK, STEP_WINDOW), "refit_bubble"),
        (("idle/", Bucket.IDLE, WALL_CLOCK, STEP_WINDOW), "idle/"),
        (("idle/a/b", Bucket.IDLE, WALL_CLOCK, STEP_WINDOW), "idle/a/b"),
        (("idle/x", Bucket.IDLE, "cpu_seconds", STEP_WINDOW), "cpu_seconds"),
        (("idle/x", Bucket.IDLE, WALL_CLOCK, "epoch"), "epoch"),
        (("idle/x", "lost", WALL_CLOCK, STEP_WINDOW), "lost"),
    ],
)
def test_a_category_that_cannot_be_used_is_refused_by_name(fields, named):
    """Catches a misspelt clock or bucket that would only show as a label nobody looks for."""
    with pytest.raises(ValueError, match=named):
        EfficiencyCategory(*fields)


def test_an_unknown_category_is_none():
    """Catches a category made up on the fly for a misspelt name."""
    assert efficiency_category("idle/nothing") is None
